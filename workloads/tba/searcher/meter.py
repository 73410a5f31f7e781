"""How much work a searcher's model does: FLOPs of prompts and responses, from the weights it was given."""

import json

from tba import telemetry
from tba.flops import ModelShape, model_shape
from tba.searcher.stats import SearcherStats
from tba.snapshots import Snapshot

_CONFIG = "config.json"


class Meter:
    """Counts into the statistics; nothing until weights with a configuration have come, or if it is no dense decoder.

    A prompt's pass counts once a visit: engines share it among the visit's responses. Where one does not, this is less
    than what it did.
    """

    def __init__(self, stats: SearcherStats, peak_flops: float | None) -> None:
        self._stats = stats
        self._shape: ModelShape | None = None
        stats.peak_flops = peak_flops or 0.0
        telemetry.PEAK_FLOPS.set(stats.peak_flops)

    def loaded(self, snapshot: Snapshot) -> None:
        """The engine has these weights."""
        if self._shape is None and _CONFIG in snapshot.assets:
            tensors = ((name, tuple(tensor.shape)) for name, tensor in snapshot.tensors.items())
            self._shape = model_shape(json.loads(snapshot.assets[_CONFIG]), tensors)

    def prompt(self, num_tokens: int) -> None:
        """A prompt is about to be read."""
        self._stats.prompt_tokens += num_tokens
        if self._shape is not None:
            self._stats.worked(self._shape.forward(num_tokens, 0))

    def response(self, prompt_tokens: int, num_tokens: int) -> None:
        """A response of so many tokens is finished."""
        if self._shape is not None and num_tokens:
            self._stats.worked(self._shape.generate(prompt_tokens, num_tokens))
