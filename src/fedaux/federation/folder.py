"""The folder of a federation: a Flower app that imports fedaux, its recipe, and a configuration
per node."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

from fedaux.config import ConfigError, ExperimentFields, inspect
from fedaux.core.algorithms import all_asks
from fedaux.core.asks import release_sections
from fedaux.data import load_test
from fedaux.federation.node import NODE_SOURCES
from fedaux.federation.plan import plan_of
from fedaux.privacy.mechanisms import UNPROTECTED_MECHANISMS
from fedaux.recipes import find_recipe, merged, read_recipe
from fedaux.running.preflight import source_problems

PORT = 8000
DEFAULT_CLIENTS = 3
"""Used if neither the recipe nor the command states a number."""
PORT_OFFSET = 100
"""Difference between the ports of the server and of the simulation: both may run at once."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,38}")
DATA_KEYS = (
    "source",
    "image_size",
    "channels",
    "image_column",
    "feature_column",
    "label_column",
    "subset",
    "skip_bad",
)
"""Settings that a node's data takes from the recipe's."""
NOT_IN_TRIALS = ("clients", "server_validation")
"""Settings of data that the nodes of a trial cannot follow."""


def write_folder(
    folder: Path,
    *,
    recipe: str,
    clients: int | None,
    trial: bool,
    port: int = PORT,
    plain_updates: bool = False,
) -> list[Path]:
    """Write the folder of a federation; return its files. `plain_updates` lets nodes send
    unprotected updates.

    A trial gives each node its part of the recipe's data and seeded noise, so that results equal
    the simulator's; otherwise nodes read their own data and draw secure noise. Raises ValueError if
    the folder is not empty or its name is not valid for a Flower app, and ConfigError for a wrong
    recipe.
    """
    folder = folder.resolve()
    if not 1 <= port <= 65535 - PORT_OFFSET:
        raise ValueError(f"--port {port}: should be between 1 and {65535 - PORT_OFFSET}")
    if not NAME.fullmatch(folder.name):
        raise ValueError(
            f"{folder.name}: names the Flower app; should be a letter, then letters, digits and "
            "hyphens"
        )
    if found := re.search(r'["\\\\$`\n]', str(folder)):
        raise ValueError(
            f"{folder}: shells and Flower do not support {found.group()!r} in a path; choose "
            "another"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already and is not overwritten; choose another name")
    raw, experiment = _recipe(recipe, name=folder.name, clients=clients)
    if trial and (key := next(filter(experiment.data.model_dump().get, NOT_IN_TRIALS), None)):
        raise ValueError(
            f"--trial: each node takes its part of the recipe's data, and data.{key} is not "
            "supported there; remove it from the recipe"
        )
    count = experiment.split.num_clients
    common = {
        "name": folder.name,
        "folder": str(folder),
        "shown": folder.name,
        "clients": str(count),
        "port": str(port),
        "simulation_port": str(port + PORT_OFFSET),
        "recipe": _recipe_text(recipe, raw, name=folder.name, count=count),
    }
    texts = {
        "app/pyproject.toml": _filled("pyproject.toml", common),
        "app/recipe.toml": _filled("recipe.toml", common),
        "app/fedaux_app/__init__.py": '"""Points at fedaux."""\n',
        "app/fedaux_app/server_app.py": _filled("server_app.py", common),
        "app/fedaux_app/client_app.py": _filled("client_app.py", common),
        "flower/config.toml": _filled("config.toml", common),
        "flower.env": _filled("flower.env", common),
    }
    paths = list((raw.get("data") or {}).get("clients") or ())
    declared = declaration(experiment)
    for client in range(count):
        own = paths[client] if client < len(paths) else None
        texts[f"nodes/node-{client}.toml"] = node_text(
            experiment,
            client,
            trial=trial,
            path=own,
            declared=declared,
            plain_updates=trial or plain_updates,
        )
    texts["nodes/simulation.toml"] = _for_simulation(
        node_text(experiment, 0, trial=True, path=None, declared=declared, plain_updates=True)
    )
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def needs_plain_updates(recipe: str) -> bool:
    """Return whether a recipe trains without DP-SGD, so that its updates are not protected."""
    return "privacy" not in (read_recipe(find_recipe(recipe))[0].get("local") or {})


@dataclass(frozen=True)
class Declaration:
    """What every node declares about its data in advance: it must not depend on private data."""

    classes: tuple[str, ...]
    image_size: int | None
    channels: int | None


def declaration(experiment: ExperimentFields) -> Declaration:
    """Return classes and image shape of the server's test data; left empty if it cannot be read."""
    section = experiment.data
    try:
        data = load_test(section)
    except (OSError, ValueError, AssertionError):
        return Declaration((), section.image_size, section.channels)
    if data.images.ndim == 2:
        return Declaration(data.classes, None, None)
    channels, height, width = data.images.shape[1:]
    return Declaration(
        data.classes, section.image_size or (height if height == width else None), channels
    )


def node_text(
    experiment: ExperimentFields,
    client: int,
    *,
    trial: bool,
    path: str | None,
    declared: Declaration,
    plain_updates: bool,
) -> str:
    """Return the configuration of one node; its budget is the cost of the recipe."""
    section = experiment.certainty
    # All methods of a seed that use the same mechanism share one release.
    asked = release_sections(all_asks(experiment).values())
    releases = len(experiment.seeds) * len(asked)
    spent = len(experiment.seeds) * sum(own.epsilon for own in asked.values())
    data: dict[str, Any] = {key: getattr(experiment.data, key) for key in DATA_KEYS}
    if trial:
        data |= {"path": experiment.data.path, "test": experiment.data.test}
        data |= {"test_fraction": experiment.data.test_fraction}
        data |= {"size": experiment.data.size, "test_size": experiment.data.test_size}
    else:
        if experiment.data.source not in NODE_SOURCES:
            data = {"source": "folder"}
        data |= {"path": path or "/path/to/your/images"}
        data |= {"image_size": declared.image_size, "channels": declared.channels}
    protected = experiment.local.privacy is not None
    rehearses = "rehearsal" in plan_of(experiment, run="init").objectives
    values = {
        "client": str(client),
        "classes": json.dumps(list(declared.classes), ensure_ascii=False),
        "data": tomli_w.dumps(
            {key: value for key, value in data.items() if value not in (None, False, ())}
        ).rstrip(),
        "epsilon": f"{float(spent or section.epsilon):g}",
        "delta": f"{max(1, releases) * section.delta:.3g}",
        "accountant": "renyi" if protected else "gaussian",
        "mechanisms": json.dumps(
            [name for name in asked if name not in UNPROTECTED_MECHANISMS] or ["mean"]
        ),
        "noise": "simulated" if trial else "secure",
        "noise_comment": "# seeded by the server: only for trials, never with private data"
        if trial
        else "# drawn on this machine: unpredictable, and safe from floating-point attacks",
        "plain_updates": "true" if plain_updates and not protected else "false",
        "public_data": "true" if rehearses else "false",
        "split": _split_text(experiment) if trial else "",
    }
    return _filled("node.toml", values).rstrip() + "\n"


def _split_text(experiment: ExperimentFields) -> str:
    split, seed = experiment.split, experiment.seeds[0]
    table = {"num_clients": split.num_clients, "alpha": split.alpha, "seed": seed}
    lines = "\n".join(f"{key} = {value}" for key, value in table.items())
    return f"\n[split] # a trial: this node's part of the simulator's split\n{lines}"


def _for_simulation(text: str) -> str:
    """Return a node's configuration for all nodes of Flower's simulation, which numbers them
    itself."""
    lines = [
        line.replace("state-0", "../state-simulation")
        for line in text.splitlines()
        if not line.startswith(("client = ", "# The policy", "# `fedaux"))
    ]
    heading = "# The policy of every node of Flower's simulation; Flower numbers the nodes."
    return "\n".join([heading, *lines]) + "\n"


def _recipe(
    recipe: str, *, name: str, clients: int | None
) -> tuple[dict[str, Any], ExperimentFields]:
    """Return the raw recipe and its fields, with the number of clients."""
    path = find_recipe(recipe)
    raw, problems = read_recipe(path)
    named = len((raw.get("data") or {}).get("clients") or ())
    if named and clients not in (None, named):
        raise ValueError(f"--clients {clients}: the recipe's data.clients names {named}")
    if clients is not None and clients < 1:
        raise ValueError(f"--clients {clients}: should be at least 1")
    stated = (raw.get("split") or {}).get("num_clients")
    if ships(recipe):
        raw = merged(raw, _changes(name=name, count=clients or stated or DEFAULT_CLIENTS))
    elif not named:
        raw = merged(raw, {"split": {"num_clients": clients or stated or DEFAULT_CLIENTS}})
    fields, found = inspect(raw)
    if problems := [*problems, *found, *source_problems(fields.data)]:
        raise ConfigError(problems, origin=str(path))
    # Nodes name their own data, so the written recipe must state the number of clients.
    return merged(raw, {"split": {"num_clients": fields.split.num_clients}}), fields


def ships(recipe: str) -> bool:
    """Return whether a recipe is the package's own; `init` changes those."""
    return not Path(recipe).is_file()


def _changes(*, name: str, count: int) -> dict[str, Any]:
    """Return changes to a shipped recipe: one method, one seed, all clients in every round."""
    return {
        "name": name,
        "method": ["fedaux"],
        "seeds": [0],
        "participation_rate": 1.0,
        "split": {"num_clients": count},
    }


def _recipe_text(recipe: str, raw: Mapping[str, Any], *, name: str, count: int) -> str:
    """Return the text of the recipe: the changes to a shipped one, or all of a user's own."""
    if ships(recipe):
        return tomli_w.dumps({"extends": recipe, **_changes(name=name, count=count)}).rstrip()
    data = {key: value for key, value in (raw.get("data") or {}).items() if key != "clients"}
    return tomli_w.dumps({**raw, "data": data}).rstrip()


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = files("fedaux.federation").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)
