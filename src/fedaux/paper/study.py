"""A study: a table or figure of the paper as a grid of runs, and what of it is cut for a quick version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from fedaux.config import Experiment
from fedaux.config_errors import nearest
from fedaux.core.methods import METHODS
from fedaux.recipes import load_experiment, parse_value

RECIPES = Path(__file__).parent / "recipes"


def quick_base(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Return what the quick version of an experiment is based on, with --set applied."""
    return load_experiment(RECIPES / f"{name}-quick.toml", overrides=overrides)


@dataclass(frozen=True)
class Value:
    """A place on an axis: how it is written, and the settings and data sets that it stands for."""

    key: str
    """What `--only` calls it."""
    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    auxiliary: str | None = None
    central: bool = True
    """Whether training in one place makes sense here, where a study draws that line."""


@dataclass(frozen=True)
class Axis:
    """What changes along the columns of a table, or from one of its blocks to the next."""

    name: str
    values: tuple[Value, ...]
    ours: tuple[Value, ...] = ()
    """What the paper does not have: run where `--only` names it, and no figure stands beside it."""

    def only(self, wanted: Sequence[str]) -> Axis:
        """Return the axis with some of its values and of ours. Raises ValueError where it has no such value."""
        both = (*self.values, *self.ours)
        keys = [value.key for value in both]
        for key in wanted:
            if key not in keys:
                guess = nearest(key, keys) or f"; it has {', '.join(keys)}"
                raise ValueError(f"--only {self.name}={key}: there is no such value{guess}")
        return replace(self, values=tuple(value for value in both if value.key in wanted), ours=())


@dataclass(frozen=True)
class Grid:
    """The runs of a study: every block, column, method and seed."""

    recipe: str
    """A file of `recipes/` beside this one: the settings that all runs share."""
    blocks: Axis
    columns: Axis
    data: str
    auxiliary: str
    cut: str = ""
    """What a quick version leaves out."""

    def axes(self) -> tuple[Axis, Axis]:
        """Return both axes."""
        return self.blocks, self.columns

    def path(self) -> Path:
        """Return the file of the recipe."""
        return RECIPES / f"{self.recipe}.toml"

    def data_sets(self) -> list[str]:
        """Return the names of all data sets that the runs read."""
        named = [self.data_of(block, column) for block, column in self.points()]
        return list(dict.fromkeys(name for pair in named for name in pair))

    def points(self) -> Iterator[tuple[Value, Value]]:
        """Yield block and column; runs that share their data are neighbours."""
        yield from sorted(product(self.blocks.values, self.columns.values), key=lambda pair: self.data_of(*pair)[1])

    def data_of(self, block: Value, column: Value) -> tuple[str, str]:
        """Return the data sets of the clients and of the server."""
        return block.data or column.data or self.data, block.auxiliary or column.auxiliary or self.auxiliary


@dataclass(frozen=True)
class Study:
    """A table or figure: its grid as in the paper, a quick one, and how both are shown."""

    name: str
    shows: str
    grid: Grid
    quick: Grid
    quick_time: str
    """Measured; on 2 cores."""
    figure: Literal["dots", "lines", "curves", "heat"] = "dots"
    central: bool = False
    """Whether training in one place is drawn beside the federation."""
    left_open: tuple[str, ...] = ()
    """What the paper does not say, and what is taken here."""
    needs_recipe: str | None = None
    """A recipe of the package without which the study cannot be run."""


@dataclass(frozen=True)
class Choice:
    """The part of a study that `--only` asks for."""

    grid: Grid
    methods: tuple[str, ...] | None = None


def narrowed(grid: Grid, only: Sequence[str]) -> Choice:
    """Return the part of a grid that `--only alpha=0.01 --only method=[fedaux,feddf]` leaves."""
    choice = Choice(grid)
    for text in only:
        name, equals, values = text.partition("=")
        parsed = parse_value(values)
        wanted = [_plain(value) for value in (parsed if isinstance(parsed, list) else [parsed])]
        names = {axis.name: axis for axis in choice.grid.axes()}
        if not equals or not wanted or name not in (*names, "method"):
            known = ", ".join([*names, "method"])
            raise ValueError(f"--only {text}: should be KEY=VALUE with one of {known}")
        if name == "method":
            choice = replace(choice, methods=_known_methods(wanted, option="--only method="))
        else:
            axis = names[name].only(wanted)
            grid = choice.grid
            grid = replace(grid, blocks=axis) if grid.blocks.name == name else replace(grid, columns=axis)
            choice = replace(choice, grid=grid)
    return choice


def chosen_methods(recipe: Sequence[str], choice: Choice, also: Sequence[str]) -> list[str]:
    """Return the recipe's methods that were asked for, and those to run besides."""
    extra = _known_methods(also, option="--also ")
    if choice.methods is None:
        return list(dict.fromkeys([*recipe, *extra]))
    if strange := [name for name in choice.methods if name not in recipe]:
        raise ValueError(f"--only method={strange[0]}: not one of {', '.join(recipe)}; --also {strange[0]} adds it")
    return list(dict.fromkeys([*(name for name in recipe if name in choice.methods), *extra]))


def concerning(method: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that a method looks at."""
    return {key: value for key, value in changes.items() if METHODS[method].looks_at(key)}


def _known_methods(names: Sequence[str], *, option: str) -> tuple[str, ...]:
    for name in names:
        if name not in METHODS:
            raise ValueError(f"{option}{name}: no such method{nearest(name, METHODS)}; see fedaux methods")
    return tuple(names)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
