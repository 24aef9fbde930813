"""A node's privacy policy: every release is checked and recorded on the node's own disk before it
leaves.

    ledger.json   every release and every private update: its cost, and the file of what was sent
    sent.jsonl    everything that left, chained by hashes; ledger.json holds a copy of its last line
    release-DIGEST.safetensors, answer-DIGEST.safetensors: what was sent
    extractor-DIGEST.safetensors, rehearsed-DIGEST.safetensors: h0 and public images, as received

A request is identified by the digest of its content. One that was answered before gets the same
answer again at no cost, so both sides may stop at any time. File names are digests computed here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from fedaux.config import Certainty, Local
from fedaux.core.objectives import OBJECTIVES
from fedaux.core.weights import below
from fedaux.data.tensor_files import save_tensors
from fedaux.federation import sent
from fedaux.federation.node import NodeConfig
from fedaux.files import save_json
from fedaux.privacy.bounds import release_problem
from fedaux.privacy.filters import FILTERS, ROUNDING
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanisms import UNPROTECTED_MECHANISMS


class Refusal(ValueError):
    """A request that this node refuses.

    The text goes to the server: it names what was asked and never depends on the data, the budget
    or what was spent. `detail` is for this node's own log.
    """

    def __init__(self, text: str, *, detail: str = "") -> None:
        super().__init__(text)
        self.detail = detail


BEYOND_BUDGET = "this request does not fit this node's privacy budget"
"""All that the server learns if a request costs too much, alone or with what was spent before."""


Received = Literal["extractor", "rehearsed"]
"""What a node keeps of the server: h0, and public images."""


class Guard:
    """A node's privacy settings and its ledger."""

    def __init__(self, config: NodeConfig) -> None:
        self._terms = config.privacy
        self._folder = config.folder
        self._policy = config.digest

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the ledger for one message at a time. Raises ValueError if the ledger and the whole
        record of what left do not fit together."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sent.complete(self._folder, sent.ledger(self._folder).get("sent"))
            if problems := self.problems():
                raise ValueError("; ".join([*problems, sent.HOW_TO_GO_ON]))
            yield

    def entries(self) -> list[LedgerEntry]:
        """Return everything that was ever spent."""
        return [LedgerEntry.from_json(row["entry"]) for row in sent.ledger(self._folder)["spent"]]

    def knows(self, run: str) -> bool:
        """Return whether something was spent for a run."""
        digest = _digest_of_text(run)
        return any(row.get("run") == digest for row in sent.ledger(self._folder)["spent"])

    def record_sent(
        self,
        *,
        kind: str,
        request: str,
        run: str,
        round: int | None,
        data: bytes,
        entry: LedgerEntry | None,
    ) -> None:
        """Record an answer before it leaves: the ledger first, then the chain of hashes."""
        ledger = sent.ledger(self._folder)
        what = {
            "kind": kind,
            "run": run,
            "round": round,
            "bytes": len(data),
            "digest": hashlib.sha256(data).hexdigest(),
            "request": request,
            "policy": self._policy,
            "entry": None if entry is None else entry.to_json(),
        }
        ledger["sent"] = sent.next_line(ledger.get("sent"), what)
        self._save(ledger)
        sent.append(self._folder, ledger["sent"])

    def sent_lines(self) -> list[dict[str, Any]]:
        """Return the record of what left."""
        return [json.loads(line) for line in sent.lines(self._folder)]

    def head(self) -> str:
        """Return the hash of the last line of that record."""
        return sent.hash_of(sent.ledger(self._folder).get("sent"))

    def problems(self, *, noted: str | None = None) -> list[str]:
        """Return what does not fit in the ledger and the whole record of what left."""
        return sent.problems(self._folder, noted=noted)

    def counted(self) -> list[LedgerEntry]:
        """Return what the budget covers: everything except unprotected releases.

        Updates always count: their own epsilon, stated at a delta of the server's choice, may be
        infinite.
        """
        return [
            one for one in self.entries() if one.steps is not None or not math.isinf(one.epsilon)
        ]

    def spent(self, entries: Sequence[LedgerEntry]) -> float:
        """Return the epsilon of entries at the budget's delta, by the node's filter."""
        terms = self._terms
        spent, _ = FILTERS[terms.accountant](epsilon=terms.epsilon, delta=terms.delta)(entries)
        return spent

    def check_release(self, section: Certainty) -> None:
        """Raise Refusal for a release that is not allowed whatever the budget, before any work."""
        if section.mechanism not in self._terms.mechanisms:
            allowed = ", ".join(self._terms.mechanisms) or "nothing"
            raise Refusal(
                f"certainty.mechanism = {section.mechanism}: not allowed by this node",
                detail=f"privacy.mechanisms allows {allowed}",
            )
        if (problem := release_problem(section)) is not None:
            raise Refusal(problem)

    def check_price(self, section: Certainty) -> None:
        """Raise Refusal for a release that alone costs more than the budget.

        Nothing may be refused for another reason after this: what a server then learns of the
        budget it has to pay for.
        """
        protected = section.mechanism not in UNPROTECTED_MECHANISMS
        if protected and section.epsilon > self._terms.epsilon:
            raise Refusal(
                BEYOND_BUDGET,
                detail=f"certainty.epsilon = {section.epsilon:g}, and privacy.epsilon = "
                f"{self._terms.epsilon:g}",
            )

    def check_update(self, section: Local, objectives: Sequence[str] = ()) -> None:
        """Raise Refusal for updates that must not leave or cannot be trained here, before any
        work is done for one."""
        if section.privacy is None and not self._terms.plain_updates:
            raise Refusal(
                "updates without DP-SGD do not leave this node; the recipe needs local.privacy"
            )
        for name in objectives:
            if name not in OBJECTIVES:
                raise Refusal(f"local.objectives = {name}: not known here")
            if section.privacy is not None and name != "proximal":
                raise Refusal(
                    f"local.objectives = {name}: depends on all examples, which DP-SGD does not "
                    "cover"
                )
        if "rehearsal" in objectives and not self._terms.public_data:
            raise Refusal(
                "local.objectives = rehearsal: this node takes no public data",
                detail="privacy.public_data = false",
            )

    def check_budget(self, entry: LedgerEntry) -> None:
        """Raise Refusal if one more release would exceed the budget."""
        release = entry.steps is None and math.isinf(entry.epsilon)
        if release and entry.mechanism in self._terms.mechanisms:
            return  # allowed by name, and not covered
        counted = self.counted()
        together, before = self.spent([*counted, entry]), self.spent(counted)
        if together > self._terms.epsilon * (1.0 + ROUNDING):
            raise Refusal(
                BEYOND_BUDGET,
                detail=f"it would cost a total of epsilon = {together:.4g} at delta = "
                f"{self._terms.delta:g}, {before:.4g} of it already spent; privacy.epsilon = "
                f"{self._terms.epsilon:g}",
            )

    def stored_release(self, key: str) -> tuple[Tensor, LedgerEntry] | None:
        """Return what was released for the same request before."""
        for row in sent.ledger(self._folder)["spent"]:
            if row["request"] == key and row["kind"] == "release":
                vector = load_file(self._folder / row["file"])["vector"]
                return vector, LedgerEntry.from_json(row["entry"])
        return None

    def store_release(self, key: str, vector: Tensor, entry: LedgerEntry, *, run: str = "") -> None:
        """Record a release within the budget; only then may it leave. Raises Refusal."""
        self.check_budget(entry)
        file = f"release-{key}.safetensors"
        save_tensors(self._folder / file, {"vector": vector})
        ledger = sent.ledger(self._folder)
        ledger["spent"].append(self._row("release", key, entry, run=run, file=file))
        self._save(ledger)

    def stored_answer(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last update and its answer, if it is for the same request."""
        last = sent.ledger(self._folder).get("last")
        if last is None or last["request"] != key:
            return None
        return load_file(self._folder / last["file"]), last

    def kept(self, run: str) -> dict[str, Tensor]:
        """Return what training kept in the last round of this run."""
        last = sent.ledger(self._folder).get("last")
        if last is None or last["run"] != _digest_of_text(run):
            return {}
        return below("kept/", load_file(self._folder / last["file"]))

    def store_answer(
        self,
        key: str,
        tensors: Mapping[str, Tensor],
        *,
        run: str,
        plan: str = "",
        about: Mapping[str, Any],
        entry: LedgerEntry | None,
    ) -> None:
        """Store the last update with the optimizer state, and record it if it was private.
        Raises Refusal."""
        if entry is not None:
            self.check_budget(entry)
        file = f"answer-{key}.safetensors"
        save_tensors(self._folder / file, tensors)
        ledger = sent.ledger(self._folder)
        if entry is not None:
            ledger["spent"].append(self._row("update", key, entry, run=plan))
        ledger["last"] = {"request": key, "run": _digest_of_text(run), "file": file, **about}
        self._save(ledger)
        for old in self._folder.glob("answer-*.safetensors"):
            if old.name != file:
                old.unlink()

    def received(self, kind: Received, digest: str) -> dict[str, Tensor] | None:
        """Return what the server sent before, if it has this digest."""
        file = self._folder / f"{kind}-{digest}.safetensors"
        if not file.is_file():
            return None
        held = load_file(file)
        return held if digest_of(kind, held) == digest else None

    def keep_received(self, kind: Received, tensors: Mapping[str, Tensor]) -> None:
        """Store what the server sent for later rounds, replacing older tensors of this kind."""
        digest = digest_of(kind, tensors)
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob(f"{kind}-*.safetensors"):
            if old.name != f"{kind}-{digest}.safetensors":
                old.unlink()
        save_tensors(self._folder / f"{kind}-{digest}.safetensors", tensors)

    def _row(
        self, kind: str, key: str, entry: LedgerEntry, *, run: str, **more: str
    ) -> dict[str, Any]:
        """Return a row of the ledger: a cost, the run it was paid for, the policy at the time."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"kind": kind, "request": key, "when": when, "policy": self._policy}
        return {**about, "run": _digest_of_text(run), **more, "entry": entry.to_json()}

    def _save(self, ledger: Mapping[str, Any]) -> None:
        save_json(self._folder / sent.LEDGER, ledger)


def digest_of(text: str, *groups: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a text and of tensors with their names, types and shapes."""
    digest = hashlib.sha256(text.encode())
    for group in groups:
        for name, tensor in sorted(group.items()):
            digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        digest.update(b"\1")
    return digest.hexdigest()


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
