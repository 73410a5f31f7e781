import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from support.memory_store import MemoryStore

from tba import trace
from tba.contracts.config import Engine, LiveConfig, Model, Prompts, Reward, RunConfig, Sampling, Storage, Sync, Task
from tba.contracts.keys import EVAL, LATEST, EvalKey, ShardKey, WeightsKey
from tba.contracts.keys import RUN as RUN_RECORD
from tba.contracts.records import (
    EvalRequest,
    FileEntry,
    Latest,
    Outcome,
    RunRecord,
    RunState,
    ShardHeader,
    SnapshotManifest,
)  # fmt: skip
from tba.evaluation import decode_block
from tba.prompts import PromptSet, PromptWalk
from tba.rewards.sandbox import RewardCall, RewardResult
from tba.searcher import evaluate
from tba.searcher.engines import build
from tba.searcher.engines.engine import Response
from tba.searcher.loop import SearcherLoop, Surroundings
from tba.searcher.spool import Spool, SpoolLimits
from tba.searcher.stats import PHASES, SearcherStats
from tba.searcher.sync import Poller
from tba.shards import decode_shard
from tba.snapshots import Snapshot
from tba.stop import StopFlag

RUN, INCARNATION, SIZE = "a" * 32, "b" * 32, 4
PROMPTS = PromptSet(
    texts=[f"p{i}" for i in range(10)], answers=[None] * 10, tokens=np.arange(10, dtype=np.int32),
    offsets=np.arange(11), dropped_too_long=0, dropped_empty=0,
)  # fmt: skip


class Pool:
    """Scores by hand: `hold` keeps results back."""

    def __init__(self) -> None:
        self.calls: list[RewardCall] = []
        self.held: list[Future] = []
        self.hold = False
        self.outcome = Outcome.SCORED

    def submit(self, call: RewardCall) -> "Future[RewardResult]":
        self.calls.append(call)
        future: Future[RewardResult] = Future()
        if self.hold:
            self.held.append(future)
        else:
            future.set_result(self.result())
        return future

    def result(self) -> RewardResult:
        return RewardResult(self.outcome, 1.0 if self.outcome is Outcome.SCORED else None, "")

    def set_limits(self, timeout_seconds: float, memory_bytes: int) -> None: ...

    def resize(self, num_workers: int) -> None: ...


class Unscored:
    """An engine whose responses have no reward of their own."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self) -> list[Response]:
        return [
            Response(r.id, r.tokens, r.finish_reason, r.spans, r.logprobs, None, r.error) for r in self.inner.step()
        ]


class Turns:
    """A gate opened by hand; `said` is what the trainer hears."""

    def __init__(self) -> None:
        self.open = False
        self.said: list[str] = []

    def wait(self, seconds: float) -> None: ...

    def asleep(self) -> None:
        self.said.append("asleep")

    def awake(self) -> None:
        self.said.append("awake")

    def starting(self) -> None:
        self.said.append("starting")


class Sleeper:
    """An engine that must not work while it sleeps."""

    def __init__(self, inner) -> None:
        self.inner, self.slept = inner, []

    def __getattr__(self, name):
        assert name not in ("step", "submit", "load") or not self.slept or self.slept[-1] == "awake", name
        return getattr(self.inner, name)

    def sleep(self, *, free_memory: bool) -> None:
        self.slept.append(f"asleep, {free_memory=}")

    def wake(self) -> None:
        self.slept.append("awake")


class Rig:
    def __init__(
        self, folder: Path, *, swap="InFlight", scored=True, capacity=8, cap_bytes=2**30, gate=None, free_memory=False,
        **fake,
    ) -> None:  # fmt: skip
        self.store = MemoryStore()
        self.pool = Pool()
        self.live = LiveConfig(storage=Storage(uri="file:///x"), sync=Sync(swap=swap))
        self.task = Task(prompts=Prompts(uri="file:///p"), reward=Reward(name="fake"), sampling=Sampling(max_tokens=40))
        config = RunConfig(model=Model(uri="file:///m"), task=self.task)
        record = RunRecord(
            run_id=RUN, owner="d/n", config=config, model_revision="r", train_prompts="x", live=self.live
        )
        engine = build(Engine(type="fake", max_num_seqs=capacity, extra_args=fake), model=config.model)
        self.engine = engine if scored else Unscored(engine)
        if gate is not None:
            self.engine = Sleeper(self.engine)
        self.commit = 0
        self.store.put_once(RUN_RECORD, record.to_json())
        self.stopped = StopFlag()
        self.poller = Poller(self.store, run_id=RUN, interval_seconds=lambda: 0.1, fetch=self.fetch)
        self.manifests: dict[str, SnapshotManifest] = {}
        self.stats = SearcherStats()
        self.spool = Spool(
            self.store,
            folder,
            header=lambda seq: ShardHeader(
                run=RUN, searcher="s-0", incarnation=INCARNATION, seq=seq, reward_version="r",
                stats=self.stats.to_dict(),
            ),
            window=lambda: self.poller.window,
            limits=lambda: SpoolLimits(shard_seconds=0.0, cap_bytes=cap_bytes),
        )  # fmt: skip
        self.loop = SearcherLoop(
            Surroundings(
                store=self.store,
                engine=self.engine,
                pool=self.pool,
                poller=self.poller,
                spool=self.spool,
                record=record,
                prompts=PROMPTS,
                walk=PromptWalk(len(PROMPTS), 0, INCARNATION),
                incarnation=INCARNATION,
                settings=lambda: self.live,
                samples_per_prompt=lambda: SIZE,
                stats=self.stats,
                stopped=self.stopped,
                exit_when_done=True,
                grace_seconds=5.0,
                load_prompts=lambda *_: PROMPTS,
                idle_seconds=0.0,
                gate=gate,
                free_memory=free_memory,
            )  # fmt: skip # type: ignore[arg-type]
        )

    def fetch(self, store, key: str) -> Snapshot:
        return Snapshot(key, self.manifests[key], {}, {})

    def publish(self, version: int, *, evaluation: EvalRequest | None = None, state=RunState.RUNNING) -> str:
        key = WeightsKey(version, 1, f"{version:032x}").path
        self.manifests[key] = SnapshotManifest(
            epoch=1, version=version, nonce=f"{version:032x}", files=list[FileEntry](), tensors=[],
            evaluation=evaluation,
        )  # fmt: skip
        self.commit += 1
        body = Latest(
            commit=self.commit, epoch=1, version=version, step=version, manifest=key, state=state,
            evaluation=key if evaluation else None, nonce=f"{self.commit:032x}",
        )  # fmt: skip
        etag = self.store.get(LATEST).etag if LATEST in self.store.objects else None
        self.store.cas(LATEST, body.to_json(), etag)
        self.poller.poll_once()
        return key

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    def shards(self):
        while self.spool.upload_once():
            pass
        keys = sorted(k for k in self.store.objects if k.startswith("shards/"))
        return [(ShardKey.parse(k), decode_shard(self.store.objects[k].data, run_id=RUN)) for k in keys]


def test_every_shard_holds_whole_visits_with_spans_and_rewards(tmp_path):
    rig = Rig(tmp_path)
    rig.publish(0)
    rig.turns(30)
    visits: dict[int, int] = {}
    for key, batch in rig.shards():
        assert key.window == 1
        assert batch.scored.all() and set(batch.visit_sizes) == {SIZE}
        for visit in batch.visits.tolist():
            visits[visit] = visits.get(visit, 0) + 1
        assert batch.header.stats["versions_loaded"] == 1
    assert len(visits) > 5 and set(visits.values()) == {SIZE}


def test_the_phases_in_every_shard_header_sum_to_the_time_that_the_loop_was_up(tmp_path):
    rig = Rig(tmp_path, scored=False)
    rig.turns(2)  # waits for weights
    rig.publish(0)
    rig.turns(30)
    for _, batch in rig.shards():
        stats = batch.header.stats
        parts = [stats[f"{phase}_seconds"] for phase in PHASES]
        assert sum(parts) + stats["other_seconds"] == pytest.approx(stats["up_seconds"])
        assert stats["generate_seconds"] > 0 and stats["wait_weights_seconds"] > 0
        assert stats["prompt_tokens"] >= batch.header.stats["visits"]
        assert (stats["model_flops"], stats["peak_flops"]) == (0.0, 0.0), "a fake engine has no model"


def test_a_timeline_shows_what_the_searcher_does_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setenv(trace.DIRECTORY, str(tmp_path / "traces"))
    rig = Rig(tmp_path / "spool", scored=False)
    with trace.recording("searcher", "s-0"):
        rig.turns(1)
        rig.publish(0)
        rig.turns(30)
        assert rig.shards()
    (path,) = (tmp_path / "traces").iterdir()
    events = json.loads(path.read_text())
    assert {"wait_weights", "fetch", "swap", "generate", "reward", "upload"} <= {e["name"] for e in events}
    rewards = [e for e in events if e["name"] == "reward"]
    assert sum(e["ph"] == "b" for e in rewards) == sum(e["ph"] == "e" for e in rewards) == len(rig.pool.calls)


def test_prompts_follow_the_walk_and_seeds_differ(tmp_path):
    rig = Rig(tmp_path)
    rig.publish(0)
    rig.turns(40)
    walk = PromptWalk(len(PROMPTS), 0, INCARNATION)
    expected = [next(walk) for _ in range(8)]
    prompt_of = {v: p for _, b in rig.shards() for v, p in zip(b.visits.tolist(), b.prompt_ids.tolist(), strict=True)}
    assert [prompt_of[v] for v in range(8)] == expected
    responses = [tuple(r.response_tokens) for _, b in rig.shards() for r in map(b.row, range(len(b)))]
    assert len(set(responses)) == len(responses)


def test_in_flight_swap_splits_responses_and_between_batches_does_not(tmp_path):
    lengths = {"distribution": "fixed", "median": 20}
    for swap, expected in (("InFlight", 2), ("BetweenBatches", 1)):
        rig = Rig(tmp_path / swap, swap=swap, tokensPerStep=8, lengths=lengths)
        rig.publish(0)
        rig.turns(2)  # 16 of 20 tokens
        rig.publish(2)
        rig.turns(12)
        batches = [b for _, b in rig.shards()]
        assert max(len(r.spans) for b in batches for r in map(b.row, range(len(b)))) == expected
        assert {r.policy.version for b in batches for r in map(b.row, range(len(b)))} == {0, 2}


def test_between_batches_an_evaluation_of_older_weights_begins_though_none_follow(tmp_path):
    rig = Rig(tmp_path, swap="BetweenBatches", capacity=40, tokensPerStep=4)
    request = EvalRequest(prompts="x", num_prompts=10, block_prompts=5, sampling="greedy", samples=1)
    key, newer = rig.publish(4, evaluation=request), rig.publish(6)
    rig.turns(5)
    assert rig.loop._held == newer and rig.engine.in_flight
    body = Latest(commit=9, epoch=1, version=6, step=6, manifest=newer, evaluation=key, nonce="9" * 32)
    rig.store.cas(LATEST, body.to_json(), rig.store.get(LATEST).etag)
    rig.poller.poll_once()
    begun = False
    for _ in range(60):
        rig.turns(1)
        begun = begun or rig.loop._held == key
    assert begun


def test_a_visit_waits_for_its_last_reward(tmp_path):
    rig = Rig(tmp_path, scored=False)
    rig.pool.hold = True
    rig.publish(0)
    rig.turns(12)
    assert rig.shards() == []
    for future in rig.pool.held[1:]:
        future.set_result(rig.pool.result())
    rig.turns(1)
    visits = {v for _, b in rig.shards() for v in b.visits.tolist()}
    assert visits and len(visits) < rig.loop._next_visit
    rig.pool.held[0].set_result(rig.pool.result())
    rig.turns(1)
    assert len({v for _, b in rig.shards() for v in b.visits.tolist()}) > len(visits)


def test_too_many_unscored_responses_pause_generation_visibly(tmp_path):
    rig = Rig(tmp_path, scored=False)
    rig.pool.hold = True
    rig.publish(0)
    rig.turns(200)
    assert len(rig.pool.calls) <= 4 * rig.engine.capacity + 2 * rig.engine.capacity
    assert rig.stats.wait_reward_seconds > 0


def test_equal_responses_of_a_visit_are_scored_once(tmp_path):
    rig = Rig(tmp_path, scored=False, distinct=1)
    rig.publish(0)
    rig.turns(20)
    rows = sum(len(b) for _, b in rig.shards())
    assert rows >= SIZE * 3 and len(rig.pool.calls) <= rows // SIZE + 3


@pytest.mark.parametrize(("outcome", "count"), [(Outcome.TIMED_OUT, "timed_out_rows"), (Outcome.FAILED, "failed_rows")])
def test_a_failed_reward_is_a_row_without_one_and_is_counted(tmp_path, outcome, count):
    rig = Rig(tmp_path, scored=False)
    rig.pool.outcome = outcome
    rig.publish(0)
    rig.turns(10)
    rows = [r for _, b in rig.shards() for r in map(b.row, range(len(b)))]
    assert rows and all(r.outcome is outcome and r.reward is None for r in rows)
    assert getattr(rig.stats, count) >= len(rows)


def test_a_full_spool_pauses_generation_and_nothing_is_lost(tmp_path):
    rig = Rig(tmp_path, cap_bytes=1)
    rig.publish(0)
    rig.turns(50)
    first = rig.loop._next_visit
    rig.turns(50)
    assert rig.loop._next_visit == first and rig.stats.wait_storage_seconds > 0
    assert rig.spool.upload_once()
    while rig.spool.upload_once():
        pass
    rig.turns(5)
    assert rig.loop._next_visit > first


def test_without_weights_it_waits_and_says_so(tmp_path):
    rig = Rig(tmp_path)
    rig.turns(3)
    assert rig.loop._next_visit == 0 and rig.loop.ready == (False, rig.poller.detail)
    key = rig.publish(0)
    rig.turns(1)
    assert rig.loop.ready == (True, key)


def test_sigterm_uploads_finished_visits_and_exits_143(tmp_path):
    rig = Rig(tmp_path)
    rig.publish(0)
    rig.turns(20)
    rig.stopped.set()
    rig.spool.start()
    assert rig.loop.run() == 143
    assert rig.spool.pending_shards == 0 and rig.shards()
    rig.spool.close()


def test_the_end_of_the_run_ends_the_searcher_if_asked(tmp_path):
    rig = Rig(tmp_path)
    rig.publish(0)
    rig.turns(20)
    rig.publish(2, state=RunState.COMPLETE)
    rig.spool.start()
    assert rig.loop.run() == 0
    rig.spool.close()


def test_an_evaluation_is_done_with_exactly_its_weights_in_all_blocks(tmp_path):
    rig = Rig(tmp_path)
    request = EvalRequest(prompts="x", num_prompts=10, block_prompts=3, sampling="greedy", samples=1)
    key = rig.publish(4, evaluation=request)
    rig.loop.turn()
    evaluation = rig.loop._evaluation
    assert evaluation is not None
    newer = rig.publish(6, evaluation=None)  # would withdraw it: put it back below
    rig.store.cas(
        LATEST,
        Latest(
            commit=99, epoch=1, version=6, step=6, manifest=newer, evaluation=key, nonce="9" * 32
        ).to_json(),
        rig.store.get(LATEST).etag,
    )  # fmt: skip
    rig.poller.poll_once()
    for _ in range(2000):
        rig.loop.turn()
        if rig.loop._evaluation is None:
            break
        assert rig.loop._held == key
    weights = WeightsKey.parse(key)
    rows = []
    for block in range(4):
        data = rig.store.objects[EvalKey(4, 1, weights.nonce, block).path].data
        rows += decode_block(data).rows
    assert [r.prompt_id for r in rows] == list(range(10))
    rig.loop.turn()
    assert rig.loop._held == newer


def test_an_evaluation_that_is_withdrawn_gives_way_to_newer_weights(tmp_path):
    rig = Rig(tmp_path, capacity=1)
    request = EvalRequest(prompts="x", num_prompts=10, block_prompts=1, sampling="greedy", samples=1)
    key = rig.publish(4, evaluation=request)
    rig.loop.turn()
    assert rig.loop._evaluation is not None
    newer = rig.publish(6)
    while rig.loop._held == key:
        rig.loop.turn()
    assert rig.loop._held == newer and rig.loop._evaluation is None
    assert sum(k.startswith(EVAL) for k in rig.store.objects) < 10


def test_blocks_that_exist_are_left_out_and_a_lost_race_is_quiet():
    store = MemoryStore()
    key = WeightsKey(4, 1, "f" * 32)
    store.put_once(EvalKey(4, 1, "f" * 32, 2).path, b"done by another")
    request = EvalRequest(prompts="x", num_prompts=10, block_prompts=2, sampling="sample", samples=3)
    evaluation = evaluate.Evaluation(
        store, key.path, request, offset=7, stopped=lambda: False, load_prompts=lambda *_: PROMPTS
    )
    seen = []
    while not evaluation.over:
        work = evaluation.poll()
        if work is None:
            continue
        seen.append(work.block)
        assert work.size == 6 and work.prompt_id(5) == work.first_prompt + 1
        if work.block == 4:
            store.put_once(EvalKey(4, 1, "f" * 32, 4).path, b"quicker")
        work.rows.clear()
        evaluation.finish(work)
    evaluation.close()
    assert seen == [3, 4, 0, 1]
    assert evaluation.uploaded == 3


@pytest.mark.parametrize("free_memory", [False, True])
def test_a_colocated_searcher_works_in_its_turn_alone_and_keeps_what_is_in_flight(tmp_path, free_memory):
    gate = Turns()
    rig = Rig(tmp_path, scored=False, gate=gate, free_memory=free_memory, tokensPerStep=4,
              lengths={"distribution": "fixed", "median": 20})  # fmt: skip
    rig.publish(0)
    rig.turns(3)
    assert rig.engine.capacity == 0, "without a turn not even its weights reach the device"
    gate.open = True
    rig.turns(3)  # 12 of 20 tokens
    assert gate.said.count("starting") == 1 and gate.said[-1] == "awake"
    gate.open = False
    before = rig.engine.in_flight
    rig.turns(5)
    assert rig.engine.in_flight == before >= 8
    rig.publish(2)
    gate.open = True
    rig.turns(3)
    told = [f"asleep, {free_memory=}", "awake"]
    assert rig.engine.slept == told * 2 and gate.said[-1] == "awake"
    lengths = [[(s.version, s.num_tokens) for s in r.spans] for _, b in rig.shards() for r in map(b.row, range(len(b)))]
    assert len(lengths) >= 8 and all(one == [(0, 12), (2, 8)] for one in lengths)
    assert rig.stats.asleep_seconds > 0


def test_a_sleeping_searcher_uploads_what_its_rewards_complete(tmp_path):
    gate = Turns()
    rig = Rig(tmp_path, scored=False, gate=gate, tokensPerStep=100)
    rig.publish(0)
    gate.open = rig.pool.hold = True
    rig.turns(1)
    gate.open = False
    rig.turns(1)
    assert not rig.shards()
    for future in rig.pool.held:
        future.set_result(rig.pool.result())
    rig.turns(1)
    assert rig.shards()
