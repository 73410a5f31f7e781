"""Writes one record batch as an Arrow IPC file (zstd)."""

from collections.abc import Sequence

import pyarrow as pa


def write_single_batch(schema: pa.Schema, columns: Sequence[pa.Array]) -> bytes:
    """Encode the columns, in schema order. Equal input gives equal bytes."""
    batch = pa.RecordBatch.from_arrays(list(columns), schema=schema)
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
