"""What a running trainer sits out, for how long, and what it says meanwhile."""

import pytest

from tba.contracts.errors import StoreUnavailable
from tba.store import AccessDenied, OutOfSpace
from tba.trainer.outage import Outage

DOWN, DENIED = StoreUnavailable("no answer"), AccessDenied("no rights")


def test_an_outage_counts_from_its_first_failure_and_is_over_with_the_first_success():
    now = 10.0
    outage = Outage("publish", give_up_seconds=60.0, clock=lambda: now)
    assert (outage.since, outage.description) == (None, "")
    assert outage.failed(DOWN) == 0.0
    assert outage.description == "storage has not answered", "the call that failed may have lasted for minutes"
    now = 40.0
    assert (outage.failed(DOWN), outage.since) == (30.0, 10.0)
    assert outage.description == "storage has not answered for 30 s"
    assert outage.failed(DENIED) == 30.0
    assert outage.description == "storage has denied access for 30 s"
    outage.failed(OutOfSpace("disk"))
    assert outage.description == "storage has had no space left for 30 s"
    outage.ended()
    now = 90.0
    assert outage.description == ""
    assert outage.failed(DOWN) == 0.0, "another outage has the whole time again"


@pytest.mark.parametrize("error", [DOWN, DENIED])
def test_an_outage_that_lasts_too_long_ends_with_its_own_error(error):
    now = 0.0
    outage = Outage("commit", give_up_seconds=60.0, clock=lambda: now)
    outage.failed(DOWN)
    now = 60.0
    outage.failed(error)
    now = 60.5
    with pytest.raises(type(error)):
        outage.failed(error)
