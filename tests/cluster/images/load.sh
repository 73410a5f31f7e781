#!/usr/bin/env bash
# load.sh ARCHIVE...: imports image archives into the nodes of a running cluster.
# A cluster that is not up yet takes them from $KUBE_RUN/images or KUBE_GOLDEN.
set -euo pipefail
. "$(dirname "$0")/../env.sh"
[ $# -gt 0 ] || fail "usage: load.sh ARCHIVE..."
for ((n = 1; n <= KUBE_NODES; n++)); do
  for archive in "$@"; do
    "$here/node.sh" exec "$n" ctr -n k8s.io images import --local "$(realpath "$archive")" > /dev/null
  done
done
