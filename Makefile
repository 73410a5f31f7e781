# Every target sets up what it needs and may be run again at any time.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
UV_VERSION := 0.13.9
UV := .uv/bin/uv
VENV := .venv
BIN := $(VENV)/bin
NODES ?= 2
# Processes that run tests: each takes up to 7 GB with what it starts, and the longest file takes minutes.
TEST_WORKERS ?= 2
# A file stays with one of them, as its tests share servers and engines; long files (integration) are given out first.
PARALLEL := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# Where it is set, every process of a run and of a test compiles this project's sources anew: a second each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-seeds test tiers test-failed test-unit test-integration test-properties test-faults cluster-build cluster-images cluster-programs cluster-archives cluster-up cluster-down cluster-clean test-cluster test-cluster-failed test-cluster-faults model-check check lint types lock format bench bench-operator clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

demo: $(VENV)/.dev  ## the main job: train the laptop model with 1 trainer and 2 searchers, then open the report
	$(BIN)/python examples/arithmetic/make_base.py
	$(BIN)/tba run examples/laptop.yaml --searchers 2 --storage embedded --fresh

demo-seeds: $(VENV)/.dev  ## the same for three seeds; fails unless each reaches 80 % held-out within 150 steps
	$(BIN)/python examples/arithmetic/make_base.py
	$(BIN)/python hack/demo_seeds.py --seeds 0 1 2

test: $(VENV)/.dev lint  ## lint, types, import contracts, unit and integration tests
	# pyright takes one processor for a minute or two: beside the tests, which also wait, and behind them.
	$(MAKE) --no-print-directory -j2 types tiers TYPES_NICE="nice -n 10"

tiers: $(VENV)/.dev
	$(BIN)/python -m pytest tests/integration tests/unit -q $(PARALLEL)

test-failed: check  ## those of them that failed last time, one at a time, after the checks; an error if none did
	$(BIN)/python -m pytest tests/unit tests/integration -q --last-failed --last-failed-no-failures none

test-unit: $(VENV)/.dev  ## pure logic only
	$(BIN)/python -m pytest tests/unit -q $(PARALLEL)

test-integration: $(VENV)/.dev  ## real processes and servers
	$(BIN)/python -m pytest tests/integration -q $(PARALLEL)

test-properties: $(VENV)/.dev  ## the properties of the unit tests, each on 1,000 examples unless it names its own number
	$(BIN)/python -m pytest tests/unit -q -m hypothesis --hypothesis-profile=thorough $(PARALLEL)

test-faults: $(VENV)/.dev  ## the long fault tier: SIGKILL at every failpoint and at random
	$(BIN)/python -m pytest tests/faults -q -s

cluster-build:  ## programs of the test cluster: 5 to 10 minutes the first time; installs Debian packages if some are absent
	tests/cluster/packages.sh
	tests/cluster/build.sh

cluster-up: cluster-build  ## a real Kubernetes cluster on this machine, as root: make cluster-up NODES=2
	KUBE_NODES=$(NODES) tests/cluster/up.sh

cluster-down:  ## end it, and those of a test session that was killed; removes every trace
	tests/cluster/down.sh
	# The second one of tests/cluster/conftest.py.
	KUBE_RUN=tests/cluster/.run-1 KUBE_BRIDGE=kube1 tests/cluster/down.sh

cluster-images:  ## this repository's images and those of its companions, for the test cluster
	tests/cluster/packages.sh
	# Programs take the processors, images the network and the disk.
	$(MAKE) -j2 cluster-programs cluster-archives
	tests/cluster/images/golden.sh tests/cluster/.golden tests/cluster/.images/operator.tar tests/cluster/.images/workload.tar

cluster-programs:
	tests/cluster/build.sh
	for companion in minio kueue; do tests/cluster/companions/$$companion/build.sh; done

cluster-archives:
	tests/cluster/images/build.sh

cluster-clean: cluster-down  ## also remove programs and images: 16 GB
	rm -rf tests/cluster/.bin tests/cluster/.images tests/cluster/.golden tests/cluster/.failures

test-cluster: $(VENV)/.dev cluster-images  ## the operator on two real clusters side by side, as root; for one half it uses that of `cluster-up`
	$(BIN)/python -m pytest tests/cluster -q -m "not faults" $(HALVES)

test-cluster-failed: $(VENV)/.dev  ## those of them that failed last time, on a new cluster
	$(BIN)/python -m pytest tests/cluster -q -m "not faults" $(HALVES) --last-failed --last-failed-no-failures none
# Each half on a cluster of its own: both wait more than they compute.
HALVES := -n 2

test-cluster-faults: $(VENV)/.dev cluster-images  ## what a cluster may do to a run, with the timeline (a quarter of an hour)
	$(BIN)/python -m pytest tests/cluster -q -s -m faults

model-check: $(VENV)/.dev  ## explore every interleaving and crash of the bucket protocol; prints the states
	$(BIN)/python -m pytest tests/unit/protocol/test_model_check.py -q -s

check: lint types  ## ruff, import-linter, generated files, pyright

types: $(VENV)/.dev
	$(TYPES_NICE) $(BIN)/pyright

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python hack/job_reference.py --check
	$(BIN)/python hack/command_reference.py --check
	$(BIN)/python hack/benchmark_tables.py --check
	$(BIN)/python hack/crd.py --check
	$(BIN)/python hack/rbac.py --check
	$(BIN)/python hack/chart.py --check
	$(BIN)/python hack/dashboard.py --check
	$(BIN)/python hack/pains.py --check

format: $(VENV)/.dev  ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## print the benchmarks (a quarter of an hour), write docs/results/ and docs/benchmarks.md
	$(BIN)/python tests/bench/bench_buffer.py -o docs/results/buffer.json
	$(BIN)/python tests/bench/bench_shards.py -o docs/results/shards.json
	$(BIN)/python tests/bench/bench_snapshot.py -o docs/results/snapshot.json
	$(BIN)/python hack/gguf_to_hf.py -o build/smollm2
	$(BIN)/python tests/bench/bench_delta.py --model build/smollm2 -o docs/results/delta.json
	$(BIN)/python tests/bench/bench_trainer.py
	$(BIN)/python tests/bench/bench_ingest.py
	$(BIN)/python hack/benchmark_tables.py

bench-operator: $(VENV)/.dev cluster-build  ## 1,000 jobs on a control plane of its own with simulated nodes, as root (half an hour, all processors)
	tests/cluster/companions/kwok/build.sh
	PYTHONPATH=workloads:operator:tests $(BIN)/python tests/bench/bench_operator.py -o docs/results/operator.json
	$(BIN)/python hack/benchmark_tables.py

# uv.lock records addresses of the index it was made from, so it is not committed; these files hold hashes only.
lock: $(UV)  ## resolve again and write requirements/*.lock
	$(UV) lock --upgrade
	$(UV) export -q --locked --extra cpu --no-dev $(EXPORT) > requirements/cpu.lock
	$(UV) export -q --locked --extra operator --no-dev $(EXPORT) > requirements/operator.lock
	$(UV) export -q --locked --extra cpu --extra operator --group dev $(EXPORT) > requirements/dev.lock
	for role in trainer searcher; do \
	  $(PYTHON) hack/role_requirements.py $$role | $(UV) pip compile -q --no-config $(COMPILE) - -o requirements/$$role.lock; \
	done
EXPORT := --no-emit-project --no-annotate --no-header --format requirements.txt
# Images for GPUs take the dependencies' own pins, not the lean overrides of this project.
COMPILE := --generate-hashes --no-annotate --no-header --no-emit-index-url --python-version 3.11 --python-platform x86_64-manylinux_2_28

$(UV):
	$(PYTHON) -m venv .uv
	.uv/bin/pip install -q uv==$(UV_VERSION)

$(VENV)/.dev: requirements/dev.lock pyproject.toml | $(UV)
	$(UV) venv -q --allow-existing --python $(PYTHON) $(VENV)
	# Compiled once: else each of the first processes compiles torch and transformers for itself.
	$(UV) pip sync -q --compile-bytecode --python $(BIN)/python --require-hashes requirements/dev.lock
	$(UV) pip install -q --python $(BIN)/python --no-deps -e .
	touch $@

clean:  ## remove what the targets made
	rm -rf $(VENV) .uv runs .pytest_cache .ruff_cache .hypothesis
