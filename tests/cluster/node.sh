#!/usr/bin/env bash
# node.sh start N | stop N | kill N | exec N COMMAND... | signal N PROGRAM SIGNAL:
# one node of the cluster. "kill" is a power cut: every process of the node is
# gone at once, its disk stays; "stop" takes its network and control groups as
# well. "signal" reaches containerd, kubelet or proxy, which are then restarted.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/sweep.sh"
verb=$1 n=$2; shift 2
name=$KUBE_NODE$n netns=$KUBE_BRIDGE-$n disk=$KUBE_RUN/nodes/$n
# Where a node's programs write: each node sees its own disk there.
directories=(/var/lib/containerd /run/containerd /run/netns /var/lib/kubelet /etc/cni /var/lib/cni /var/log/pods /var/log/containers)

# groups: the node's control groups, one a hierarchy.
groups() {
  local controller
  if [ "$KUBE_CGROUPS" = 2 ]; then echo "$registry/$name"; return; fi
  for controller in "${controllers[@]}" unified; do
    [ ! -d "/sys/fs/cgroup/$controller" ] || echo "/sys/fs/cgroup/$controller/$KUBE_BRIDGE/$name"
  done
}

# delegate GROUP: lets the children of a cgroup v2 group have its controllers.
delegate() {
  local controller
  tr ' ' '\n' < "$1/cgroup.controllers" | while read -r controller; do
    echo "+$controller" 2> /dev/null > "$1/cgroup.subtree_control" || true
  done
}

# make_groups: fresh ones, with the node's memory limit.
make_groups() {
  local group file
  remove_groups "$KUBE_BRIDGE/$name"
  if [ "$KUBE_CGROUPS" = 2 ]; then
    mkdir -p "$registry"
    delegate /sys/fs/cgroup
    delegate "$registry"
    mkdir "$registry/$name"
    echo $((KUBE_NODE_MEMORY << 30)) > "$registry/$name/memory.max"
    return
  fi
  for group in $(groups); do
    mkdir -p "$group"
    case $group in
      */cpuset/*)
        for file in cpuset.cpus cpuset.mems; do
          cat "/sys/fs/cgroup/cpuset/$file" > "$(dirname "$group")/$file"
          cat "/sys/fs/cgroup/cpuset/$file" > "$group/$file"
        done ;;
      */memory/*) echo $((KUBE_NODE_MEMORY << 30)) > "$group/memory.limit_in_bytes" ;;
    esac
  done
}

# join [CHILD]: puts this shell in the node's control groups, or in a child of them.
join() {
  local group
  for group in $(groups); do echo $$ > "$group${1:+/$1}/cgroup.procs"; done
}

# enter: the node's control group is the root of this shell's view by now. With
# cgroup v2 a group that has children with controllers may hold no process itself.
enter() {
  if [ "$KUBE_CGROUPS" = 2 ]; then
    mkdir "$registry/$name/init"
    join init
    delegate "$registry/$name"
  fi
  exec ip netns exec "$netns" unshare --mount --uts --ipc --pid --fork --kill-child "$here/node.sh" inside "$n"
}

# mount_groups: the control groups as seen from the node: its own group is the root.
mount_groups() {
  local controller
  umount -R /sys/fs/cgroup 2> /dev/null || true
  if [ "$KUBE_CGROUPS" = 2 ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    return
  fi
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  for controller in "${controllers[@]}"; do
    mkdir "/sys/fs/cgroup/$controller"
    case $controller in
      systemd) mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd ;;
      *) mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller" ;;
    esac
  done
  mkdir /sys/fs/cgroup/unified
  mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
}

configure() {
  mkdir -p /etc/cni/net.d
  cat > /etc/cni/net.d/10-bridge.conflist <<X
{ "cniVersion": "1.0.0", "name": "pods", "plugins": [
  { "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
    "ipam": { "type": "host-local", "ranges": [[{ "subnet": "$KUBE_PODS.$n.0/24" }]], "routes": [{ "dst": "0.0.0.0/0" }] } },
  { "type": "portmap", "capabilities": { "portMappings": true } } ] }
X
  cat > "$disk/containerd.toml" <<X
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "registry.k8s.io/pause:3.10"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["$KUBE_BIN"]
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "$(command -v runc)"
      SystemdCgroup = false
[plugins."io.containerd.nri.v1.nri"]
  disable = true
X
  cat > "$disk/kubelet.yaml" <<X
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: { anonymous: { enabled: false }, webhook: { enabled: true }, x509: { clientCAFile: $KUBE_RUN/pki/ca.crt } }
authorization: { mode: Webhook }
tlsCertFile: $KUBE_RUN/pki/kubelet$n-serving.crt
tlsPrivateKeyFile: $KUBE_RUN/pki/kubelet$n-serving.key
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
singleProcessOOMKill: true
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
address: $KUBE_NET.$n
clusterDomain: cluster.local
clusterDNS: ["$master"]
resolvConf: /etc/resolv.conf
nodeStatusUpdateFrequency: 2s
nodeLeaseDurationSeconds: 8
evictionHard: { memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1% }
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
systemReserved: { memory: $(( $(awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo) - KUBE_NODE_MEMORY * 1024 ))Mi }
X
  cat > "$disk/proxy.yaml" <<X
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ${KUBE_PROXY:-nftables}
hostnameOverride: $name
clusterCIDR: $KUBE_PODS.0.0/16
clientConnection: { kubeconfig: $KUBE_RUN/proxy.conf }
conntrack: { maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s }
healthzBindAddress: "127.0.0.1:10256"
metricsBindAddress: "127.0.0.1:10249"
X
}

# inside: the first process of the node's namespaces. Becomes containerd's and
# kubelet's parent and keeps both running, as an init system would.
inside() {
  local directory image
  hostname "$name"
  mount --make-rprivate /
  mount -t proc proc /proc
  for directory in "${directories[@]}"; do
    mkdir -p "$disk$directory"
    mount --bind "$disk$directory" "$directory"
  done
  rm -rf "$disk"/run/*/*
  # DNS of the cluster for the pods with dnsPolicy Default, too.
  echo "nameserver $master" > "$disk/resolv.conf"
  mount --bind "$disk/resolv.conf" /etc/resolv.conf
  printf '127.0.0.1 localhost\n%s %s\n' "$KUBE_NET.$n" "$name" > "$disk/hosts"
  mount --bind "$disk/hosts" /etc/hosts
  mount --make-rshared /
  mount_groups
  configure
  keep containerd containerd --config "$disk/containerd.toml" &
  until [ -S /run/containerd/containerd.sock ]; do sleep 0.05; done
  mkdir -p "$disk/imported"
  for image in "$KUBE_RUN"/images/*.tar; do
    [ ! "$disk/imported/$(basename "$image")" -nt "$image" ] || continue
    ctr -n k8s.io images import --local "$image" > /dev/null
    touch "$disk/imported/$(basename "$image")"
  done
  keep kubelet kubelet --config "$disk/kubelet.yaml" --kubeconfig "$KUBE_RUN/kubelet$n.conf" --hostname-override "$name" --node-ip "$KUBE_NET.$n" &
  keep proxy kube-proxy --config "$disk/proxy.yaml" &
  trap 'exit 0' TERM
  while :; do wait; sleep 1; done
}

# keep NAME COMMAND...: restarts COMMAND whenever it ends.
keep() {
  local program=$1; shift
  while :; do
    "$@" >> "$KUBE_RUN/logs/$name-$program.log" 2>&1 < /dev/null &
    echo $! > "$disk/$program.pid"
    wait $! || true
    sleep 1
  done
}

# wire: the node's network namespace and its routes. Pods and services are
# reached through the nodes, from the host as well.
wire() {
  if [ ! -e "/run/netns/$netns" ]; then
    ip netns add "$netns"
    ip link add "$netns" type veth peer name eth0 address "02:00:00:00:01:$(printf %02x "$n")" netns "$netns"
    ip link set "$netns" master "$KUBE_BRIDGE" up
    ip -n "$netns" link set lo up
    ip -n "$netns" addr add "$KUBE_NET.$n/24" dev eth0
    ip -n "$netns" link set eth0 up
    ip -n "$netns" route add default via "$master"
    ip netns exec "$netns" sysctl -qw net.ipv4.ip_forward=1
  fi
  ip route replace "$KUBE_PODS.$n.0/24" via "$KUBE_NET.$n"
  [ "$n" != 1 ] || ip route replace "$KUBE_SERVICES.0.0/16" via "$KUBE_NET.$n"
}

# seed: a new disk begins with the images of the golden store. Files that a
# store never changes are hard links, so this takes seconds and no space.
seed() {
  local target=$disk/var/lib/containerd
  [ -n "$KUBE_GOLDEN" ] && [ ! -e "$target" ] || return 0
  rm -rf "$target.partial"
  mkdir -p "$(dirname "$target")"
  if ! cp -al "$KUBE_GOLDEN" "$target.partial" 2> /dev/null; then
    echo "node.sh: $KUBE_GOLDEN and $disk are on different filesystems: copying" >&2
    rm -rf "$target.partial"
    cp -a "$KUBE_GOLDEN" "$target.partial"
  fi
  (cd "$KUBE_GOLDEN" && find . -name '*.db' -exec cp -p --remove-destination --parents {} "$target.partial" \;)
  mv "$target.partial" "$target"
}

case $verb in
  start)
    alive "$name" && exit
    wire
    seed
    mkdir -p "$disk"
    for directory in "${directories[@]}"; do
      [ -d "$directory" ] || { mkdir -p "$directory"; echo "$directory" >> "$host/made"; }
    done
    make_groups
    join
    start "$name" unshare --cgroup "$here/node.sh" enter "$n"
    ;;
  enter) enter ;;
  inside) inside ;;
  signal) exec "$here/node.sh" exec "$n" kill "-$2" "$(cat "$disk/$1.pid")" ;;
  kill) stop "$name" KILL ;;
  exec)
    alive "$name" || fail "$name is down"
    read -r pid _ < "$KUBE_RUN/pids/$name"
    for ((tick = 0; tick < 50; tick++)); do  # a node that has just been started
      child=$(cut -d' ' -f1 "/proc/$pid/task/$pid/children")
      [ -z "$child" ] || break
      sleep 0.1
    done
    if [ "$KUBE_CGROUPS" = 2 ]; then join init; else join; fi
    exec nsenter --target "$child" --mount --uts --ipc --net --pid --cgroup \
      env CONTAINER_RUNTIME_ENDPOINT=unix:///run/containerd/containerd.sock "$@"
    ;;
  stop)
    stop "$name" KILL
    remove_network "$netns"
    ip route del "$KUBE_PODS.$n.0/24" 2> /dev/null || true
    remove_groups "$KUBE_BRIDGE/$name"
    ;;
  *) fail "unknown verb $verb: start, stop, kill, exec or signal" ;;
esac
