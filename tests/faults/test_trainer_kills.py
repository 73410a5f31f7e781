"""SIGKILL of the real trainer at named points and at random: nothing lost, nothing twice, bit-equal weights."""

import random
import signal
import time

import pytest
from support.audit import audit, weights_differ
from support.processes import cluster, job_for

from tba.contracts.records import RunState

POINTS = [
    "commit.before_cas",
    "commit.after_cas",
    "snapshot.after_data",
    "snapshot.before_manifest",
    "checkpoint.before_data",
    "checkpoint.before_manifest",
    "checkpoint.before_commit",
    "checkpoint.after_commit",
    "step.after_update",
]
KILLS = 20


def schedule(seed: int) -> list[str]:
    """Failpoint settings of the attempts: every point twice, at seeded passages, then random moments ("")."""
    rng = random.Random(seed)
    named = [f"{point}=kill:{rng.randint(1, 6)}" for point in POINTS for _ in range(2)]
    rng.shuffle(named)
    return [*named, *[""] * (KILLS - len(named))]


@pytest.mark.timeout(900)
def test_twenty_kills_of_the_trainer_lose_nothing_and_change_no_bit(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 400})
    rng = random.Random(7)
    killed = 0
    with cluster(tmp_path, job) as run:
        searcher = run.searcher()
        for failpoints in schedule(7):
            trainer = run.trainer(failpoints)
            if not failpoints:
                run.wait_for(lambda latest, pid=trainer.pid: latest.manifest is not None)
                time.sleep(rng.uniform(3, 6))
                trainer.kill()
            assert trainer.wait(120) in (-signal.SIGKILL, 0), run.tail()
            killed += trainer.returncode == -signal.SIGKILL
        run.stop(searcher)
        last = run.trainer()
        assert last.wait(240) == 0, run.tail()
        latest = run.latest()
        assert latest is not None and latest.state is RunState.COMPLETE
        result = audit(run.store)
        print(f"kills {killed}, epochs {latest.epoch}, ids {sum(result.in_bucket.values())}")
        assert killed >= KILLS
        assert result.lost == set() and result.doubled == set()
        assert weights_differ(run.store) == []


@pytest.mark.timeout(600)
def test_kills_of_searchers_at_random_lose_no_uploaded_row(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 100000})
    rng = random.Random(11)
    with cluster(tmp_path, job) as run:
        trainer = run.trainer()
        searchers = {name: run.searcher(name) for name in ("searcher-0", "searcher-1")}
        run.wait_for(lambda latest: latest.manifest is not None)
        for killed in range(8):
            run.wait_for_shards(searchers=1 + killed // 2, more_than=len(run.shards()))
            time.sleep(rng.uniform(0.0, 2.0))
            name = rng.choice(sorted(searchers))
            searchers[name].kill()
            searchers[name].wait()
            searchers[name] = run.searcher(name)
        run.stop(*searchers.values())
        time.sleep(3)  # many polls: what the searchers left behind arrives
        assert run.stop(trainer) == [143], run.tail()
        result = audit(run.store)
        assert result.lost == set() and result.doubled == set()
        assert len({i.incarnation for i in result.ingested}) >= 3
