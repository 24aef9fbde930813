"""The search for optimizers: what it tries, that it sees no test data, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.experiments import tiny
from helpers.typing_commands import called

import fedaux
from fedaux.config import ConfigError, Experiment
from fedaux.core.algorithms import METHODS
from fedaux.recipes import load_experiment
from fedaux.running import preflight
from fedaux.running.run import Inputs, load_inputs
from fedaux.sweep import tuning
from fedaux.sweep.tuning import candidates, on_validation, search_of, tune

pytestmark = pytest.mark.usefixtures("without_pages")


def accuracies(path: Path) -> list[float]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["accuracy"] for line in lines]


def test_a_method_can_have_an_optimizer_of_its_own(tmp_path: Path) -> None:
    """Beside the same method with the recipe's, in one run."""
    methods = ["fedavg", "fedavg@sgd-0.3"]
    fedaux.run(tiny(method=methods, rounds=1), out=tmp_path / "both", progress=False)
    sgd = {"optimizer": "sgd", "learning_rate": 0.3}
    fedaux.run(tiny(method="fedavg", rounds=1), out=tmp_path / "adam", progress=False)
    fedaux.run(tiny(method="fedavg", rounds=1, local=sgd), out=tmp_path / "sgd", progress=False)
    separate = accuracies(tmp_path / "adam") + accuracies(tmp_path / "sgd")
    assert accuracies(tmp_path / "both") == separate
    assert accuracies(tmp_path / "adam") != accuracies(tmp_path / "sgd")


@pytest.mark.parametrize("name", ["fedavg@lbfgs-0.1", "fedavg@sgd-0", "x@sgd-0.1", "fedavg@sgd"])
def test_other_names_are_not_known(name: str) -> None:
    assert name not in METHODS
    with pytest.raises(ConfigError, match="not known"):
        preflight.check(tiny(method=name))


def test_names_with_an_optimizer_are_not_listed_and_read_as_numbers() -> None:
    assert METHODS["fedavg+p@adam-3e-05"].optimizer == ("adam", 3e-5)
    assert METHODS["scaffold@sgd-0.1"].problems(tiny()) != []
    preflight.check(tiny(method="scaffold@sgd-0.1"))
    assert not any("@" in name for name in METHODS)


def test_candidates_follow_from_the_recipe() -> None:
    experiment = tiny(
        method=["scaffold@sgd-0.1", "fedavg", "private-head"], local={"learning_rate": 0.003}
    )
    sgd = ["sgd-0.03", "sgd-0.1", "sgd-0.3"]
    grid = ["adam-0.0003", "adam-0.0009", "adam-0.003", "adam-0.009", *sgd]
    assert candidates(experiment) == {
        "scaffold@sgd-0.1": [f"scaffold@{own}" for own in sgd],
        "fedavg": [f"fedavg@{own}" for own in grid],
        "private-head": [],
    }
    linear = tiny(method="fedavg+p", mode="linear", local={"optimizer": "sgd"})
    assert candidates(linear)["fedavg+p"][2] == "fedavg+p@adam-0.01"
    with pytest.raises(ValueError, match="nothing to tune"):
        search_of(tiny(method="private-head"))


@pytest.mark.parametrize("validation", [0, 50])
def test_validation_examples_take_the_place_of_test_data(validation: int) -> None:
    experiment = tiny(data={"server_validation": validation})
    inputs, held = load_inputs(experiment), on_validation(experiment)
    every, rest, chosen = (
        [row.numpy().tobytes() for row in images]
        for images in (inputs.data.images, held.data.images, held.data.test_images)
    )
    assert len(chosen) == len(every) // 5
    assert sorted(rest + chosen) == sorted(every)
    kept = held.data.validation
    assert (0 if kept is None else len(kept[1])) == validation


def test_the_best_is_chosen_on_validation_examples_whatever_the_test_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny(method=["fedavg", "private-head"], rounds=3)
    monkeypatch.setattr(tuning, "SGD_RATES", (0.3,))
    monkeypatch.setattr(tuning, "ADAM_FACTORS", (1.0,))

    def spoiled(experiment: Experiment) -> Inputs:
        inputs = load_inputs(experiment)
        inputs.data.test_images.zero_()
        inputs.data.test_labels.copy_(torch.zeros_like(inputs.data.test_labels))
        return inputs

    search = search_of(experiment, rounds=1)
    assert search.method == ("fedavg@adam-0.001", "fedavg@sgd-0.3")
    table = tune(experiment, search, out=tmp_path / "a")
    monkeypatch.setattr(tuning, "load_inputs", spoiled)
    assert tune(experiment, search, out=tmp_path / "b").rows == table.rows
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    best = max(summary["rows"], key=lambda row: row["accuracy_mean"])["method"]
    assert [f"fedavg@{table.rows[0][1]}-{table.rows[0][2]}"] == [best]
    tuned = load_experiment(tmp_path / "a/tuned.toml")
    assert tuned.method == ("fedavg", best, "private-head")
    assert (tuned.rounds, tuned.data) == (3, experiment.data)


@pytest.mark.slow
def test_the_command_prints_a_table_and_the_run_that_follows(tmp_path: Path) -> None:
    changes = ["rounds=2", "method=[fedavg]", "auxiliary.size=200", "pretraining.epochs=1"]
    words = [word for change in changes for word in ("--set", change)]
    done = called("tune", "demo", "--rounds", "1", "--seeds", "1", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "validation accuracy" in done.stdout
    assert "Run it: fedaux run runs/demo-tune/tuned.toml" in done.stdout
    again = called(
        "tune", "demo", "--rounds", "1", "--seeds", "1", *words, "--resume", cwd=tmp_path
    )
    assert again.stdout.splitlines()[-3:] == done.stdout.splitlines()[-3:]
    ran = called("run", "runs/demo-tune/tuned.toml", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "fedavg@" in ran.stdout
