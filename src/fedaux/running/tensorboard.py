"""TensorBoard event files (`output.tensorboard`).

Like metrics.jsonl they are derived from state.json: a resumed run rewrites them first, so that
every round is one point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedaux.config import ExperimentFields
from fedaux.core.task import Callback, Task
from fedaux.files import read_json
from fedaux.formatting import install_hint

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fedaux.running.run_directory import RunDirectory

FOLDER = "tensorboard"
"""Folder of the event files in a run directory, with one folder per method and seed."""


def check(experiment: ExperimentFields) -> None:
    """Raise ValueError if event files are requested but TensorBoard is not installed."""
    if experiment.output.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            f"output.tensorboard = true: needs TensorBoard, {install_hint('tensorboard')}"
        )


@contextmanager
def event_files(directory: RunDirectory, callback: Callback) -> Iterator[Callback]:
    """Yield a callback that also writes event files, or the same callback if none are requested."""
    if not directory.experiment.output.tensorboard:
        yield callback
        return
    board = TensorBoardCallback(directory, callback)
    try:
        yield board
    finally:
        board.close()


class TensorBoardCallback:
    """Writes one point per round and quantity, and forwards events to another callback."""

    def __init__(self, directory: RunDirectory, callback: Callback) -> None:
        self._directory = directory
        self._callback = callback
        self._writers: dict[tuple[str, int], SummaryWriter] = {}
        for header in directory.headers():
            self._writer(header["method"], header["seed"])
            self._end_if_finished(header)

    def phase(self, task: Task, round: int, name: str) -> None:
        """Forward the phase."""
        self._callback.phase(task, round, name)

    def round(self, row: Mapping[str, Any]) -> None:
        """Write the points of a finished round and flush."""
        writer = self._writer(row["method"], row["seed"])
        _write(writer, round_points(row), step=row["round"])
        writer.flush()
        self._end_if_finished(row)
        self._callback.round(row)

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _end_if_finished(self, row: Mapping[str, Any]) -> None:
        """Close the files of a method and seed after its last round."""
        if row["round"] >= self._directory.experiment.rounds:
            self._writers.pop((row["method"], row["seed"])).close()

    def _writer(self, method: str, seed: int) -> SummaryWriter:
        """Return the writer of a method and seed; the first call rewrites its files."""
        if (method, seed) in self._writers:
            return self._writers[method, seed]
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # a slow import

        state = self._directory.folder(method, seed) / "state.json"
        folder = self._directory.path / FOLDER / state.parent.name
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # A running TensorBoard drops its old points, which are written again.
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
    """Return the quantities of the preparation phase by tag, for round 0."""
    return {
        **{f"seconds/{phase}": seconds for phase, seconds in preparation["seconds"].items()},
        "bytes/up": preparation["bytes_up"],
        "bytes/down": preparation["bytes_down"],
    }


def round_points(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured quantities of a round by tag."""
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
    """Estimate when preparation and each round ended, backwards from the last."""
    times = [last]
    for row in reversed(rows):
        times.append(times[-1] - sum(row["seconds"].values()))
    return times[::-1]
