#!/usr/bin/env bash
# up.sh: brings up a Kubernetes cluster on this machine and returns when every
# node is Ready. The control plane runs on the host; each node is a set of
# namespaces (network, mount, pid, ...) with its own containerd and kubelet.
# Safe to run again: what already runs is left alone, what died is started.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/sweep.sh"

# check: what would otherwise fail half way, with what to do about it.
check() {
  local tool name
  [ "$(id -u)" = 0 ] || fail "must be root: nodes are made of namespaces, mounts and network links"
  "$here/build.sh" --check || fail "the programs are not built, or their sources have changed: make cluster-build"
  for tool in runc nft iptables conntrack ip openssl setsid unshare nsenter flock ss; do
    command -v "$tool" > /dev/null || fail "$tool is missing: make cluster-build installs it on Debian and Ubuntu"
  done
  if [ "$KUBE_CGROUPS" = 1 ]; then
    for name in "${controllers[@]}"; do
      [ -d "/sys/fs/cgroup/$name" ] || fail "the cgroup v1 controller $name is not mounted under /sys/fs/cgroup"
    done
  else
    for name in cpu cpuset memory pids; do
      grep -qw "$name" /sys/fs/cgroup/cgroup.controllers || fail "cgroup v2 without the $name controller: kubelet needs it"
    done
  fi
  [ -z "$KUBE_GOLDEN" ] || [ -d "$KUBE_GOLDEN" ] || fail "KUBE_GOLDEN=$KUBE_GOLDEN is no folder: images/golden.sh makes one"
}

# check_addresses: of a cluster that does not run yet.
check_addresses() {
  local port network
  for port in "$KUBE_ETCD_PORT" $((KUBE_ETCD_PORT + 1)); do
    [ -z "$(ss -Hltn "sport = :$port")" ] || fail "port $port is taken: set KUBE_ETCD_PORT to the first of two free ports"
  done
  for network in "KUBE_NET $KUBE_NET.0/24" "KUBE_PODS $KUBE_PODS.0.0/16" "KUBE_SERVICES $KUBE_SERVICES.0.0/16"; do
    [ -z "$(ip -4 route show root "${network#* }")" ] || fail "the network ${network#* } is in use on this machine: set ${network% *}"
  done
}

# make_network: a bridge that holds the control plane's address.
make_network() {
  local setting name
  if [ ! -e "/sys/class/net/$KUBE_BRIDGE" ]; then
    ip link add "$KUBE_BRIDGE" address 02:00:00:00:00:fe type bridge
    ip addr add "$master/24" dev "$KUBE_BRIDGE"
    ip link set "$KUBE_BRIDGE" up
  fi
  for setting in net.ipv4.ip_forward=1 fs.inotify.max_user_instances=1024; do
    name=${setting%=*}
    [ -s "$host/sysctl.$name" ] || sysctl -n "$name" > "$host/sysctl.$name"
    sysctl -qw "$setting"
  done
  if [[ $(forwarding) == *"policy drop"* ]]; then
    iptables -C FORWARD "${forward_rule[@]}" 2> /dev/null || iptables -I FORWARD "${forward_rule[@]}"
  fi
}

start_etcd() {
  local client=http://127.0.0.1:$KUBE_ETCD_PORT peer=http://127.0.0.1:$((KUBE_ETCD_PORT + 1))
  start etcd etcd --name test --data-dir "$KUBE_RUN/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls "$client" --advertise-client-urls "$client" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "test=$peer"
}

start_apiserver() {
  # shellcheck disable=SC2086 # the flags are words
  start apiserver kube-apiserver --bind-address "$master" --advertise-address "$master" --secure-port 6443 \
    --etcd-servers "http://127.0.0.1:$KUBE_ETCD_PORT" --service-cluster-ip-range "$KUBE_SERVICES.0.0/16" \
    --client-ca-file "$pki/ca.crt" --tls-cert-file "$pki/apiserver.crt" --tls-private-key-file "$pki/apiserver.key" \
    --service-account-issuer https://kubernetes.default.svc.cluster.local \
    --service-account-key-file "$pki/sa.pub" --service-account-signing-key-file "$pki/sa.key" \
    --kubelet-certificate-authority "$pki/ca.crt" --kubelet-client-certificate "$pki/apiserver-kubelet.crt" \
    --kubelet-client-key "$pki/apiserver-kubelet.key" --kubelet-preferred-address-types InternalIP \
    --requestheader-client-ca-file "$pki/front-proxy-ca.crt" --requestheader-allowed-names front-proxy-client \
    --requestheader-extra-headers-prefix X-Remote-Extra- --requestheader-group-headers X-Remote-Group \
    --requestheader-username-headers X-Remote-User \
    --proxy-client-cert-file "$pki/front-proxy.crt" --proxy-client-key-file "$pki/front-proxy.key" --enable-aggregator-routing \
    --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction --allow-privileged \
    --default-not-ready-toleration-seconds "${KUBE_EVICT:-10}" --default-unreachable-toleration-seconds "${KUBE_EVICT:-10}" \
    ${KUBE_APISERVER_FLAGS:-}
  wait_for 60 kube-apiserver kubectl get --raw /readyz
}

start_controllers() {
  # shellcheck disable=SC2086 # the flags are words
  start controller-manager kube-controller-manager --kubeconfig "$KUBE_RUN/manager.conf" --secure-port 0 --leader-elect=false \
    --use-service-account-credentials --service-account-private-key-file "$pki/sa.key" --root-ca-file "$pki/ca.crt" \
    --cluster-signing-cert-file "$pki/ca.crt" --cluster-signing-key-file "$pki/ca.key" \
    --node-monitor-period 1s --node-monitor-grace-period "${KUBE_GRACE:-10s}" \
    --horizontal-pod-autoscaler-sync-period 5s --horizontal-pod-autoscaler-initial-readiness-delay 5s \
    --horizontal-pod-autoscaler-cpu-initialization-period 10s --horizontal-pod-autoscaler-downscale-stabilization 10s \
    ${KUBE_MANAGER_FLAGS:-}
  start scheduler kube-scheduler --kubeconfig "$KUBE_RUN/scheduler.conf" --secure-port 0 --leader-elect=false
}

# start_dns: on the host, so that it works whichever nodes are down.
start_dns() {
  cat > "$KUBE_RUN/Corefile" <<X
.:53 {
  bind $master
  errors
  hosts {
    $(for ((n = 1; n <= KUBE_NODES; n++)); do echo "    $KUBE_NET.$n $KUBE_NODE$n"; done)
    fallthrough
  }
  kubernetes cluster.local in-addr.arpa {
    kubeconfig $KUBE_RUN/dns.conf
    pods insecure
    ttl 5
  }
}
X
  start coredns coredns -conf "$KUBE_RUN/Corefile"
}

start_metrics() {
  kubectl apply --server-side -f - > /dev/null <<X
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: metrics-server-host, namespace: kube-system, labels: { kubernetes.io/service-name: metrics-server } }
addressType: IPv4
ports: [{ name: https, port: 4443, protocol: TCP }]
endpoints: [{ addresses: ["$master"], conditions: { ready: true } }]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: { name: v1beta1.metrics.k8s.io }
spec:
  group: metrics.k8s.io
  version: v1beta1
  groupPriorityMinimum: 100
  versionPriority: 100
  service: { name: metrics-server, namespace: kube-system }
  caBundle: $(base64 -w0 "$pki/ca.crt")
X
  start metrics-server metrics-server --kubeconfig "$KUBE_RUN/metrics.conf" --authentication-kubeconfig "$KUBE_RUN/metrics.conf" \
    --authorization-kubeconfig "$KUBE_RUN/metrics.conf" --bind-address "$master" --secure-port 4443 \
    --metric-resolution 10s --kubelet-request-timeout 5s \
    --tls-cert-file "$pki/metrics-serving.crt" --tls-private-key-file "$pki/metrics-serving.key" \
    --kubelet-certificate-authority "$pki/ca.crt" --kubelet-preferred-address-types InternalIP
}

# make_images: those that every cluster has; the caller may have put more archives there.
make_images() {
  local program name
  mkdir -p "$KUBE_RUN/images"
  for program in "pause registry.k8s.io/pause:3.10" "probe docker.io/tba/probe:test" "minio docker.io/minio/minio:test"; do
    name=${program#* } program=${program% *}
    [ -e "$KUBE_BIN/$program" ] || continue  # a companion that is not built
    [ ! "$KUBE_RUN/images/$program.tar" -nt "$KUBE_BIN/$program" ] || continue
    rm -rf "$KUBE_RUN/root" && mkdir "$KUBE_RUN/root"
    cp "$KUBE_BIN/$program" "$KUBE_RUN/root/"
    "$here/images/mkimage.py" "$KUBE_RUN/images/$program.tar" "$name" "$KUBE_RUN/root" --entrypoint "[\"/$program\"]" --user 65532
    rm -r "$KUBE_RUN/root"
  done
}

start_nodes() {
  local n
  for ((n = 1; n <= KUBE_NODES; n++)); do "$here/node.sh" start "$n" 9<&-; done
  for ((n = 1; n <= KUBE_NODES; n++)); do
    wait_for 60 "$KUBE_NODE$n" kubectl get node "$KUBE_NODE$n"
    kubectl wait --for=condition=Ready "node/$KUBE_NODE$n" --timeout=60s > /dev/null
  done
}

check
lock
refuse_foreign
mkdir -p "$KUBE_RUN" || fail "cannot write to KUBE_RUN=$KUBE_RUN"
echo "$KUBE_NODES" > "$KUBE_RUN/node-count"
if ! alive apiserver && ! alive etcd; then
  sweep  # what a killed run has left
  check_addresses
fi
mkdir -p "$KUBE_RUN"/{pids,logs,nodes} "$host/up"
touch "$host/up/$KUBE_BRIDGE"
mkdir -p "$registry/control"
echo $$ > "$registry/control/cgroup.procs"
. "$here/pki.sh"
make_network
start_etcd
# After an outage of the API server its clients wait up to a minute before they
# look again: start them afresh with it.
alive apiserver || for name in scheduler controller-manager coredns metrics-server; do stop "$name"; done
start_apiserver
start_controllers
kubectl apply --server-side -f "$here/addons.yaml" > /dev/null
start_dns
start_metrics
make_images
start_nodes
cat <<X
$KUBE_NODES node(s) Ready. To use the cluster:
  export KUBECONFIG=$KUBE_RUN/admin.conf PATH=$KUBE_BIN:\$PATH
X
