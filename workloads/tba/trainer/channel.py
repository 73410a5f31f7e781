"""Messages between a thread of rank 0 and one of another rank, in order, beside the collectives of the main threads.

```
rank 0, a thread ◄── pieces, numbered, under keys of torch's store (which rank 0 serves, or torchrun) ──► another's
```
A collective has one order for all ranks, which threads beside the training loop cannot keep: the store has none.
"""

from datetime import timedelta

from torch.distributed import DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

WAIT_SECONDS = 3600.0
"""One request to the store waits so long; the store's own limit is an int of milliseconds."""
PIECE_CHARS = 2**20
"""At most 4 MiB: of a request of more than 8 the store breaks the connection."""
_LAST, _MORE = ".", "+"


class Channel:
    """One end. For one thread at a time, which alone may wait on `store`: a client answers one request at a time."""

    def __init__(self, store: Store, *, own: str, other: str, wait_seconds: float = WAIT_SECONDS) -> None:
        """`own`, `other`: names of the two ends, the other way round there. `wait_seconds`: of one request."""
        self._store = store
        self._wait_seconds = wait_seconds
        self._out, self._in = f"{own}>{other}", f"{other}>{own}"
        self._sent = self._received = 0

    def send(self, text: str) -> None:
        """Raises: torch's DistNetworkError if the store has gone, and rank 0 with it."""
        for begin in range(0, max(1, len(text)), PIECE_CHARS):
            piece = text[begin : begin + PIECE_CHARS]
            mark = _MORE if begin + len(piece) < len(text) else _LAST
            self._store.set(f"{self._out}/{self._sent}", mark + piece)
            self._sent += 1

    def receive(self, seconds: float | None = None) -> str:
        """The next message, which begins within `seconds`; without, however long it takes.

        Raises: TimeoutError; torch's DistNetworkError if the store has gone.
        """
        pieces = [self._piece(seconds)]
        while pieces[-1].startswith(_MORE):
            pieces.append(self._piece(seconds))
        return "".join(piece[1:] for piece in pieces)

    def _piece(self, seconds: float | None) -> str:
        key, left = f"{self._in}/{self._received}", seconds
        while True:
            limit = self._wait_seconds if left is None else min(left, self._wait_seconds)
            try:
                self._store.wait([key], timedelta(seconds=limit))
                break
            except DistStoreError as error:  # it says no more than that the time is over
                if left is not None and (left := left - limit) <= 0:
                    raise TimeoutError(f"no message {self._in} within {seconds:.0f} s") from error
        piece = self._store.get(key).decode()
        self._store.delete_key(key)
        self._received += 1
        return piece
