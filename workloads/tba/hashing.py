"""The one content hash of data objects and tensors: xxh3_128, about 15 GB a CPU-second, not cryptographic."""

import xxhash


def xxh3_128(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 of a contiguous buffer as 32 hex digits. Large buffers release the interpreter lock."""
    return xxhash.xxh3_128_hexdigest(data)
