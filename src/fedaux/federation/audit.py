"""The audit of a node: real requests to its Flower app, whose answers must match its ledger.

Two nodes hold images that differ in one. Each request goes to a node with an empty state folder, so
that nothing is answered from store: the node reads its node.toml and its data, checks its terms,
extracts features, releases, writes its ledger and packs the answer, as it does for a server.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tomli_w
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty, Prototype
from fedaux.formatting import install_hint
from fedaux.models import MODELS, SplitModel
from fedaux.privacy.audit.distribution import PValue, deviations
from fedaux.privacy.audit.mechanisms import FixedNoise
from fedaux.privacy.audit.neighbours import Findings, uncalibrated
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanisms import MECHANISMS, Public, Release

IMAGE_SHAPE = (1, 6, 6)
NUM_EXAMPLES, NUM_NEGATIVES, WIDTH = 30, 60, 12
CLIENT = 4
CLASSES = ("0", "1")
WHERE = "answers of a node"


class NodeAudit:
    """Two nodes that hold neighbouring data, and a server's request to them."""

    def __init__(self, section: Certainty, folder: Path, *, seed: int) -> None:
        generator = seeding.generator(seed, "audit node")
        self._section, self._folder = section, folder
        images = _images(generator, NUM_EXAMPLES)
        other = images.clone()
        other[0] = 255 * (other[0] < 128)
        self._images = (images, other)
        labels = torch.arange(NUM_EXAMPLES) % 2
        self._labels = (labels, torch.cat([1 - labels[:1], labels[1:]]))
        with seeding.initialisation(seed, part="audit node"):
            self._model: SplitModel = MODELS["mlp"](IMAGE_SHAPE, 2, width=WIDTH)
        self.mechanism = MECHANISMS[section.mechanism](section)
        negatives = self._features(_images(generator, NUM_NEGATIVES))
        self.public: Public = self.mechanism.publish(
            negatives, num_classes=len(CLASSES), sizes=[NUM_EXAMPLES]
        )
        for side in (0, 1):
            self._write(side)

    def noiseless(self, side: int) -> Release:
        """Return the release of one node's data without noise, computed here rather than by the
        node."""
        features = self._features(self._images[side])
        noise = FixedNoise(0.0, kind="secure")
        return self.mechanism.release(features, self.public, noise=noise, labels=self._labels[side])

    def fresh(self, side: int) -> Path:
        """Return the state folder of a node, emptied: a node that has not been asked before."""
        state = self._folder / f"state-{side}"
        for file in sorted(state.glob("*/*")):
            file.unlink()
        return state / f"client-{CLIENT:05d}"

    def ask(self, side: int, *, share: float = 1.0) -> tuple[Tensor, LedgerEntry] | str:
        """Send a prepare request to a node, for a share of its budget; return the vector with the
        entry that came with it, or the refusal."""
        from flwr.app import Context, Message, RecordDict
        from flwr.app.metadata import Metadata

        from fedaux.federation import records
        from fedaux.federation.client import NODE_KEY, app
        from fedaux.federation.terms import PREPARE, Plan, PrepareTerms

        section = self._section.model_copy(update={"epsilon": share * self._section.epsilon})
        terms = PrepareTerms(
            client=CLIENT,
            run="audit",
            plan=Plan(run="audit", certainty=(section,), releases=1),
            seed=0,
            prototype=Prototype(name="audit", model="mlp", options={"width": WIDTH}),
            mode="full",
            image_shape=IMAGE_SHAPE,
            classes=CLASSES,
            certainty=section,
        )
        content = RecordDict(
            {
                "terms": records.text_record(terms.model_dump_json()),
                "extractor": records.arrays(self._model.features.state_dict()),
                "public": records.arrays(self.public),
            }
        )
        about = Metadata(
            run_id=1,
            message_id="1",
            src_node_id=1,
            dst_node_id=2,
            reply_to_message_id="",
            group_id="0",
            created_at=time.time(),
            ttl=3600.0,
            message_type=PREPARE,
        )
        context = Context(0, 2, {NODE_KEY: str(self._file(side))}, RecordDict(), {})
        # The documented signatures of Message want a task that Flower has started.
        message = Message(metadata=about, content=content)  # type: ignore[call-overload]
        reply = app(message, context).content
        if "refusal" in reply:
            return records.text_of(reply, "refusal")
        vector = records.some_tensors(reply.get("release"), most_bytes=10**7)["vector"]
        entry = LedgerEntry.from_json(json.loads(records.text_of(reply, "answer"))["entry"])
        return vector, entry

    def _features(self, images: Tensor) -> Tensor:
        """Return features [N, F] as the documentation defines them: pixels over 255, the network in
        inference mode."""
        with torch.no_grad():
            features: Tensor = self._model.features.eval()(images.float() / 255)
        return features

    def _file(self, side: int) -> Path:
        return self._folder / f"node-{side}.toml"

    def _write(self, side: int) -> None:
        data = self._folder / f"data-{side}.safetensors"
        save_file({"images": self._images[side], "labels": self._labels[side]}, data)
        table = {
            "client": CLIENT,
            "state": f"state-{side}",
            "device": "cpu",
            "classes": list(CLASSES),
            "data": {
                "source": "tensors",
                "path": data.name,
                "image_size": IMAGE_SHAPE[1],
                "channels": IMAGE_SHAPE[0],
            },
            "privacy": {
                "epsilon": self._section.epsilon,
                "delta": self._section.delta,
                "mechanisms": [self._section.mechanism],
            },
        }
        self._file(side).write_text(tomli_w.dumps(table), encoding="utf-8")


def audit_node(section: Certainty, *, releases: int, seed: int, findings: Findings) -> list[PValue]:
    """Return p-values of the noise in a node's answers; adds to `findings` where answers and ledger
    disagree."""
    if find_spec("flwr") is None or find_spec("opendp") is None:
        raise ValueError(
            f"the audit of a node needs Flower and OpenDP: {install_hint('flower,privacy')}"
        )
    with tempfile.TemporaryDirectory() as folder, _quiet():
        nodes = NodeAudit(section, Path(folder), seed=seed)
        centres = [nodes.noiseless(side) for side in (0, 1)]
        ratio = float((centres[0].vector - centres[1].vector).norm()) / centres[0].sensitivity
        if not ratio <= 1 + 1e-9:
            findings.setdefault(
                "a node's vector moves too far", f"{ratio:.3g} times the sensitivity"
            )
        rows = []
        for number in range(releases):
            side = number % 2
            state = nodes.fresh(side)
            answer = nodes.ask(side)
            if isinstance(answer, str):
                findings.setdefault("a node refuses what its budget allows", answer)
                return []
            vector, entry = answer
            if problem := _ledger_problem(state, vector, entry, centres[side]):
                findings.setdefault("a node's ledger", problem)
            rows.append(vector.double() - centres[side].vector)
        _ask_again(nodes, findings)
    stated = replace(centres[0], noise="secure")
    return deviations(torch.stack(rows), stated, where=WHERE, findings=findings)


def _ledger_problem(state: Path, vector: Tensor, entry: LedgerEntry, expected: Release) -> str:
    """Return in what the ledger, the entry sent and the release that was expected differ; empty
    where they agree."""
    booked = _booked(state)
    if not booked:
        return "a release left without an entry"
    if booked != [entry]:
        return "it does not hold the entry that was sent, alone"
    for name in ("mechanism", "sensitivity", "sigma", "epsilon", "delta", "noise"):
        if getattr(entry, name) != getattr(expected, name):
            return f"{name} is {getattr(entry, name)}, should be {getattr(expected, name)}"
    if entry.num_examples != NUM_EXAMPLES or len(vector) != len(expected.vector):
        return "it counts other examples than the node holds"
    return uncalibrated(expected)


def _booked(state: Path) -> list[LedgerEntry]:
    """Return the content of a node's ledger, read from its disk."""
    file = state / "ledger.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["spent"] if file.exists() else []
    return [LedgerEntry.from_json(row["entry"]) for row in rows]


def _ask_again(nodes: NodeAudit, findings: Findings) -> None:
    """The same request gets the same answer and costs nothing; another one is beyond the budget and
    costs nothing."""
    state = nodes.fresh(0)
    first, second = nodes.ask(0), nodes.ask(0)
    if isinstance(first, str) or isinstance(second, str) or not torch.equal(first[0], second[0]):
        findings.setdefault("a node answers the same request twice", "with different noise")
    third = nodes.ask(0, share=0.99)
    if not isinstance(third, str):
        findings.setdefault("a node goes beyond its budget", "it answers a second request")
    if len(_booked(state)) != 1:
        findings.setdefault("a node's ledger", "a repeated or refused request was booked")


def _images(generator: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(generator.integers(0, 256, (count, *IMAGE_SHAPE), dtype=np.uint8))


@contextmanager
def _quiet() -> Iterator[None]:
    """Do not log the refusals that the audit provokes."""
    logger = logging.getLogger("fedaux.node")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
