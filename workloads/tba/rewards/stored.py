"""The code of a run's own reward as an object of its bucket: the trainer puts it there, searchers have nothing else."""

import hashlib

from tba.contracts.errors import CorruptObject
from tba.contracts.keys import reward_key
from tba.store.protocol import ObjectStore


def put_reward_code(store: ObjectStore, code: str) -> str:
    """The key. Raises: StoreUnavailable."""
    data = code.encode()
    key = reward_key(hashlib.sha256(data).hexdigest())
    store.put_once(key, data)
    return key


def get_reward_code(store: ObjectStore, key: str | None) -> str | None:
    """The code at `key`; None for a reward without one. Raises: NotFound, CorruptObject, StoreUnavailable."""
    if key is None:
        return None
    data = store.get(key).data
    found = reward_key(hashlib.sha256(data).hexdigest())
    if found != key:
        raise CorruptObject(f"{key}: its {len(data)} bytes hash to {found}: the bytes were changed")
    return data.decode()
