"""Does several things at once and hands the results over in order, never far ahead of who takes them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(pool: Executor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """`function` of each item, in order; at most `ahead` results are under way or wait to be taken.

    An error comes where its result would have come; what was begun behind it is given up.
    """
    begun: deque[Future[R]] = deque()
    try:
        for item in items:
            if len(begun) == ahead:
                yield begun.popleft().result()
            begun.append(pool.submit(function, item))
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
