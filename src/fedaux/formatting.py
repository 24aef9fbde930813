"""Numbers and settings as text for people; a dash for unknown values."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

UNKNOWN = "–"


def install_hint(extras: str) -> str:
    """Return how to install extras ("flower,privacy"); fedaux is not on PyPI."""
    return f"pip install -e '.[{extras}]' in the checkout (docs/install.md: from a wheel)"


def optional(module: str, needs: str, *, extras: str) -> Any:
    """Import a module of an extra. Raises ValueError with what needs it and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{needs}: {install_hint(extras)}") from error


def as_number(value: Any, *, missing: float = math.nan) -> float:
    """Return a JSON number as a float: ``missing`` for null or NaN, infinity for "inf"."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return missing
    return missing if math.isnan(number) else number


def over_seeds(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return mean and standard deviation (n - 1; 0 for one value), or None for both without
    values."""
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def mean_and_deviation(mean: Any, deviation: Any = None, *, scale: float = 100.0) -> str:
    """Return "71.2 ± 2.1", in percent by default; the mean alone without a deviation."""
    parts = [
        f"{scale * number:.1f}"
        for number in map(as_number, (mean, deviation))
        if not math.isnan(number)
    ]
    return " ± ".join(parts) if not math.isnan(as_number(mean)) else UNKNOWN


def privacy_budget(epsilon: Any, delta: Any) -> str:
    """Return "(0.5, 1e-5)" for epsilon and delta; a dash if nothing was released."""
    return UNKNOWN if epsilon is None else f"({short(epsilon, digits=4)}, {short(delta)})"


def short(value: Any, *, digits: int = 3) -> str:
    """Return a number with few significant digits: 0.0522, 1e-5, ∞."""
    number = as_number(value)
    if math.isnan(number):
        return UNKNOWN
    if math.isinf(number):
        return "∞"
    return re.sub(
        r"e([+-])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", f"{number:.{digits}g}"
    )


def decimal(value: Any) -> str:
    """Return a number with one decimal and thousands separators: 1,234.6."""
    number = as_number(value)
    return UNKNOWN if math.isnan(number) else f"{number:,.1f}"


def count(value: float) -> str:
    """Return a whole number with thousands separators; others by :func:`short`."""
    return f"{value:,.0f}" if value.is_integer() else short(value)


def megabytes(value: Any) -> str:
    """Return bytes in units of 10⁶."""
    number = as_number(value) / 1e6
    return decimal(number) if number >= 10 else short(number)


def interval(values: Iterable[Any], *, form: Callable[[float], str] = count) -> str:
    """Return "smallest to largest", or one of them if both look the same."""
    known = [number for number in map(as_number, values) if not math.isnan(number)]
    if not known:
        return UNKNOWN
    low, high = form(min(known)), form(max(known))
    return low if low == high else f"{low} to {high}"


def plural(number: int, noun: str) -> str:
    """Return "1 run", "2 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def distinct_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Return what distinguishes paths: "a" and "b" for data/a/train.csv and data/b/train.csv."""
    parts = [re.split(r"[/\\]+", path.rstrip("/\\")) for path in paths]
    for end in (0, -1) if len(parts) > 1 else ():
        while min(map(len, parts)) > 1 and len({own[end] for own in parts}) == 1:
            parts = [own[1:] if end == 0 else own[:-1] for own in parts]
    names = ["/".join(own if len(parts) > 1 else own[-1:]) for own in parts]
    endings = {PurePosixPath(name).suffix for name in names}
    if len(endings) == 1 and (ending := endings.pop()):
        names = [name.removesuffix(ending) for name in names]
    twice = {name for name in names if names.count(name) > 1}
    return tuple(
        f"{name} ({number})" if name in twice else name for number, name in enumerate(names)
    )


def client_label(client: int, names: Sequence[str]) -> str:
    """Return a client's name, or "client 3" if it has none."""
    return names[client] if client < len(names) else f"client {client}"


def setting_text(value: Any) -> str:
    """Return the value of a setting as short as possible; different values never look the same."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return text if float((text := short(value)).replace("∞", "inf")) == value else repr(value)
    if isinstance(value, list):
        return "+".join(map(setting_text, value))
    if isinstance(value, Mapping):  # a prototype: its name, and what else it has
        rest = [
            setting_text(item)
            for key, item in value.items()
            if key not in ("name", "options", "share")
        ]
        rest += [
            f"{key}={setting_text(item)}" for key, item in (value.get("options") or {}).items()
        ]
        return f"{value.get('name', '')} ({', '.join(rest)})".replace(" ()", "").strip()
    return UNKNOWN if value is None else str(value)


def cell(value: object) -> str:
    """Return a value for a CSV file; a text that a spreadsheet would compute begins with a quote.

    Names of files and classes can be anything, and names that begin with =, +, -, @, a tab or a
    line break are formulas there, which can start programs.
    """
    text = str(value)
    if not text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return text
    try:
        float(text.rstrip("%").rstrip())
    except ValueError:
        return f"'{text}"
    return text
