#!/usr/bin/env bash
# kind-up.sh: the project in a local cluster: kind, MinIO, both images, the
# operator by Helm. Safe to run again: it builds and rolls out what has changed.
# Needs docker, kind, kubectl, helm; about 6 GB of disk. CLUSTER names the cluster.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cluster=${CLUSTER:-tba}
namespace=tba-system

for tool in docker kind kubectl helm; do
  command -v "$tool" > /dev/null || { echo "kind-up.sh: $tool is missing" >&2; exit 1; }
done
docker info > /dev/null 2>&1 || { echo "kind-up.sh: docker does not answer: is its daemon running, and may you use it?" >&2; exit 1; }

if ! kind get clusters 2> /dev/null | grep -qxF "$cluster"; then
  kind create cluster --name "$cluster" --config "$root/hack/kind.yaml" --wait 120s
fi
kube() { kubectl --context "kind-$cluster" "$@"; }

# One image for trainer and searcher, for nodes without a GPU. Tags follow the
# content: a pod never runs an older image under the same name.
build() {
  local name=$1 id
  shift
  docker build -q -t "$name:build" "$@" "$root" > /dev/null
  id=$(docker image inspect -f '{{.Id}}' "$name:build")
  tag=${id#sha256:} tag=${tag:0:12}
  docker tag "$name:build" "$name:$tag"
  kind load docker-image --name "$cluster" "$name:$tag"
}
build tba-operator -f "$root/operator/Dockerfile"
operator=$tag
build tba-workload -f "$root/Dockerfile.trainer" --build-arg LOCK=requirements/cpu.lock
workload=$tag
# The example's Job names the released image: here it is this one.
released=$(sed -n 's/^ *image: *//p' "$root/examples/arithmetic/prepare.yaml")
docker tag "tba-workload:$workload" "$released"
kind load docker-image --name "$cluster" "$released"

kube apply -f "$root/hack/minio.yaml"
kube -n minio rollout status deployment/minio --timeout=180s
helm --kube-context "kind-$cluster" upgrade --install tba "$root/charts/tba-operator" --namespace "$namespace" --create-namespace \
  --set image.repository=docker.io/library/tba-operator --set-string image.tag="$operator" \
  --set workloads.trainerImage="docker.io/library/tba-workload:$workload" \
  --set workloads.searcherImage="docker.io/library/tba-workload:$workload" \
  --wait --timeout 180s

cat <<X

Ready. Next:
  kubectl config use-context kind-$cluster
  kubectl apply -k examples/arithmetic          # credentials; a Job makes the base model
  kubectl wait --for=condition=Complete job --all --timeout=10m
  kubectl apply -f examples/arithmetic.yaml
  kubectl get tbajob arithmetic -w
hack/kind-down.sh removes the cluster.
X
