"""Phases of a step add up."""

import time

import torch

from tba.trainer.stopwatch import Stopwatch


def test_phases_are_summed_by_name_and_those_that_did_not_happen_are_zero():
    stopwatch = Stopwatch(torch.device("cpu"))
    started = time.perf_counter()
    for phase in ("collate", "forward_backward", "collate"):
        with stopwatch(phase):
            pass
    seconds = stopwatch.seconds()
    assert list(seconds) == ["collate", "reference", "forward_backward", "optimizer"]
    assert seconds["reference"] == seconds["optimizer"] == 0.0
    assert 0.0 < sum(seconds.values()) <= time.perf_counter() - started


def test_phase_that_fails_is_counted():
    stopwatch = Stopwatch(torch.device("cpu"))
    try:
        with stopwatch("optimizer"):
            raise FloatingPointError
    except FloatingPointError:
        pass
    assert stopwatch.seconds()["optimizer"] > 0.0
