"""FLOPs of a searcher, from the weights that it was given."""

import json

import pytest
import torch

from tba.contracts.records import SnapshotManifest
from tba.flops import model_shape
from tba.searcher.meter import Meter
from tba.searcher.stats import SearcherStats
from tba.snapshots import Snapshot

CONFIG = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 12}
TENSORS = {"layers.0.q_proj.weight": torch.zeros(8, 8), "embed_tokens.weight": torch.zeros(12, 8)}
MANIFEST = SnapshotManifest(epoch=1, version=0, nonce="0" * 32, files=[], tensors=[])


def snapshot(tensors=TENSORS, **config):
    assets = {"config.json": json.dumps(CONFIG | config).encode()} if tensors else {}
    return Snapshot("key", MANIFEST, tensors, assets)


def test_a_prompt_counts_once_and_each_response_goes_on_from_it():
    stats = SearcherStats()
    meter = Meter(stats, 1e12)
    meter.loaded(snapshot())
    meter.prompt(5)
    meter.response(5, 3)
    meter.response(5, 4)
    shape = model_shape(CONFIG, [(n, t.shape) for n, t in TENSORS.items()])
    assert stats.model_flops == pytest.approx(shape.forward(5, 0) + shape.generate(5, 3) + shape.generate(5, 4))
    assert (stats.prompt_tokens, stats.peak_flops) == (5, 1e12)


@pytest.mark.parametrize("weights", [None, snapshot({}), snapshot(num_local_experts=4)])
def test_without_weights_or_of_an_unknown_kind_of_model_nothing_is_claimed(weights):
    stats = SearcherStats()
    meter = Meter(stats, None)
    if weights is not None:
        meter.loaded(weights)
    meter.prompt(5)
    meter.response(5, 3)
    assert (stats.model_flops, stats.prompt_tokens, stats.peak_flops) == (0.0, 5, 0.0)


def test_a_response_that_never_began_costs_nothing():
    stats = SearcherStats()
    meter = Meter(stats, None)
    meter.loaded(snapshot())
    meter.response(5, 0)
    assert stats.model_flops == 0.0
