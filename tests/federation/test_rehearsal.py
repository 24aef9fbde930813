"""Rehearsal over Flower: the simulator's figures, messages that are sent once, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import WHOLE, tiny
from torch import Tensor

import fedaux
from fedaux.config import Experiment, Local, LocalPrivacy, Prototype
from fedaux.core.weights import snapshot
from fedaux.models import MODELS
from fedaux.recipes import merged

pytest.importorskip("flwr", reason="needs the extra flower")
from flwr.app import Message, RecordDict
from helpers.loopback import LoopbackGrid, asked, write_nodes

from fedaux.federation import records
from fedaux.federation.policy import digest_of
from fedaux.federation.server import federate
from fedaux.federation.terms import TRAIN, Plan, RehearsalTerms, TrainTerms

pytestmark = pytest.mark.usefixtures("without_pages")

SAME = ("accuracy", "loss", "local_loss", "clients_answered", "clients_dropped")
BYTES = ("bytes_up", "bytes_down")
WILLING = {"privacy": {"public_data": True, "mechanisms": ["mean", "classes"]}}
KEPT = {"optimizer_state": "kept"}
BOTH = {"method": ["fedavg+p"], "local": {"objectives": ["logit-adjusted", "rehearsal"]}}


def federated(**changes: Any) -> Experiment:
    base: dict[str, Any] = {
        "rounds": 2,
        "auxiliary": {"size": 120},
        "split": {"num_clients": 3, "alpha": 1.0},
        "federation": {"authenticated": False, "deadline": 5.0, "wait_seconds": 2.0},
        "engine": {"clients_at_once": 1},
        "rehearsal": {"batch_size": 8, "examples": 50},
    }
    return tiny(**merged(base, changes))


class Counting(LoopbackGrid):
    """Notes which records each training message has."""

    def __init__(self, files: dict[int, Path]) -> None:
        super().__init__(files)
        self.sent: list[tuple[int, list[str], int]] = []

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == TRAIN:
                arrays = {name: one for name, one in message.content.items() if name != "terms"}
                size = sum(
                    tensor.nbytes
                    for record in arrays.values()
                    for tensor in records.some_tensors(record, most_bytes=10**9).values()
                )
                self.sent.append((message.metadata.dst_node_id, sorted(arrays), size))
        return super().push_messages(messages)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def preparation_of(path: Path) -> dict[str, Any]:
    (file,) = path.rglob("state.json")
    held: dict[str, Any] = json.loads(file.read_text())["preparation"]
    return held


@pytest.mark.parametrize(
    "changes",
    [
        {"method": ["fedaux2"], "data": {"mirror": True}},
        BOTH,
        pytest.param(
            {
                "method": ["fedaux2"],
                "mode": "linear",
                "data": {"mirror": True},
                "federation": {"wire": "fp16"},
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"method": ["fedntd"], "local": {"objectives": ["rehearsal"], **KEPT}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fedaux2", "fedavg+p", "linear", "kept"],
)
def test_rehearsal_in_a_federation_comes_to_the_simulators_figures(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    experiment = federated(**changes)
    fedaux.run(experiment, out=tmp_path / "simulated")
    grid = Counting(write_nodes(tmp_path / "nodes", experiment, **WILLING))
    federate(experiment, grid, path=tmp_path / "federated", resume=False)
    simulated, real = (rows_of(tmp_path / name) for name in ("simulated", "federated"))
    for one, other in zip(simulated, real, strict=True):
        assert {key: other[key] for key in SAME + BYTES} == {key: one[key] for key in SAME + BYTES}
    prepared, expected = (preparation_of(tmp_path / name) for name in ("federated", "simulated"))
    assert {key: prepared[key] for key in BYTES} == {key: expected[key] for key in BYTES}
    # Public images go to each client once, soft labels in each round; heads rehearse in the first.
    rehearses = experiment.mode == "full"
    first, later = grid.sent[:3], grid.sent[3:]
    assert all({"beliefs", "rehearsed"} <= set(names) for _, names, _ in first)
    assert all(("beliefs" in names) == rehearses for _, names, _ in later)
    assert not any("rehearsed" in names for _, names, _ in later)
    public = 3 * 50 * 64
    assert prepared["bytes_down"] >= public
    assert sum(size for *_, size in first) == real[0]["bytes_down"] + public
    assert sum(size for *_, size in later) == real[1]["bytes_down"]


@pytest.mark.slow
def test_public_images_are_sent_again_after_a_restart_and_a_loss(tmp_path: Path) -> None:
    """A resumed server does not know what nodes have; a node without its images says so."""
    experiment = federated(rounds=3, split={"num_clients": 2}, **BOTH)
    fedaux.run(experiment, out=tmp_path / "simulated")
    files = write_nodes(tmp_path / "nodes", experiment, **WILLING)
    short = experiment.model_copy(update={"rounds": 1})
    federate(short, Counting(files), path=tmp_path / "run", resume=False)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1", "rounds = 3"))
    grid = Counting(files)
    federate(experiment, grid, path=tmp_path / "run", resume=True)
    assert ["rehearsed" in names for _, names, _ in grid.sent] == [True, True, False, False]
    for one, other in zip(rows_of(tmp_path / "simulated"), rows_of(tmp_path / "run"), strict=True):
        assert {key: other[key] for key in SAME + BYTES} == {key: one[key] for key in SAME + BYTES}

    def forget(reply: Message) -> Message:
        for kept in (tmp_path / "nodes/state/client-00001").glob("rehearsed-*"):
            kept.unlink()
        return reply

    grid = Counting(files)
    grid.change = {1001: forget}
    federate(experiment, grid, path=tmp_path / "again", resume=False)
    rows = rows_of(tmp_path / "again")
    assert [row["clients_answered"] for row in rows] == [[0, 1], [0], [0, 1]]
    assert "public images are missing here" in rows[1]["clients_dropped"]["1"]


def test_a_node_that_takes_no_public_data_refuses_before_it_pays(tmp_path: Path) -> None:
    files = write_nodes(
        tmp_path / "nodes", federated(), privacy={"mechanisms": ["classes"], "public_data": False}
    )
    with pytest.raises(ValueError, match="no client released class sums") as failure:
        federate(
            federated(method=["fedaux2"]), LoopbackGrid(files), path=tmp_path / "run", resume=False
        )
    assert str(failure.value).count("rehearsal: this node takes no public data") == 3
    assert not list((tmp_path / "nodes").rglob("ledger.json"))


# A hostile server.

IMAGES = torch.arange(6 * 64, dtype=torch.int64).remainder(251).to(torch.uint8).view(6, 1, 8, 8)
BELIEFS = torch.full((6, 10), 0.1, dtype=torch.float16)
DIGEST = digest_of("rehearsed", {"images": IMAGES})


def ask(
    file: Path,
    *,
    images: Tensor | None = IMAGES,
    beliefs: Tensor | None = BELIEFS,
    objectives: tuple[str, ...] = ("rehearsal",),
    planned: tuple[str, ...] | None = None,
    local: Local | None = None,
    round: int = 1,
    **terms: Any,
) -> str | None:
    """Ask a node to rehearse; return its refusal, or None if it answers."""
    local = local or Local()
    stated: dict[str, Any] = {"examples": 6, "batch_size": 4, "digest": DIGEST} | terms
    planned = objectives if planned is None else planned
    model = MODELS["cnn"]((1, 8, 8), 10, width=4)
    sent = TrainTerms(
        client=0,
        run="r",
        plan=Plan(run="r", local=local, objectives=planned, updates=1),
        seed=0,
        prototype=Prototype(name="p", model="cnn", options={"width": 4}),
        mode="full",
        image_shape=(1, 8, 8),
        classes=tuple(str(digit) for digit in range(10)),
        round=round,
        local=local,
        proximal=0.0,
        wire="fp32",
        objectives=objectives,
        rehearsal=RehearsalTerms(**stated) if stated["examples"] else None,
    )
    content: dict[str, Any] = {
        "terms": records.text_record(sent.model_dump_json()),
        "weights": records.arrays(snapshot(model)),
    }
    if images is not None:
        content["rehearsed"] = records.arrays({"images": images})
    if beliefs is not None:
        content["beliefs"] = records.arrays({"beliefs": beliefs})
    answer = asked(file, RecordDict(content), TRAIN).content
    return str(answer["refusal"]["text"]) if "refusal" in answer else None


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return write_nodes(tmp_path / "nodes", federated(data=WHOLE), **WILLING)[1000]


def kept(file: Path) -> list[str]:
    return sorted(one.name for one in file.parent.rglob("rehearsed-*"))


def test_images_are_kept_under_their_digest_and_only_the_last_ones(node: Path) -> None:
    assert ask(node) is None
    assert kept(node) == [f"rehearsed-{DIGEST}.safetensors"]
    assert ask(node, images=None, round=2) is None
    other = 255 - IMAGES
    digest = digest_of("rehearsed", {"images": other})
    assert ask(node, images=other, digest=digest, round=3) is None
    assert kept(node) == [f"rehearsed-{digest}.safetensors"]
    assert "missing here" in str(ask(node, images=None, round=4))


def beliefs(value: float) -> Tensor:
    changed = BELIEFS.clone()
    changed[3, 7] = value
    return changed


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "fewer images": ({"images": IMAGES[:5]}, "tensor images is uint8 [5, 1, 8, 8], should be"),
    "another shape": ({"images": IMAGES.view(6, 8, 1, 8)}, "should be uint8 [6, 1, 8, 8]"),
    "another type": ({"images": IMAGES.float()}, "tensor images is float32"),
    "no image": ({"images": None}, "the public images are missing here"),
    "another digest": ({"digest": "0" * 64}, "do not have the digest of the terms"),
    "other images": ({"images": 255 - IMAGES}, "do not have the digest of the terms"),
    "no soft labels": ({"beliefs": None}, "has no tensors"),
    "classes": ({"beliefs": BELIEFS[:, :9]}, "tensor beliefs is float16 [6, 9], should be"),
    "single precision": ({"beliefs": BELIEFS.float()}, "tensor beliefs is float32"),
    "NaN": ({"beliefs": beliefs(torch.nan)}, "the soft labels hold negative numbers or NaN"),
    "negative": ({"beliefs": beliefs(-0.1)}, "the soft labels hold negative numbers or NaN"),
    "infinity": ({"beliefs": beliefs(torch.inf)}, "sum to more than 1, the strength"),
    "too strong": ({"beliefs": beliefs(0.2)}, "sum to more than 1, the strength"),
    "too many": ({"examples": 10**8}, "6400000000 bytes, more than this node accepts"),
    "unknown": ({"objectives": ("rehearsal", "leak")}, "local.objectives = leak: not known here"),
    "unplanned": ({"planned": ()}, "local.objectives: differ from the plan"),
    "no terms": ({"examples": 0}, "should be given with the objective of this name"),
    "no objective": ({"objectives": ()}, "should be given with the objective of this name"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_what_a_hostile_server_gives_to_rehearse_is_refused_and_not_kept(
    node: Path, attack: str
) -> None:
    changes, words = HOSTILE[attack]
    answer = ask(node, **changes)
    assert answer is not None
    assert words in answer
    assert answer.startswith("refused: ")
    assert kept(node) == []
    assert not list(node.parent.rglob("sent.jsonl"))


@pytest.mark.parametrize(("size", "own"), [(10**8, 10**6), (300_000, 1)])
def test_batches_that_need_too_much_memory_are_refused(node: Path, size: int, own: int) -> None:
    """A batch of so many images, or the numbers drawn for all batches of an epoch."""
    words = ask(node, batch_size=size, local=Local(batch_size=own))
    assert words == f"refused: rehearsal.batch_size = {size}: more than this node accepts"
    assert not list(node.parent.rglob("sent.jsonl"))


def test_kept_images_are_as_many_as_the_terms_state(node: Path) -> None:
    """The digest of six images with soft labels for seven would read beyond them."""
    assert ask(node) is None
    more = torch.full((7, 10), 0.1, dtype=torch.float16)
    words = ask(node, images=None, beliefs=more, examples=7, round=2)
    assert words == "refused: the public images with this digest have another number or shape"


@pytest.mark.parametrize("name", ["logit-adjusted", "not-true", "rehearsal"])
def test_private_training_has_no_objective_that_mixes_examples(node: Path, name: str) -> None:
    private = Local(privacy=LocalPrivacy(noise_multiplier=2.0))
    examples = 6 if name == "rehearsal" else 0
    words = ask(node, objectives=(name,), local=private, examples=examples)
    assert (
        words == f"refused: local.objectives = {name}: depends on all examples, which DP-SGD "
        "does not cover"
    )
