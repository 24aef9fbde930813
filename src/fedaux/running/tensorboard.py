"""TensorBoard's event files beside the metrics, where `output.tensorboard` asks for them.

They are derived from the run's cells, like metrics.jsonl: whoever goes on with a run writes them anew first, so every
round is one point, whatever was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedaux.config import ExperimentFields
from fedaux.core.task import Callback, Task
from fedaux.files import read_json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fedaux.running.run_directory import RunDirectory

FOLDER = "tensorboard"
"""Where the event files of a run directory are, in a folder for each method and seed."""


def check(experiment: ExperimentFields) -> None:
    """Raise ValueError where event files are wanted and TensorBoard is not installed."""
    if experiment.output.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            "output.tensorboard = true: needs TensorBoard, pip install 'fedaux[tensorboard]'"
        )


@contextmanager
def watching(directory: RunDirectory, callback: Callback) -> Iterator[Callback]:
    """Give a callback that also writes event files, or the same one where the experiment asks for none."""
    if not directory.experiment.output.tensorboard:
        yield callback
        return
    board = Board(directory, callback)
    try:
        yield board
    finally:
        board.close()


class Board:
    """A callback that writes a point a round and quantity, and passes on what it is told."""

    def __init__(self, directory: RunDirectory, callback: Callback) -> None:
        self._directory = directory
        self._callback = callback
        self._writers: dict[tuple[str, int], SummaryWriter] = {}
        for header in directory.headers():
            self._writer(header["method"], header["seed"])
            self._end_if_finished(header)

    def phase(self, task: Task, round: int, name: str) -> None:
        """Pass it on."""
        self._callback.phase(task, round, name)

    def round(self, row: Mapping[str, Any]) -> None:
        """Write the points of a finished round, visible at once."""
        writer = self._writer(row["method"], row["seed"])
        _write(writer, round_points(row), step=row["round"])
        writer.flush()
        self._end_if_finished(row)
        self._callback.round(row)

    def close(self) -> None:
        """Finish the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _end_if_finished(self, row: Mapping[str, Any]) -> None:
        """Close the files of a method and seed after its last round: a long run has many."""
        if row["round"] >= self._directory.experiment.rounds:
            self._writers.pop((row["method"], row["seed"])).close()

    def _writer(self, method: str, seed: int) -> SummaryWriter:
        """Return the writer of one method and seed; the first time with new files, which hold what its cell holds."""
        if (method, seed) in self._writers:
            return self._writers[method, seed]
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # imports for seconds, and only where it is wanted

        state = self._directory.cell(method, seed) / "state.json"
        folder = self._directory.path / FOLDER / state.parent.name
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # A TensorBoard that is looking on forgets the points it has: each comes again.
        writer = SummaryWriter(str(folder), purge_step=0)
        header = read_json(state)
        times = _times(header["rows"], last=state.stat().st_mtime)
        _write(writer, preparation_points(header["preparation"]), step=0, time=times[0])
        for row, time in zip(header["rows"], times[1:], strict=True):
            _write(writer, round_points(row), step=row["round"], time=time)
        writer.flush()
        self._writers[method, seed] = writer
        return writer


def preparation_points(preparation: Mapping[str, Any]) -> dict[str, float]:
    """Return what the preparation phase took, by tag; it is drawn at round 0."""
    return {
        **{f"seconds/{phase}": seconds for phase, seconds in preparation["seconds"].items()},
        "bytes/up": preparation["bytes_up"],
        "bytes/down": preparation["bytes_down"],
    }


def round_points(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the quantities of a round by tag; what was not measured has no point."""
    points: dict[str, float | None] = {
        "test/accuracy": row["accuracy"],
        "test/loss": row["loss"],
        "test/accuracy_ensemble": row["accuracy_ensemble"],
        **{
            f"test/accuracy_of_{name}": accuracy
            for name, accuracy in row["accuracy_by_prototype"].items()
        },
        "local/loss": row["local_loss"],
        "clients/asked": len(row["clients_asked"]),
        "clients/answered": len(row["clients_answered"]),
        "clients/dropped": len(row["clients_dropped"]),
        "clients/remembered": len(row["clients_remembered"]),
        "bytes/up": row["bytes_up"],
        "bytes/down": row["bytes_down"],
        **{f"seconds/{phase}": seconds for phase, seconds in row["seconds"].items()},
    }
    return {tag: value for tag, value in points.items() if value is not None}


def _write(
    writer: SummaryWriter, points: Mapping[str, float], *, step: int, time: float | None = None
) -> None:
    for tag, value in points.items():
        writer.add_scalar(tag, value, step, walltime=time)


def _times(rows: list[dict[str, Any]], *, last: float) -> list[float]:
    """Return when preparation and each round ended, if nothing came between them: counted back from the last."""
    times = [last]
    for row in reversed(rows):
        times.append(times[-1] - sum(row["seconds"].values()))
    return times[::-1]
