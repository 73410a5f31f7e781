#!/usr/bin/env bash
# kind-down.sh: removes the cluster of kind-up.sh and its data. The images stay in Docker.
set -euo pipefail
exec kind delete cluster --name "${CLUSTER:-tba}"
