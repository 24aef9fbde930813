"""What a person sees while a run goes on, and the table at its end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedaux.config import Experiment
from fedaux.report.results import results_table
from fedaux.report.tables import Table, bold_row, to_terminal

if TYPE_CHECKING:  # a sweep shows its progress without torch
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table as TerminalTable

    from fedaux.core.task import Task

QUIET_SECONDS = 2.0
"""Plain output says at most one line in this time, besides the last round of each method and seed."""


def live_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """Return bars, each a description, the bar and these columns; what is no terminal sees none of them."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class Display:
    """A callback for people: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, experiment: Experiment, console: Console, *, done: int = 0) -> None:
        self._rounds = experiment.rounds
        self._total = experiment.rounds * len(experiment.method) * len(experiment.seeds)
        self._done = self._done_before = done
        self._console = console
        self._began = time.monotonic()
        self._spoke = 0.0
        self._accuracy: dict[tuple[str, int], float] = {}
        self._interrupted = False
        self._live = live_bar(
            console,
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._bar = self._live.add_task("starting", total=self._total, completed=done)

    def __enter__(self) -> Display:
        self._previous_handler = signal.signal(signal.SIGINT, self._interrupt)
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        signal.signal(signal.SIGINT, self._previous_handler)

    def _interrupt(self, *_: object) -> None:
        # Python drops an exception that hits it inside a destructor; then the next phase raises it again.
        self._interrupted = True
        raise KeyboardInterrupt

    def _heed_interrupt(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def phase(self, task: Task, round: int, name: str) -> None:
        """Show what is being done."""
        self._heed_interrupt()
        method = task.method.name
        where = f"seed {task.seed}  {method:<10} round {round}/{self._rounds}  {name:<8}"
        accuracy = self._accuracy.get((method, task.seed))
        self._live.update(self._bar, description=where + _percent(accuracy, width=7))
        if round == 0 and not self._console.is_terminal:
            self._say(f"seed {task.seed}  {method:<10} preparing: {name}", force=False)

    def round(self, row: Mapping[str, Any]) -> None:
        """Count a finished round."""
        self._done += 1
        if row["accuracy"] is not None:
            self._accuracy[row["method"], row["seed"]] = row["accuracy"]
        self._live.update(self._bar, completed=self._done)
        if self._console.is_terminal:
            return
        elapsed = time.monotonic() - self._began
        remaining = elapsed / max(1, self._done - self._done_before) * (self._total - self._done)
        dropped = f"  dropped {', '.join(row['clients_dropped'])}" if row["clients_dropped"] else ""
        dropped += "  no answer was of use, the model stays as it was" if row["model_kept"] else ""
        self._say(
            f"seed {row['seed']}  {row['method']:<10} round {row['round']}/{self._rounds}"
            f"{_percent(row['accuracy'], width=9)}{dropped}  {self._done}/{self._total} rounds, ETA {remaining:.0f} s",
            force=row["round"] == self._rounds,
        )

    def _say(self, line: str, *, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._spoke >= QUIET_SECONDS:
            self._spoke = now
            self._console.print(line, highlight=False, soft_wrap=True)


def _percent(accuracy: float | None, *, width: int) -> str:
    return "" if accuracy is None else f"{100 * accuracy:>{width}.1f} %"


def result_table(summary: Mapping[str, Any]) -> TerminalTable:
    """Return the final table: accuracy over seeds and its cost, one row per method."""
    seeds: Sequence[int] = summary["seeds"]
    over = (
        f"mean ± standard deviation over {len(seeds)} seeds"
        if len(seeds) > 1
        else f"seed {seeds[0]}"
    )
    covered = (
        "everything sent"
        if any(row["updates_protected"] for row in summary["rows"])
        else "the certainty scores"
    )
    caption = f"{summary['name']}: test accuracy in %, {over}; (ε, δ) covers {covered}"
    return to_terminal(results_table(summary["rows"], caption=caption, without="seeds"))


def split_table(table: NDArray[np.int64], classes: Sequence[str], *, how: str) -> TerminalTable:
    """Return the client-by-class table of a split."""
    headers = ("client", *classes, "all")
    rows = [
        *(
            (client, *(count or "·" for count in counts), counts.sum())
            for client, counts in enumerate(table)
        ),
        ("all", *table.sum(axis=0), table.sum()),
    ]
    bold = bold_row(len(table), headers)
    return to_terminal(
        Table(headers, rows, "r" * len(headers), f"Examples by client and class ({how})", bold)
    )


def dropped_lines(directory: Path) -> list[str]:
    """Say which share of the clients' answers could not be used, and why, where there was any."""
    rows = [
        json.loads(line)
        for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        reasons = [reason for row in own for reason in row["clients_dropped"].values()]
        if reasons:
            asked = sum(len(row["clients_asked"]) for row in own)
            lines.append(
                f"Warning: {len(reasons)} of {asked} answers to {method} were dropped, first: {reasons[0]}"
            )
        if kept := sum(row["model_kept"] for row in own):
            lines.append(
                f"Warning: in {kept} of {len(own)} rounds of {method} no answer was of use; the model stayed as it was"
            )
    return lines


def privacy_lines(directory: Path) -> list[str]:
    """Say what the ledger of a run comes to."""
    from fedaux.privacy.accounting import ledger_lines

    return ledger_lines(json.loads((directory / "ledger.json").read_text(encoding="utf-8")))


def h0_lines(directory: Path, checkpoint: str | None) -> list[str]:
    """Say what `fedaux pretrain` has once measured of the h0 that a run began from, where it has."""
    from fedaux.pretrain.store import probe_line, read_card

    files = (
        sorted((directory / "pretrained").glob("*.safetensors"))
        if checkpoint is None
        else [Path(checkpoint)]
    )
    cards = [read_card(file) or {} for file in files]
    several = [one for card in cards for one in (card.get("prototypes") or {"": card}).values()]
    return [line for card in several if (line := probe_line(card)) is not None]
