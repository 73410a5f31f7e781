# shellcheck shell=bash
# Sourced on a GPU host, in the repository's root: import paths and what vLLM is told. VS is where install.sh unpacks.
export VS=${VS:-$HOME/vs}
export PYTHONPATH=$VS/site:$PWD/workloads:$PWD/tests PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=WARNING
export TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export TBA_GPU_MODEL=${TBA_GPU_MODEL:-$VS/smol} TBA_GPU_REQUIRED=1 PATH=$VS/bin:$PATH
