"""A registered node that turns hostile: it may lose its own place in a round, and nothing else."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra flower")
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from helpers.experiments import tiny
from helpers.loopback import LoopbackGrid, write_nodes

from fedaux.config import Certainty, Experiment, Local, LocalPrivacy
from fedaux.core.dpsgd import update_entry
from fedaux.core.messages import TrainRequest
from fedaux.federation import answers, records
from fedaux.federation.records import Unusable
from fedaux.federation.server import federate
from fedaux.privacy.bounds import MOST_EXAMPLES
from fedaux.privacy.ledger import SCORES, entry_of
from fedaux.privacy.mechanism import SimulatedNoise
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.recipes import merged

pytestmark = pytest.mark.usefixtures("without_pages")

BRACKETS = "[" * 200_000
Change = Callable[[Any], Any]


def hospitals(**changes: Any) -> Experiment:
    base: dict[str, Any] = {
        "rounds": 2,
        "split": {"num_clients": 3, "alpha": 1.0},
        "federation": {"authenticated": False, "deadline": 5.0, "wait_seconds": 2.0},
        "engine": {"clients_at_once": 1},
    }
    return tiny(**merged(base, changes))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def says(record: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the JSON text of a node's answers; a text stays as it is."""

    def changed(reply: Any) -> Any:
        if record in reply.content:
            made = change(json.loads(str(reply.content[record]["text"])))
            text = made if isinstance(made, str) else json.dumps(made)
            reply.content[record] = ConfigRecord({"text": text})
        return reply

    return changed


def releases(value: float) -> Change:
    """Put a number into a node's release."""

    def changed(reply: Any) -> Any:
        if "release" in reply.content:
            (array,) = reply.content["release"].values()
            data = array.data[:-8] + struct.pack("<d", value)
            reply.content["release"] = ArrayRecord(
                {"tensors": Array("uint8", (len(data),), array.stype, data)}
            )
        return reply

    return changed


def with_entry(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda said: said | {"entry": said["entry"] | fields} if "entry" in said else said


@pytest.mark.quickly("deep", "1e200")
@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (says("answer", lambda said: "[" * 5000), "more than 8 brackets within brackets"),
        (says("answer", with_entry(sigma=10**400)), "a number of 401 characters, more than 32"),
        (releases(1e200), "released a vector of norm inf, should be at most"),
        (releases(-1e18), "released a vector of norm 1e+18, should be at most"),
    ],
    ids=["deep", "digits", "1e200", "1e18"],
)
def test_a_hostile_release_costs_its_sender_the_round_and_nobody_else(
    tmp_path: Path, attack: Change, words: str
) -> None:
    experiment = hospitals()
    files = write_nodes(tmp_path / "nodes", experiment)
    grid = LoopbackGrid(files)
    grid.change = {1001: attack}
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    for row in rows_of(tmp_path / "run"):
        assert row["clients_answered"] == [0, 2]
        assert words in row["clients_dropped"]["1"]
        assert row["loss"] is not None
    # Nothing of it was stored: the run goes on, with the node as it should be.
    more = hospitals(rounds=3)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    federate(more, LoopbackGrid(files), path=tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run")[-1]["clients_answered"] == [0, 1, 2]


def test_hostile_numbers_and_greetings_cost_their_senders_the_round(tmp_path: Path) -> None:
    experiment = hospitals(
        rounds=1, method=["fedavg"], split={"num_clients": 6}, federation={"wait_for": 5}
    )
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment))
    loss = says("answer", lambda said: said | {"loss": 1e308})
    grid.change = {
        1001: loss,
        1002: loss,  # two losses of 1e308 have no finite mean
        1003: says("answer", lambda said: said | {"num_examples": 2**40}),
        1004: says("answer", lambda said: said | {"num_examples": said["num_examples"] + 1}),
        1005: says("hello", lambda said: BRACKETS),
    }
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    (row,) = rows_of(tmp_path / "run")
    assert row["clients_answered"] == [0]
    assert row["clients_absent"] == [5]
    for client, words in {
        "1": "came to a loss of 1e+308",
        "2": "came to a loss of 1e+308",
        "3": "examples is not valid",
        "4": "when it connected",
    }.items():
        assert words in row["clients_dropped"][client]


def test_a_claim_of_most_examples_counts_as_much_as_all_others(tmp_path: Path) -> None:
    """Without the limit, zeros with a huge claim would be the average."""
    experiment = hospitals(rounds=1, method=["fedavg"])
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment))
    claim = says("hello", lambda said: said | {"num_examples": MOST_EXAMPLES})

    def zeros(reply: Any) -> Any:
        reply = says("answer", lambda said: said | {"num_examples": MOST_EXAMPLES})(claim(reply))
        if "weights" in reply.content:
            (array,) = reply.content["weights"].values()
            head = 8 + int.from_bytes(array.data[:8], "little")
            data = array.data[:head] + bytes(len(array.data) - head)
            reply.content["weights"] = ArrayRecord(
                {"tensors": Array("uint8", (len(data),), array.stype, data)}
            )
        return reply

    grid.change = {1001: zeros}
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    (row,) = rows_of(tmp_path / "run")
    assert row["clients_answered"] == [0, 1, 2]
    norm = norm_of(tmp_path / "run")
    grid = LoopbackGrid(write_nodes(tmp_path / "others", experiment))
    federate(experiment, grid, path=tmp_path / "honest", resume=False)
    honest = norm_of(tmp_path / "honest")
    assert 0.4 * honest < norm < 0.6 * honest


def test_class_sums_of_a_huge_claim_count_as_much_as_all_others(tmp_path: Path) -> None:
    """Without the limit, one release would be the private head and take all of the teacher."""
    experiment = hospitals(rounds=1, method=["fedaux2"], auxiliary={"size": 120})
    willing = {"privacy": {"public_data": True, "mechanisms": ["classes"]}}
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment, **willing))
    claim = says("hello", lambda said: said | {"num_examples": MOST_EXAMPLES})

    def sums(reply: Any) -> Any:
        reply = says("answer", with_entry(num_examples=MOST_EXAMPLES))(claim(reply))
        if "release" in reply.content:
            vector = records.some_tensors(reply.content["release"], most_bytes=10**6)["vector"]
            table = torch.zeros_like(vector).reshape(10, -1)  # a class holds its sum and its count
            table[:, -1] = MOST_EXAMPLES / 10
            reply.content["release"] = records.arrays({"vector": table.flatten()})
        return reply

    grid.change = {1001: sums}
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    (row,) = rows_of(tmp_path / "run")
    assert row["clients_answered"] == [0, 1, 2]
    assert 0.3 < row["public_weight_by_client"]["1"] < 0.7


def norm_of(path: Path) -> float:
    """The norm of the server's model after the first round."""
    (file,) = path.glob("**/round-00001.safetensors")
    return math.sqrt(sum(float(own.double().square().sum()) for own in load_file(file).values()))


# The parsers alone, with messages that were honest before they were mutated.

SECTION = Certainty(epsilon=1.0, components=4)
MECHANISM = MECHANISMS["mean"](SECTION)
PUBLIC = MECHANISM.publish(torch.from_numpy(np.random.default_rng(0).normal(size=(60, 5))).float())
SENT = {
    "w": torch.zeros(3, 2),
    "b": torch.ones(2),
    "running_var": torch.ones(2),
    "count": torch.tensor(3),
}
REQUEST = TrainRequest(1, {"a": SENT}, Local(), 0.0, 0)
PRIVATE = replace(REQUEST, local=Local(privacy=LocalPrivacy()))


def hello_message() -> RecordDict:
    said = {"client": 1, "name": "north", "version": "2", "num_examples": 100}
    return RecordDict({"hello": records.text_record(json.dumps(said))})


def release_message() -> RecordDict:
    features = torch.from_numpy(np.random.default_rng(1).normal(size=(100, 5))).float()
    noise = SimulatedNoise(np.random.default_rng(2))
    release = MECHANISM.release(features, PUBLIC, noise=noise)
    entry = entry_of(release, client=1, num_examples=100, purpose=SCORES).to_json()
    said = json.dumps({"client": 1, "entry": entry})
    return RecordDict(
        {"release": records.arrays({"vector": release.vector}), "answer": records.text_record(said)}
    )


def update_message(*, private: bool = False) -> RecordDict:
    said: dict[str, Any] = {"client": 1, "num_examples": 100, "loss": None if private else 0.7}
    if private:
        entry = update_entry(PRIVATE.local, num_examples=100, client=1, noise="secure")
        said["entry"] = entry.to_json()
    return RecordDict(
        {"weights": records.arrays(SENT), "answer": records.text_record(json.dumps(said))}
    )


def read_release(content: RecordDict) -> Any:
    return answers.read_release(
        content,
        client=1,
        certainty=SECTION,
        purpose=SCORES,
        width=4,
        limits=lambda examples: MECHANISM.limits(examples, PUBLIC),
        most_examples=100,
    )


def read_update(content: RecordDict, request: TrainRequest = REQUEST) -> Any:
    return answers.read_update(content, client=1, sent=SENT, request=request, most_examples=100)


PARSERS: dict[str, tuple[Callable[[], RecordDict], Callable[[RecordDict], Any]]] = {
    "hello": (hello_message, lambda content: answers.read_hello(content, num_clients=3)),
    "release": (release_message, read_release),
    "update": (update_message, read_update),
    "private": (
        lambda: update_message(private=True),
        lambda content: read_update(content, PRIVATE),
    ),
}


@pytest.mark.parametrize("kind", PARSERS)
def test_honest_messages_pass(kind: str) -> None:
    make, read = PARSERS[kind]
    assert read(make()).client == 1


@pytest.mark.parametrize(
    ("kind", "record", "change", "words"),
    [
        ("release", "answer", lambda said: BRACKETS, "answer is missing or too long"),
        ("release", "answer", with_entry(epsilon=10**31), "does not state what was requested"),
        ("release", "answer", with_entry(sigma=1e7), "does not state what was requested"),
        ("release", "answer", with_entry(num_examples=10**9), "the ledger entry is not valid"),
        ("release", "answer", with_entry(noise="x" * 5000), "the ledger entry is not valid"),
        ("private", "answer", with_entry(steps=2**30), "does not state what was requested"),
        ("update", "answer", lambda said: said | {"client": True}, "answers as client True"),
        ("hello", "hello", lambda said: "[" * 5000, "more than 8 brackets within brackets"),
        ("hello", "hello", lambda said: said | {"num_examples": 10**400}, "401 characters"),
        ("hello", "hello", lambda said: said | {"num_examples": -1}, "examples is not valid"),
        ("hello", "hello", lambda said: [said], "is not a JSON object"),
    ],
)
def test_limits_are_named(
    kind: str, record: str, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    make, read = PARSERS[kind]
    message = SimpleNamespace(content=make())
    with pytest.raises(Unusable, match=words):
        read(says(record, change)(message).content)


@pytest.mark.parametrize("text", ['{"' + '\\"' * 500_000, '{"a": ' + '"' * 999_999, "{" * 10**6])
def test_a_text_is_refused_in_linear_time(text: str) -> None:
    """The longest that is let through; quadratic time would hold the server up for hours."""
    began = time.process_time()
    with pytest.raises(Unusable):
        records.parsed(text)
    assert time.process_time() - began < 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARSERS)
def test_no_malformed_message_raises_more_than_dropped(kind: str) -> None:
    """2,500 mutations for each of the four parsers."""
    make, read = PARSERS[kind]
    generator = np.random.default_rng(sum(map(ord, kind)))
    dropped = 0
    for _ in range(2500):
        content = make()
        for _ in range(int(generator.integers(1, 4))):
            content = mutated(content, generator)
        reason = ""
        try:
            check(read(content))
        except Unusable as error:
            reason = str(error)
            dropped += 1
        assert len(reason) < 1000
        assert reason.isprintable()
    assert dropped > 1500, "most mutations should do harm"


def check(result: Any) -> None:
    """What passes has bounded, finite values."""
    assert result.client == 1 or isinstance(result, answers.Hello)
    if hasattr(result, "vector"):
        assert float(result.vector.norm()) < 1e3
    if hasattr(result, "weights"):
        assert 1 <= result.num_examples <= 100
        for name, tensor in result.weights.items():
            assert tensor.shape == SENT[name].shape
            assert float(tensor.double().abs().max()) <= 2**40
        assert result.loss is None or abs(result.loss) <= 1e9


NASTY = [
    *("null", "true", "NaN", "-Infinity", "1e999", "1e308", "-1", "0", '""', '"inf"', "[]", "{}"),
    *("9" * 400, "9" * 5000, "-" + "9" * 31, "1" + "0" * 20, "0." + "3" * 100, '"\\ud800"'),
    *("[" * 9 + "]" * 9, "[" * 3000, '{"a":' * 2000, '"' + "x" * 20_000 + '"', "1.5", "2"),
]


def mutated(content: RecordDict, generator: np.random.Generator) -> RecordDict:
    """Return a message with one mutation: of a text, of an array, or of its records."""
    names = list(content)
    if not names or generator.random() < 0.15:
        return other_records(content, generator)
    name = names[int(generator.integers(len(names)))]
    record = content[name]
    if isinstance(record, ConfigRecord) and isinstance(record.get("text"), str):
        text = mutated_text(str(record["text"]), generator)
        content[name] = ConfigRecord({"text": text})
    elif isinstance(record, ArrayRecord) and len(record) == 1:
        ((key, array),) = record.items()
        data, stype = array.data, array.stype
        if len(data) > 8 and generator.random() < 0.6:
            head = min(len(data), 8 + int.from_bytes(data[:8], "little") % 2**20)
            text = mutated_text(data[8:head].decode("utf-8", "replace"), generator)
            packed = text.encode("utf-8", "surrogatepass")
            data = len(packed).to_bytes(8, "little") + packed + data[head:]
        else:
            data = mutated_bytes(data, generator)
        if generator.random() < 0.05:
            key, stype = ("other", stype) if generator.random() < 0.5 else (key, "numpy.ndarray")
        content[name] = ArrayRecord({key: Array("uint8", (len(data),), stype, data)})
    return content


def mutated_text(text: str, generator: np.random.Generator) -> str:
    """Replace a value by a nasty one, or cut, repeat, insert or change characters."""
    import re

    choice = int(generator.integers(6))
    nasty = NASTY[int(generator.integers(len(NASTY)))]
    if choice <= 2:
        places = [found.span(1) for found in re.finditer(r"[:,\[]\s*([^,:\[\]{}]+)", text)]
        if places:
            begin, end = places[int(generator.integers(len(places)))]
            return text[:begin] + nasty + text[end:]
    begin, end = sorted(int(place) for place in generator.integers(0, len(text) + 1, 2))
    if choice == 3:
        return text[:begin] + text[end:]
    if choice == 4:
        return text[:begin] + text[begin:end] * int(generator.integers(2, 200)) + text[end:]
    letters = "".join(chr(int(one)) for one in generator.integers(0, 300, 3))
    return text[:begin] + (nasty if generator.random() < 0.5 else letters) + text[begin:]


def mutated_bytes(data: bytes, generator: np.random.Generator) -> bytes:
    """Change, cut or append bytes, or write a huge number."""
    changed = bytearray(data)
    for place in generator.integers(0, max(1, len(data)), int(generator.integers(1, 9))):
        if place < len(changed):
            changed[place] = int(generator.integers(256))
    choice = generator.random()
    if choice < 0.2:
        return bytes(changed[: int(generator.integers(len(changed) + 1))])
    if choice < 0.3:
        return bytes(changed) + bytes(int(generator.integers(1, 100)))
    if choice < 0.6 and len(changed) >= 8:
        changed[-8:] = struct.pack("<d", float(generator.choice([1e18, 1e200, -1e300, math.inf])))
    return bytes(changed)


def other_records(content: RecordDict, generator: np.random.Generator) -> RecordDict:
    """Return a message without a record, with foreign ones, or with one of another kind."""
    names = list(content)
    choice = int(generator.integers(5))
    if choice == 0 and names:
        del content[names[int(generator.integers(len(names)))]]
    elif choice == 1:
        for number in range(int(generator.integers(1, 20))):
            content[f"more{number}"] = ConfigRecord({"text": "x"})
    elif choice == 2 and names:
        content[names[0]] = MetricRecord({"text": 1.0, "more": [2.0] * 50})
    elif choice == 3 and names:
        content[names[-1]] = ConfigRecord({"text": [1, 2, 3], "other": b"\xff" * 10})
    else:
        content["answer"] = ArrayRecord({"a": Array("uint8", (3,), "fedaux.safetensors", b"abc")})
    return content
