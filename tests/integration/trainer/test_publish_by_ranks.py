"""Two ranks upload a part of each snapshot each: real processes, gloo, FSDP2 on the CPU, a store in a directory."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.rank_publishes import LOST
from support.rank_results import ROOT, rank_environment

from tba.contracts.config import Delta
from tba.contracts.keys import LATEST, WeightsKey
from tba.contracts.records import Latest
from tba.protocol.garbage import Retention
from tba.snapshots import SnapshotFetcher, fetch_manifest
from tba.store import ObjectStore, open_store
from tba.trainer.committer import Committer
from tba.trainer.garbage import Sweeper
from tba.trainer.publish import Publisher

PROGRAM = ROOT / "tests/support/rank_publishes.py"
VERSIONS = 5
RANKS = {"rank00000", "rank00001"}


class Run:
    """What the program left."""

    def __init__(self, folder: Path, recipe: str, versions: int, *, code: int = 0, **environment: str) -> None:
        self.folder, self.store = folder, open_store(f"file://{folder}/store")
        argv = [sys.executable, str(PROGRAM), self.store.uri, str(folder), recipe, str(versions)]
        env = rank_environment(OMP_NUM_THREADS="1", **environment)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == code, done.stderr[-4000:]
        self.told = done.stderr + done.stdout
        self.published = [(int(v), e, key) for v, e, key in re.findall(r"PUBLISHED (\d+) (\w+) (.*)", done.stdout)]
        self.staged = [int(size) for size in re.findall(r"STAGED (\d+)", done.stdout)]

    @property
    def latest(self) -> Latest:
        return Latest.parse(self.store.get(LATEST).data)

    def gathered(self, version: int) -> dict[str, torch.Tensor]:
        """As rank 0 gathered all of them."""
        return load_file(self.folder / f"{version}.safetensors")

    def writers(self, key: str) -> set[str]:
        return {file.name.split("-")[1] for file in fetch_manifest(self.store, key).files}


def same_bits(found, wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == t.dtype and torch.equal(found[n].view(torch.uint8), t.view(torch.uint8))
        for n, t in wanted.items()
    )


@pytest.fixture(scope="module", params=["bfloat16", "plain", "adapter"])
def run(request, tmp_path_factory) -> Iterator[Run]:
    yield Run(tmp_path_factory.mktemp(request.param), request.param, VERSIONS)


def test_what_two_ranks_published_is_rebuilt_bit_for_bit(run):
    assert [(v, e) for v, e, _ in run.published] == list(enumerate(["full", "delta", "delta", "full", "delta"]))
    follower = SnapshotFetcher()
    for version, _, key in run.published:
        for reader in (follower, SnapshotFetcher()):
            assert same_bits(reader(run.store, key).tensors, run.gathered(version))
    assert run.latest.manifest == run.published[-1][2]


def test_each_rank_stages_about_half_and_writes_its_own_files(run):
    whole = sum(t.nbytes for t in run.gathered(0).values())
    largest = max(t.nbytes for t in run.gathered(0).values())
    assert all(abs(size - whole / 2) <= largest / 2 for size in run.staged)
    assert all(run.writers(key) == RANKS for _, _, key in run.published)


def test_a_rank_that_does_not_find_the_bucket_leaves_its_share_to_the_others(tmp_path):
    run = Run(tmp_path, "bfloat16", 2, RANK_STORE=f"file://{tmp_path}/elsewhere")
    assert "upload_delegated" in run.told and "holds another run here, or none" in run.told
    assert [e for _, e, _ in run.published] == ["full", "delta"]
    assert [f.name for f in fetch_manifest(run.store, run.published[0][2]).files] == ["model-00000.safetensors"]
    assert same_bits(SnapshotFetcher()(run.store, run.published[1][2]).tensors, run.gathered(1))


def data_of(store: ObjectStore, version: int) -> set[str]:
    keys = [info.key for info in store.list_after("weights/")]
    return {key for key in keys if WeightsKey.parse(key).version == version}


@pytest.mark.parametrize(
    ("point", "left"),
    [("part.before_put", 1), ("snapshot.before_file", 1), ("part.after_put", 2)],
)
def test_a_rank_killed_between_two_puts_leaves_the_snapshot_before_it_and_garbage_that_is_swept(tmp_path, point, left):
    run = Run(tmp_path, "bfloat16", 4, code=LOST, RANK_FAILPOINTS=f"{point}=kill:3")
    assert "trainer rank 1 ended with SIGKILL" in run.told
    assert [(v, e) for v, e, _ in run.published] == [(0, "full"), (1, "delta")]
    assert run.latest.manifest == run.published[1][2]
    orphans = data_of(run.store, 2)
    assert len(orphans) <= left and len({WeightsKey.parse(key).prefix for key in orphans}) <= 1
    assert not any(key.endswith("manifest.json") for key in orphans)
    searcher = SnapshotFetcher()
    assert same_bits(searcher(run.store, str(run.latest.manifest)).tensors, run.gathered(1))

    committer = Committer.take_over(run.store)
    publisher = Publisher(
        run.store, committer, assets={}, delta=Delta, give_up_seconds=60.0,
        on_published=lambda done: None,
    )  # fmt: skip
    publisher.publish(run.gathered(2), version=2, epoch=committer.epoch, evaluation=None, stage_seconds=0.0)
    assert publisher.background.join(60.0)
    Sweeper(run.store, committer).sweep(Retention(1, None, 0, 1, 0.0))
    assert not orphans & data_of(run.store, 2)
    assert same_bits(searcher(run.store, str(run.latest.manifest)).tensors, run.gathered(2))
