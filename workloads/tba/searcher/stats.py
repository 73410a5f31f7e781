"""Counters of a searcher process since its start: into shard headers, metrics and the log."""

from dataclasses import asdict, dataclass

from tba import telemetry


@dataclass(slots=True)
class SearcherStats:
    """Names are an API: the report shows them."""

    generated_rows: int = 0
    generated_tokens: int = 0
    visits: int = 0
    failed_rows: int = 0
    timed_out_rows: int = 0
    eval_rows: int = 0
    eval_blocks: int = 0
    versions_loaded: int = 0
    generate_seconds: float = 0.0
    load_seconds: float = 0.0
    wait_weights_seconds: float = 0.0
    wait_storage_seconds: float = 0.0
    wait_reward_seconds: float = 0.0
    wait_idle_seconds: float = 0.0
    """After the end of the run."""
    up_seconds: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """For a shard header."""
        return {name: float(value) for name, value in asdict(self).items()}

    def waited(self, what: str, seconds: float) -> None:
        """Count a wait for weights, storage, reward or (nothing to do) idle."""
        name = f"wait_{what}_seconds"
        setattr(self, name, getattr(self, name) + seconds)
        if what != "idle":
            telemetry.SEARCHER_WAIT.labels(what).inc(seconds)
