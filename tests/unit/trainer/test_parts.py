"""Several ranks publish one snapshot, each its part: what one would publish, or nothing at all."""

import threading
from collections.abc import Callable, Collection

import pytest
import torch
from pydantic import ValidationError
from support.memory_store import MemoryStore
from torch import Tensor
from torch.distributed import HashStore

from tba import failpoints
from tba.contracts.config import Delta
from tba.contracts.errors import Fenced, StoreUnavailable, UserError
from tba.contracts.keys import LATEST, WeightsKey
from tba.contracts.records import Latest
from tba.protocol.garbage import Retention
from tba.snapshots import fetch_snapshot
from tba.store import AccessDenied
from tba.trainer.background import Background
from tba.trainer.channel import Channel
from tba.trainer.committer import Committer
from tba.trainer.garbage import Sweeper
from tba.trainer.partmessages import REPLY, Stored
from tba.trainer.parts import Parts
from tba.trainer.publish import Published, Publisher
from tba.trainer.shares import assign
from tba.trainer.uploader import Uploader

HANG = 10.0  # seconds after which a test that waits for a thread has failed


class RankStore(MemoryStore):
    """Another rank's client of the bucket of `shared`, which fails on demand."""

    def __init__(self, shared: MemoryStore) -> None:
        super().__init__()
        self.objects = shared.objects
        self.raises: list[Exception] = []
        """By the next puts, in order."""
        self.on_put: Callable[[str], None] = lambda key: None

    def put_once(self, key, data) -> None:
        if self.raises:
            raise self.raises.pop(0)
        self.on_put(key)
        super().put_once(key, data)


class Team:
    """A publisher of `size` ranks whose uploaders are threads of this process."""

    def __init__(
        self,
        size: int,
        *,
        store: MemoryStore | None = None,
        max_file_bytes: int = 2**30,
        reply_seconds: float = HANG,
        give_up_seconds: float = 60.0,
        names: Collection[str] = (*(f"layer.{i}" for i in range(6)), "norm"),
        **delta,
    ) -> None:
        self.store, self.published = store or MemoryStore(), list[Published]()
        self.delta = Delta(max_ratio=1.0).model_copy(update=delta)
        self.committer = Committer.take_over(self.store)
        self.meeting = HashStore()
        self.losses: list[BaseException] = []
        self.stores = {rank: RankStore(self.store) for rank in range(1, size)}
        self.uploaders = {
            rank: Uploader(
                store,
                Channel(self.meeting, own=f"rank{rank}", other="rank0"),
                rank=rank,
                on_loss=self.losses.append,
                max_file_bytes=max_file_bytes,
            )
            for rank, store in self.stores.items()
        }
        channels = {rank: Channel(self.meeting, own="rank0", other=f"rank{rank}") for rank in self.stores}
        self.parts = Parts(channels, names, reply_seconds=reply_seconds) if channels else None
        self.publisher = Publisher(
            self.store, self.committer, assets={"config.json": b"{}"}, delta=lambda: self.delta,
            give_up_seconds=60.0, on_published=self.published.append, parts=self.parts,
        )  # fmt: skip
        self.publisher.background = Background("publish", give_up_seconds=give_up_seconds, sleep=lambda _: None)
        self.staged: list[dict[str, Tensor]] = []

    def publish(self, version: int, tensors: dict[str, Tensor], *, silent: tuple[int, ...] = ()) -> None:
        """All but those `silent` serve."""
        owners = (0,) if self.parts is None else self.parts.owners
        found = assign({n: t.nbytes for n, t in tensors.items()}, owners)
        self.staged = [{n: t.clone() for n, t in tensors.items() if found[n] == rank} for rank in owners]
        for rank, uploader in self.uploaders.items():
            if rank not in silent:
                uploader.start(self.staged[rank])
        self.publisher.publish(
            self.staged[0], version=version, epoch=self.committer.epoch, evaluation=None, stage_seconds=0.0
        )
        assert self.publisher.background.join(HANG), "the publish hangs"

    @property
    def latest(self) -> Latest:
        return Latest.model_validate_json(self.store.get(LATEST).data)

    def ranks_of(self, done: Published) -> set[str]:
        """Which wrote the snapshot's files."""
        return {file.name.split("-")[1] for file in done.manifest.files}


def weights(version: int, *, changed: float = 0.01) -> dict[str, Tensor]:
    """Six tensors in bf16 and one in float32, of which a share moves at each version."""
    found = {f"layer.{i}": torch.full((40, 25), 1.0, dtype=torch.bfloat16) for i in range(6)} | {"norm": torch.ones(7)}
    for step in range(version):
        for number, tensor in enumerate(found.values()):
            noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(100 * step + number))
            tensor[noise < changed] += 0.25
    return found


def noise(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn((40, 25), generator=generator).bfloat16() for i in range(6)}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_chain_of_several_ranks_is_that_of_one_and_comes_back_bit_for_bit(size):
    team = Team(size, anchor_every=3)
    for version in range(5):
        team.publish(version, weights(version))
        assert same(fetch_snapshot(team.store, team.published[-1].key).tensors, weights(version))
    assert [done.row.encoding for done in team.published] == ["full", "delta", "delta", "full", "delta"]
    assert [done.manifest.depth for done in team.published] == [0, 1, 2, 0, 1]
    alone = Team(1, anchor_every=3)
    for version in range(5):
        alone.publish(version, weights(version))
    for done, wanted in zip(team.published, alone.published, strict=True):
        assert {t.name: t.hash for t in done.manifest.tensors} == {t.name: t.hash for t in wanted.manifest.tensors}
        ranks = {f"rank{rank:05d}" for rank in range(size)} if size > 1 else {"00000.safetensors"}
        assert team.ranks_of(done) == ranks


def test_more_ranks_than_tensors_leave_some_with_nothing_to_write():
    team = Team(4, names=["layer.0", "layer.1"])
    for version in (0, 1):
        team.publish(version, {name: t for name, t in weights(version).items() if name in ("layer.0", "layer.1")})
    assert [done.row.encoding for done in team.published] == ["full", "delta"]
    assert team.ranks_of(team.published[1]) == {"rank00000", "rank00001"}


def test_a_delta_is_chosen_by_the_bytes_of_all_parts_together():
    team = Team(3)
    team.publish(0, weights(0, changed=0.2))
    team.publish(1, weights(1, changed=0.2))
    size = sum(file.size for file in team.published[1].manifest.files)
    whole = sum(t.nbytes for t in weights(0).values())
    assert team.published[1].row.encoding == "delta"
    for ratio, wanted in ((0.5 * size / whole, "full"), (1.1 * size / whole, "delta")):
        other = Team(3, max_ratio=ratio)  # of which each part alone is well below the limit
        other.publish(0, weights(0, changed=0.2))
        other.publish(1, weights(1, changed=0.2))
        assert other.published[1].row.encoding == wanted
        assert same(fetch_snapshot(other.store, other.published[1].key).tensors, weights(1, changed=0.2))


def test_a_delta_that_one_part_makes_too_large_is_no_delta_of_any():
    team = Team(2, max_ratio=0.1)
    team.publish(0, weights(0))
    team.publish(1, weights(0) | {"layer.1": noise(0)["layer.1"]})
    assert [done.row.encoding for done in team.published] == ["full", "full"]
    assert team.published[1].manifest.base is None and len(team.published[1].manifest.assets) == 1


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), AccessDenied("not now")])
@pytest.mark.parametrize("version", [0, 1])
def test_a_rank_whose_storage_does_not_answer_makes_all_try_again_under_a_fresh_prefix(error, version):
    team = Team(3)
    for before in range(version):
        team.publish(before, weights(before))
    standing = team.latest.manifest
    seen: list[str | None] = []
    team.stores[1].on_put = lambda key: seen.append(team.latest.manifest)
    team.stores[2].raises = [error]
    team.publish(version, weights(version))
    assert seen == [standing, standing], "both tries; the one before serves until the commit"
    done = team.published[-1]
    assert team.latest.manifest == done.key and done.row.encoding == ("delta" if version else "full")
    assert same(fetch_snapshot(team.store, done.key).tensors, weights(version))
    tried = {WeightsKey.parse(key).prefix for key in team.store.objects if key.startswith("weights/")}
    assert len(tried) == version + 2


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError("a bug"), RuntimeError), (UserError("the bucket is gone"), UserError)]
)
def test_a_rank_that_cannot_go_on_ends_the_publish_with_its_words_and_changes_nothing(error, kind):
    team = Team(2)
    team.publish(0, weights(0))
    standing = team.latest
    team.stores[1].raises = [error]
    with pytest.raises(kind, match=f"trainer rank 1.*{error}|(?s:trainer rank 1.*{error})"):
        team.publish(1, weights(1))
    assert team.latest == standing and len(team.published) == 1


@pytest.mark.parametrize("point", ["part.before_put", "part.after_put", "snapshot.before_file"])
def test_a_rank_that_ends_between_two_puts_leaves_garbage_under_one_prefix_that_nobody_sees(point):
    team = Team(2, max_file_bytes=2000)
    team.publish(0, weights(0))
    standing = team.latest
    failpoints.configure(f"{point}=raise{':2' if point == 'snapshot.before_file' else ''}")
    try:
        with pytest.raises(RuntimeError, match="failpoint"):
            team.publish(1, weights(1))
    finally:
        failpoints.configure("")
    assert team.latest == standing
    assert same(fetch_snapshot(team.store, str(standing.manifest)).tensors, weights(0))
    left = [key for key in team.store.objects if key.startswith("weights/") and WeightsKey.parse(key).version == 1]
    assert left and len({WeightsKey.parse(key).prefix for key in left}) == 1
    assert not any(key.endswith("manifest.json") for key in left)
    successor = Team(2, store=team.store)
    successor.publish(1, weights(1))
    Sweeper(team.store, successor.committer).sweep(Retention(1, None, 0, 1, 0.0))
    assert not set(left) & team.store.objects.keys(), "what it left is swept"
    assert same(fetch_snapshot(team.store, str(team.latest.manifest)).tensors, weights(1))


def test_parts_that_rank_0_does_not_see_are_no_snapshot():
    team = Team(3, give_up_seconds=-1.0)
    team.publish(0, weights(0))
    standing = team.latest
    team.stores[2].objects = {}  # a directory of the same name on another host
    with pytest.raises(StoreUnavailable, match=r"model-rank00002-00000.*give all hosts of the trainer the same bucket"):
        team.publish(1, noise(1))
    assert team.latest == standing and len(team.published) == 1


def test_a_rank_that_says_nothing_for_too_long_ends_the_publish():
    team = Team(2, reply_seconds=0.05)
    with pytest.raises(TimeoutError, match=r"rank 1 must upload its part of a snapshot within 0 s.*see where it hangs"):
        team.publish(0, weights(0), silent=(1,))
    assert team.latest.manifest is None


def test_a_rank_that_can_serve_no_more_says_so_at_once_and_not_when_rank_0_asks_next():
    team = Team(2, reply_seconds=1.0)
    Channel(team.meeting, own="rank0", other="rank1").send("no order of this release")
    with pytest.raises(TimeoutError):
        team.publish(0, weights(0))
    assert [type(loss) for loss in team.losses] == [ValidationError]


@pytest.mark.parametrize(("version", "encoding"), [(0, "full"), (1, "delta")])
def test_a_snapshot_that_lacks_a_tensor_is_none(version, encoding):
    """As where ranks of two releases deal shares differently."""
    team = Team(2)
    for before in range(version):
        team.publish(before, weights(before))
    standing = team.latest
    team.uploaders[1] = Lacking(team.uploaders[1])
    with pytest.raises(ValueError, match=r"each tensor must be of one part, got \['layer.1'\] of none"):
        team.publish(version, weights(version))
    assert team.latest == standing


class Lacking:
    """An uploader that loses the first tensor of its share in what it tells."""

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader
        self._channel = uploader._channel
        uploader._channel = self

    def start(self, staged: dict[str, Tensor]) -> None:
        self._uploader.start(staged)

    def receive(self) -> str:
        return self._channel.receive()

    def send(self, text: str) -> None:
        reply = REPLY.validate_json(text)
        if isinstance(reply, Stored):
            reply = reply.model_copy(update={"tensors": reply.tensors[1:]})
        self._channel.send(reply.model_dump_json())


def test_looks_at_what_others_wrote_keep_no_process_that_ends():
    team = Team(3, max_file_bytes=2000)
    lookers: list[threading.Thread] = []
    head = team.store.head
    team.store.head = lambda key: (lookers.append(threading.current_thread()), head(key))[1]
    team.publish(0, weights(0))
    assert len(lookers) >= 3 and all(thread.daemon for thread in lookers)


def test_a_copy_that_a_rank_has_written_to_misleads_nobody():
    team = Team(2)
    team.publish(0, weights(0))
    next(iter(team.staged[1].values()))[0] = 5.0
    for version in (1, 2):
        team.publish(version, weights(version))
    assert [done.row.encoding for done in team.published] == ["full", "full", "delta"]
    assert same(fetch_snapshot(team.store, team.published[2].key).tensors, weights(2))


def test_no_rank_keeps_anything_to_build_on_while_deltas_are_off():
    team = Team(2, enabled=False)
    team.publish(0, weights(0))
    team.delta = Delta(max_ratio=1.0)
    for version in (1, 2):
        team.publish(version, weights(version))
    assert [done.row.encoding for done in team.published] == ["full", "full", "delta"]


def test_a_fenced_trainer_of_several_ranks_publishes_nothing():
    team = Team(2)
    team.publish(0, weights(0))
    Committer.take_over(team.store)
    standing = team.latest
    with pytest.raises(Fenced):
        team.publish(1, weights(1))
    assert team.latest == standing
