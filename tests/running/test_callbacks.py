"""What a run shows in Python, and what other programs are told of it."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import tiny
from rich.console import Console

import fedaux
from fedaux.running.callbacks import NotebookBar, TerminalBar

pytestmark = pytest.mark.usefixtures("without_pages")


class Kept:
    """A callback that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.phases: list[str] = []
        self.closed = 0

    def phase(self, task: Any, round: int, name: str) -> None:
        self.phases.append(name)

    def round(self, row: Any) -> None:
        self.rows.append(dict(row))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fedaux.Result:
    experiment = tiny(method=["fedavg", "feddf"], rounds=2, seeds=[0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedaux.report, "write_report", lambda path: None)
        return fedaux.run(experiment, out=tmp_path_factory.mktemp("run"))


def test_every_callback_sees_every_round(tmp_path: Path) -> None:
    both = Kept(), Kept()
    done = fedaux.run(tiny(method=["fedavg"], rounds=2), out=tmp_path, callback=both)
    assert both[0].rows == both[1].rows == done.metrics()
    assert both[0].phases == both[1].phases
    assert both[0].closed == both[1].closed == 1


def test_callbacks_are_closed_when_a_run_fails(tmp_path: Path) -> None:
    class Failing(Kept):
        def round(self, row: Any) -> None:
            raise RuntimeError("full disk")

    kept, failing = Kept(), Failing()
    with pytest.raises(RuntimeError, match="full disk"):
        fedaux.run(tiny(method=["fedavg"]), out=tmp_path, callback=[kept, failing])
    assert kept.closed == failing.closed == 1


def test_a_result_is_a_table(result: fedaux.Result) -> None:
    rows = {row["method"]: row for row in result.summary["rows"]}
    lines = str(result).splitlines()
    for method, row in rows.items():
        mean, deviation = 100 * row["accuracy_mean"], 100 * row["accuracy_std"]
        line = next(line for line in lines if line.startswith(method))
        assert f"{mean:.1f} ± {deviation:.1f}" in line
        assert f"{mean:.1f} ± {deviation:.1f}" in result._repr_html_()
    assert lines[-1] == f"Report: {result.directory / 'report.html'}"
    assert repr(result) == str(result)


def test_a_result_as_a_data_frame(result: fedaux.Result) -> None:
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    frame = result.to_pandas()
    assert len(frame) == 8
    means = frame[frame["round"] == 2].groupby("method")["accuracy"].mean()
    for row in result.summary["rows"]:
        assert means[row["method"]] == pytest.approx(row["accuracy_mean"])


def test_a_missing_extra_is_named(result: fedaux.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # import fails, as without the package
    with pytest.raises(ValueError, match=r"needs the package pandas: .*\[pandas\]"):
        result.to_pandas()


def test_a_terminal_gets_a_bar(result: fedaux.Result) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = TerminalBar(fedaux.load_experiment(result.directory / "config.toml"), console)
    for row in result.metrics():
        bar.round(row)
    (task,) = bar._live.tasks
    bar.close()
    assert (task.completed, task.total) == (8, 8)
    last = result.metrics()[-1]
    assert task.description == f"feddf seed 1 round 2/2 {100 * last['accuracy']:.1f} %"


def test_a_notebook_gets_a_bar(result: fedaux.Result) -> None:
    pytest.importorskip("IPython", reason="the extra dev is not installed")
    shell = import_module("IPython.core.interactiveshell").InteractiveShell.instance()
    with import_module("IPython.utils.capture").capture_output() as shown:
        bar = NotebookBar(fedaux.load_experiment(result.directory / "config.toml"))
        bar.round(result.metrics()[0])
        bar.close()
    shell.clear_instance()
    started, moved, ended = (output.data["text/html"] for output in shown.outputs)
    assert (started, ended) == ("starting", "")
    assert moved.startswith('<progress value="1" max="8"></progress> fedavg seed 0 round 1/2 ')
