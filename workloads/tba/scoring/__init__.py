"""Token log-probabilities of responses under a model: the one kernel for policy and reference."""

from tba.scoring.layout import Layout, Rows, pack_rows, to_device
from tba.scoring.scorer import Scorer

__all__ = ["Layout", "Rows", "Scorer", "pack_rows", "to_device"]
