# shellcheck shell=bash disable=SC2034 # used by those who source this
# env.sh: what up.sh, node.sh and down.sh agree on. Sourced, never run.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
KUBE_BIN=$(realpath -m "${KUBE_BIN:-$here/.bin}")  # what build.sh built
KUBE_RUN=$(realpath -m "${KUBE_RUN:-$here/.run}")  # everything the cluster writes
KUBE_NODES=${KUBE_NODES:-$(cat "$KUBE_RUN/node-count" 2> /dev/null || echo 2)}
KUBE_NODE_MEMORY=${KUBE_NODE_MEMORY:-6}         # GiB a node may use
[ -n "${KUBE_GOLDEN+set}" ] || { [ ! -d "$here/.golden" ] || KUBE_GOLDEN=$here/.golden; }
KUBE_GOLDEN=${KUBE_GOLDEN:-}                    # a store of images/golden.sh that new nodes start with; .golden if there
KUBE_NET=${KUBE_NET:-172.29.0}                  # /24 of the node network
KUBE_PODS=${KUBE_PODS:-10.244}                  # /16 of the pods: one /24 a node
KUBE_SERVICES=${KUBE_SERVICES:-10.96}           # /16 of the services
KUBE_BRIDGE=${KUBE_BRIDGE:-kube0}
KUBE_NODE=${KUBE_NODE:-node}                    # node names: node1, node2, ...
KUBE_ETCD_PORT=${KUBE_ETCD_PORT:-2379}          # and the one after it, on the loopback
export KUBE_BIN KUBE_RUN KUBE_NODES KUBE_NODE_MEMORY KUBE_GOLDEN KUBE_NET KUBE_PODS KUBE_SERVICES KUBE_BRIDGE KUBE_NODE KUBE_ETCD_PORT
master=$KUBE_NET.254
host=/run/test-clusters  # what up.sh changed on this machine and the last cluster's down.sh sets back
export PATH=$KUBE_BIN:$PATH:/usr/sbin:/sbin KUBECONFIG=$KUBE_RUN/admin.conf

# Every process of the cluster is in a control group below this one, so that
# what a killed run left can be found without its folder, and nothing else.
controllers=(cpu cpuacct cpuset memory devices freezer blkio pids systemd)
# Told to the inside of a node, which at first sees none.
[ -n "${KUBE_CGROUPS:-}" ] || { KUBE_CGROUPS=1; [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ] || KUBE_CGROUPS=2; }
export KUBE_CGROUPS
if [ "$KUBE_CGROUPS" = 2 ]; then
  registry=/sys/fs/cgroup/$KUBE_BRIDGE
else
  registry=/sys/fs/cgroup/pids/$KUBE_BRIDGE
fi

# fail MESSAGE: ends the script.
fail() { echo "$(basename "$0"): $1" >&2; exit 1; }

# lock: waits for another up.sh or down.sh on this machine, but not for long.
# On a folder that is there anyway; what the script starts must not inherit it.
lock() {
  exec 9< /run
  flock --timeout "${KUBE_PATIENCE:-30}" 9 || fail "another up.sh or down.sh is at work on this machine; try again when it has ended"
}

# registered: the processes of the cluster, of whichever run folder.
registered() { find "$registry" -name cgroup.procs -exec cat {} + 2> /dev/null || true; }

# owner: the run folder of the cluster that runs on this machine; nothing if none does.
owner() {
  local pid folder
  for pid in $(registered); do
    folder=$(sed -zn 's/^KUBE_RUN=//p' "/proc/$pid/environ" 2> /dev/null | tr -d '\0') || true
    [ -z "$folder" ] || { echo "$folder"; return; }
  done
}

# refuse_foreign: leaves the cluster of another run folder alone, unless the folder is gone.
refuse_foreign() {
  local folder
  folder=$(owner)
  [ -z "$folder" ] || [ "$folder" = "$KUBE_RUN" ] || [ ! -d "$folder" ] ||
    fail "a cluster of another run folder is up: KUBE_RUN=$folder $here/down.sh ends it"
}

# alive NAME: whether the process that `start NAME` began still runs.
alive() {
  local pid start
  read -r pid start 2> /dev/null < "$KUBE_RUN/pids/$1" || return 1
  # A killed process may stay as a zombie: PID 1 need not be quick to reap it.
  [ "$(awk '$3 != "Z" {print $22}' "/proc/$pid/stat" 2> /dev/null)" = "$start" ]
}

# start NAME COMMAND...: runs COMMAND in the background, in a session of its
# own, its output in logs/NAME.log. A process that already runs is left alone.
start() {
  local name=$1; shift
  alive "$name" && return
  setsid "$@" >> "$KUBE_RUN/logs/$name.log" 2>&1 < /dev/null 9<&- &
  # The start time tells this process from a later one with the same id.
  echo "$! $(awk '{print $22}' "/proc/$!/stat")" > "$KUBE_RUN/pids/$name"
}

# stop NAME [SIGNAL [SECONDS]]: ends it, by force after SECONDS.
stop() {
  local name=$1 signal=${2:-TERM} patience=${3:-5} pid tick
  if alive "$name"; then
    read -r pid _ < "$KUBE_RUN/pids/$name"
    kill "-$signal" "$pid" || true
    for ((tick = 0; tick < patience * 10; tick++)); do alive "$name" || break; sleep 0.1; done
    if alive "$name"; then kill -KILL "$pid" || true; sleep 0.1; fi
  fi
  rm -f "$KUBE_RUN/pids/$name"
}

# wait_for SECONDS WHAT COMMAND...: polls COMMAND until it succeeds.
wait_for() {
  local end=$((SECONDS + $1)) what=$2; shift 2
  until "$@" > /dev/null 2>&1; do
    [ $SECONDS -lt $end ] || fail "$what did not come up; see $KUBE_RUN/logs"
    sleep 0.1
  done
}
