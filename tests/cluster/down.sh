#!/usr/bin/env bash
# down.sh [--keep-logs]: ends the cluster and removes all that up.sh made.
# Safe to run at any time, also after an up.sh that was killed half way.
set -uo pipefail
. "$(dirname "$0")/env.sh"
. "$here/sweep.sh"
[ "$(id -u)" = 0 ] || fail "must be root"
lock
refuse_foreign
sweep
[ -e "$KUBE_RUN/node-count" ] || exit 0  # no run folder, or not one of up.sh's
if [ "${1:-}" = --keep-logs ]; then
  find "$KUBE_RUN" -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf --one-file-system {} +
else
  rm -rf --one-file-system "$KUBE_RUN"
fi
