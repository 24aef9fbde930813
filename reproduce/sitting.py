"""Fill the tables over many short sittings: several cells side by side, until time is over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedaux.files import read_json
from reproduce.cells import Cell
from reproduce.results import is_current
from reproduce.running import UNFINISHED, Work

Found = Mapping[str, dict[str, Any]]
OUTCOMES = {0: "finished", UNFINISHED: "unfinished", -signal.SIGTERM: "unfinished"}
"""By exit status; others are failures."""
START_SECONDS = 25.0
"""From the start of a process to its first round."""
LEAST_SECONDS = 40.0
"""That a cell should have to be started at all."""
GRACE_SECONDS = 30.0
"""After the end, for the round that each process is in."""
REPORT_SECONDS = 20.0
POLL_SECONDS = 0.5
GUESSES = {  # seconds per round on an H200, fixed and per participant; measured times replace them
    "averaging": (0.05, 0.022),
    "distilling": (0.6, 0.105),
    "bayesian": (1.6, 0.105),
    "rehearsing": (0.8, 0.13),
}
KINDS = {
    "fedavg": "averaging",
    "fedprox": "averaging",
    "fedbe": "bayesian",
    "fedaux2": "rehearsing",
}
HEADS_FACTOR = 0.2
ONE_SHOT_SECONDS = 200.0


class Estimate:
    """Seconds of a GPU that cells take: guessed, corrected by the results that are there."""

    def __init__(self, cells: Sequence[Cell], found: Found) -> None:
        ratios: dict[tuple[str, ...], list[float]] = {}
        for cell in cells:
            if (result := found.get(cell.name)) is not None and "cpu" not in result["device"]:
                ratio = result["seconds"] / result["side_by_side"] / guess(cell)
                for key in _keys(cell):
                    ratios.setdefault(key, []).append(ratio)
        self._ratios = {key: median(values) for key, values in ratios.items()}

    def __call__(self, cell: Cell) -> float:
        """Return the seconds of a whole cell, alone."""
        known = [self._ratios[key] for key in _keys(cell) if key in self._ratios]
        return guess(cell) * (known[0] if known else 1.0)


def _keys(cell: Cell) -> list[tuple[str, ...]]:
    """Return what results are grouped by, the nearest first."""
    method = cell.row.method
    return [(cell.table, method, cell.place), (cell.table, method), (method,), (kind(cell),)]


def kind(cell: Cell) -> str:
    """Return the key of a cell's method in GUESSES."""
    return KINDS.get(re.split(r"[+@]", cell.row.method)[0], "distilling")


def guess(cell: Cell) -> float:
    """Return the seconds of a cell as long as nothing like it has been measured."""
    settings = cell.settings()
    if cell.rounds == 1:
        return ONE_SHOT_SECONDS
    clients = settings["split.num_clients"] * settings.get("participation_rate", 1.0)
    fixed, each = GUESSES[kind(cell)]
    seconds: float = cell.rounds * (fixed + each * clients)
    return seconds * (HEADS_FACTOR if settings.get("mode") == "linear" else 1.0)


@dataclass
class Job:
    """A cell that runs in a separate process."""

    cell: Cell
    process: subprocess.Popen[bytes]


def progress(cell: Cell, work: Work) -> tuple[int, float | None] | None:
    """Return the finished rounds of an unfinished run and its last accuracy in %; None before its
    first round."""
    with suppress(OSError, ValueError, KeyError, StopIteration):
        state = read_json(next(work.folder(cell).glob("cells/*/state.json")))
        rows = state["rows"]
        return len(rows), 100 * rows[-1]["accuracy"] if rows else None
    return None


def sitting(
    cells: Sequence[Cell],
    work: Work,
    found: Found,
    *,
    minutes: float,
    whole: bool = False,
) -> int:
    """Run missing cells in order until time is over, unfinished ones first; return the exit status.

    Cells that are not finished by then stop after a round and continue in the next sitting; with
    `whole`, only cells that are expected to finish are started.
    """
    began = time.time()
    until = began + 60 * minutes
    estimate = Estimate(cells, found)
    todo = [cell for cell in cells if not is_current(cell, found.get(cell.name), work.overrides)]
    todo.sort(key=lambda cell: not work.folder(cell).exists())  # stable: the order stays
    reasons = {cell.name: cell.missing(work.data, pretrain=work.pretrain) for cell in todo}
    for reason, number in Counter(filter(None, reasons.values())).items():
        print(f"{number} cells left out: missing: {reason}")
    todo = [cell for cell in todo if not reasons[cell.name]]
    running: list[Job] = []
    outcomes: Counter[str] = Counter()
    warm, reported = False, began

    def say(text: str) -> None:
        print(f"{_clock(time.time() - began)} {text}", flush=True)

    while True:
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            warm = True
            outcome = OUTCOMES.get(job.process.returncode, "failed")
            outcomes[outcome] += 1
            say(f"{outcome}: {job.cell.name}{_ending(job, outcome, work)}")
        warm = warm or any(progress(job.cell, work) for job in running)
        left = until - time.time()
        while len(running) < work.at_once and (warm or not running) and left > LEAST_SECONDS:
            chosen = _choose(todo, work, estimate, left / work.at_once, whole=whole)
            if chosen is None:
                break
            todo.remove(chosen)
            running.append(_start(chosen, work, until))
            say(f"started: {chosen.name}, about {estimate(chosen) / 60:.1f} minutes alone")
        if not running:
            break
        if left < -GRACE_SECONDS:
            for job in running:
                job.process.terminate()
        if time.time() - reported >= REPORT_SECONDS:
            reported = time.time()
            for job in running:
                rounds, accuracy = progress(job.cell, work) or (0, None)
                shown = "" if accuracy is None else f", {accuracy:.1f} %"
                say(f"  {job.cell.name}: round {rounds} of {job.cell.rounds}{shown}")
        time.sleep(POLL_SECONDS)
    told = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
    say(f"{told or 'nothing to do'}; {len(todo)} cells of these not started")
    return 1 if outcomes["failed"] else 0


def _choose(
    todo: Sequence[Cell], work: Work, estimate: Estimate, seconds: float, *, whole: bool
) -> Cell | None:
    """Return the first cell that fits into the seconds of a GPU that are left for it; else,
    unless `whole`, the first that can go on after some round."""
    for cell in todo:
        done, _ = progress(cell, work) or (0, None)
        needed = estimate(cell) * (1 - done / cell.rounds) + START_SECONDS / work.at_once
        if needed <= seconds:
            return cell
    return None if whole else next((cell for cell in todo if cell.rounds > 1), None)


def _start(cell: Cell, work: Work, until: float) -> Job:
    """Start the process of a cell; its output goes into STATE/logs."""
    log = work.state / "logs" / f"{work.folder(cell).name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "reproduce", "--cell", cell.name, "--until", str(until)]
    command += ["--data", str(work.data), "--state", str(work.state), "--out", str(work.out)]
    command += ["--commit", work.commit, "--at-once", str(work.at_once)]
    command += [part for text in work.overrides for part in ("--set", text)]
    command += ["--pretrain"] if work.pretrain else []
    share = str(max(1, (os.cpu_count() or 1) // work.at_once))
    environment = {"OMP_NUM_THREADS": share, "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    return Job(cell, process)


def _ending(job: Job, outcome: str, work: Work) -> str:
    """Return what to say about the end of a cell."""
    if outcome == "finished":
        accuracy = read_json(work.out / f"{job.cell.name}.json")["accuracy"]
        return f": {accuracy[-1]:.1f} / {max(accuracy):.1f}"
    if outcome == "unfinished":
        rounds, _ = progress(job.cell, work) or (0, None)
        return f": {rounds} of {job.cell.rounds} rounds"
    log = work.state / "logs" / f"{work.folder(job.cell).name}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return ":\n    " + "\n    ".join(lines[-12:])


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def report_status(cells: Sequence[Cell], found: Found) -> None:
    """Print the number of results per table, the time that the others take, and the next cells."""
    estimate = Estimate(cells, found)
    missing = [cell for cell in cells if not is_current(cell, found.get(cell.name))]
    names = {cell.name for cell in missing}
    print(f"{'table':15}{'seed':>5}{'cells':>7}{'there':>7}{'old':>5}{'missing, GPU minutes':>22}")
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.table, cell.seed), []).append(cell)
    for (table, seed), group in groups.items():
        lacking = [cell for cell in group if cell.name in names]
        old = sum(cell.name in found for cell in lacking)
        minutes = sum(map(estimate, lacking)) / 60
        there = len(group) - len(lacking)
        print(f"{table:15}{seed:5}{len(group):7}{there:7}{old:5}{minutes:22.0f}")
    total = sum(map(estimate, missing)) / 60
    print(f"{len(missing)} of {len(cells)} cells are missing, {total:.0f} GPU minutes. The next:")
    for cell in missing[:10]:
        print(f"  {cell.name}, {estimate(cell) / 60:.1f} minutes")
