"""One leader at a time, whatever is slow, lost or stopped."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kube_fake import FakeKube
from support.simulated_time import now, run

from tba_operator.kubeapi import Forbidden, Unavailable
from tba_operator.lease import Election, LeaseLost, Timing
from tba_operator.world import Ref

LEASE = Ref("coordination.k8s.io/v1", "Lease", "tba-system", "tba-operator")


class Slow:
    """An API as one process sees it: each call takes `before` to get there and `after` to come back.

    A process that is stopped (SIGSTOP) looks just so from outside: its next step comes late.
    """

    def __init__(self, api: FakeKube, delays: list[tuple[float, float, bool]]) -> None:
        """(before, after, whether the answer is lost), call by call; none left: no delay."""
        self._api, self._delays = api, delays
        self.accesses = api.accesses

    async def get(self, ref: Ref) -> Any:
        return await self._delayed("get", ref)

    async def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Any:
        return await self._delayed("create", manifest)

    async def replace(self, manifest: Mapping[str, Any]) -> Any:
        return await self._delayed("replace", manifest)

    async def _delayed(self, method: str, argument: Any) -> Any:
        before, after, lost = self._delays.pop(0) if self._delays else (0.0, 0.0, False)
        await asyncio.sleep(before)
        answer = await getattr(self._api, method)(argument)
        await asyncio.sleep(after)
        if lost:
            raise Unavailable("answer lost")
        return answer


def election(api: Any, identity: str) -> Election:
    return Election(api, namespace="tba-system", name="tba-operator", identity=identity, wall=now)


async def forever() -> None:
    await asyncio.Event().wait()


def start(candidate: Election) -> asyncio.Task[None]:
    return asyncio.create_task(candidate.run(forever))


async def stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_the_first_leads_at_once_and_keeps_it():
    async def main() -> None:
        api = FakeKube(clock=now)
        first, second = election(api, "a"), election(api, "b")
        tasks = [start(first)]
        await asyncio.sleep(0.1)
        tasks.append(start(second))
        for _ in range(100):
            await asyncio.sleep(3)
            assert first.leading and not second.leading
        assert second.holder == first.identity
        spec = api[LEASE]["spec"]
        assert (spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (15, 0)
        await stop(*tasks)

    run(main())


def test_a_released_lease_is_taken_at_the_next_look():
    async def main() -> None:
        api = FakeKube(clock=now)
        first, second = election(api, "a"), election(api, "b")
        one, two = start(first), start(second)
        await asyncio.sleep(30)
        await stop(one)
        assert not first.leading
        await asyncio.sleep(2.1)
        assert second.leading and api[LEASE]["spec"]["leaseTransitions"] == 1
        await stop(two)

    run(main())


def test_the_lease_is_kept_until_the_work_has_wound_up():
    async def main() -> None:
        api = FakeKube(clock=now)
        first, second = election(api, "a"), election(api, "b")

        async def work() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(60)
                assert first.leading and not second.leading

        one = asyncio.create_task(first.run(work))
        two = start(second)
        await asyncio.sleep(5)
        await stop(one)
        assert now() == 65 and one.cancelled()
        await stop(two)

    run(main())


def test_the_end_of_the_work_is_the_end_of_the_lead():
    async def main() -> None:
        api = FakeKube(clock=now)
        first = election(api, "a")

        async def work() -> None:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            await first.run(work)
        assert api[LEASE]["spec"]["holderIdentity"] == ""

    run(main())


def test_a_dead_holder_is_replaced_after_its_duration():
    async def main() -> None:
        api = FakeKube(clock=now)
        first, second = election(Slow(api, [(0, 0, False)] * 2 + [(1e6, 0, False)]), "a"), election(api, "b")
        one = start(first)
        await asyncio.sleep(1)
        two = start(second)
        await asyncio.sleep(14.9)
        assert second.holder == first.identity and not first.leading and not second.leading
        await asyncio.sleep(2)
        assert second.leading
        with pytest.raises(LeaseLost):
            await one
        await stop(two)

    run(main())


def test_a_server_that_is_away_for_longer_than_the_deadline_ends_the_lead():
    async def main() -> None:
        api = FakeKube(clock=now)
        first = election(api, "a")
        one = start(first)
        await asyncio.sleep(9)  # renewed at 8
        api.fail(Unavailable("connection refused"), times=None)
        await asyncio.sleep(8.9)
        assert first.leading and first.trouble == "connection refused"
        with pytest.raises(LeaseLost, match="connection refused"):
            await one
        assert now() == pytest.approx(18)

    run(main())


def test_a_short_outage_costs_nothing():
    async def main() -> None:
        api = FakeKube(clock=now)
        first = election(api, "a")
        one = start(first)
        await asyncio.sleep(9)
        api.fail(Unavailable("connection refused"), times=None)
        await asyncio.sleep(5)
        api.mend()
        await asyncio.sleep(60)
        assert first.leading and not first.trouble
        await stop(one)

    run(main())


def test_a_renewal_whose_answer_was_lost_is_recognised():
    async def main() -> None:
        api = FakeKube(clock=now)
        first = election(api, "a")
        one = start(first)
        await asyncio.sleep(3)
        api.fail(Unavailable("answer lost"), verb="replace", after=True)
        await asyncio.sleep(60)
        assert first.leading
        await stop(one)

    run(main())


def test_a_lease_that_another_has_written_is_lost_at_once():
    async def main() -> None:
        api = FakeKube(clock=now)
        first = election(api, "a")
        one = start(first)
        await asyncio.sleep(3)
        api.edit(LEASE, spec={"holderIdentity": "somebody"})
        with pytest.raises(LeaseLost, match="somebody"):
            await one
        assert now() <= 5 and api[LEASE]["spec"]["holderIdentity"] == "somebody"

    run(main())


def test_a_standby_without_permission_says_so():
    async def main() -> None:
        api = FakeKube(clock=now)
        api.fail(Forbidden("cannot get leases"), times=None)
        first = election(api, "a")
        one = start(first)
        await asyncio.sleep(5)
        assert first.trouble == "cannot get leases" and not first.leading
        await stop(one)

    run(main())


def test_a_deadline_beyond_the_duration_is_refused():
    with pytest.raises(ValueError, match="two leaders"):
        Timing(duration=15, renew_deadline=15)


def test_a_restarted_container_is_another_candidate():
    api = FakeKube()
    assert election(api, "pod").identity != election(api, "pod").identity


@pytest.mark.parametrize(
    "slow",
    [
        [(0, 0), (0, 9.5), (40, 0)],  # the creation is told late, and no renewal arrives
        [(0, 0), (0, 0), (0, 9.5), (40, 0)],  # a renewal is told late, and no other arrives
        [(0, 0), (0, 0), (9.5, 0), (40, 0)],  # a renewal arrives late
        [(0, 0), (0, 0), (0, 40)],  # stopped with a renewal on its way back
        [(0, 0), (0, 0), (40, 0)],  # stopped with a renewal on its way there
    ],
)
def test_a_holder_that_is_stopped_knows_before_a_rival_leads(slow):
    async def main() -> None:
        api = FakeKube(clock=now)
        first = election(Slow(api, [(before, after, False) for before, after in slow]), "a")
        second = election(api, "b")
        one = start(first)
        await asyncio.sleep(1)
        two = start(second)
        led: list[str] = []
        while len(led) < 2 and now() < 60:
            await asyncio.sleep(0.1)
            leaders = [name for name, candidate in (("a", first), ("b", second)) if candidate.leading]
            assert len(leaders) <= 1
            led += [name for name in leaders if name not in led]
        assert led == ["a", "b"]
        await stop(one, two)

    run(main())


delay = st.sampled_from([0.0, 0.0, 0.5, 3.0, 9.5, 14.0, 40.0])
delays = st.lists(st.tuples(delay, delay, st.booleans()), max_size=12)


@settings(deadline=None, max_examples=25)
@given(each=st.lists(delays, min_size=2, max_size=3), starts=st.lists(st.floats(0, 20), min_size=3, max_size=3))
def test_never_two_lead_by_their_own_clocks_and_in_the_end_one_does(each, starts):
    async def main() -> None:
        api = FakeKube(clock=now)
        left = [list(slow) for slow in each]
        candidates = [election(Slow(api, slow), f"c{n}") for n, slow in enumerate(left)]

        async def live(candidate: Election, begin: float) -> None:
            await asyncio.sleep(begin)
            while True:
                try:
                    await candidate.run(forever)
                except LeaseLost:
                    await asyncio.sleep(1)  # the process is started again

        tasks = [asyncio.create_task(live(c, s)) for c, s in zip(candidates, starts, strict=False)]
        undisturbed = 0.0
        while undisturbed < 120:
            await asyncio.sleep(0.5)
            assert sum(candidate.leading for candidate in candidates) <= 1
            undisturbed = 0.0 if any(left) else undisturbed + 0.5
        assert any(candidate.leading for candidate in candidates)
        await stop(*tasks)

    run(main())
