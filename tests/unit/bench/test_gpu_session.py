"""The stage of hack/gpu/session.sh that spends a sitting on pairs of arms; a bench that does nothing in its place."""

import os
import re
import shutil
import subprocess

import pytest
from bench.gpu.places import ROOT

BENCH = """#!/bin/bash
[[ "$*" =~ --gpus\\ ([0-9,]+).*--arms\\ ([0-9]+)\\ --seeds\\ ([0-9]+) ]] || exit 64
cores=$(env -u OMP_NUM_THREADS nproc)
echo "arm ${BASH_REMATCH[2]} seed ${BASH_REMATCH[3]} on ${BASH_REMATCH[1]} of $cores" >> "$RUNS_LOG"
sleep "$SLEEP"
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

    def pairs(self, *seeds, stage="pairs", limit=585, failing="nothing", variant="", sleep=0.0):
        """(runs of this call, what it said)."""
        log, said = self.call(stage, *seeds, limit=limit, failing=failing, variant=variant, sleep=sleep)
        return [tuple(map(int, re.findall(r"\d+", line)))[:2] for line in log], said

    def call(self, stage, *seeds, limit, failing, variant, sleep, arms=""):
        """(a line a run, what it said)."""
        log = self.folder / "runs.log"
        log.write_text("")
        names = {"VS": "vs", "KEEP": "keep", "PARTS": "parts", "OUT": "out", "RUN_ROOT": "runs"}
        env = {name: str(self.folder / where) for name, where in names.items()}
        env |= {
            "RUNS_LOG": str(log),
            "FAILING": failing,
            "SLEEP": str(sleep),
            "VARIANT": variant,
            "PAIRS_LIMIT": str(limit),
            **({"PAIR_ARMS": arms} if arms else {}),
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
        }
        argv = [self.folder / "hack" / "gpu" / "session.sh", stage, *map(str, seeds)]
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
        return log.read_text().splitlines(), done.stdout


@pytest.fixture
def sitting(tmp_path):
    return Sitting(tmp_path)


def test_a_seed_is_complete_before_the_next_one_begins(sitting):
    runs, said = sitting.pairs(0, 1)
    assert runs == [(arm, seed) for seed in (0, 1) for arm in (2, 9, 3)]
    assert "at the end" in said and "failed" not in said


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


def test_two_lanes_share_the_runs_each_on_cards_and_processors_of_its_own(sitting):
    lines, _ = sitting.call("lanes", 0, 1, 2, limit=585, failing="nothing", variant="", sleep=0.2)
    runs = [tuple(re.findall(r"arm (\d) seed (\d) on ([0-9,]+) of (\d+)", line)[0]) for line in lines]
    assert sorted((int(seed), int(arm)) for arm, seed, _, _ in runs) == [(s, a) for s in (0, 1, 2) for a in (2, 3, 9)]
    shared = {cards for arm, _, cards, _ in runs if arm == "9"}
    assert shared <= {"0,1,1,1,0,0", "2,3,3,3,2,2"}
    assert {cards for arm, _, cards, _ in runs if arm != "9"} <= {"0,1", "2,3"}
    assert len({cards[0] for _, _, cards, _ in runs}) == 2, "both lanes had some"
    assert {int(cores) for *_, cores in runs} == {len(os.sched_getaffinity(0)) // 2}


def test_a_layout_that_was_chosen_is_that_of_later_runs(sitting):
    (sitting.folder / "parts").mkdir()
    (sitting.folder / "parts" / "searchers").write_text("3x64")
    lines, _ = sitting.call("pairs", 0, limit=585, failing="nothing", variant="", sleep=0)
    assert "arm 9 seed 0 on 0,1,1,0 " in lines[1]


def test_the_comparison_on_one_card_needs_no_second(sitting):
    lines, _ = sitting.call("pairs", 0, limit=585, failing="nothing", variant="", sleep=0, arms="9one 1one 3one")
    assert [line.partition(" of ")[0] for line in lines] == [
        "arm 9 seed 0 on 0,0,0,0,0,0",
        "arm 1 seed 0 on 0",
        "arm 3 seed 0 on 0",
    ]


def test_a_run_that_fails_in_one_lane_is_tried_once_more_and_told(sitting):
    runs, said = sitting.pairs(0, stage="lanes", failing="--arms 9 --seeds 0", sleep=0.1)
    assert sorted(runs) == [(2, 0), (3, 0), (9, 0), (9, 0)] and "failed: pairs-9-0" in said
