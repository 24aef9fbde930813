"""Plugins: Python files that add entries to the registries (docs/write-a-method.md)."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedaux.config import NO_DATA
from fedaux.config_errors import nearest
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.core.asks import Asks
from fedaux.core.objectives import OBJECTIVES, Objective
from fedaux.core.server import Method
from fedaux.data.sources import SOURCES, Source
from fedaux.files import read_json
from fedaux.models import MODELS
from fedaux.privacy.mechanisms import MECHANISMS, Mechanism

Rows = dict[str, dict[str, Any]]

REGISTRIES: Mapping[str, dict[str, Any]] = {
    "OBJECTIVES": OBJECTIVES,
    "METHODS": METHODS,
    "MODELS": MODELS,
    "SOURCES": SOURCES,
    "MECHANISMS": MECHANISMS,
}


@dataclass(frozen=True)
class Plugin:
    """A loaded file: its path as given, its digest, and the rows it added."""

    path: str
    sha256: str
    rows: Rows


LOADED: dict[Path, Plugin] = {}
"""The plugins of this process by resolved path, in order of loading."""


def load_plugin(path: Path | str) -> ModuleType:
    """Execute a Python file that adds rows to the registries, and return its module.

    A file that is loaded again replaces its own rows. Raises ValueError, and restores the
    registries, if the file cannot be read, fails, changes existing rows or adds invalid ones.
    """
    place = Path(path).resolve()
    try:
        content = place.read_bytes()
    except OSError as error:
        raise ValueError(f"plugin {path}: cannot be read ({error.strerror})") from error
    before, known = _copy(), LOADED.get(place)
    for registry, names in (known.rows if known else {}).items():
        for name in names:
            REGISTRIES[registry].pop(name, None)
    others = _copy()
    digest = hashlib.sha256(content).hexdigest()
    # Execute the bytes that were hashed, under a name that no other module has.
    module = ModuleType(f"fedaux_plugin_{place.stem}_{digest[:12]}")
    module.__file__ = str(place)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        _execute(content, module, path=str(path))
        if problems := _problems(others):
            raise ValueError("\n".join(f"plugin {path}: {problem}" for problem in problems))
    except BaseException:
        for registry, rows in before.items():
            REGISTRIES[registry].clear()
            REGISTRIES[registry].update(rows)
        del sys.modules[module.__name__]
        raise
    LOADED[place] = Plugin(str(path), digest, _added(others))
    return module


def loaded() -> dict[str, str]:
    """Return path and SHA-256 of every plugin of this process, for environment.json."""
    return {plugin.path: plugin.sha256 for plugin in LOADED.values()}


def check_same(directory: Path) -> None:
    """Raise ValueError if a run was started with a plugin that is not loaded or has changed."""
    file = directory / "environment.json"
    used: dict[str, str] = read_json(file).get("plugins", {}) if file.is_file() else {}
    missing = [
        f"{path} (SHA-256 {digest[:12]}...)"
        for path, digest in used.items()
        if digest not in loaded().values()
    ]
    if missing:
        raise ValueError(
            f"{directory} was started with the plugin {', '.join(missing)}, which is not loaded "
            "or has changed; load the same file with --plugin (fedaux.load_plugin), or start a new "
            "run in another directory"
        )


def _execute(content: bytes, module: ModuleType, *, path: str) -> None:
    """Execute a plugin's code. Raises ValueError with file and line if it fails."""
    file = str(module.__file__)
    try:
        exec(compile(content, file, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename == file:
            line, message = error.lineno, error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            line = next(
                (frame.lineno for frame in reversed(frames) if frame.filename == file), None
            )
            message = str(error)
        reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise ValueError(
            f"plugin {path}{f':{line}' if line else ''}: fails with {reason}"
        ) from error


def _copy() -> Rows:
    return {registry: dict(rows) for registry, rows in REGISTRIES.items()}


def _added(others: Rows) -> Rows:
    return {
        registry: {name: row for name, row in rows.items() if name not in others[registry]}
        for registry, rows in REGISTRIES.items()
    }


def _problems(others: Rows) -> list[str]:
    """Return a line for each changed row of others and each invalid new row."""
    problems = [
        f"{registry}[{name!r}] is {_owner(registry, name)}; choose another name"
        for registry, rows in others.items()
        for name, row in rows.items()
        if REGISTRIES[registry].get(name) != row
    ]
    for registry, rows in _added(others).items():
        for name, row in rows.items():
            problems += [
                f"{registry}[{name!r}]{problem}" for problem in CHECKS[registry](name, row)
            ]
    return problems


def _owner(registry: str, name: str) -> str:
    owners = [plugin.path for plugin in LOADED.values() if name in plugin.rows[registry]]
    return f"a row of the plugin {owners[0]}" if owners else "a row that ships with fedaux"


def _method_problems(name: str, row: object) -> list[str]:
    if not isinstance(row, Method):
        return [f" = {row!r}: should be a fedaux.Method"]
    problems = []
    if row.name != name:
        problems.append(f".name = {row.name!r}: should be {name!r}, the name of its row")
    if "/" in name:
        problems.append(": is the name of a directory; should not contain a slash")
    try:
        asks = asks_of(name)
    except Exception as error:
        return [*problems, f".asks fails with {type(error).__name__}: {error}"]
    if not isinstance(asks, Asks):
        return [*problems, f".asks returns {asks!r}: should be a fedaux.core.asks.Asks"]
    for one in asks.objectives:
        if one not in OBJECTIVES:
            guess = nearest(one, OBJECTIVES) or f"; there are {', '.join(OBJECTIVES)}"
            problems.append(f".objectives = {one!r}: not known{guess}")
    return problems


def _objective_problems(name: str, row: object) -> list[str]:
    """Return the problems of a local objective, tried on a client that lacks a class."""
    if not isinstance(row, Objective):
        return [f" = {row!r}: should be a fedaux.core.objectives.Objective"]
    counts, labels = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1])
    logits, even = torch.zeros(4, 3), torch.full((4, 3), 1 / 3)
    found: dict[str, tuple[object, list[int]]] = {}
    try:
        if row.adjust is not None:
            both: Any = row.adjust(counts, row.strength)
            if not isinstance(both, tuple) or len(both) != 2:
                return [f".adjust returns {both!r}: should be scale and offset, [classes] each"]
            found |= {".adjust": (both[0], [3]), ".adjust, second,": (both[1], [3])}
        if row.term is not None:
            found[".term"] = row.term(logits, labels, even, counts / counts.sum()), [4]
    except Exception as error:
        return [f" fails on four examples of three classes with {type(error).__name__}: {error}"]
    return [
        f"{part} returns {list(own.shape) if isinstance(own, Tensor) else own!r} for four examples "
        f"of three classes; should be finite numbers {shape}"
        for part, (own, shape) in found.items()
        if not isinstance(own, Tensor) or list(own.shape) != shape or not own.isfinite().all()
    ]


def _source_problems(name: str, row: object) -> list[str]:
    if not isinstance(row, Source):
        return [f" = {row!r}: should be a fedaux.data.Source"]
    if name == NO_DATA:
        return [": is reserved for no data; choose another name"]
    if row.load_labelled is None and row.load_auxiliary is None:
        return [": should have load_labelled, load_auxiliary or both"]
    if row.load_labelled is not None and row.count_labelled is None:
        return [".count_labelled: missing; required with load_labelled"]
    return []


def _function_problems(name: str, row: object) -> list[str]:
    return [] if callable(row) else [f" = {row!r}: should be a function"]


def _mechanism_problems(name: str, row: object) -> list[str]:
    if isinstance(row, type) and not issubclass(row, Mechanism):
        return [": should be a subclass of fedaux.privacy.mechanism.Mechanism, since 0.3.0"]
    return _function_problems(name, row)


CHECKS: Mapping[str, Callable[[str, object], list[str]]] = {
    "OBJECTIVES": _objective_problems,
    "METHODS": _method_problems,
    "MODELS": _function_problems,
    "SOURCES": _source_problems,
    "MECHANISMS": _mechanism_problems,
}
