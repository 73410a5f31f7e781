# shellcheck shell=bash disable=SC2154 # variables of env.sh
# sweep.sh: removes all that a cluster is made of outside its run folder:
# processes, control groups, namespaces, links with their routes. Sourced by up.sh, which
# clears what a killed run left, and by down.sh. Safe when there is nothing.

# Hosts with a container engine drop what they forward, unless told otherwise.
forward_rule=(-i "$KUBE_BRIDGE" -o "$KUBE_BRIDGE" -j ACCEPT)
forwarding() { nft list chain ip filter FORWARD 2> /dev/null || true; }

# sweep: everything, whichever nodes there were.
sweep() {
  local netns
  end_processes
  for netns in /run/netns/"$KUBE_BRIDGE"-*; do
    [ ! -e "$netns" ] || remove_network "$(basename "$netns")"
  done
  ip link del "$KUBE_BRIDGE" 2> /dev/null || true
  if [[ $(forwarding) == *"oifname \"$KUBE_BRIDGE\""* ]]; then iptables -D FORWARD "${forward_rule[@]}"; fi
  remove_groups "$KUBE_BRIDGE"
  rm -f "$host/up/$KUBE_BRIDGE"
  [ -n "$(ls -A "$host/up" 2> /dev/null)" ] || set_back
}

# set_back: the machine's settings and directories as they were before the first of its clusters.
set_back() {
  local file directory
  for file in "$host"/sysctl.*; do
    [ ! -s "$file" ] || sysctl -qw "$(basename "$file" | cut -d. -f2-)=$(cat "$file")"
  done
  # Mount points that were not there before; rmdir spares what is in use.
  if [ -e "$host/made" ]; then
    while read -r directory; do rmdir "$directory" 2> /dev/null || true; done < "$host/made"
  fi
  # What `ip netns` makes of its folder.
  if mountpoint -q /run/netns && [ -z "$(ls -A /run/netns)" ]; then umount /run/netns && rmdir /run/netns; fi
  rm -rf "$host"
}

# end_processes: by force, again until no new ones are born.
end_processes() {
  local pid left tick
  for ((tick = 0; tick < 100; tick++)); do
    left=
    for pid in $(registered); do
      grep -q '^State:.Z' "/proc/$pid/status" 2> /dev/null && continue
      kill -KILL "$pid" 2> /dev/null && left+=" $pid"
    done
    [ -n "$left" ] || return 0
    sleep 0.1
  done
  fail "processes of the cluster do not end:$left"
}

# remove_network NETNS: a node's network namespace with its link.
remove_network() {
  ip netns del "$1" 2> /dev/null || true
  ip link del "$1" 2> /dev/null || true
}

# remove_groups GROUP: the control groups GROUP of every hierarchy, children first.
remove_groups() {
  local hierarchy tick
  for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
    # A process that was just killed holds its group for a moment.
    for ((tick = 0; tick < 30; tick++)); do
      [ -d "$hierarchy/$1" ] || break
      find "$hierarchy/$1" -depth -type d -exec rmdir {} + 2> /dev/null || sleep 0.1
    done
  done
}
