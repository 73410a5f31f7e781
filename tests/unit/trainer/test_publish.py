"""Publishing: one at a time, visible only by the commit, and never twice under one prefix."""

import threading

import pytest
import torch
from support.memory_store import MemoryStore

from tba.contracts.config import Delta
from tba.contracts.errors import Fenced, StoreUnavailable
from tba.contracts.keys import LATEST, WeightsKey
from tba.contracts.records import EvalRequest, Latest, SnapshotManifest
from tba.snapshots import fetch_snapshot
from tba.trainer.background import Background
from tba.trainer.committer import Committer
from tba.trainer.publish import Published, Publisher, may_follow

HANG = 10.0  # seconds after which a test that waits for a thread has failed
REQUEST = EvalRequest(prompts="prompts/x", num_prompts=5, block_prompts=2, sampling="greedy", samples=1)


class Setting:
    """A run that this process has just taken over, and its publisher."""

    def __init__(self, store: MemoryStore | None = None, give_up_seconds: float = 60.0) -> None:
        self.store = store or MemoryStore()
        self.committer = Committer.take_over(self.store)
        self.published: list[Published] = []
        self.delta = Delta(enabled=False)
        self.publisher = Publisher(
            self.store,
            self.committer,
            assets={"config.json": b"{}"},
            delta=lambda: self.delta,
            give_up_seconds=give_up_seconds,
            on_published=self.published.append,
        )

    def publish(
        self, version: int, *, evaluation: EvalRequest | None = None, tensors: dict[str, torch.Tensor] | None = None
    ) -> float:
        return self.publisher.publish(
            {"w": torch.full((4,), float(version))} if tensors is None else tensors,
            version=version,
            epoch=self.committer.epoch,
            evaluation=evaluation,
            stage_seconds=0.125,
        )

    def wait(self) -> None:
        assert self.publisher.background.join(HANG), "the publish hangs"

    @property
    def latest(self) -> Latest:
        return Latest.model_validate_json(self.store.get(LATEST).data)


def test_published_weights_are_what_latest_names():
    run = Setting()
    run.publish(4)
    run.wait()
    (done,) = run.published
    assert run.latest.manifest == done.key and run.latest.version == run.latest.step == 4
    snapshot = fetch_snapshot(run.store, done.key)
    assert torch.equal(snapshot.tensors["w"], torch.full((4,), 4.0))
    assert snapshot.assets == {"config.json": b"{}"}
    assert (done.row.version, done.row.epoch, done.row.total_bytes) == (4, 1, done.manifest.total_bytes)
    assert done.row.stage_seconds == 0.125 and done.row.upload_seconds >= 0 and done.row.commit_seconds >= 0


def test_commit_is_the_last_thing_written():
    run = Setting()
    run.store.calls.clear()
    run.publish(0)
    run.wait()
    writes = [(call, key) for call, key in run.store.calls if call in ("put_once", "cas")]
    assert [call for call, _ in writes][-1] == "cas" and [call for call, _ in writes].count("cas") == 1
    assert writes[-2] == ("put_once", run.published[0].key), "the manifest comes after its data"


def test_second_publish_waits_for_the_first_and_names_it_as_parent():
    release, entered = threading.Event(), threading.Event()
    run = Setting()

    def hold() -> None:
        entered.set()
        assert release.wait(HANG)

    run.store.before_cas = hold
    assert run.publish(1) < 1.0
    assert entered.wait(HANG)
    second = threading.Thread(target=lambda: run.publish(2))
    second.start()
    second.join(0.005)
    assert second.is_alive() and run.published == [], "two uploads at once"
    assert not any(WeightsKey.parse(k).version == 2 for k in run.store.objects if k.startswith("weights/"))
    run.store.before_cas = lambda: None
    release.set()
    second.join(HANG)
    run.wait()
    first, then = run.published
    assert (first.manifest.parent, then.manifest.parent) == (None, first.key)
    assert run.latest.manifest == then.key


def test_evaluation_is_asked_for_in_the_manifest_and_in_latest():
    run = Setting()
    run.publish(2, evaluation=REQUEST)
    run.wait()
    assert run.latest.evaluation == run.published[0].key
    assert run.published[0].manifest.evaluation == REQUEST
    run.publish(3)
    run.wait()
    assert run.latest.evaluation == run.published[0].key, "a later snapshot does not withdraw it"
    assert run.published[1].manifest.evaluation is None


class FailingStore(MemoryStore):
    """Refuses so many next calls of one method with StoreUnavailable."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: dict[str, int] = {}

    def put_once(self, key, data) -> None:
        self._maybe("put_once")
        super().put_once(key, data)

    def cas(self, key, data, etag):
        self._maybe("cas")
        return super().cas(key, data, etag)

    def _maybe(self, call: str) -> None:
        if self.refuse.get(call, 0) > 0:
            self.refuse[call] -= 1
            raise StoreUnavailable("no answer")


@pytest.mark.parametrize("call", ["put_once", "cas"])
def test_broken_try_is_repeated_under_a_fresh_prefix(call):
    run = Setting(FailingStore())
    run.publisher.background = Background("publish", give_up_seconds=60.0, sleep=lambda _: None)
    run.store.refuse = {call: 1}
    run.publish(3)
    run.wait()
    (done,) = run.published
    prefixes = {WeightsKey.parse(k).prefix for k in run.store.objects if k.startswith("weights/")}
    assert WeightsKey.parse(done.key).prefix in prefixes
    assert len(prefixes) == (2 if call == "cas" else 1)
    assert run.latest.manifest == done.key
    assert torch.equal(fetch_snapshot(run.store, done.key).tensors["w"], torch.full((4,), 3.0))


def test_commit_whose_reply_was_lost_is_published_once():
    run = Setting()
    run.store.lose_replies = 1
    before = run.latest.commit
    run.publish(3)
    run.wait()
    assert len(run.published) == 1
    assert (run.latest.commit, run.latest.manifest) == (before + 1, run.published[0].key)


def test_storage_that_stays_away_is_given_up_at_the_next_publish():
    run = Setting(FailingStore(), give_up_seconds=-1.0)
    run.store.refuse = {"put_once": 1}
    run.publish(3)
    with pytest.raises(StoreUnavailable):
        run.publish(4)
    assert run.published == [] and run.latest.manifest is None


def test_fenced_publisher_changes_nothing_and_says_so():
    run = Setting()
    run.publish(1)
    run.wait()
    newer = Committer.take_over(run.store)
    standing = run.latest
    run.publish(2)
    with pytest.raises(Fenced, match=f"epoch {newer.epoch}"):
        run.publish(3)
    assert run.latest == standing
    assert [done.manifest.version for done in run.published] == [1]
    run.publish(3)
    with pytest.raises(Fenced):
        run.publisher.background.join(HANG)


def large(version: int, *, changed: int = 5) -> dict[str, torch.Tensor]:
    """1000 bf16 weights of which the first `changed` move with each version."""
    weights = torch.ones(1000, dtype=torch.bfloat16)
    weights[:changed] += version
    return {"w": weights}


class DeltaSetting(Setting):
    """Publishes deltas wherever it may."""

    def __init__(self, store: MemoryStore | None = None, **delta) -> None:
        super().__init__(store)
        self.delta = Delta(**delta)
        self.publisher.background = Background("publish", give_up_seconds=60.0, sleep=lambda _: None)

    def encodings(self, versions, *, changed: int = 5) -> list[str]:
        for version in versions:
            self.publish(version, tensors=large(version, changed=changed))
            self.wait()
        return [done.row.encoding for done in self.published[-len(versions) :]]


def test_small_changes_travel_as_deltas_between_anchors():
    run = DeltaSetting(anchor_every=3)
    assert run.encodings(range(7)) == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert [done.manifest.depth for done in run.published] == [0, 1, 2, 0, 1, 2, 0]
    for version, done in enumerate(run.published):
        assert torch.equal(fetch_snapshot(run.store, done.key).tensors["w"], large(version)["w"])
        assert done.row.total_bytes == done.manifest.total_bytes and done.manifest.parent == (
            run.published[version - 1].key if version else None
        )
    assert run.published[1].row.total_bytes < run.published[0].row.total_bytes / 4


def test_a_delta_larger_than_the_ratio_is_published_in_full():
    rng = torch.Generator().manual_seed(0)
    run = DeltaSetting(max_ratio=0.5)
    for version in (1, 2):
        run.publish(version, tensors={"w": torch.randn(1000, generator=rng).bfloat16()})
        run.wait()
    assert [done.row.encoding for done in run.published] == ["full", "full"]
    assert run.encodings([3, 4]) == ["full", "delta"]


def test_the_delta_settings_are_live():
    run = DeltaSetting(enabled=False)
    assert run.encodings([0, 1]) == ["full", "full"]
    run.delta = Delta()
    assert run.encodings([2, 3]) == ["full", "delta"], "no weights were kept to build on while it was off"
    run.delta = Delta(enabled=False)
    assert run.encodings([4]) == ["full"]


def test_a_base_that_was_written_to_after_its_publish_misleads_nobody():
    run = DeltaSetting()
    reused = large(0)
    run.publish(0, tensors=reused)
    run.wait()
    reused["w"][7] = 5.0
    assert run.encodings([1, 2]) == ["full", "delta"]
    assert torch.equal(fetch_snapshot(run.store, run.published[2].key).tensors["w"], large(2)["w"])


def test_anchors_carry_the_assets_and_deltas_find_them_there():
    run = DeltaSetting()
    run.encodings([0, 1])
    assert [len(done.manifest.assets) for done in run.published] == [1, 0]
    assert fetch_snapshot(run.store, run.published[1].key).assets == {"config.json": b"{}"}


def test_the_first_publish_after_a_take_over_is_an_anchor():
    run = DeltaSetting()
    assert run.encodings([0, 1]) == ["full", "delta"]
    restored = DeltaSetting(run.store)
    assert restored.encodings([1, 2]) == ["full", "delta"]
    assert restored.published[1].manifest.base == restored.published[0].key


@pytest.mark.parametrize("call", ["put_once", "cas"])
def test_a_delta_whose_publish_broke_is_tried_again_on_the_same_base(call):
    store = FailingStore()
    run = DeltaSetting(store)
    run.encodings([0])
    store.refuse = {call: 1}
    assert run.encodings([1, 2]) == ["delta", "delta"]
    assert [done.manifest.base for done in run.published] == [None, run.published[0].key, run.published[1].key]
    assert torch.equal(fetch_snapshot(store, run.latest.manifest or "").tensors["w"], large(2)["w"])


def test_a_delta_follows_only_what_latest_names_in_its_own_epoch_within_the_chain_limit():
    key = WeightsKey(3, 2, "a" * 32).path
    base = SnapshotManifest(epoch=2, version=3, nonce="a" * 32, files=[], tensors=[], depth=3)
    named = Latest(commit=1, epoch=2, version=3, step=3, nonce="x", manifest=key)
    assert may_follow(key, base, Delta(anchor_every=5), 2, named)
    assert not may_follow(key, base, Delta(anchor_every=4), 2, named)
    assert not may_follow(key, base, Delta(anchor_every=5, enabled=False), 2, named)
    assert not may_follow(key, base, Delta(anchor_every=5), 3, named)
    other = named.model_copy(update={"manifest": WeightsKey(3, 2, "b" * 32).path})
    assert not may_follow(key, base, Delta(anchor_every=5), 2, other)
