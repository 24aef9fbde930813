"""Tensors and tables as Flower's records. Bytes are taken for what they should be and for nothing else.

A tensor travels as its plain little-endian bytes, with its type and shape beside them: there is no format to parse and
nothing to unpickle. Names, types, shapes and sizes are compared with what was expected before a tensor is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedaux.clients import sent_as, shortened

PLAIN = "fedaux.bytes"
"""How arrays are written, in Flower's field for it."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.float32, torch.float64, torch.int64)
}
LONGEST_TEXT = 1_000_000
"""Characters of JSON that are looked at."""
LONGEST_REASON = 300
Expected = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor of a record."""


class Unusable(ValueError):
    """A message that cannot be what it should be; the text says why and holds nothing of its content."""


def arrays(tensors: Mapping[str, Tensor], *, wire: str = "fp32") -> ArrayRecord:
    """Return tensors as a record, weights in the precision of the wire."""
    return ArrayRecord({name: _array(shortened(tensor.detach(), wire=wire)) for name, tensor in tensors.items()})


def tensors(record: object, expected: Expected, *, wire: str = "fp32") -> dict[str, Tensor]:
    """Return the tensors of a record, each in the type that is expected of it. Raises Unusable."""
    if not isinstance(record, ArrayRecord):
        raise Unusable("holds no tensors")
    if missing := sorted(expected.keys() - record.keys()):
        raise Unusable(f"tensor {missing[0]} is missing")
    if foreign := sorted(record.keys() - expected.keys()):
        raise Unusable(f"tensor {_printable(foreign[0])} is unknown")
    for name, (dtype, shape) in expected.items():
        _check(name, record[name], sent_as(dtype, wire), shape)
    return {name: _tensor(record[name]).to(dtype) for name, (dtype, _) in expected.items()}


def some_tensors(record: object, *, most_bytes: int, most_tensors: int = 64) -> dict[str, Tensor]:
    """Return the tensors of a record whose names and shapes are not known beforehand, within limits."""
    if not isinstance(record, ArrayRecord) or len(record) > most_tensors:
        raise Unusable(f"should hold tensors, {most_tensors} at most")
    for name, array in record.items():
        if array.dtype not in DTYPES:
            raise Unusable(f"tensor {_printable(name)} is of type {_printable(array.dtype)}")
        _check(name, array, DTYPES[array.dtype], tuple(array.shape))
    if (size := sum(len(array.data) for array in record.values())) > most_bytes:
        raise Unusable(f"holds {size} bytes, more than {most_bytes}")
    return {name: _tensor(array) for name, array in record.items()}


def expected_of(weights: Mapping[str, Tensor]) -> Expected:
    """Return types and shapes of weights, which may lie on the meta device."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}


def text_record(text: str) -> ConfigRecord:
    """Return a text, mostly JSON, as a record."""
    return ConfigRecord({"text": text})


def text_of(content: RecordDict, name: str) -> str:
    """Return the text of a record. Raises Unusable."""
    record = content.get(name)
    text = record.get("text") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise Unusable(f"says no {name}, or too much")
    return text


def reason_of(text: str) -> str:
    """Return somebody else's words as they may stand in metrics and on a screen: short, and nothing but print."""
    return _printable(text)[:LONGEST_REASON]


def size_of(content: RecordDict) -> int:
    """Return the bytes of a message's tensors and texts."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
        else:
            total += sum(len(str(key)) + len(str(value)) for key, value in record.items())
    return total


def _array(tensor: Tensor) -> Array:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"tensors of type {name} are not sent; those of {', '.join(DTYPES)} are")
    return Array(name, tuple(tensor.shape), PLAIN, tensor.cpu().contiguous().numpy().tobytes())


def _check(name: str, array: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    given = tuple(array.shape)
    if array.stype != PLAIN or array.dtype not in DTYPES or DTYPES[array.dtype] is not dtype or given != shape:
        shown = f"{_printable(array.dtype)} {list(given)[:8]}"
        raise Unusable(f"tensor {_printable(name)} is {shown}, should be {wanted}")
    if any(side < 0 for side in given) or len(array.data) != math.prod(given) * dtype.itemsize:
        raise Unusable(f"tensor {_printable(name)} has {len(array.data)} bytes, which is not {wanted}")


def _tensor(array: Array) -> Tensor:
    dtype, shape = DTYPES[array.dtype], tuple(array.shape)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(shape)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[: LONGEST_REASON + 1])
