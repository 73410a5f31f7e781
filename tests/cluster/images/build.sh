#!/usr/bin/env bash
# build.sh: builds the repository's images from its Dockerfiles, without a registry, for the test cluster.
# Writes $IMAGES/{operator,workload}.tar; a second run with unchanged inputs is a no-op.
# Needs root, buildah and mmdebstrap; Debian's and Python's package registries.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
IMAGES=$(realpath -m "${IMAGES:-$here/../.images}")
mkdir -p "$IMAGES"
export STORAGE_DRIVER=overlay BUILDAH_ISOLATION=chroot
base=docker.io/library/python:3.11-slim
certificates=/etc/ssl/certs/ca-certificates.crt

# stamp FILE...: a hash over files and what is below folders.
stamp() { (cd "$root" && find "$@" -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1); }

# The stand-in for python:3.11-slim: Debian's own Python, and this machine's certificates for its network.
make_base() {
  local wanted=$1
  [ "$(cat "$IMAGES/base.stamp" 2> /dev/null)" = "$wanted" ] && return
  rm -f "$IMAGES/base.tar"
  local scratch=/dev/shm exclude=()
  [ -w $scratch ] || scratch=$IMAGES
  for folder in doc man locale info lintian; do exclude+=("--dpkgopt=path-exclude=/usr/share/$folder/*"); done
  TMPDIR=$scratch mmdebstrap --quiet --mode=root --variant=apt --include=python3-venv,python-is-python3,ca-certificates \
    --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io "${exclude[@]}" \
    --customize-hook='copy-in /usr/local/share/ca-certificates /usr/local/share' --customize-hook='chroot "$1" update-ca-certificates' \
    bookworm "$IMAGES/base.tar"
  "$here/mkimage.py" "$IMAGES/base-image.tar" "$base" "$IMAGES/base.tar" --cmd '["python3"]' --env LANG=C.UTF-8
  echo "$wanted" > "$IMAGES/base.stamp"
}

# build NAME STAMP DOCKERFILE [ARGUMENT]...
build() {
  local name=$1 wanted=$2 file=$3
  shift 3
  [ "$(cat "$IMAGES/$name.stamp" 2> /dev/null)" = "$wanted" ] && { echo "$name: unchanged"; return; }
  flock "$IMAGES" buildah pull -q "docker-archive:$IMAGES/base-image.tar" > /dev/null
  rm -f "$IMAGES/$name.tar"
  # Straight into the archive: kept layers of the large image would cost 10 GB more and a second copy.
  buildah bud -q --layers=false --jobs 2 --network host --pull-never \
    -v "$IMAGES/pip.conf:/etc/pip.conf:ro" -v "$IMAGES/uv.toml:/etc/uv/uv.toml:ro" -v "$uv_cache:/root/.cache/uv" \
    --build-arg VERSION=test --build-arg REVISION="$(git -C "$root" rev-parse HEAD 2> /dev/null || echo unknown)" "$@" \
    -t "docker-archive:$IMAGES/$name.tar:docker.io/tba/$name:test" -f "$root/$file" "$root" > /dev/null
  echo "$wanted" > "$IMAGES/$name.stamp"
  echo "$name: built"
}

uv_cache=${UV_CACHE_DIR:-$HOME/.cache/uv}  # the one that `make .venv` has filled
mkdir -p "$uv_cache"
printf '[global]\ncert = %s\n' "$certificates" > "$IMAGES/pip.conf"
printf 'system-certs = true\n' > "$IMAGES/uv.toml"
make_base "$(cat "$here/build.sh" "$here/mkimage.py" /usr/local/share/ca-certificates/* 2> /dev/null | sha256sum | cut -d' ' -f1)"
sources=(pyproject.toml operator workloads tests/cluster/images/build.sh)
# Side by side: each waits for the network, then for one processor, then for the disk.
trap wait EXIT
build operator "$(stamp "${sources[@]}" requirements/operator.lock)" operator/Dockerfile & operator=$!
build workload "$(stamp "${sources[@]}" Dockerfile.trainer requirements/cpu.lock)" Dockerfile.trainer --build-arg LOCK=requirements/cpu.lock & workload=$!
wait $operator
wait $workload
buildah rmi -f "$base" > /dev/null 2>&1 || true
