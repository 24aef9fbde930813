"""Output of a run: the progress bar, the table of results, warnings and privacy costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from fedaux.files import read_json
from fedaux.formatting import UNKNOWN, decimal
from fedaux.report.results import is_bound, ranked, read_runs, results_table
from fedaux.report.tables import Table, TerminalTable, bold_row
from fedaux.report.verdict import last_accuracies, verdict
from fedaux.report.warnings import all_warnings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LINE_SECONDS = 2.0
"""Minimum time between two lines of progress if the output is not a terminal."""
MOST_CLASSES = 20
"""With more classes than this, the table of a split has no column for each."""


def live_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """Return progress bars with a description and these columns; invisible without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def result_table(summary: Mapping[str, Any]) -> TerminalTable:
    """Return the final table for a terminal."""
    return TerminalTable(summary_table(summary))


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the final table: accuracy over seeds and its cost, one row per method."""
    seeds: Sequence[int] = summary["seeds"]
    over = f"seed {seeds[0]}"
    if len(seeds) > 1:
        over = f"mean ± standard deviation over {len(seeds)} seeds"
    protected = any(row["updates_protected"] for row in summary["rows"])
    covered = "everything sent" if protected else "the clients' releases"
    caption = f"{summary['name']}: test accuracy in %, {over}; (ε, δ) covers {covered}"
    if shared := summary.get("shared_seconds"):
        apart = f"{decimal(shared)} s for h0 and features, which methods share"
        caption += f"; seconds of one seed, without {apart}"
    return results_table(summary["rows"], caption=caption, without="seeds")


def best_method(summary: Mapping[str, Any]) -> str:
    """Return the most accurate federated method in the last round; of bounds alone, the best."""
    names: list[str] = [row["method"] for row in ranked(summary["rows"])]
    return next((name for name in names if not is_bound(name)), names[0])


def split_table(
    table: NDArray[np.int64], classes: Sequence[str], *, how: str, names: Sequence[str] = ()
) -> TerminalTable:
    """Return the client-by-class table of a split; of many classes, only how many clients have."""
    caption = f"Examples by client and class ({how})"
    align = "l" if names else "r"
    labels = [names[client] if names else client for client in range(len(table))]
    if len(classes) > MOST_CLASSES:
        rows = [
            (label, counts.sum(), (counts > 0).sum(), *_largest(counts, classes))
            for label, counts in zip(labels, table, strict=True)
        ]
        headers: tuple[str, ...] = ("client", "examples", "classes", "largest class", "its share")
        return TerminalTable(Table(headers, rows, f"{align}rrlr", caption))
    headers = ("client", *classes, "all")
    rows = [
        *(
            (label, *(count or "·" for count in counts), counts.sum())
            for label, counts in zip(labels, table, strict=True)
        ),
        ("all", *table.sum(axis=0), table.sum()),
    ]
    bold = bold_row(len(table), headers)
    return TerminalTable(Table(headers, rows, align + "r" * (len(headers) - 1), caption, bold))


def classes_line(table: NDArray[np.int64], classes: Sequence[str]) -> str:
    """Return how the examples of a split are spread over the classes."""
    counts = table.sum(axis=0)
    name, share = _largest(counts, classes)
    return (
        f"Examples per class: least {min(counts):,}, median {int(median(counts)):,}, most "
        f"{max(counts):,}; class {name} has {share} of {sum(counts):,}"
    )


def _largest(counts: NDArray[np.int64], classes: Sequence[str]) -> tuple[str, str]:
    """Return the most frequent class, and its share."""
    label, total = int(counts.argmax()), counts.sum()
    return (classes[label], f"{100 * counts[label] / total:.0f} %") if total else (UNKNOWN, UNKNOWN)


def verdict_table(directory: Path) -> TerminalTable | None:
    """Return the differences between methods; None if there is one method."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    examples = read_json(directory / "data.json")["test"]["examples"]
    table = verdict(last_accuracies(map(json.loads, lines)), test_examples=examples)
    return None if table is None else TerminalTable(table)


def warning_lines(directory: Path) -> list[str]:
    """Return the warnings of a run, or of all runs of a sweep, each with its method."""
    runs = read_runs(directory)
    before = runs.only.noise_warnings if runs.only else ()  # printed when the run began
    return [f"Warning: {line}" for line in all_warnings(runs) if line not in before]


def privacy_lines(directory: Path) -> list[str]:
    """Return the totals of a run's privacy ledger."""
    from fedaux.privacy.accounting import ledger_lines

    return ledger_lines(read_json(directory / "ledger.json"))


def h0_lines(directory: Path, checkpoint: str | None) -> list[str]:
    """Return the probe results of the h0 of a run, if `fedaux pretrain` has measured it."""
    from fedaux.pretrain.store import probe_line, read_card

    stored = sorted((directory / "pretrained").glob("*.safetensors"))
    files = stored if checkpoint is None else [Path(checkpoint)]
    cards = [read_card(file) or {} for file in files]
    several = [one for card in cards for one in (card.get("prototypes") or {"": card}).values()]
    return [line for card in several if (line := probe_line(card)) is not None]
