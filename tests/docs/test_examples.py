"""The programs in examples/ do what they say, in their quick form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import tiny
from helpers.paths import ROOT

import fedaux as package
from fedaux.recipes import flatten

EXAMPLES = ROOT / "examples"


def run_example(name: str, out: Path, *, timeout: float = 120) -> str:
    """Run an example as a reader would, with warnings as errors; return what it says."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), "--quick", "--out", str(out)]
    done = subprocess.run(
        command, cwd=out.parent, env=os.environ, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["complete"]
    assert (run / "report.html").exists()
    return summary


def test_every_example_is_tested_and_shown() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    programs = {"first_experiment.py", "own_data.py", "own_method.py", "federation.py"}
    others = {"ablation.py", "to_tensorboard.py", "to_wandb.py", "to_mlflow.py"}
    assert names == programs | others
    page = (EXAMPLES.parent / "docs/index.md").read_text(encoding="utf-8")
    assert all(f"](../examples/{name})" in page for name in names)


@pytest.mark.slow
def test_ablation_rows_differ_in_one_part_and_run(tmp_path: Path) -> None:
    plugin = ["--plugin", str(EXAMPLES / "ablation.py")]
    fedaux = [sys.executable, "-m", "fedaux"]
    load = (
        "import sys, fedaux; fedaux.load_plugin(sys.argv[1]); "
        "print(*(f'{name}={vars(one)}' for name, one in fedaux.METHODS.items()), sep='\\n')"
    )
    words = [sys.executable, "-c", load, plugin[1]]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = dict(line.split("={'name': ", 1) for line in listed)
    rows = {name: row.partition(", ")[2] for name, row in rows.items()}
    without = [name for name in rows if name.startswith("fedaux2-")]
    peers = [f"{peer}+head+reh" for peer in ("fedavg", "fedprox", "feddf")]
    assert len(without) == 10
    assert all(rows[name] != rows["fedaux2"] for name in without)
    assert peers == [name for name in rows if name in peers]
    chosen = json.dumps(["fedaux2", *without, *peers])
    settings = [f"method={chosen}", "seeds=[0]", "rounds=1", "mode=linear", "data.size=300"]
    options = [word for one in settings for word in ("--set", one)]
    command = [*fedaux, "run", "demo", "--out", str(tmp_path / "run"), *plugin, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(summary_of(tmp_path / "run")["rows"]) == 1 + len(without) + len(peers)


@pytest.mark.slow
def test_a_first_experiment(tmp_path: Path) -> None:
    said = run_example("first_experiment.py", tmp_path / "run")
    rows = summary_of(tmp_path / "run")["rows"]
    assert [row["method"] for row in rows] == ["fedaux", "fedavg+p"]
    assert all(f"{row['method']}: {row['accuracy_mean']:.1%}" in said for row in rows)
    assert "one vector a seed, at ε = 0.5 and δ = 1e-05" in said
    entries = json.loads((tmp_path / "run/ledger.json").read_text(encoding="utf-8"))["entries"]
    assert sorted(entry["client"] for entry in entries) == list(range(10))  # one each, as it says


@pytest.mark.slow
def test_own_data(tmp_path: Path) -> None:
    said = run_example("own_data.py", tmp_path / "clinics")
    rows = summary_of(tmp_path / "clinics/run")["rows"]
    assert all(f"{100 * row['accuracy_mean']:.1f}" in said for row in rows)
    entries = json.loads((tmp_path / "clinics/run/ledger.json").read_text(encoding="utf-8"))[
        "entries"
    ]
    assert [entry["num_examples"] for entry in entries] == [90] * 6  # every clinic its own folder


@pytest.mark.slow
def test_own_method(tmp_path: Path) -> None:
    said = run_example("own_method.py", tmp_path / "run")
    rows = summary_of(tmp_path / "run")["rows"]
    assert [row["method"] for row in rows] == ["surest", "feddf", "fedavg"]
    assert len({row["accuracy_mean"] for row in rows}) > 1
    assert all(f"{row['method']}: {row['accuracy_mean']:.1%}" in said for row in rows)


@pytest.mark.federation
def test_a_federation(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    said = run_example("federation.py", tmp_path / "all", timeout=280)
    assert "answers of clients [0, 1]" in said
    summary_of(tmp_path / "all/trial/runs/trial")
    for client in (0, 1):
        (ledger,) = (tmp_path / f"all/node-{client}").rglob("ledger.json")
        assert len(json.loads(ledger.read_text(encoding="utf-8"))["spent"]) == 1


def test_rounds_come_to_tensorboard(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    package.run(tiny(rounds=2), out=tmp_path)
    program = [sys.executable, str(EXAMPLES / "to_tensorboard.py"), str(tmp_path)]
    for _ in range(2):  # a second call replaces the files of the first
        subprocess.run(program, check=True)
    curves = reading.EventAccumulator(str(tmp_path / "tensorboard/fedaux-seed0")).Reload()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for tag, name in (("accuracy", "accuracy"), ("seconds/train", "seconds.train")):
        expected = [(row["round"], flatten(row)[name]) for row in map(json.loads, lines)]
        found = [(event.step, event.value) for event in curves.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])
