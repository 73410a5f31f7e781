#!/bin/bash
# One sitting on a GPU host with two cards, in the repository's root, stage by stage; see README.md beside this file.
# usage: hack/gpu/session.sh STAGE; what was measured lies in $KEEP and is copied to $OUT at the end of each stage.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source=hack/gpu/env.sh
source hack/gpu/env.sh
KEEP=${KEEP:-$HOME/keep} PARTS=${PARTS:-$HOME/parts} START=${START:-$HOME/start}
SECONDS_A_RUN=${SECONDS_A_RUN:-180}
PAIR_SECONDS=${PAIR_SECONDS:-50} PAIR_SECONDS_TRL=${PAIR_SECONDS_TRL:-100} PAIR_SECONDS_ONE=${PAIR_SECONDS_ONE:-75} PAIRS_LIMIT=${PAIRS_LIMIT:-585}
SCALING_SECONDS=${SCALING_SECONDS:-40}
SLOW_CALLS=${SLOW_CALLS:-160} # of the reward at a time in every arm of count-slow; a fifth of them for each of five searchers
PAIR_ARMS=${PAIR_ARMS:-2 9 3} # and PAIR_MORE: what bench_count.py is told besides, without blanks inside
RUN_ROOT=${RUN_ROOT:-/dev/shm/tba}
OUT=${OUT:-$HOME/out}
mkdir -p "$KEEP" "$PARTS" "$OUT" "$RUN_ROOT"
trap 'cp -f "$KEEP"/* "$OUT"/ 2>/dev/null' EXIT

step() { # step CARDS LIMIT_SECONDS NAME COMMAND...: with a limit, its end shown, all of it in $KEEP/log.txt
  local cards=$1 limit=$2 name=$3 began=$SECONDS code
  shift 3
  CUDA_VISIBLE_DEVICES=$cards timeout -k 5 "$limit" "$@" > "$PARTS/$name.log" 2>&1
  code=$?
  { echo "=== $name: exit $code after $((SECONDS - began)) s: $*"; tail -c 60000 "$PARTS/$name.log"; } >> "$KEEP/log.txt"
  echo "=== $name: exit $code after $((SECONDS - began)) s"
  grep -v -e '^$' -e Warning "$PARTS/$name.log" | tail -n "${TAIL:-14}" | cut -c1-400
  return $code
}

merge() { # merge NAME: one file of the rows of all parts; what a command measured anew takes the place of the old
  python3 - "$KEEP/$1.json" "$PARTS/$1".*.json <<'PY'
import json, os, sys
rows = {(row["metric"], row["command"].replace(os.environ["HOME"], "$HOME")): row for path in sys.argv[2:] for row in json.load(open(path))}
open(sys.argv[1], "w").write("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows.values()) + "\n]\n")
PY
}

trainer_bench() {
  local bench=(python3 tests/bench/gpu/bench_trainer_gpu.py --tokenizer "$VS/smol")
  step 1 200 trainer-small "${bench[@]}" --shapes 0.135b --repetitions 3 --micro-rows 16 40 80 -o "$PARTS/gpu_trainer.1.json"
  step 1 300 trainer-large "${bench[@]}" --shapes 1.5b --repetitions 3 --micro-rows 8 20 -o "$PARTS/gpu_trainer.2.json"
  merge gpu_trainer
  step 1 200 tests-trainer python3 -m pytest tests/gpu -q -s -p no:cacheprovider --ignore tests/gpu/test_vllm_on_gpu.py
}

recomputed() { # what selective recomputation keeps and costs for the small model, on card $CARD
  local bench=(python3 tests/bench/gpu/bench_trainer_gpu.py --tokenizer "$VS/smol" --repetitions 3 --shapes 0.135b --micro-rows 80)
  step ${CARD:-0} 60 tests-selective python3 -m pytest tests/gpu/test_trainer_on_gpu.py -q -s -p no:cacheprovider -k "recomputed_layers or selective_recomputation"
  step ${CARD:-0} 100 small-default "${bench[@]}" -o "$PARTS/gpu_trainer.7.json"
  step ${CARD:-0} 100 small-selective "${bench[@]}" --set activationCheckpointing=Selective -o "$PARTS/gpu_trainer.5.json"
  [ -e "$PARTS/gpu_trainer.1.json" ] || cp docs/results/gpu_trainer.json "$PARTS/gpu_trainer.0.json"
  merge gpu_trainer
}

memory() { # ways to keep less for the backward pass, on card $CARD
  local bench=(python3 tests/bench/gpu/bench_trainer_gpu.py --tokenizer "$VS/smol" --repetitions 3)
  step ${CARD:-0} 150 memory-selective "${bench[@]}" --shapes 1.5b --micro-rows 20 --set activationCheckpointing=Selective -o "$PARTS/gpu_trainer.3.json"
  step ${CARD:-0} 150 memory-default "${bench[@]}" --shapes 1.5b --micro-rows 20 -o "$PARTS/gpu_trainer.6.json"
  step ${CARD:-0} 100 memory-small "${bench[@]}" --shapes 0.135b --micro-rows 80 --set activationCheckpointing=Selective -o "$PARTS/gpu_trainer.5.json"
  # Without trainer_bench in this sitting: beside the rows of an earlier one, not in their place.
  [ -e "$PARTS/gpu_trainer.1.json" ] || cp docs/results/gpu_trainer.json "$PARTS/gpu_trainer.0.json"
  merge gpu_trainer
}

engine() { # engine CARD PROMPTS
  step "$1" 300 engine python3 tests/bench/gpu/bench_engine.py --model "$START/start" --prompts "$2" --repetitions 2 \
    -o "$KEEP/gpu_engine.json"
}

sync_small() { # sync_small CARD: a publish of 0.27 GB
  step "$1" 90 sync-small python3 tests/bench/gpu/bench_sync.py --model "$VS/smol" --what ${2:-model} --engine vllm \
    --folder "$RUN_ROOT" -o "$PARTS/gpu_sync.1.json"
}

sync_large() { # sync_large CARD
  step "$1" 150 sync-large python3 tests/bench/gpu/bench_sync.py --model "$VS/smol" --what 1.5b --engine vllm \
    --folder "$RUN_ROOT" -o "$PARTS/gpu_sync.2.json"
}

count() { # count CARDS LIMIT ARGUMENTS...
  local cards=$1 limit=$2 name
  shift 2
  name=count-$(echo "$*" | tr -c 'a-z0-9\n' '-' | cut -c1-80)
  [ -e "$KEEP/gpu_count.jsonl" ] || cp docs/results/gpu_count.jsonl "$KEEP/" 2>/dev/null
  TAIL=40 step 0,1 "$limit" "$name" python3 tests/bench/gpu/bench_count.py --start "$START" --gpus "$cards" \
    --seconds "$SECONDS_A_RUN" --max-steps 250 --run-root "$RUN_ROOT" --runs "$KEEP/gpu_count.jsonl" -o "$KEEP/gpu_count.json" "$@"
}

shared() { # shared NxPLACES: cards of arm 9, of the trainer and then of each searcher: the larger half beside no trainer
  local number=${1%x*} cards=0 i
  for ((i = 0; i < number; i++)); do cards+=,$((i < (number + 1) / 2)); done
  echo "$cards"
}

layout() { # layout NAME: sets what one run is: its arm, clock, seconds beside it, cards, and what else it is told
  clock=$PAIR_SECONDS cards=0,1 more=(--variant "${VARIANT:-}")
  arm=${1%%[a-z]*}
  local searchers
  searchers=$(cat "$PARTS/searchers" 2> /dev/null || echo "${SEARCHERS:-5x128}")
  # Beside its clock: start, held-out prompts, end.
  case $1 in
  2) beside=60 ;;
  3) beside=60 clock=$PAIR_SECONDS_TRL ;;
  5) beside=90 ;;
  6) beside=100 ;;
  9) beside=100 cards=$(shared "$searchers") more+=(--searchers "$searchers") ;;
  # On one card.
  1one) beside=60 clock=$PAIR_SECONDS_ONE cards=0 more=(--variant "one card") ;;
  3one) beside=60 clock=$PAIR_SECONDS_TRL cards=0 more=(--variant "one card") ;;
  9one) beside=110 cards=0,0,0,0,0,0 more=(--variant "one card, ratio to the sampler" --searchers 5x128 --set objective.parameters.ratioAlpha=1) ;;
  # On two cards, with nothing else on the host.
  2two) beside=60 clock=60 more=(--variant "two cards") ;;
  3two) beside=60 clock=$PAIR_SECONDS_TRL more=(--variant "two cards") ;;
  9two) beside=100 cards=$(shared "$searchers") more=(--variant "two cards, ratio to the sampler" --searchers "$searchers" --set objective.parameters.ratioAlpha=1) ;;
  2twolong) beside=60 clock=90 more=(--variant "two cards" --task count-long) ;;
  9twolong) beside=100 clock=50 cards=$(shared "$searchers") more=(--variant "two cards, ratio to the sampler" --task count-long --searchers "$searchers" --set objective.parameters.ratioAlpha=1) ;;
  # Rewards of 200 ms, as many calls at a time in every arm.
  2twoslow) beside=60 clock=${SLOW_CLOCK:-80} more=(--variant "two cards" --task count-slow --set "task.reward.workers=$SLOW_CALLS") ;;
  9twoslow) beside=100 clock=${SLOW_CLOCK_OURS:-50} cards=$(shared "$searchers") more=(--variant "two cards, ratio to the sampler" --task count-slow --searchers "$searchers" --set objective.parameters.ratioAlpha=1 --set "task.reward.workers=$((SLOW_CALLS / 5))") ;;
  # On one card, other tasks: responses of a longer tail; rewards of 200 ms.
  1onelong) beside=60 clock=110 cards=0 more=(--variant "one card" --task count-long) ;;
  3onelong) beside=60 clock=$PAIR_SECONDS_TRL cards=0 more=(--variant "one card" --task count-long) ;;
  9onelong) beside=110 clock=70 cards=0,0,0,0,0,0 more=(--variant "one card, ratio to the sampler" --task count-long --searchers 5x128 --set objective.parameters.ratioAlpha=1) ;;
  1oneslow) beside=60 clock=90 cards=0 more=(--variant "one card" --task count-slow --set "task.reward.workers=$SLOW_CALLS") ;;
  3oneslow) beside=60 clock=$PAIR_SECONDS_TRL cards=0 more=(--variant "one card" --task count-slow --set "task.reward.workers=$SLOW_CALLS") ;;
  9oneslow) beside=110 clock=60 cards=0,0,0,0,0,0 more=(--variant "one card, ratio to the sampler" --task count-slow --searchers 5x128 --set objective.parameters.ratioAlpha=1 --set "task.reward.workers=$((SLOW_CALLS / 5))") ;;
  # Speed alone.
  2three) beside=60 clock=22 more=(--variant "speed, 3 engines a card" --engines 3 --evaluate-every 0) ;;
  2long) beside=50 clock=30 more=(--variant speed --task count-long --evaluate-every 0) ;;
  9long) beside=65 clock=30 cards=$(shared "$searchers") more=(--variant speed --searchers "$searchers" --task count-long --evaluate-every 0) ;;
  9x*) beside=70 clock=22 cards=$(shared "${1#9x}") more=(--variant "speed, ${1#9x}" --searchers "${1#9x}" --evaluate-every 0) ;;
  *) echo "no layout $1" >&2; exit 64 ;;
  esac
  if [ "${LANE:-}" = b ]; then cards=$(tr 01 23 <<< "$cards"); fi
}

pairs() { # pairs SEED...: $PAIR_ARMS of each seed, one run at a time, while this call lasts; the next call goes on
  local pass seed name mark arm clock beside cards more
  for pass in new failed; do # one that failed is tried again, after all others
    for seed in "$@"; do
      for name in $PAIR_ARMS; do
        mark=$PARTS/pairs${VARIANT:+-$VARIANT}-$name-$seed
        layout "$name"
        # Two lanes share the work: who makes the folder has the run.
        if [ -e "$mark.done" ]; then continue; fi
        if [ $pass = new ] && [ -e "$mark.new" ]; then continue; fi
        if [ $pass = failed ] && { [ ! -e "$mark.fell" ] || [ -e "$mark.failed" ]; }; then continue; fi
        if ((SECONDS + clock + beside > PAIRS_LIMIT)); then
          echo "pairs: next is arm $name, seed $seed: call this again"
          return
        fi
        mkdir "$mark.$pass" 2> /dev/null || continue
        if SECONDS_A_RUN=$clock count "$cards" "$(least $((clock + beside + 60)) $((PAIRS_LIMIT + 5 - SECONDS)))" \
          --arms "$arm" --seeds "$seed" "${more[@]}" ${PAIR_MORE:-}; then touch "$mark.done"; else touch "$mark.fell"; fi
        rm -rf "${RUN_ROOT:?}"/*
        cp -f "$KEEP"/* "$OUT"/
      done
    done
  done
}

begin_pairs() { # what an earlier call left unfinished has failed, and what failed may be tried again
  local mark
  for mark in "$PARTS"/pairs*.new; do
    if [ -e "$mark" ] && [ ! -e "${mark%.new}.done" ]; then touch "${mark%.new}.fell"; fi
  done
  rm -rf "$PARTS"/pairs*.failed
}

end_pairs() { # end_pairs SEED...
  local mark
  for mark in "$PARTS"/pairs*.fell; do
    if [ -e "$mark" ] && [ ! -e "${mark%.fell}.done" ]; then echo "failed: $(basename "$mark" .fell)"; fi
  done
  echo "pairs: at the end of seeds $*"
}

lane() { # lane a|b SEED...: on one half of a host with four cards, with half of its processors
  local half=$(($(env -u OMP_NUM_THREADS nproc) / 2)) # nproc would count threads of OpenMP
  export LANE=$1 RUN_ROOT=$RUN_ROOT/$1
  shift
  mkdir -p "$RUN_ROOT"
  if [ $LANE = a ]; then taskset -cp "0-$((half - 1))" $BASHPID; else taskset -cp "$half-$((2 * half - 1))" $BASHPID; fi > /dev/null
  pairs "$@"
}

lanes() { # lanes SEED...: pairs, two runs at a time
  begin_pairs
  lane a "$@" & # each in a shell of its own
  lane b "$@" &
  wait
  end_pairs "$@"
}

look() { # look LIMIT SECONDS NAME CARDS ARGUMENTS...: speed alone, of one layout
  local limit=$1 seconds=$2 name=$3 cards=$4
  shift 4
  SECONDS_A_RUN=$seconds count "$cards" "$limit" --evaluate-every 0 --seeds 0 --variant "$name" "$@"
  rm -rf "${RUN_ROOT:?}"/*
}

least() { echo $(($1 < $2 ? $1 : $2)); }

case ${1:?stage} in
first) # the first piece is there: the trainer's bench needs no more, and runs on while the others travel
  # A virtual machine that grows as its memory is used would have every copy wait for it.
  setsid nohup python3 -c "import numpy; numpy.ones(${FILL_GIB:-64} * 2**27)" > /dev/null 2>&1 < /dev/null &
  hack/gpu/install.sh a || exit 1
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  python3 -c "import torch, transformers, vllm, trl, structlog, zstandard, tba.store; print(torch.__version__, transformers.__version__, vllm.__version__, trl.__version__)"
  if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then # gradients over two cards, seen to work before arm 2 needs it
    CUDA_VISIBLE_DEVICES=1 timeout 90 python3 -m bench.gpu.average 1 2 29411 &
    CUDA_VISIBLE_DEVICES=0 timeout 90 python3 -m bench.gpu.average 0 2 29411
    wait
  fi
  [ -n "${START_ONLY:-}" ] || setsid nohup "$0" trainer > "$PARTS/background.log" 2>&1 < /dev/null &
  setsid nohup python3 -m compileall -q -j 8 "$VS/site" > /dev/null 2>&1 < /dev/null &
  ;;
trainer) OUT=$PARTS/none; mkdir -p "$OUT"; trainer_bench ;;
memory) OUT=${MEMORY_OUT:-$OUT}; mkdir -p "$OUT"; memory; touch "$PARTS/memory.done" ;;
recomputed) OUT=$PARTS/none; mkdir -p "$OUT"; recomputed; touch "$PARTS/recomputed.done" ;;
second) hack/gpu/install.sh b ;;
third) # the model is complete: its start, the tests of the tier, engine and weights on the first card
  hack/gpu/install.sh c || exit 1
  if [ "${START_ONLY:-}" = four ]; then # weights and a test beside it, on cards of their own
    sync_large 1 &
    step 2 120 tests-vllm python3 -m pytest tests/gpu/test_vllm_on_gpu.py -q -s -p no:cacheprovider -k "starts_while or adapters" &
    step 0 120 start python3 examples/count/make_start.py --model "$VS/smol" -o "$START"
    wait
    merge gpu_sync
    exit
  fi
  if [ "${START_ONLY:-}" = small ]; then # a small publish beside it
    sync_small 1 &
    step 0 120 start python3 examples/count/make_start.py --model "$VS/smol" -o "$START"
    wait
    [ -e "$PARTS/gpu_sync.2.json" ] || cp docs/results/gpu_sync.json "$PARTS/gpu_sync.0.json"
    merge gpu_sync
    exit
  fi
  if [ -n "${START_ONLY:-}" ]; then
    step 0 120 start python3 examples/count/make_start.py --model "$VS/smol" -o "$START"
    [ "$START_ONLY" = engine ] || exit
    # Weights on the first card, the engine on the second.
    sync_large 0 &
    engine 1 320
    wait
    merge gpu_sync
    exit
  fi
  (step 0 180 tests-vllm python3 -m pytest tests/gpu/test_vllm_on_gpu.py -q -s -p no:cacheprovider) &
  tests=$!
  step 0 120 start python3 examples/count/make_start.py --model "$VS/smol" -o "$START"
  wait "$tests"
  engine 0 640
  sync_small 0 "model deltas"
  sync_large 0
  merge gpu_sync
  cat "$PARTS/background.log"
  ;;
async) # arm 5 on both cards, then two seeds of arm 1, a card each
  count 0,1 300 --arms 5 --seeds "${2:-0}"
  rm -rf "${RUN_ROOT:?}"/*
  count 0 280 --arms 1 --seeds "${2:-0}" &
  count 1 280 --arms 1 --seeds "${3:-1}" &
  wait
  ;;
pairs) # what the headline compares, on both cards: session.sh pairs SEED...
  shift
  begin_pairs
  pairs "${@:-0}"
  end_pairs "${@:-0}"
  ;;
lanes) # the same on four cards, two runs at a time: session.sh lanes SEED...
  shift
  lanes "${@:-0}"
  ;;
choose) # looks at layouts of arm 9 in two lanes; the one that should learn fastest is that of arm 9 from now on
  PAIR_ARMS="${LOOKS:-9x2x128 9x5x128 9x3x128 9x4x64}"
  lanes 0
  python3 tests/bench/gpu/choose_layout.py --runs "$KEEP/gpu_count.jsonl" -o "$PARTS/searchers" \
    --start "$(python3 -c "import json; print(json.load(open('$START/made.json'))['weights'])")"
  ;;
scaling) # one to three searchers, each on a card of its own, with nothing beside: session.sh scaling SEED
  export SECONDS_A_RUN=$SCALING_SECONDS
  count 0,1 175 --arms 7 --seeds "${2:-0}" --variant "1 searcher" --set searcher.replicas=1
  rm -rf "${RUN_ROOT:?}"/*
  count 0,1,2 175 --arms 7 --seeds "${2:-0}" --variant "2 searchers" --set searcher.replicas=2
  rm -rf "${RUN_ROOT:?}"/*
  count 0,1,2,3 175 --arms 7 --seeds "${2:-0}"
  rm -rf "${RUN_ROOT:?}"/*
  ;;
look) # speed of one layout: session.sh look LIMIT SECONDS NAME CARDS ARGUMENTS...
  shift
  look "$@"
  ;;
lag) # cells of the study of stale data, side by side on the first card: session.sh lag LIMIT ARGUMENTS...
  limit=${2:?limit}
  shift 2
  [ -e "$KEEP/gpu_lag.jsonl" ] || cp docs/results/gpu_lag.jsonl "$KEEP/" 2>/dev/null
  TAIL=60 step 0 "$limit" "lag-$SECONDS" python3 tests/bench/gpu/bench_lag.py --start "$START" \
    --runs "$KEEP/gpu_lag.jsonl" -o "$KEEP/gpu_lag.json" "$@"
  ;;
lags) # the same on all cards, a seed on each: session.sh lags LIMIT ARGUMENTS...
  limit=${2:?limit}
  shift 2
  [ -e "$KEEP/gpu_lag.jsonl" ] || cp docs/results/gpu_lag.jsonl "$KEEP/" 2>/dev/null
  for ((card = 0; card < $(nvidia-smi -L | wc -l); card++)); do
    step "$card" "$limit" "lag-$card-$SECONDS" python3 tests/bench/gpu/bench_lag.py --start "$START" --gpu "$card" \
      --seeds "$card" --runs "$KEEP/gpu_lag.jsonl" -o "$PARTS/gpu_lag.$card.json" "$@" &
  done
  wait
  ;;
count) # anything else: session.sh count CARDS LIMIT ARGUMENTS...
  shift
  count "$@"
  ;;
s3) # the same weights through an S3 server; needs piece d
  hack/gpu/install.sh d || exit 1
  step 0 200 sync-s3 python3 tests/bench/gpu/bench_sync.py --model "$VS/smol" --what model 1.5b --store s3 \
    --folder "$RUN_ROOT" -o "$PARTS/gpu_sync.3.json"
  merge gpu_sync
  ;;
*) echo "no stage $1" >&2; exit 64 ;;
esac
