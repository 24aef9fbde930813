"""What several commands are given, and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaux.config import ConfigError, Experiment
from fedaux.config_errors import inspect
from fedaux.recipes import find_recipe, read_recipe

Recipe = Annotated[
    str,
    typer.Argument(
        help="A TOML file, or the name of a recipe that ships with fedaux.", metavar="RECIPE"
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a setting: --set local.epochs=5. May be repeated.",
        metavar="KEY=VALUE",
    ),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        help="A Python file with own methods, teachers, models, sources or mechanisms. May be repeated. "
        "It is code that runs with your rights: use only files you trust.",
        metavar="FILE",
    ),
]


def load_plugins(plugins: list[Path] | None) -> None:
    """Run the files given with --plugin, so that their rows are known."""
    if plugins:
        from fedaux.running.plugins import load_plugin

        for plugin in plugins:
            load_plugin(plugin)


def load(
    recipe: str,
    overrides: list[str],
    *,
    plugins: list[Path] | None = None,
    unlabelled: bool = False,
) -> Experiment:
    """Read a recipe by path or by the name of one that ships with the package; all problems are told at once.

    `unlabelled`: it can do without labelled data.
    """
    load_plugins(plugins)
    path = find_recipe(recipe)
    raw, problems = read_recipe(path, overrides=overrides)
    fields, found = inspect(raw)
    from fedaux.running.preflight import problems_of

    # Names that were wrong already stand at their defaults in `fields`, so nothing is told twice.
    problems += found + [
        line for line in problems_of(fields, unlabelled=unlabelled) if line not in found
    ]
    if problems:
        raise ConfigError(hinted(problems), origin=str(path))
    return Experiment(**raw)


def hinted(problems: list[str]) -> list[str]:
    """Where no name is near, the row may be one of a file that was not given."""
    hint = "; given by a plugin? --plugin FILE"
    return [line + hint if ": not known; there are " in line else line for line in problems]
