"""Tensors and texts as Flower's records, strictly validated.

All tensors of a record are sent as one array in the format of safetensors: a JSON header with the
type, shape and offsets of each, then their little-endian bytes. Flower sends every array in
separate requests, so one array is much faster than many. Names, types, shapes and sizes are checked
before a tensor is created.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import save
from torch import Tensor

from fedaux.core.messages import sent_as, shortened

FORMAT = "fedaux.safetensors"
"""The serialization type in Flower's arrays."""
ALL = "tensors"
"""The name of the one array."""
DTYPES = {
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""Types that are sent, by safetensors' names."""
LONGEST_HEADER = 1_000_000
"""Largest header, in bytes."""
LONGEST_TEXT = 1_000_000
"""Longest JSON text, in characters."""
LONGEST_REASON = 300
DEEPEST = 8
"""Most brackets within brackets in a JSON text."""
LONGEST_NUMBER = 32
"""Most characters of a number in a JSON text; Python writes at most 24."""
MOST_DIMENSIONS = 8
LARGEST_DIMENSION = 2**40
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)
"""Possessive, and a string may lack its end: no text is searched twice."""
Expected = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor of a record."""


class Unusable(ValueError):
    """A message is not valid; the text states why, without its content."""


@dataclass(frozen=True)
class Piece:
    """The type, shape and bytes of a tensor in a record."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview


def arrays(tensors: Mapping[str, Tensor], *, wire: str = "fp32") -> ArrayRecord:
    """Return tensors as a record, weights in the precision of the wire."""
    sent = {
        name: shortened(tensor.detach(), wire=wire).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    for name, tensor in sent.items():
        if tensor.dtype not in DTYPES.values():
            raise TypeError(f"tensor {name} is {_words(tensor.dtype)}: this type is not supported")
    data = save(sent)
    return ArrayRecord({ALL: Array("uint8", (len(data),), FORMAT, data)})


def tensors(record: object, expected: Expected, *, wire: str = "fp32") -> dict[str, Tensor]:
    """Return the tensors of a record, each in its expected type. Raises Unusable."""
    pieces = _pieces(record)
    if missing := sorted(expected.keys() - pieces.keys()):
        raise Unusable(f"tensor {missing[0]} is missing")
    if foreign := sorted(pieces.keys() - expected.keys()):
        raise Unusable(f"tensor {_printable(foreign[0])} is unknown")
    for name, (dtype, shape) in expected.items():
        piece, sent = pieces[name], sent_as(dtype, wire)
        if piece.dtype is not sent or piece.shape != shape:
            shown = f"{_words(piece.dtype)} {list(piece.shape)[:8]}"
            raise Unusable(
                f"tensor {_printable(name)} is {shown}, should be {_words(sent)} {list(shape)}"
            )
    return {name: _tensor(pieces[name]).to(dtype) for name, (dtype, _) in expected.items()}


def some_tensors(record: object, *, most_bytes: int, most_tensors: int = 64) -> dict[str, Tensor]:
    """Return the tensors of a record with unknown names and shapes, within limits. Raises
    Unusable."""
    pieces = _pieces(record)
    if len(pieces) > most_tensors:
        raise Unusable(f"has {len(pieces)} tensors, more than {most_tensors}")
    if (size := sum(len(piece.data) for piece in pieces.values())) > most_bytes:
        raise Unusable(f"has {size} bytes, more than {most_bytes}")
    return {name: _tensor(piece) for name, piece in pieces.items()}


def expected_of(weights: Mapping[str, Tensor]) -> Expected:
    """Return types and shapes of weights, which may be on the meta device."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}


def text_record(text: str) -> ConfigRecord:
    """Return a text, mostly JSON, as a record."""
    return ConfigRecord({"text": text})


def text_of(content: RecordDict, name: str, *, longest: int = LONGEST_TEXT) -> str:
    """Return the text of a record. Raises Unusable."""
    record = content.get(name)
    text = record.get("text") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str) or len(text) > longest:
        raise Unusable(f"{name} is missing or too long")
    return text


def parsed(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object within limits on depth and digits. Raises Unusable.

    The depth is measured before anything is parsed: a parser that recurses would fail at it.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        depth = 0
        for found in _STRING_OR_BRACKET.finditer(text):
            first = text[found.start()]
            depth += first in "[{"
            depth -= first in "]}"
            if depth > DEEPEST:
                raise Unusable(f"has more than {DEEPEST} brackets within brackets")
        value = json.loads(text, parse_int=_integer, parse_float=_float)
    except Unusable:
        raise
    except (ValueError, RecursionError) as error:
        raise Unusable("cannot be read as JSON") from error
    if not isinstance(value, dict):
        raise Unusable("is not a JSON object")
    return value


def _integer(text: str) -> int:
    return int(_short(text))


def _float(text: str) -> float:
    return float(_short(text))


def _short(text: str) -> str:
    if len(text) > LONGEST_NUMBER:
        raise Unusable(f"has a number of {len(text)} characters, more than {LONGEST_NUMBER}")
    return text


def reason_of(text: str) -> str:
    """Return a foreign text in a form that is safe to show: short and printable."""
    return _printable(text)[:LONGEST_REASON]


def refusal_in(content: RecordDict) -> str:
    """Return a node's reason for a refusal."""
    try:
        return reason_of(text_of(content, "refusal"))
    except Unusable:
        return "refused without a reason"


def size_of(content: RecordDict) -> int:
    """Return the bytes of a message's tensors and texts."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
        else:
            total += sum(
                len(key) + len(value) for key, value in record.items() if isinstance(value, str)
            )
    return total


def _pieces(record: object) -> dict[str, Piece]:
    """Return the tensors that a record declares, after checking their sizes. Raises Unusable."""
    array = record.get(ALL) if isinstance(record, ArrayRecord) and len(record) == 1 else None
    if array is None or array.stype != FORMAT:
        raise Unusable("has no tensors in the format of this version")
    data = memoryview(array.data)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(LONGEST_HEADER, len(data) - 8):
        raise Unusable("the header of the tensors cannot be read")
    try:
        entries = parsed(bytes(data[8 : 8 + length]))
    except Unusable as error:
        raise Unusable(f"the header of the tensors cannot be read: {error}") from error
    body = data[8 + length :]
    return {name: _piece(name, entry, body) for name, entry in entries.items()}


def _piece(name: str, entry: object, body: memoryview) -> Piece:
    given = entry if isinstance(entry, dict) else {}
    kind, shape, place = given.get("dtype"), given.get("shape"), given.get("data_offsets")
    if not (
        name.isprintable()
        and isinstance(kind, str)
        and kind in DTYPES
        and _are_counts(shape)
        and _are_counts(place)
        and len(place) == 2
    ):
        raise Unusable(f"tensor {_printable(name)} of type {_printable(str(kind))} is not valid")
    begin, end = place
    if not begin <= end <= len(body) or end - begin != math.prod(shape) * DTYPES[kind].itemsize:
        wanted = f"{_words(DTYPES[kind])} {list(shape)[:8]}"
        raise Unusable(
            f"tensor {_printable(name)} has {max(0, end - begin)} bytes, which is not {wanted}"
        )
    return Piece(DTYPES[kind], tuple(shape), body[begin:end])


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(values, list)
        and len(values) <= MOST_DIMENSIONS
        and all(type(value) is int and 0 <= value <= LARGEST_DIMENSION for value in values)
    )


def _tensor(piece: Piece) -> Tensor:
    if len(piece.data) == 0:
        return torch.empty(piece.shape, dtype=piece.dtype)
    return torch.frombuffer(bytearray(piece.data), dtype=piece.dtype).reshape(piece.shape)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _printable(text: str) -> str:
    return "".join(
        letter if letter.isprintable() else "?" for letter in str(text)[: LONGEST_REASON + 1]
    )
