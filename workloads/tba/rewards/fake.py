"""No task: a reward drawn from a hash, for load tests."""

import hashlib


def reward(prompt: str, response: str, answer: str | None, *, seed: int = 0, mean: float = 0.5) -> float:
    """Return 1.0 with probability `mean` over responses, else 0.0; the same text always gets the same reward."""
    digest = hashlib.blake2b(f"{seed}\0{prompt}\0{response}".encode(errors="surrogatepass"), digest_size=8).digest()
    return float(int.from_bytes(digest) < mean * 2.0**64)


def check_parameters(*, seed: int = 0, mean: float = 0.5) -> None:
    """Refuse a mean that is no probability when the reward is loaded."""
    if not 0 <= mean <= 1:
        raise ValueError("mean must be between 0 and 1")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError("seed must be an integer")
