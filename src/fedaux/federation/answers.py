"""What nodes send, parsed under limits before anything else uses it.

Everything here may be hostile. Sizes, depths, digits, counts and values are checked; a violation
raises `Unusable`, for which the server leaves the client out of the round. A text of at most
`LONGEST_ANSWER` characters holds the numbers, and one array the tensors (see `records`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedaux.config import Certainty
from fedaux.core.dpsgd import schedule
from fedaux.core.messages import (
    ClientRelease,
    TrainRequest,
    Update,
    Weights,
    num_bytes,
    problem_of_release,
)
from fedaux.federation import records
from fedaux.federation.records import Unusable
from fedaux.privacy.bounds import MOST_EXAMPLES
from fedaux.privacy.ledger import UPDATE, LedgerEntry
from fedaux.privacy.mechanism import Limits

LONGEST_ANSWER = 10_000
"""Characters of the JSON text of an answer; an honest one has some hundred."""
MOST_RECORDS = 8
"""Records of a message, and entries of a record."""
LARGEST_WEIGHT = 1e8
"""Largest absolute value of a parameter or statistic."""
LARGEST_COUNTER = 2**40
"""Largest integer in a model: a counter of batches."""
LARGEST_LOSS = 1e9
NOISES = ("secure", "simulated", "none")
PRECISION = 1e-6
"""Relative difference at which stated noise is another than the requested one."""


class Misstated(Unusable):
    """An answer about more examples than the node stated; it may state them again."""


@dataclass(frozen=True)
class Hello:
    """How a node introduces itself."""

    client: int
    name: str
    num_examples: int | None
    """The number of its examples; None if it could not count them."""


def read_hello(content: RecordDict, *, num_clients: int) -> Hello:
    """Return a node's introduction. Raises Unusable."""
    said = _text_of(content, "hello", most_bytes=0)
    client, examples, name = said.get("client"), said.get("num_examples"), said.get("name", "")
    if type(client) is not int or not 0 <= client < num_clients:
        raise Unusable(f"claims to be client {_shown(client)}, but there are {num_clients} clients")
    shown = records.reason_of(name)[:100] if isinstance(name, str) else ""
    return Hello(client, shown, None if examples is None else _count(examples))


def read_release(
    content: RecordDict,
    *,
    client: int,
    certainty: Certainty,
    purpose: str,
    width: int,
    limits: Callable[[int], Limits],
    most_examples: int,
) -> ClientRelease:
    """Return a client's release; `limits(n)` is the range of one of n examples. Raises Unusable."""
    answer = _answer(content, client=client, most_bytes=8 * width)
    entry = _entry(answer, client=client, purpose=purpose)
    if entry.mechanism != certainty.mechanism:
        raise Unusable(f"released through {_shown(entry.mechanism)}, which was not requested")
    _at_most(entry.num_examples, most_examples)
    possible = limits(entry.num_examples)
    stated = (entry.sigma <= possible.sigma * (1 + PRECISION), entry.delta <= certainty.delta)
    if not all(stated) or entry.epsilon not in (certainty.epsilon, math.inf):
        raise Unusable("the ledger entry does not state what was requested")
    vector = records.tensors(content.get("release"), {"vector": (torch.float64, (width,))})
    problem = problem_of_release(vector["vector"], width=width, limits=possible)
    if problem is not None:
        raise Unusable(problem)
    return ClientRelease(client, vector["vector"], entry)


def read_update(
    content: RecordDict,
    *,
    client: int,
    sent: Weights,
    request: TrainRequest,
    most_examples: int,
) -> Update:
    """Return a client's update, of tensors like those sent. Raises Unusable."""
    answer = _answer(content, client=client, most_bytes=num_bytes(sent, wire=request.wire))
    examples, loss = _count(answer.get("num_examples")), answer.get("loss")
    _at_most(examples, most_examples)
    if not (loss is None or type(loss) is float):
        raise Unusable("the loss is not a number")
    if loss is not None and not abs(loss) <= LARGEST_LOSS:
        raise Unusable(f"training came to a loss of {loss:g}")
    private = request.local.privacy is not None
    entry = _entry(answer, client=client, purpose=UPDATE) if private and "entry" in answer else None
    if entry is not None:
        _check_update_entry(entry, request, num_examples=examples)
    expected = records.expected_of(sent)
    weights = records.tensors(content.get("weights"), expected, wire=request.wire)
    for name, tensor in weights.items():
        _check_values(name, tensor)
    return Update(client, examples, weights, None if private else loss, entry)


def check_size(content: RecordDict, *, most_bytes: int) -> None:
    """Raise Unusable for a message with more records or bytes than an honest one has."""
    counts = [len(content), *(len(record) for record in content.values())]
    if max(counts) > MOST_RECORDS:
        raise Unusable(f"the answer has {max(counts)} records, more than {MOST_RECORDS}")
    arrays = [record for record in content.values() if isinstance(record, ArrayRecord)]
    size = sum(len(array.data) for record in arrays for array in record.values())
    most = most_bytes + records.LONGEST_HEADER
    if size > most:
        raise Unusable(f"the answer has {size} bytes, more than {most}")


def _text_of(content: RecordDict, name: str, *, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object of a record of a message of the right size."""
    check_size(content, most_bytes=most_bytes)
    try:
        text = records.text_of(content, name, longest=LONGEST_ANSWER)
        return records.parsed(text)
    except Unusable as error:
        raise Unusable(f"the answer cannot be read: {error}") from error


def _answer(content: RecordDict, *, client: int, most_bytes: int) -> dict[str, Any]:
    answer = _text_of(content, "answer", most_bytes=most_bytes)
    number = answer.get("client")
    if type(number) is not int or number != client:
        raise Unusable(f"answers as client {_shown(number)}")
    return answer


def _entry(answer: Mapping[str, Any], *, client: int, purpose: str) -> LedgerEntry:
    """Return the ledger entry of an answer, with valid numbers."""
    fields = answer.get("entry")
    try:
        entry = LedgerEntry.from_json(fields if isinstance(fields, dict) else {})
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise Unusable("the ledger entry cannot be read") from error
    numbers = (entry.sensitivity, entry.sigma, entry.epsilon, entry.delta)
    if not (
        type(entry.client) is int
        and entry.client == client
        and entry.purpose == purpose
        and type(entry.num_examples) is int
        and 1 <= entry.num_examples <= MOST_EXAMPLES
        and all(type(number) in (int, float) and number >= 0 for number in numbers)
        and entry.sigma <= LARGEST_WEIGHT
        and entry.delta <= 1
        and isinstance(entry.mechanism, str)
        and entry.noise in NOISES
        and (purpose == UPDATE or entry.steps is entry.sampling_probability is None)
    ):
        raise Unusable("the ledger entry is not valid")
    return entry


def _check_update_entry(entry: LedgerEntry, request: TrainRequest, *, num_examples: int) -> None:
    """Raise Unusable unless an entry states the private training that was requested."""
    privacy = request.local.privacy
    assert privacy is not None, "only private updates have entries"
    query, steps = schedule(request.local, num_examples=num_examples)
    stated = (entry.num_examples, entry.mechanism, entry.steps, entry.sampling_probability)
    scale = (entry.sensitivity, entry.sigma, entry.delta)
    if stated != (num_examples, "dp-sgd", steps, query.sampling_probability) or scale != (
        2.0 * privacy.clip,
        privacy.noise_multiplier * privacy.clip,
        privacy.delta,
    ):
        raise Unusable("the ledger entry does not state what was requested")


def _check_values(name: str, tensor: Tensor) -> None:
    if tensor.numel() == 0:
        return
    low, high = (float(value) for value in tensor.aminmax())
    if math.isnan(low) or math.isnan(high) or math.isinf(low) or math.isinf(high):
        raise Unusable(f"tensor {name} holds NaN or infinity")
    most = LARGEST_WEIGHT if tensor.is_floating_point() else LARGEST_COUNTER
    if max(-low, high) > most or (low < 0 and not tensor.is_floating_point()):
        raise Unusable(
            f"tensor {name} holds values from {low:.3g} to {high:.3g}, beyond {most:.0e}"
        )


def _count(value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST_EXAMPLES:
        raise Unusable(
            f"the number of examples is not valid; should be between 1 and {MOST_EXAMPLES}"
        )
    return value


def _at_most(examples: int, most: int) -> None:
    if examples > most:
        raise Misstated(f"claims {examples} examples and stated {most} when it connected")


def _shown(value: object) -> str:
    return records.reason_of(str(value))[:20]
