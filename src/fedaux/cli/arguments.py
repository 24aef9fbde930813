"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaux.config import ConfigError, Experiment, inspect
from fedaux.recipes import find_recipe, read_recipe

Recipe = Annotated[
    str,
    typer.Argument(
        help="A TOML file, or the name of a recipe that ships; see `fedaux recipes`.",
        metavar="RECIPE",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a setting: --set local.epochs=5; --set KEY= restores its default. May be "
        "repeated.",
        metavar="KEY=VALUE",
    ),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        help="A Python file that adds methods, teachers, models, sources or mechanisms. May be "
        "repeated. It is executed with your rights: use only files you trust.",
        metavar="FILE",
    ),
]


Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds", help="Use seeds 0 to N-1.", show_default="the recipe's", metavar="N", min=1
    ),
]
Devices = Annotated[
    str | None,
    typer.Option("--devices", help="Devices for parallel runs.", metavar="cuda:0,cuda:1"),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", help="Number of parallel runs.", show_default="one per device", min=1),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        help="Start a run only if it is expected to finish in time.",
        metavar="SECONDS",
    ),
]


def load_plugins(plugins: list[Path] | None) -> None:
    """Load the files given with --plugin."""
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
    """Load a recipe by path or by name. Raises ConfigError with all problems at once.

    `unlabelled`: labelled data is optional.
    """
    load_plugins(plugins)
    path = find_recipe(recipe)
    raw, problems = read_recipe(path, overrides=overrides)
    fields, found = inspect(raw)
    from fedaux.running.preflight import problems_of

    # Fields with a wrong value have their default in `fields`: no problem is reported twice.
    problems += found + [
        line for line in problems_of(fields, unlabelled=unlabelled) if line not in found
    ]
    if problems:
        raise ConfigError(hinted(problems), origin=str(path))
    return Experiment(**raw)


def hinted(problems: list[str]) -> list[str]:
    """Add a hint to --plugin where no known name is similar."""
    hint = "; if a plugin adds it, use --plugin FILE"
    return [line + hint if ": not known; there are " in line else line for line in problems]
