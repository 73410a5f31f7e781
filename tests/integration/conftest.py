"""Fixtures of tests with real processes."""

import pytest
from support.processes import Cluster

from tba.cli import main


@pytest.fixture
def trainer_here(monkeypatch):
    """A run's trainer that ends soon, in this process: a start of its own takes seconds of imports."""
    monkeypatch.setattr("tba.trainer.main.configure", lambda **_: None)  # the log of the other tests stays as it is

    def run(cluster: Cluster, **environment: str) -> int:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            main(["trainer", "--config", str(cluster.root / "config"), "--storage", cluster.uri])
        assert isinstance(end.value.code, int)
        return end.value.code

    return run
