#!/usr/bin/env bash
# golden.sh STORE ARCHIVE...: unpacks image archives into a containerd store of
# its own, once. With KUBE_GOLDEN=STORE each new node starts with a copy made of
# hard links: seconds, and no disk, however large the images. Does nothing while
# the store holds the archives as they are. Keep STORE on KUBE_RUN's filesystem.
set -euo pipefail
. "$(dirname "$0")/../env.sh"
[ $# -ge 2 ] || fail "usage: golden.sh STORE ARCHIVE..."
[ "$(id -u)" = 0 ] || fail "must be root"
store=$(realpath -m "$1"); shift

contents=$(realpath "$@" | xargs -d '\n' stat -c '%n %s %Y')
[ "$(cat "$store/archives" 2> /dev/null)" != "$contents" ] || exit 0

fresh=$store.partial run=$(mktemp -d)
rm -rf "$fresh" && mkdir -p "$fresh"
daemon=
# shellcheck disable=SC2317 # called by the trap
finish() {
  [ -z "$daemon" ] || { kill "$daemon" 2> /dev/null && wait "$daemon"; }
  rm -rf "$run"
}
trap finish EXIT

cat > "$run/containerd.toml" <<X
version = 3
root = "$fresh"
state = "$run/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri"]
[grpc]
  address = "$run/grpc.sock"
[ttrpc]
  address = "$run/ttrpc.sock"
X
containerd --config "$run/containerd.toml" > "$run/log" 2>&1 &
daemon=$!
for ((tick = 0; tick < 200; tick++)); do
  [ ! -S "$run/grpc.sock" ] || break
  kill -0 "$daemon" 2> /dev/null || { cat "$run/log" >&2; fail "containerd did not start"; }
  sleep 0.1
done
for archive in "$@"; do
  ctr -a "$run/grpc.sock" -n k8s.io images import --local "$archive" > "$run/import" || { cat "$run/import" "$run/log" >&2; fail "cannot import $archive"; }
done
kill "$daemon"
wait "$daemon" || true
daemon=
echo "$contents" > "$fresh/archives"
rm -rf "$store"
mv "$fresh" "$store"
