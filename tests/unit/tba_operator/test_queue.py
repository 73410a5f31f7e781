"""Keys: once, one at a time, when due."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_time import now, run

from tba_operator.queue import WorkQueue


async def drain(queue: WorkQueue[str], seconds: float) -> list[tuple[float, str]]:
    """What one worker that needs no time gets within so many seconds."""
    got: list[tuple[float, str]] = []
    try:
        async with asyncio.timeout(seconds):
            while (key := await queue.get()) is not None:
                got.append((round(now(), 6), key))
                queue.done(key)
    except TimeoutError:
        pass
    return got


def test_a_key_added_often_is_worked_on_once():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for key in ("a", "b", "a", "a"):
            queue.add(key)
        assert queue.depth == 2
        assert await drain(queue, 1) == [(0, "a"), (0, "b")]

    run(main())


def test_the_earliest_of_several_delays_counts():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a", 600)
        queue.add("a", 5)
        queue.add("a", 60)
        assert queue.depth == 0
        assert await drain(queue, 1000) == [(5, "a")]

    run(main())


def test_a_waiting_worker_is_woken_by_an_earlier_key():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("late", 100)
        worker = asyncio.create_task(drain(queue, 50))
        await asyncio.sleep(3)
        queue.add("early")
        assert await worker == [(3, "early")]

    run(main())


def test_a_key_added_while_active_runs_again_after():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        key = await queue.get()
        queue.add("a")
        other = asyncio.create_task(queue.get())
        await asyncio.sleep(10)
        assert not other.done()
        queue.done("a")
        assert await other == key == "a"
        queue.done("a")
        assert await drain(queue, 10) == []

    run(main())


def test_a_delay_asked_for_while_active_counts_from_then():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        await queue.get()
        queue.add("a", 30)
        queue.add("a", 20)
        await asyncio.sleep(5)
        queue.done("a")
        assert await drain(queue, 100) == [(20, "a")]

    run(main())


def test_retries_back_off_and_forget_starts_anew():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue(jitter=lambda: 0.0)
        assert [queue.retry("a") for _ in range(10)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
        assert queue.retry("b") == 0.2
        queue.forget("a")
        assert queue.retry("a") == 0.2

    run(main())


def test_jitter_takes_up_to_half():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue(jitter=lambda: 0.5)
        assert queue.retry("a") == pytest.approx(0.15)

    run(main())


def test_a_closed_queue_gives_no_keys():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(1)
        queue.close()
        assert await asyncio.gather(*waiting) == [None, None, None]
        queue.add("a")
        assert await queue.get() is None

    run(main())


def test_a_cancelled_worker_loses_no_key():
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        worker = asyncio.create_task(queue.get())
        await asyncio.sleep(1)
        queue.add("a")
        worker.cancel()
        await asyncio.wait({worker})
        assert await drain(queue, 1) == [(1, "a")]

    run(main())


Step = tuple[float, str, float]
"""(pause before, key, delay)"""


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([0, 0.1, 1, 5]), st.sampled_from("abc"), st.sampled_from([0, 0.5, 3, 20]))
    ),
    workers=st.integers(1, 4),
    effort=st.sampled_from([0, 0.3, 4]),
)
def test_every_wish_is_followed_and_never_two_workers_share_a_key(steps: list[Step], workers: int, effort: float):
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        active: Counter[str] = Counter()
        runs: dict[str, list[float]] = {key: [] for key in "abc"}
        wishes: list[tuple[str, float]] = []

        async def work() -> None:
            while (key := await queue.get()) is not None:
                active[key] += 1
                assert active[key] == 1
                runs[key].append(now())
                await asyncio.sleep(effort)
                active[key] -= 1
                queue.done(key)

        tasks = [asyncio.create_task(work()) for _ in range(workers)]
        for pause, key, delay in steps:
            await asyncio.sleep(pause)
            wishes.append((key, now()))
            queue.add(key, delay)
        await asyncio.sleep(1000)
        queue.close()
        await asyncio.gather(*tasks)
        assert all(any(started >= asked for started in runs[key]) for key, asked in wishes)
        assert sum(map(len, runs.values())) <= len(steps)

    run(main())
