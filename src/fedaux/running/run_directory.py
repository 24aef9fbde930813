"""The run directory: configuration, metrics, checkpoints, ledger, summary.

    config.toml  environment.json  metrics.jsonl  ledger.json  summary.json  split.json
    scores.safetensors  report.html
    pretrained/            h0 of each prototype and seed
    public/                what clients receive for their releases besides h0, per seed
    frozen/                h0 as methods use it, once for all methods and seeds with the same
    cells/METHOD-seedN/    one method and seed; state.json names the current checkpoint
        memory/ kept/      one file per client: its last predictions, its state between rounds

`state.json` is replaced atomically after its tensors are on disk; the other files are derived from
it. Nothing is pickled.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import tomli_w
from safetensors import SafetensorError
from torch import Tensor

from fedaux.config import ConfigError, Experiment
from fedaux.core.algorithms import all_asks
from fedaux.core.asks import unprotected_by
from fedaux.core.messages import ClientRelease, ClientState, Weights
from fedaux.core.task import Preparation, State
from fedaux.core.weights import flat
from fedaux.data.tensor_files import load_checked, save_checked, weights_digest
from fedaux.files import UNFINISHED, replacing, save_text
from fedaux.privacy.ledger import NEIGHBOURS, LedgerEntry
from fedaux.recipes import flatten, load_experiment


@dataclass(frozen=True)
class Progress:
    """The progress of one method and seed."""

    state: State
    preparation: Preparation
    rows: Sequence[Mapping[str, Any]]
    """The metrics of every finished round."""
    kept: Mapping[int, ClientState] = field(default_factory=dict)
    """State of simulated clients between rounds."""


class RunDirectory:
    """One run on disk, used by one process at a time."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self.path = path
        self.experiment = experiment
        self._lock: IO[str] | None = None
        self._frozen: dict[Path, dict[str, str]] = {}

    @classmethod
    def open(cls, path: Path, experiment: Experiment, *, resume: bool) -> RunDirectory:
        """Start a run in a new or empty directory, or resume a run of the same experiment.

        A run that is resumed with more rounds is extended.
        """
        recipe = path / "config.toml"
        stored = stored_experiment(path, experiment, resume=resume) or experiment
        path.mkdir(parents=True, exist_ok=True)
        directory = cls(path, experiment)
        directory._lock = locked(path)
        for unfinished in path.rglob(UNFINISHED):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
        for folder in path.glob("cells/*"):
            if (folder / STATE).exists():
                with suppress(ValueError):  # a damaged one is reported when it is needed
                    _remove_old(folder, read_header(folder))
        if experiment.rounds > stored.rounds:
            (path / "scores.safetensors").unlink(missing_ok=True)  # of what was the last round
            if not experiment.output.models and (path / "models").exists():
                shutil.rmtree(path / "models")
            stored = stored.model_copy(update={"rounds": experiment.rounds})
            save_text(recipe, tomli_w.dumps(stored.to_dict()))
        elif not recipe.exists():
            save_text(recipe, tomli_w.dumps(experiment.to_dict()))
        return directory

    def close(self) -> None:
        """Release the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tasks(self) -> Iterator[tuple[str, int]]:
        """Yield (method, seed) in order; all methods of a seed share its split and h0."""
        for seed in self.experiment.seeds:
            for method in self.experiment.method:
                yield method, seed

    def folder(self, method: str, seed: int) -> Path:
        """Return the directory of one method and seed."""
        return self.path / "cells" / f"{method}-seed{seed}"

    def rounds_done(self, method: str, seed: int) -> int:
        """Return the number of finished rounds of one method and seed."""
        folder = self.folder(method, seed)
        return int(read_header(folder)["round"]) if (folder / STATE).exists() else 0

    def load(self, method: str, seed: int, *, device: str = "cpu") -> Progress | None:
        """Return the progress of one method and seed, or None if it has not started.

        Raises ValueError with the file that is damaged or missing, and how to continue.
        """
        folder = self.folder(method, seed)
        if not (folder / STATE).exists():
            return None
        header = read_header(folder)
        with _reading(folder / STATE):
            entries = [LedgerEntry.from_json(entry) for entry in header["ledger"]]
        prepared: dict[str, dict[str, dict[str, Tensor]]] = {}
        if header["prepared"]:
            with _reading(file := folder / header["prepared"]):
                prepared = _nested(load_checked(file, device=device))
        extractors = prepared.get("extractor", {})  # runs of earlier versions have h0 in there
        for name, digest in header.get("frozen", {}).items():
            with _reading(file := frozen_file(self.path, digest), folder=folder):
                extractors[name] = load_checked(file, device=device)
        with _reading(file := folder / header["checkpoint"]):
            tensors = _nested(load_checked(file, device=device))
            weights = tensors["weights"]
            vectors = tensors.get("vector", {}).get("client", {})
            releases = {
                entry.client: ClientRelease(entry.client, vectors[str(entry.client)], entry)
                for entry in entries[: len(vectors)]
            }
        stamped: dict[str, dict[int, ClientState]] = {kind: {} for kind in KEPT_BY_CLIENT}
        for kind, states in stamped.items():
            for client, number in header.get(kind, {}).items():
                file = _stamped_file(folder, kind, int(client), number)
                with _reading(file, folder=folder):
                    states[int(client)] = ClientState(number, load_checked(file, device=device))
        spent = tuple(entries[len(vectors) :])
        own = flat(tensors.get("smoothed", {}), prefix="final/")  # of runs of version 0.2
        own |= flat(tensors.get("own", {}))
        memory = stamped["memory"]
        state = State(header["round"], weights, releases, spent, memory, own)
        public = prepared.get("public", {})
        preparation = Preparation(extractors, public, **header["preparation"])
        return Progress(state, preparation, header["rows"], stamped["kept"])

    def save(self, method: str, seed: int, progress: Progress) -> None:
        """Save a round: its tensors, then the header that refers to them; remove old tensors."""
        folder, state, preparation = self.folder(method, seed), progress.state, progress.preparation
        prepared = flat(preparation.public, prefix="public/")
        if folder not in self._frozen:
            self._frozen[folder] = self._save_frozen(preparation.extractors)
        if prepared and state.round == 0:
            save_checked(folder / "prepared.safetensors", prepared)
        checkpoint = f"round-{state.round:05d}.safetensors"
        vectors = {str(client): released.vector for client, released in state.releases.items()}
        save_checked(
            folder / checkpoint,
            flat(state.models, prefix="weights/")
            | {f"own/{key}": tensor for key, tensor in state.own.items()}
            | flat({"client": vectors}, prefix="vector/"),
        )
        stamped = dict(zip(KEPT_BY_CLIENT, (state.memory, progress.kept), strict=True))
        for kind, clients in stamped.items():
            for client, one in clients.items():
                if not (file := _stamped_file(folder, kind, client, one.round)).exists():
                    save_checked(file, one.tensors)
        header = {
            "method": method,
            "seed": seed,
            "round": state.round,
            "prepared": "prepared.safetensors" if prepared else None,
            "frozen": self._frozen[folder],
            "checkpoint": checkpoint,
            "preparation": {
                "seconds": dict(preparation.seconds),
                "bytes_up": preparation.bytes_up,
                "bytes_down": preparation.bytes_down,
            },
            "ledger": [
                entry.to_json()
                for entry in (
                    *(released.entry for released in state.releases.values()),
                    *state.ledger,
                )
            ],
            "rows": list(progress.rows),
        } | {
            kind: {str(client): one.round for client, one in clients.items()}
            for kind, clients in stamped.items()
        }
        save_text(folder / STATE, json.dumps(header, allow_nan=False) + "\n")  # fast in one line
        _remove_old(folder, header)
        if state.ledger:  # updates add entries in every round
            self.write_ledger()

    def _save_frozen(self, extractors: Mapping[str, Weights]) -> dict[str, str]:
        """Save the h0 of each prototype, unless the directory has it; return their digests."""
        digests = {name: weights_digest(weights) for name, weights in extractors.items()}
        for name, digest in digests.items():
            file = frozen_file(self.path, digest)
            try:
                load_checked(file)
            except (FileNotFoundError, SafetensorError, ValueError):  # missing or damaged
                if not self._link_frozen(file, digest):
                    save_checked(file, extractors[name])
        return digests

    def _link_frozen(self, file: Path, digest: str) -> bool:
        """Make a hard link to the same h0 in a run directory beside this one, as a grid of runs
        has; return whether there is one. Such files are replaced, never changed."""
        for other in self.path.parent.glob(f"*/frozen/{file.name}"):
            with suppress(OSError, SafetensorError, ValueError):  # no links here, gone, damaged
                with replacing(file) as temporary:
                    os.link(other, temporary)
                    if weights_digest(load_checked(temporary)) != digest:
                        raise ValueError("other weights")
                return True
        return False

    def headers(self) -> list[dict[str, Any]]:
        """Return the header (state.json) of every method and seed that has started, in order."""
        folders = [self.folder(method, seed) for method, seed in self.tasks()]
        return [read_header(folder) for folder in folders if (folder / STATE).exists()]

    def write_metrics(self) -> None:
        """Rewrite metrics.jsonl from the headers."""
        lines = [json.dumps(row) + "\n" for header in self.headers() for row in header["rows"]]
        save_text(self.path / "metrics.jsonl", "".join(lines))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a finished round to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def write_ledger(self) -> None:
        """Write ledger.json from the headers: every release of every client with its privacy
        cost."""
        entries = [  # one in a line, which is fast to write
            json.dumps({"method": header["method"], "seed": header["seed"]} | entry)
            for header in self.headers()
            for entry in header["ledger"]
        ]
        unprotected = unprotected_by(all_asks(self.experiment).values(), self.experiment)
        about = json.dumps({"neighbours": NEIGHBOURS, "unprotected": unprotected})
        lines = f'{about[:-1]}, "entries": [\n' + ",\n".join(entries) + "\n]}\n"
        save_text(self.path / "ledger.json", lines)


STATE = "state.json"
KEPT_BY_CLIENT = ("memory", "kept")
"""Stored in one file per client: the server's memory, and the state of simulated clients."""


HEADER = ("method", "seed", "round", "prepared", "checkpoint", "preparation", "ledger", "rows")


def read_header(folder: Path) -> dict[str, Any]:
    """Return the state.json of one method and seed. Raises ValueError if it is damaged."""
    with _reading(file := folder / STATE):
        header: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for key in HEADER:
            header[key]
        int(header["round"])
    return header


@contextmanager
def _reading(file: Path, *, folder: Path | None = None) -> Iterator[None]:
    """Name a damaged or missing file of a checkpoint, and how to continue without it; its method
    and seed have this folder, by default the file's."""
    try:
        yield
    except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError) as error:
        folder = folder or file.parent
        reason = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({error})"
        raise ValueError(
            f"{file}: {reason}, so {folder.name} cannot be continued; to run it again from its "
            f"first round, delete or move away {folder} and use --resume; the rest is kept"
        ) from error


def _remove_old(folder: Path, header: Mapping[str, Any]) -> None:
    """Remove tensors of earlier rounds, which the header no longer names."""
    current = {folder / header["checkpoint"]}
    for kind in KEPT_BY_CLIENT:
        for client, number in header.get(kind, {}).items():
            current.add(_stamped_file(folder, kind, int(client), number))
    for pattern in ("round-*", *(f"{kind}/client-*" for kind in KEPT_BY_CLIENT)):
        for file in folder.glob(f"{pattern}.safetensors"):
            if file not in current:
                file.unlink()


def frozen_file(run: Path, digest: str) -> Path:
    """Return the file of an h0 in a run directory."""
    return run / "frozen" / f"{digest}.safetensors"


def _stamped_file(folder: Path, kind: str, client: int, number: int) -> Path:
    return folder / kind / f"client-{client:05d}-round-{number:05d}.safetensors"


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, dict[str, Tensor]]]:
    nested: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        kind, group, name = key.split("/", 2)
        nested.setdefault(kind, {}).setdefault(group, {})[name] = tensor
    return nested


def locked(path: Path) -> IO[str]:
    """Lock a directory until the returned file is closed. Raises ValueError if it is locked."""
    lock = (path / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ValueError(f"{path} is in use by another process") from error
    return lock


def stored_experiment(path: Path, experiment: Experiment, *, resume: bool) -> Experiment | None:
    """Return the experiment of the run in a directory; None if the directory is new or empty.

    Raises ValueError or ConfigError if `experiment` can neither start nor continue there.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose a directory with --out (out=)")
    if (path / "config.toml").exists():
        if not resume:
            raise ValueError(
                f"{path} already contains a run; continue it with --resume (resume=True), "
                "or choose another directory with --out (out=)"
            )
        stored = load_experiment(path / "config.toml")
        refuse_other_experiment(path, stored, experiment)
        return stored
    if path.exists() and any(
        item.name != ".lock" and not item.match(UNFINISHED) for item in path.iterdir()
    ):
        raise ValueError(
            f"{path} is not empty and contains no run; choose another directory with --out (out=)"
        )
    return None


def refuse_other_experiment(path: Path, stored: Experiment, given: Experiment) -> None:
    """Raise ConfigError with the settings that differ between a run and an experiment; more rounds
    extend a run."""
    old, new = (flatten(experiment.essentials()) for experiment in (stored, given))
    hints = dict.fromkeys(old.keys() | new.keys(), "")
    if new["rounds"] > old["rounds"]:
        del hints["rounds"]
    else:
        hints["rounds"] = (
            f"; a run can be extended, not shortened: --set rounds={old['rounds']}, or more"
        )
    different = [key for key in sorted(hints) if old.get(key) != new.get(key)]
    if different:
        raise ConfigError(
            [
                f"{key} = {new.get(key)!r}: the run has {old.get(key)!r}{hints[key]}"
                for key in different
            ],
            origin=f"{path} contains a run of another experiment and cannot be resumed",
        )
