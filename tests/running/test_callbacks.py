"""What a run shows in Python, and what other programs are told of it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import tiny
from rich.console import Console

import fedaux
from fedaux.running.callbacks import MLflowCallback, NotebookBar, TerminalBar, WandbCallback
from fedaux.running.tensorboard import round_points

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
        (line,) = [line for line in lines if line.startswith(method)]
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


@pytest.mark.parametrize("module", ["pandas", "wandb", "mlflow"])
def test_a_missing_extra_is_named(
    result: fedaux.Result, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # import fails, as without the package
    need = {"pandas": result.to_pandas, "wandb": WandbCallback, "mlflow": MLflowCallback}[module]
    with pytest.raises(ValueError, match=f"{module} is not installed; .* extra {module}"):
        need()


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


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: LevelDB's log of protocol buffers."""
    record: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the last piece of a record
            yield record.FromString(whole)
            whole = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = WandbCallback(project="digits", dir=str(tmp_path))
    experiment = tiny(method=["fedavg"], rounds=2, seeds=[0, 1])
    done = fedaux.run(experiment, out=tmp_path / "run", callback=callback)
    wandb.teardown()  # its process writes its files
    found: dict[str, list[dict[str, Any]]] = {}
    for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
        records = list(wandb_records(file))
        (run,) = {
            (record.run.project, record.run.run_group, record.run.display_name)
            for record in records
            if record.WhichOneof("record_type") == "run"
        }
        assert run[:2] == ("digits", "tiny")
        found[run[2]] = [
            {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
    assert set(found) == {"fedavg-seed0", "fedavg-seed1"}
    for row in done.metrics():
        logged = found[f"fedavg-seed{row['seed']}"][row["round"] - 1]
        assert logged["_step"] == row["round"]
        assert {key: logged[key] for key in round_points(row)} == round_points(row)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    store = (tmp_path / "mlruns").as_uri()
    experiment = tiny(method=["fedavg"], rounds=2, seeds=[0, 1])
    done = fedaux.run(experiment, out=tmp_path / "run", callback=MLflowCallback(store))
    client = mlflow.MlflowClient(tracking_uri=store)
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert {run.info.run_name for run in runs} == {"fedavg-seed0", "fedavg-seed1"}
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.params["certainty.epsilon"] == "1.0"
        rows = [row for row in done.metrics() if str(row["seed"]) == run.data.params["seed"]]
        assert len(rows) == 2
        for name in round_points(rows[0]):
            history = client.get_metric_history(run.info.run_id, name)
            assert {point.step: point.value for point in history} == {
                row["round"]: round_points(row)[name] for row in rows
            }


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
