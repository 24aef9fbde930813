"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from helpers.experiments import TINY, tiny
from helpers.typing_commands import called

import fedaux
from fedaux.core.server import Server
from fedaux.core.task import State

pytestmark = pytest.mark.usefixtures("without_pages")

pytest.importorskip("tensorboard")


def points_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of every tag, all of them, in the order of the file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def expected_points(directory: Path, cell: str) -> dict[str, list[tuple[int, float]]]:
    """Return what the truth about a cell says, written out."""
    state = json.loads((directory / "cells" / cell / "state.json").read_text())
    expected: dict[str, list[tuple[int, float]]] = {}

    def add(tag: str, step: int, value: float | None) -> None:
        if value is not None:
            expected.setdefault(tag, []).append((step, value))

    for phase, seconds in state["preparation"]["seconds"].items():
        add(f"seconds/{phase}", 0, seconds)
    add("bytes/up", 0, state["preparation"]["bytes_up"])
    add("bytes/down", 0, state["preparation"]["bytes_down"])
    for row in state["rows"]:
        step = row["round"]
        add("test/accuracy", step, row["accuracy"])
        add("test/loss", step, row["loss"])
        add("test/accuracy_ensemble", step, row["accuracy_ensemble"])
        add("test/accuracy_of_cnn", step, row["accuracy_by_prototype"].get("cnn"))
        add("local/loss", step, row["local_loss"])
        add("bytes/up", step, row["bytes_up"])
        add("bytes/down", step, row["bytes_down"])
        for kind in ("asked", "answered", "dropped", "remembered"):
            add(f"clients/{kind}", step, len(row[f"clients_{kind}"]))
        for phase, seconds in row["seconds"].items():
            add(f"seconds/{phase}", step, seconds)
    return expected


def assert_same(directory: Path, cell: str) -> None:
    found, expected = points_of(directory / "tensorboard" / cell), expected_points(directory, cell)
    assert found.keys() == expected.keys()
    for tag, points in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        assert [value for _, value in found[tag]] == pytest.approx(
            [value for _, value in points], rel=1e-6
        ), tag


def test_every_round_of_every_cell_is_a_point(tmp_path: Path) -> None:
    experiment = tiny(
        method=["fedavg", "fedaux"],
        seeds=[0, 1],
        evaluation={"every": 2},
        output={"tensorboard": True},
    )
    fedaux.run(experiment, out=tmp_path / "run")
    cells = sorted(path.name for path in (tmp_path / "run/tensorboard").iterdir())
    assert cells == ["fedaux-seed0", "fedaux-seed1", "fedavg-seed0", "fedavg-seed1"]
    for cell in cells:
        assert_same(tmp_path / "run", cell)
    accuracy = points_of(tmp_path / "run/tensorboard/fedaux-seed0")["test/accuracy"]
    assert [step for step, _ in accuracy] == [2, 3]  # every second, and the last


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    fedaux.run(tiny(rounds=1), out=tmp_path / "run")
    assert not (tmp_path / "run/tensorboard").exists()


def test_a_resumed_run_has_no_point_twice_and_none_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny(method=["fedavg", "fedaux"], output={"tensorboard": True})
    play_round = Server.play_round

    def fail_after_the_round(self: Server, state: State) -> tuple[State, dict[str, Any]]:
        played = play_round(self, state)
        if (self.task.method.name, state.round) == ("fedaux", 1):
            # The callback was told of round 2, the checkpoint is of round 1.
            raise KeyboardInterrupt
        return played

    monkeypatch.setattr(Server, "play_round", fail_after_the_round)
    with pytest.raises(KeyboardInterrupt):
        fedaux.run(experiment, out=tmp_path / "run")
    told = points_of(tmp_path / "run/tensorboard/fedaux-seed0")["local/loss"]
    assert [step for step, _ in told] == [1, 2]
    monkeypatch.setattr(Server, "play_round", play_round)
    fedaux.run(experiment, out=tmp_path / "run", resume=True)
    for cell in ("fedavg-seed0", "fedaux-seed0"):
        assert_same(tmp_path / "run", cell)


def test_a_run_that_began_without_gets_its_earlier_rounds_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_round = Server.play_round

    def stop_after_two(self: Server, state: State) -> tuple[State, dict[str, Any]]:
        if state.round == 2:
            raise KeyboardInterrupt
        return play_round(self, state)

    monkeypatch.setattr(Server, "play_round", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        fedaux.run(tiny(), out=tmp_path / "run")
    monkeypatch.setattr(Server, "play_round", play_round)
    fedaux.run(tiny(output={"tensorboard": True}), out=tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", "fedaux-seed0")


def test_times_of_points_written_later_are_those_of_the_rounds(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fedaux.run(tiny(), out=tmp_path / "run")
    fedaux.run(tiny(output={"tensorboard": True}), out=tmp_path / "run", resume=True)
    reader = EventAccumulator(str(tmp_path / "run/tensorboard/fedaux-seed0"))
    reader.Reload()
    times = [event.wall_time for event in reader.Scalars("local/loss")]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert times[1] - times[0] == pytest.approx(sum(rows[1]["seconds"].values()), abs=1e-3)
    assert times[2] == pytest.approx(
        (tmp_path / "run/cells/fedaux-seed0/state.json").stat().st_mtime, abs=1e-3
    )


def test_the_option_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(TINY | {"rounds": 1}))
    done = called("run", "recipe.toml", "--tensorboard", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Curves: tensorboard --logdir runs/tiny/tensorboard" in done.stdout
    assert_same(tmp_path / "runs/tiny", "fedaux-seed0")


def test_without_tensorboard_the_extra_is_named_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaux.running.tensorboard.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"output.tensorboard = true: needs TensorBoard.*\[tensorboard\]'"
    ):
        fedaux.run(tiny(output={"tensorboard": True}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
