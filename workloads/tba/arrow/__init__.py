"""Arrow IPC files of one record batch: written by pyarrow, read by our own strict reader.

pyarrow 26 dies of a segmentation fault on some files with a single flipped bit (our fuzz test found one within 20,000),
which would take the trainer with it. The reader here follows no unchecked offset and bounds the decompressed size
before it decompresses anything; other tools still read the files, since they are ordinary Arrow.
"""

from tba.arrow.reader import ArrowFile, Column, read_single_batch
from tba.arrow.writer import write_single_batch

__all__ = ["ArrowFile", "Column", "read_single_batch", "write_single_batch"]
