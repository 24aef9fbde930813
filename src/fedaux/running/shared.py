"""In a sweep, a method that does not depend on a swept key is run once for all of its values."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedaux.config import Experiment
from fedaux.core.algorithms import asks_of
from fedaux.core.asks import Asks
from fedaux.recipes import flatten
from fedaux.running import plugins
from fedaux.running.run_directory import STATE, RunDirectory, frozen_file, read_header


def is_idle(key: str, asks: Asks) -> bool:
    """Return whether a setting changes nothing for a method: neither results nor costs."""
    return (
        asks.ignores(key)
        or (key.startswith("certainty.") and not asks.all_releases)
        or (key.startswith("memory.") and not asks.remembers)
        or key in ("name", "method", "seeds", "engine.device")
        or key.startswith("output.")
    )


def digest_of(experiment: Experiment, method: str) -> str:
    """Return a digest of all that the results of a method depend on, besides the seed."""
    asks = asks_of(method, experiment)
    settings = flatten(experiment.to_dict())
    own = {key: value for key, value in settings.items() if not is_idle(key, asks)}
    text = json.dumps([method, own, plugins.loaded()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@contextmanager
def turn(directory: RunDirectory, method: str, seed: int, *, wait: bool) -> Iterator[bool]:
    """Take what another run of a sweep has computed, or let the caller compute it while others
    wait; yield False if another run is at it and the caller does not `wait`."""
    root = directory.path.parent
    if not (root / "sweep.json").is_file():
        yield True
        return
    file = root / ".once" / f"{digest_of(directory.experiment, method)}-seed{seed}"
    file.parent.mkdir(exist_ok=True)
    with file.open("a+", encoding="utf-8") as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        owner.seek(0)
        if (name := owner.read().strip()) and name != directory.path.name:
            _take(directory, root / name, method, seed)
        yield True
        if directory.rounds_done(method, seed) >= directory.experiment.rounds:
            owner.truncate(0)
            owner.write(directory.path.name)


def _take(directory: RunDirectory, other: Path, method: str, seed: int) -> None:
    """Copy what another run has finished, unless this one has begun or the other has gone."""
    folder = directory.folder(method, seed)
    donor = other / "cells" / folder.name
    if (folder / STATE).exists() or not (donor / STATE).exists():
        return
    header = read_header(donor)
    if header["round"] < directory.experiment.rounds:
        return
    for digest in header.get("frozen", {}).values():
        if not (file := frozen_file(directory.path, digest)).exists():
            file.parent.mkdir(exist_ok=True)
            shutil.copy(frozen_file(other, digest), file)
    shutil.copytree(donor, folder, dirs_exist_ok=True, ignore=lambda _, names: {STATE} & set(names))
    shutil.copy(donor / STATE, folder / STATE)  # last: it makes the others count
    directory.write_ledger()
