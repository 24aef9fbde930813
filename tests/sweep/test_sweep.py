"""A sweep as it runs: in processes that share work, skipping finished cells, surviving failures,
stops or is killed."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from helpers.experiments import TINY
from helpers.sweeps import accuracies, alive
from helpers.typing_commands import called

from fedaux.config import ConfigError
from fedaux.recipes import merged
from fedaux.running import run as execute
from fedaux.sweep import Cell, cells_of, expand, read_records, sweep
from fedaux.sweep.runner import SweepCallback, by_shared_inputs, is_finished
from fedaux.sweep.scheduler import CellQueue
from fedaux.sweep.worker import MODEL_SECTIONS, ROUND_SECTIONS, EventWriter, InputCache


class Notes(SweepCallback):
    """A callback that writes down what it is told."""

    def __init__(self, *, interrupt: str | None = None, kill: str | None = None) -> None:
        """On the second round of one cell all workers are killed; on that of another, the sweep is
        interrupted."""
        self.events: list[tuple[str, str]] = []
        self.finished: list[str] = []
        self._interrupt, self._kill = interrupt, kill

    def planned(
        self, cells: Sequence[Cell], *, finished: Sequence[str], done: Mapping[str, int]
    ) -> None:
        self.finished = list(finished)

    def started(self, cell: Cell) -> None:
        self.events.append(("started", cell.name))

    def progressed(self, cell: Cell, event: Mapping[str, Any]) -> None:
        if event["event"] == "round":
            self.events.append(("round", cell.name))
            second = self.of("round").count(cell.name) == 2
            if second and cell.name == self._interrupt:
                raise KeyboardInterrupt
            if second and cell.name == self._kill:
                for worker in workers_of(os.getpid()):
                    os.kill(worker, signal.SIGKILL)

    def ended(self, cell: Cell, reason: str | None) -> None:
        self.events.append(("ended" if reason is None else "failed", cell.name))

    def of(self, kind: str) -> list[str]:
        return [name for event, name in self.events if event == kind]


def workers_of(parent: int) -> list[int]:
    """The worker processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
            command = status.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(words[1]) == parent and b"fedaux.sweep.worker" in command and words[0] != "Z":
            found.append(int(status.parent.name))
    return found


def grid(**changes: Any) -> list[Cell]:
    return expand(merged(TINY, {"rounds": 2, **changes}))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Cell], Notes]:
    """Three cells, the second wrong in a way that only its data tells."""
    out, notes = tmp_path_factory.mktemp("sweep") / "out", Notes()
    points = [
        {"split.alpha": 0.1, "data.channel_mean": [0.5]},
        {"split.alpha": 0.1, "data.channel_mean": [0.1, 0.2]},
        {"split.alpha": 1.0, "data.channel_mean": [0.5]},
    ]
    cells = cells_of(merged(TINY, {"rounds": 2, "method": ["fedaux", "fedavg"]}), points)
    outcome = sweep(cells, out, name="swept", callback=notes)
    assert outcome.finished == ("alpha=0.1,channel_mean=0.5", "alpha=1,channel_mean=0.5")
    assert list(outcome.failed) == ["alpha=0.1,channel_mean=0.1_0.2"]
    return out, cells, notes


def test_each_cell_is_a_run_like_any_other(
    swept: tuple[Path, list[Cell], Notes], tmp_path: Path
) -> None:
    out, cells, _ = swept
    for cell in (cells[0], cells[2]):
        execute.run(cell.experiment, out=tmp_path / cell.name)
        assert is_finished(out / cell.name, cell)
        # The second of them took data and compute of the first.
        assert accuracies(out / cell.name) == accuracies(tmp_path / cell.name)
        assert (out / cell.name / "report.html").exists()


def test_a_cell_that_fails_is_recorded_and_the_others_go_on(
    swept: tuple[Path, list[Cell], Notes],
) -> None:
    out, cells, notes = swept
    bad = cells[1].name
    assert notes.of("failed") == [bad]
    assert len(notes.of("ended")) == 2
    record = json.loads((out / "sweep.json").read_text())
    assert record["keys"] == ["split.alpha", "data.channel_mean"]
    reasons = [cell["failed"] for cell in record["cells"]]
    assert reasons[0] is reasons[2] is None
    assert "data.channel_mean = [0.1, 0.2]: should be 1 numbers" in reasons[1]
    assert "Traceback" in (out / "logs" / f"{bad}.log").read_text()
    text = (out / "report.html").read_text()
    assert f"Of 3: 1 failed ({bad})." in text
    assert "failed: 1 problem in the configuration" in text


@pytest.mark.slow
def test_finished_cells_are_skipped_and_a_sweep_can_grow(
    swept: tuple[Path, list[Cell], Notes],
) -> None:
    out, cells, _ = swept
    good = [cells[0], cells[2]]
    before = {cell.name: (out / cell.name / "summary.json").stat().st_mtime_ns for cell in good}
    notes = Notes()
    more = grid(
        method=["fedaux", "fedavg"],
        split={"alpha": [0.1, 1.0, 10.0]},
        data={"channel_mean": [[0.5]]},
    )
    outcome = sweep(more, out, name="swept", resume=True, callback=notes)
    assert outcome.complete
    assert notes.finished == [cell.name for cell in good]
    assert notes.of("started") == ["alpha=10,channel_mean=0.5"]
    assert before == {
        cell.name: (out / cell.name / "summary.json").stat().st_mtime_ns for cell in good
    }
    names = [cell["name"] for cell in json.loads((out / "sweep.json").read_text())["cells"]]
    assert names == [*(cell.name for cell in cells), "alpha=10,channel_mean=0.5"]
    assert len([record for record in read_records(out) if record["complete"]]) == 6


def test_what_a_place_cannot_hold_is_refused_before_anything_runs(
    swept: tuple[Path, list[Cell], Notes], tmp_path: Path
) -> None:
    out, cells, _ = swept
    with pytest.raises(
        ValueError, match="already contains a sweep; continue it or add cells with --resume"
    ):
        sweep(cells, out)
    other = grid(method=["fedaux"], split={"alpha": [0.1, 1.0]}, data={"channel_mean": [[0.5]]})
    with pytest.raises(ConfigError) as error:
        sweep(other, out, resume=True)
    assert error.value.problems == [
        f"{cell.name}: method = ['fedaux']: the run has ['fedaux', 'fedavg']" for cell in other
    ]
    with pytest.raises(ValueError, match="contains a single run"):
        sweep(cells, out / cells[0].name)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(ValueError, match="is not empty and contains no sweep"):
        sweep(cells, tmp_path / "full")
    for devices, jobs, message in (
        (("cpu", "gpu"), None, "devices = 'gpu': should be auto, cpu, cuda or cuda:N"),
        (("cuda:99",), None, "CUDA devices are available"),
        (("cpu", "cpu"), 1, "jobs = 1: should be at least 2"),
        ((), 0, "jobs = 0: should be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep(cells, tmp_path / "new", devices=devices, jobs=jobs)
    assert not (tmp_path / "new").exists()


@pytest.mark.chance
@pytest.mark.slow
def test_killed_workers_and_stopped_sweeps_lose_nothing(tmp_path: Path) -> None:
    cells, notes = (
        grid(rounds=4, split={"alpha": [1.0, 2.0]}),
        Notes(kill="alpha=1", interrupt="alpha=2"),
    )
    with pytest.raises(KeyboardInterrupt):
        sweep(cells, tmp_path / "out", callback=notes)
    assert workers_of(os.getpid()) == []
    assert notes.of("failed") == ["alpha=1"]  # and the other cell went on without it
    (one, two) = json.loads((tmp_path / "out/sweep.json").read_text())["cells"]
    assert "status -9" in one["failed"]
    assert two["failed"] is None
    again = Notes()
    assert sweep(
        cells, tmp_path / "out", resume=True, devices=["cpu"], jobs=2, callback=again
    ).complete
    assert [event for event, _ in again.events[:2]] == [
        "started",
        "started",
    ]  # side by side: both, before either ended
    for cell in cells:
        assert 0 < again.of("round").count(cell.name) < 4  # each went on from where it was
    assert json.loads((tmp_path / "out/sweep.json").read_text())["cells"][0]["failed"] is None


@pytest.mark.chance
@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_from_there(tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "out"
    recipe.write_text(tomli_w.dumps(merged(TINY, {"rounds": 40, "split": {"alpha": [0.5, 5.0]}})))
    command = [
        sys.executable,
        "-m",
        "fedaux",
        "run",
        str(recipe),
        "--out",
        str(out),
        "--set",
        "rounds=6",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        workers: list[int] = []
        while not list(out.glob("alpha=5/cells/*/round-0000[2-5].safetensors")):
            workers = workers or workers_of(process.pid)
            assert process.poll() is None, "the second cell never began"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert workers
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not any(
        alive(worker) for worker in workers
    )  # they ended with the sweep, or the lock would not be free
    assert "1 finished before, 1 to be continued" in done.stdout
    cell = expand(merged(TINY, {"rounds": 6, "split": {"alpha": [5.0]}}))[0]
    execute.run(cell.experiment, out=tmp_path / "plain")
    assert accuracies(out / cell.name) == accuracies(tmp_path / "plain")


@pytest.mark.slow
def test_the_command_tells_plan_ranking_and_status(tmp_path: Path) -> None:
    recipe, plugin = tmp_path / "recipe.toml", tmp_path / "own.py"
    recipe.write_text(tomli_w.dumps(merged(TINY, {"rounds": 1})))
    plugin.write_text(
        "from dataclasses import replace\nfrom fedaux import METHODS\n"
        'METHODS["own"] = replace(METHODS["fedavg"], name="own")\n'
    )

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"COLUMNS": "120"}
        whole = [sys.executable, "-m", "fedaux", "run", str(recipe), *arguments]
        return subprocess.run(
            whole, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment
        )

    lists = ("--set", "data.channel_mean=[[0.5],[0.5,0.5]]", "--set", "method=[fedavg,own]")
    done = command(*lists, "--seeds", "2", "--plugin", "own.py")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith(
        "Sweep: 2 cells, 8 rounds in total\n  data.channel_mean = [0.5], [0.5, 0.5]\n"
        "  in each: fedavg, own\n  in each: seeds 0, 1\n"
    )
    assert "Failed: channel_mean=0.5_0.5: 1 problem in the configuration" in done.stdout
    assert "Report: runs/tiny/report.html" in done.stdout
    rows = {(record["method"], record["seed"]) for record in read_records(tmp_path / "runs/tiny")}
    assert rows == {(method, seed) for method in ("fedavg", "own") for seed in range(2)}


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(TINY))
    lists = "--set split.alpha=[-1,0.1] --set method=[[fedaux]] --set local.epoch=3"
    done = called("run", "recipe.toml", *lists.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: recipe.toml: 2 problems in the configuration",
        "method=fedaux,alpha=-1: split.alpha = -1: should be greater than 0",
        "local.epoch: unknown key; did you mean local.epochs?",
    ]
    single = called("run", "recipe.toml", "--devices", "cpu", cwd=tmp_path)
    assert "are for sweeps, and this recipe is a single run" in single.stderr
    several = called("run", "recipe.toml", "--set", "seeds=[[0]]", "--dry-run", cwd=tmp_path)
    assert "--dry-run are for a single run, and this is a sweep" in several.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_no_cell_is_begun_that_would_end_too_late() -> None:
    short, long, other = grid(rounds=2)[0], grid(rounds=200)[0], grid(rounds=3)[0]
    done = {cell.name: 0 for cell in (short, long, other)}
    work = CellQueue([short, long, other], done=done, time_limit=100.0)
    assert work.take() is short  # nothing is known yet
    work.finished(short, seconds=2.0)  # one second per round
    assert work.take() is other  # 200 rounds would not end in time
    assert work.take() is None
    assert work.left == [long]


def test_cells_that_share_their_inputs_are_run_in_a_row() -> None:
    models = [[{"name": "a", "model": "cnn"}], [{"name": "b", "model": "mlp"}]]
    cells = grid(split={"alpha": [1.0, 2.0]}, auxiliary={"size": [100, 200]}, prototypes=models)
    ordered = [tuple(cell.settings.values()) for cell in by_shared_inputs(cells)]
    sizes, alphas = [100, 200], [1.0, 2.0]
    assert list(cells[0].settings) == ["auxiliary.size", "split.alpha", "prototypes"]
    assert ordered == [
        (size, alpha, model) for size in sizes for model in models for alpha in alphas
    ]


def test_inputs_are_kept_only_where_nothing_they_depend_on_has_changed() -> None:
    load = InputCache()
    first = load(grid()[0].experiment)
    assert load(grid(split={"alpha": 3.0}, local={"epochs": 2}, seeds=[4])[0].experiment) is first
    other_model = load(grid(prototypes=[{"name": "cnn", "model": "mlp"}])[0].experiment)
    assert other_model.data is first.data
    assert other_model.compute is not first.compute
    other_data = load(grid(auxiliary={"size": 100})[0].experiment)
    assert (len(first.auxiliary), len(other_data.auxiliary)) == (200, 100)
    sections = set(grid()[0].experiment.to_dict())
    assert sections >= ROUND_SECTIONS | MODEL_SECTIONS  # every name is one of a section


def test_a_worker_tells_every_part_of_the_preparation_and_rounds_now_and_then() -> None:
    out = io.StringIO()
    telling = EventWriter(out)
    task = SimpleNamespace(method=SimpleNamespace(name="fedaux"), seed=0)
    for number, name in (
        (0, "pretrain"),
        (0, "pretrain 1/5"),
        (0, "release"),
        (1, "train"),
        (1, "teach"),
    ):
        telling.phase(task, number, name)  # type: ignore[arg-type]
    assert [json.loads(line)["phase"] for line in out.getvalue().splitlines()] == [
        "pretrain",
        "release",
    ]


@pytest.mark.slow
def test_a_scheduler_runs_the_cells_as_commands(tmp_path: Path) -> None:
    recipe = merged(TINY, {"split": {"alpha": [1.0, 2.0]}})
    (tmp_path / "grid.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
    words = ["run", "grid.toml", "--out", "out", "--commands"]
    told = called(*words, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        program, *rest = shlex.split(line)
        done = called(*rest, cwd=tmp_path)
        assert (program, done.returncode) == ("fedaux", 0), done.stderr
    assert "already contains a sweep" in called(*words, cwd=tmp_path).stderr
    assert called(*words, "--resume", cwd=tmp_path).stdout == ""  # nothing is left
    done = called("run", "grid.toml", "--out", "out", "--resume", cwd=tmp_path)
    assert "2 finished before" in done.stdout, done.stderr
    assert (tmp_path / "out/report.html").is_file()
