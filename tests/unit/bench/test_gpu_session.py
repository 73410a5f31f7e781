"""The stage of hack/gpu/session.sh that spends a sitting on pairs of arms; a bench that does nothing in its place."""

import os
import re
import shutil
import subprocess

import pytest
from bench.gpu.places import ROOT

BENCH = """#!/bin/bash
[[ "$*" =~ --seconds\\ ([0-9]+).*--arms\\ ([0-9]+)\\ --seeds\\ ([0-9]+) ]] || exit 64
echo "arm ${BASH_REMATCH[2]} seed ${BASH_REMATCH[3]} for ${BASH_REMATCH[1]}" >> "$RUNS_LOG"
touch "$KEEP/gpu_count.jsonl"
[[ "$*" != *"$FAILING"* ]]
"""


class Sitting:
    """A machine on which stages run one after the other."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "hack").mkdir()
        shutil.copytree(ROOT / "hack" / "gpu", folder / "hack" / "gpu")
        bench = folder / "vs" / "bin" / "python3"  # session.sh puts it first on the path
        bench.parent.mkdir(parents=True)
        bench.write_text(BENCH)
        bench.chmod(0o755)
        self.kept = folder / "out" / "gpu_count.jsonl"

    def pairs(self, *seeds, limit=585, failing="nothing", variant=""):
        """(runs of this call, what it said)."""
        log = self.folder / "runs.log"
        log.write_text("")
        names = {"VS": "vs", "KEEP": "keep", "PARTS": "parts", "OUT": "out", "RUN_ROOT": "runs"}
        env = {name: str(self.folder / where) for name, where in names.items()}
        env |= {
            "RUNS_LOG": str(log),
            "FAILING": failing,
            "VARIANT": variant,
            "PAIRS_LIMIT": str(limit),
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
        }
        argv = [self.folder / "hack" / "gpu" / "session.sh", "pairs", *map(str, seeds)]
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
        runs = [tuple(map(int, re.findall(r"\d+", line))) for line in log.read_text().splitlines()]
        return [run[:2] for run in runs], done.stdout


@pytest.fixture
def sitting(tmp_path):
    return Sitting(tmp_path)


def test_a_seed_is_complete_before_the_next_one_begins(sitting):
    runs, said = sitting.pairs(0, 1)
    assert runs == [(arm, seed) for seed in (0, 1) for arm in (2, 9, 3)]
    assert "nothing is left" in said and "failed" not in said.replace("but what failed", "")


def test_no_run_begins_that_would_not_end_in_this_call_and_the_next_call_goes_on(sitting):
    runs, said = sitting.pairs(0, limit=120)
    assert runs == [(2, 0)] and "next is arm 9, seed 0" in said
    assert sitting.kept.exists(), "what a call measured comes back with it"
    assert sitting.pairs(0)[0] == [(9, 0), (3, 0)]
    assert sitting.pairs(0)[0] == []


def test_a_run_that_failed_is_tried_again_after_all_others(sitting):
    runs, said = sitting.pairs(0, failing="--arms 9 --seeds 0")
    assert runs == [(2, 0), (9, 0), (3, 0), (9, 0)] and "failed: pairs-9-0" in said
    assert sitting.pairs(0)[0] == [(9, 0)]


def test_a_variant_is_a_comparison_of_its_own(sitting):
    sitting.pairs(0)
    assert len(sitting.pairs(0, variant="second start")[0]) == 3
    assert sitting.pairs(0, variant="second start")[0] == []
