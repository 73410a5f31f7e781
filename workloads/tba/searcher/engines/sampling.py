"""Neutral sampling: softmax(logits / T) and nothing else, with noise that belongs to the request.

The uniform number of a token depends on (seed, position) alone, so a response does not depend on which other requests
shared its batch, nor on the device. B rows, V vocabulary.
"""

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """(B,) uint64 seeds and positions -> (B,) float64 in [0, 1), 53 bits.

    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), its state taken at index `position` of the mixed seed.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, greedy: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `noise`, or take the largest logit.

    (B, V), (B,) float32, (B,) bool, (B,) float64 in [0, 1) -> tokens (B,) int64, log-probabilities (B,) float32 of
    log_softmax(logits / T), also of greedy tokens.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)  # (B, V)
    tokens = logprobs.argmax(dim=-1)
    if not bool(greedy.all()):
        # float64: the error of a float32 sum over a large vocabulary would exceed the rarest tokens' mass.
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        threshold = (noise * cumulative[:, -1])[:, None]
        drawn = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        tokens = torch.where(greedy, tokens, drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
