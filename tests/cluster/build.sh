#!/usr/bin/env bash
# build.sh [--check]: builds every program of the test cluster into $KUBE_BIN
# from the Go module beside it. Needs the Go toolchain, a C compiler and the Go
# module proxy; 5 to 10 minutes with an empty build cache, else seconds. Does
# nothing while its inputs are unchanged; --check only says whether that is so.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=$(realpath -m "${KUBE_BIN:-$here/.bin}")
cd "$here"

stamp=$( (cat go.mod go.sum build.sh cmd/*/*.go images/pause.c; go version || echo none) 2> /dev/null | sha256sum | cut -d' ' -f1)
[ "$(cat "$bin/.stamp" 2> /dev/null)" != "$stamp" ] || exit 0
[ "${1:-}" != --check ] || exit 1
for tool in go cc; do
  command -v "$tool" > /dev/null || { echo "build.sh: $tool is missing; needed: Go $(sed -n 's/^go //p' go.mod) or later, a C compiler" >&2; exit 1; }
done
mkdir -p "$bin"

export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
# version prints the version of a module that go.mod has settled on.
version() { go list -m -f '{{with .Replace}}{{.Version}}{{else}}{{.Version}}{{end}}' "$1"; }
kube=$(version k8s.io/kubernetes)
minor=${kube#v1.}; minor=${minor%%.*}

ldflags="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  for setting in gitVersion="$kube" gitMajor=1 gitMinor="$minor" gitTreeState=clean buildDate=1970-01-01T00:00:00Z; do
    ldflags+=" -X $package.$setting"
  done
done
ldflags+=" -X github.com/containerd/containerd/v2/version.Version=$(version github.com/containerd/containerd/v2)"
ldflags+=" -X helm.sh/helm/v4/internal/version.version=$(version helm.sh/helm/v4)"
ldflags+=" -X sigs.k8s.io/cri-tools/pkg/version.Version=$(version sigs.k8s.io/cri-tools)"

packages=(./cmd/kube ./cmd/kubectl ./cmd/coredns ./cmd/probe)
while read -r package; do packages+=("$package"); done < <(go list tool)
[ ! -L "$bin/kubectl" ] || rm "$bin/kubectl"  # of an older build: it would be written through
# One call: the shared packages are compiled once, the links run beside them.
nice go build -trimpath -ldflags "$ldflags" -o "$bin/" "${packages[@]}"
for name in etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet metrics-server; do
  ln -sf kube "$bin/$name"
done
cc -Os -static -s -o "$bin/pause" images/pause.c
echo "$stamp" > "$bin/.stamp"
