"""The safetensors format in one buffer: tensors in by a single copy, out as views, no file.

    8 bytes: header length · JSON header, padded with spaces to 8 bytes · tensor bytes, gapless

Source: safetensors format (github.com/huggingface/safetensors, README "Format"). Readers here are stricter than theirs:
every byte of the data belongs to exactly one tensor.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tba.contracts.errors import CorruptObject

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIM = 2**48


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor lies: bytes [begin, end) of the buffer."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises: ValueError if it has none."""
    if dtype not in _NAMES:
        raise ValueError(f"dtype {dtype} has no safetensors name: use one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def serialise(tensors: Mapping[str, Tensor]) -> memoryview:
    """Tensors as safetensors bytes; each is copied once, from whatever device and stride it has.

    Equal tensors give equal bytes. Raises: ValueError for a dtype without a safetensors name.
    """
    # Widest dtype first keeps every tensor aligned, so that a reader can view it in place.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": dtype_name(tensors[name].dtype), "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    buffer = np.empty(start + end, np.uint8).data  # a bytearray would be filled under the interpreter's lock
    buffer[:start] = len(text).to_bytes(8, "little") + text
    for name in names:
        source = tensors[name].detach()
        if source.numel():
            offset = start + header[name]["data_offsets"][0]
            target = torch.frombuffer(buffer, dtype=source.dtype, count=source.numel(), offset=offset)
            _copy(target.view(source.shape), source)
    return buffer


def _copy(target: Tensor, source: Tensor) -> None:
    if source.device.type == "cpu" and source.is_contiguous():
        # Not torch's own: its threads wait for each other, for seconds where the cores are busy.
        np.copyto(_bytes(target), _bytes(source))
    else:
        target.copy_(source)


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(-1).view(torch.uint8).numpy()


def parse(data: bytearray | memoryview) -> dict[str, Tensor]:
    """Tensors as views of `data`, which must be writable and which they keep alive.

    Raises: CorruptObject if the header is not valid to the last byte.
    """
    return {span.name: _view(data, span) for span in read_header(data)}


def read_header(data: bytes | bytearray | memoryview) -> list[TensorSpan]:
    """Where each tensor lies, in file order. Raises: CorruptObject if anything does not add up."""
    view = memoryview(data)
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 0 < size <= min(len(view) - 8, _MAX_HEADER_BYTES):
        raise CorruptObject(f"safetensors: a header of {size} bytes does not fit a file of {len(view)}")
    try:
        header = json.loads(bytes(view[8 : 8 + size]), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError(f"the header is a {type(header).__name__}, not an object")
        header.pop("__metadata__", None)
        spans = [_span(name, entry, 8 + size) for name, entry in header.items()]
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"safetensors: {str(error)[:200]}") from error
    spans.sort(key=lambda s: (s.begin, s.end))
    position = 8 + size
    for span in spans:
        if span.begin != position:
            raise CorruptObject(f"safetensors: {span.name} starts at byte {span.begin}, expected {position}")
        position = span.end
    if position != len(view):
        raise CorruptObject(f"safetensors: tensors end at byte {position} of {len(view)}")
    return spans


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _span(name: str, entry: Any, start: int) -> TensorSpan:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: expected dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < _MAX_DIM for d in shape) or len(shape) > 16:
        raise ValueError(f"{name}: shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int and o >= 0 for o in offsets):
        raise ValueError(f"{name}: data_offsets {offsets!r}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise ValueError(f"{name}: unknown dtype {entry['dtype']!r}")
    size = math.prod(shape) * DTYPES[entry["dtype"]].itemsize
    if offsets[1] - offsets[0] != size:
        raise ValueError(f"{name}: {entry['dtype']} {shape} takes {size} bytes, data_offsets are {offsets}")
    return TensorSpan(name, entry["dtype"], shape, start + offsets[0], start + offsets[1])


def _view(data: bytearray | memoryview, span: TensorSpan) -> Tensor:
    dtype = DTYPES[span.dtype]
    if span.begin == span.end:  # frombuffer refuses empty views
        return torch.empty(span.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=span.end - span.begin, offset=span.begin)
    if flat.data_ptr() % dtype.itemsize:  # another writer's file: kernels expect aligned data
        flat = flat.clone()
    return flat.view(dtype).view(span.shape)
