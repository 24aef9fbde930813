from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from helpers.experiments import tiny
from helpers.programs import run_program
from safetensors.torch import load_file

import fedaux
from fedaux.config import ConfigError, Experiment
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.data.tensor_files import save_checked
from fedaux.fast.feature_cache import FeatureCache
from fedaux.models.standardised import without_map
from fedaux.pretrain.training import Training
from fedaux.privacy.ledger import LedgerEntry
from fedaux.recipes import load_experiment
from fedaux.running.display import (
    best_method,
    classes_line,
    privacy_lines,
    split_table,
    warning_lines,
)
from fedaux.running.shared import digest_of


def rows_of(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "seconds"}
        for line in lines
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "finished"
    experiment = tiny(method=["fedavg", "fedaux"], seeds=[0, 1], participation_rate=0.5)
    assert fedaux.run(experiment, out=directory).directory == directory
    return directory


def test_a_run_directory_holds_everything(finished: Path) -> None:
    experiment = load_experiment(finished / "config.toml")
    rows = rows_of(finished)
    order = [(row["seed"], row["method"], row["round"]) for row in rows]
    assert order == [(s, m, r) for s in (0, 1) for m in ("fedavg", "fedaux") for r in (1, 2, 3)]
    wanted = {
        "accuracy",
        "loss",
        "clients_asked",
        "clients_answered",
        "clients_dropped",
        "bytes_up",
        "bytes_down",
    }
    assert all(wanted <= row.keys() for row in rows)
    ledger = json.loads((finished / "ledger.json").read_text())
    assert {(e["method"], e["seed"], e["client"]) for e in ledger["entries"]} == {
        ("fedaux", seed, client) for seed in (0, 1) for client in range(4)
    }
    assert all(entry["noise"] == "simulated" for entry in ledger["entries"])
    assert ledger["unprotected"].startswith(
        "The model updates of local training are sent without differential privacy."
    )
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["complete"] is True
    assert summary["config_sha256"] == experiment.sha256()
    assert (finished / "report.html").stat().st_size > 1000
    assert json.loads((finished / "environment.json").read_text())["fedaux"] == fedaux.__version__


def test_summary_states_mean_and_spread_over_seeds(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    rows = rows_of(finished)
    for line in summary["rows"]:
        accuracy = np.array(
            [
                [
                    row["accuracy"]
                    for row in rows
                    if (row["method"], row["seed"]) == (line["method"], s)
                ]
                for s in (0, 1)
            ]
        )
        assert line["accuracy_mean"] == pytest.approx(accuracy[:, -1].mean())
        assert line["accuracy_std"] == pytest.approx(accuracy[:, -1].std(ddof=1))
        assert line["accuracy_max_mean"] == pytest.approx(accuracy.max(axis=1).mean())
    by_method = {line["method"]: line for line in summary["rows"]}
    assert (by_method["fedaux"]["epsilon"], by_method["fedaux"]["delta"]) == (1.0, 1e-5)
    assert by_method["fedavg"]["epsilon"] is None


@pytest.mark.usefixtures("without_pages")
def test_seconds_of_methods_are_without_what_methods_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, late = time.perf_counter, 0.0

    def slow(function: Any) -> Any:
        """By its clock, a call takes a hundred seconds longer."""

        def slower(*args: Any, **options: Any) -> Any:
            nonlocal late
            late += 100.0
            return function(*args, **options)

        return slower

    monkeypatch.setattr(time, "perf_counter", lambda: real() + late)
    monkeypatch.setattr(FeatureCache, "_computed", slow(FeatureCache._computed))
    monkeypatch.setattr(Training, "epoch", slow(Training.epoch))
    experiment = tiny(method=["fedaux", "fedavg+p"], rounds=1, mode="linear")
    summary = fedaux.run(experiment, out=tmp_path / "run").summary
    # Features of public, private and test examples, and one epoch.
    assert 400 <= summary["shared_seconds"] < 500
    assert all(row["seconds"] < 100 for row in summary["rows"])


def test_methods_of_a_seed_share_split_selection_and_pretraining(finished: Path) -> None:
    rows = rows_of(finished)
    asked = {(row["method"], row["seed"], row["round"]): row["clients_asked"] for row in rows}
    for seed in (0, 1):
        for number in (1, 2, 3):
            assert asked["fedavg", seed, number] == asked["fedaux", seed, number]
    assert len(list((finished / "pretrained").iterdir())) == 2  # one a seed


def test_scores_picture_has_a_distribution_over_clients(finished: Path) -> None:
    tensors = load_file(finished / "scores.safetensors")
    assert tensors["weights_by_class"].sum(dim=0).numpy() == pytest.approx(np.ones(10), abs=1e-5)
    assert list(tensors) == ["weights_by_class"]


def test_only_the_last_checkpoint_is_kept_and_nothing_is_pickled(finished: Path) -> None:
    for cell in (finished / "cells").iterdir():
        held = {path.name for path in cell.iterdir()} - {"prepared.safetensors"}
        assert held == {"round-00003.safetensors", "state.json"}


def unread(_: Experiment) -> Any:
    raise AssertionError("data is read before the directory is refused")


def test_a_used_directory_is_refused(finished: Path) -> None:
    experiment = load_experiment(finished / "config.toml")
    before = (finished / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="already contains a run; continue it with --resume"):
        fedaux.run(experiment, out=finished, load=unread)
    assert (finished / "metrics.jsonl").read_text() == before


def test_resuming_another_experiment_is_refused_naming_the_keys(finished: Path) -> None:
    changes: dict[str, Any] = {"method": ["fedavg", "fedaux"], "seeds": [0, 1]}
    with pytest.raises(ConfigError, match=r"participation_rate = 1.0: the run has"):
        fedaux.run(tiny(**changes), out=finished, resume=True)
    with pytest.raises(ConfigError, match=r"rounds = 2: the run has 3; a run can be extended, not"):
        fedaux.run(tiny(**changes, participation_rate=0.5, rounds=2), out=finished, resume=True)


def weights_of(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all checkpoints, by file."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.glob("cells/**/*.safetensors"))
    }


@pytest.mark.usefixtures("without_pages")
def test_more_rounds_extend_a_finished_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"method": ["fedavg", "fedaux+m"], "participation_rate": 0.5}
    fedaux.run(tiny(**changes, rounds=4), out=tmp_path / "whole")
    fedaux.run(tiny(**changes, rounds=2), out=tmp_path / "extended")
    summary = fedaux.run(tiny(**changes, rounds=4), out=tmp_path / "extended", resume=True).summary
    assert (summary["rounds"], summary["complete"]) == (4, True)
    extended, whole = rows_of(tmp_path / "extended"), rows_of(tmp_path / "whole")
    for row in extended:
        if row["round"] == 2:  # it was the last round then
            del row["confusion"]
            row.pop("information", None)
    assert extended == whole
    assert weights_of(tmp_path / "extended") == weights_of(tmp_path / "whole")
    one, other = (load_file(tmp_path / run / "scores.safetensors") for run in ("whole", "extended"))
    assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())
    with pytest.raises(
        ConfigError, match=r"rounds = 2: the run has 4; .*: --set rounds=4, or more"
    ):
        fedaux.run(tiny(**changes, rounds=2), out=tmp_path / "extended", resume=True)
    for file in ("config.toml", "ledger.json"):
        assert (tmp_path / "extended" / file).read_text() == (tmp_path / "whole" / file).read_text()


@pytest.mark.usefixtures("without_pages")
def test_an_extended_run_keeps_no_model_of_an_earlier_round(tmp_path: Path) -> None:
    fedaux.run(tiny(rounds=1, output={"models": True}), out=tmp_path / "run")
    assert list(tmp_path.glob("run/models/*.safetensors"))
    extended = tiny(rounds=2, output={"models": False})
    fedaux.run(extended, out=tmp_path / "run", resume=True)
    assert not list(tmp_path.glob("run/models/*"))


def test_what_a_killed_process_left_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.config.toml.1234.part").write_text("name =")
    for rest in ("round-00000.safetensors", "memory/client-00001-round-00000.safetensors"):
        experiment = tiny(method="fedavg+m", rounds=1)
        fedaux.run(experiment, out=tmp_path / "run", resume=True)
        assert not list(tmp_path.rglob("*.part"))
        assert not list(tmp_path.rglob("*-00000.safetensors"))
        (tmp_path / "run/cells/fedavg+m-seed0" / rest).write_bytes(b"old")
    fedaux.run(experiment, out=tmp_path / "run", resume=True)
    assert not list(tmp_path.rglob("*-00000.safetensors"))


def test_resuming_a_finished_run_does_no_work_and_keeps_every_figure(finished: Path) -> None:
    before = rows_of(finished)
    fedaux.run(load_experiment(finished / "config.toml"), out=finished, resume=True)
    assert rows_of(finished) == before


def test_foreign_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty and contains no run"):
        fedaux.run(tiny(), out=tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        fedaux.run(tiny(), out=tmp_path / "precious.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    from fedaux.running.run_directory import RunDirectory

    with (
        RunDirectory.open(tmp_path / "run", tiny(), resume=False),
        pytest.raises(ValueError, match="in use by another process"),
    ):
        fedaux.run(tiny(), out=tmp_path / "run", resume=True)


@pytest.mark.quickly("fedaux")
@pytest.mark.usefixtures("without_pages")
@pytest.mark.parametrize("method", ["fedavg", "fedaux"])
def test_a_failure_at_any_round_resumes_to_the_same_metrics(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fedaux.run(tiny(method=method), out=tmp_path / "whole")
    play = Server.play_round
    for failing in (1, 2, 3):
        directory = tmp_path / f"broken{failing}"

        def fail(self: Server, state: State, failing: int = failing) -> Any:
            if state.round + 1 == failing:
                raise RuntimeError("power cut")
            return play(self, state)

        with monkeypatch.context() as patch:
            patch.setattr(Server, "play_round", fail)
            with pytest.raises(RuntimeError, match="power cut"):
                fedaux.run(tiny(method=method), out=directory)
        fedaux.run(tiny(method=method), out=directory, resume=True)
        assert rows_of(directory) == rows_of(whole.directory)


def start(recipe: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedaux", "run", str(recipe), "--out", str(out), "--resume"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr.decode()


@pytest.fixture(scope="module")
def killable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("kill")
    recipe = folder / "recipe.toml"
    experiment = tiny(
        method=["feddf", "fedaux"], rounds=12, participation_rate=0.5, local={"epochs": 3}
    )
    recipe.write_text(tomli_w.dumps(experiment.to_dict()))
    finish(start(recipe, folder / "whole"))
    return recipe, folder


@pytest.mark.long
@pytest.mark.chance
@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """Kill forty runs of a small demo, resume each, and compare with one that was not killed."""
    done = run_program(
        "kill_runs.py", str(tmp_path), "40", changes={"OMP_NUM_THREADS": "1"}, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["different"] == {}
    assert told["stopped"] > 20  # the others had just ended
    assert told["states"] > 8  # the kills came at different points of the work


@pytest.mark.chance
@pytest.mark.slow
def test_interrupt_ends_cleanly_and_can_be_resumed(killable: tuple[Path, Path]) -> None:
    recipe, folder = killable
    directory = folder / "interrupted"
    command = [sys.executable, "-m", "fedaux", "run", str(recipe), "--out", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(directory.glob("cells/*/round-0000[3-9]*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()
    assert b"--resume" in stdout
    assert b"Traceback" not in stderr
    finish(start(recipe, directory))
    assert rows_of(directory) == rows_of(folder / "whole")


def test_ledger_entries_of_a_checkpoint_read_back(finished: Path) -> None:
    header = json.loads((finished / "cells/fedaux-seed0/state.json").read_text())
    entries = [LedgerEntry.from_json(entry) for entry in header["ledger"]]
    assert [entry.client for entry in entries] == [0, 1, 2, 3]


def test_experiment_is_what_python_users_run() -> None:
    assert isinstance(fedaux.Experiment(), Experiment)
    assert "run" in dir(fedaux)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedaux.nothing


@pytest.mark.usefixtures("pages")
def test_a_run_without_protection_says_so_everywhere(tmp_path: Path) -> None:
    for mechanism in ("released-code", "none"):
        directory = tmp_path / mechanism
        result = fedaux.run(tiny(rounds=1, certainty={"mechanism": mechanism}), out=directory)
        row = result.summary["rows"][0]
        assert (row["epsilon"], row["mechanism"]) == ("inf", mechanism)
        assert "not differentially private" in (directory / "report.html").read_text()
        first = privacy_lines(directory)[0]
        assert first.startswith("NOT PRIVATE: each client of fedaux released a vector")
        assert f"through `{mechanism}`" in first
        entries = json.loads((directory / "ledger.json").read_text())["entries"]
        assert {entry["epsilon"] for entry in entries} == {"inf"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auxiliary": {"size": 1}}, r"auxiliary\.negatives_fraction"),
        (
            {"prototypes": [{"name": "a", "model": "cnn", "options": {"width": -3}}]},
            r"width = -3: should be a whole",
        ),
        (
            {"prototypes": [{"name": "a", "model": "cnn", "options": {"width": "x"}}]},
            r"width = 'x': should be a whole",
        ),
        ({"pretraining": {"checkpoint": __file__}}, "not a readable safetensors file"),
    ],
)
def test_what_cannot_be_run_leaves_nothing_behind(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fedaux.run(tiny(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all kinds of files, to be continued with a second round."""
    directory = tmp_path_factory.mktemp("stopped") / "run"
    fedaux.run(tiny(**STOPPED, rounds=1), out=directory)
    return directory


STOPPED: dict[str, Any] = {"method": "fedaux+m", "local": {"optimizer_state": "kept"}}


@pytest.mark.usefixtures("without_pages")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b'{"round": '),
        ("state.json", b'{"round": 1}'),
        ("prepared.safetensors", b""),
        ("round-00001.safetensors", None),
        ("round-00001.safetensors", b"\2\0\0\0\0\0\0\0{}"),  # no tensors
        ("memory/client-00002-round-00001.safetensors", b"\2\0\0\0"),
        ("kept/client-00002-round-00001.safetensors", None),
    ],
)
def test_a_damaged_checkpoint_is_named_and_can_be_set_aside(
    stopped: Path, tmp_path: Path, name: str, content: bytes | None
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    cell = run / "cells/fedaux+m-seed0"
    (cell / name).unlink()
    if content is not None:
        (cell / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{cell / name}: ")) as raised:
        fedaux.run(tiny(**STOPPED, rounds=2), out=run, resume=True)
    assert "\n" not in str(raised.value)
    assert f"delete or move away {cell} and use --resume" in str(raised.value)


@pytest.mark.parametrize(
    "name", ["prepared", "round-00001", "memory/client-00002-round-00001", "../../frozen/*"]
)
def test_one_flipped_bit_of_a_checkpoint_is_noticed(
    stopped: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    (file,) = (run / "cells/fedaux+m-seed0").glob(f"{name}.safetensors")
    file = file.resolve()
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{file}: damaged (the checksum of its ")):
        fedaux.run(tiny(**STOPPED, rounds=2), out=run, resume=True)


@pytest.mark.usefixtures("without_pages")
def test_heads_share_one_copy_of_the_frozen_network(stopped: Path, tmp_path: Path) -> None:
    (own,) = (stopped / "pretrained").glob("*.safetensors")
    h0 = Path(shutil.copy(own, tmp_path / "h0.safetensors"))
    changes: dict[str, Any] = {"method": ["fedavg+p", "fedaux2"], "seeds": [0, 1], "mode": "linear"}
    heads = tiny(**changes, rounds=1, pretraining={"checkpoint": str(h0)})
    result = fedaux.run(heads, out=tmp_path / "run")
    (frozen,) = (tmp_path / "run/frozen").iterdir()
    assert without_map(load_file(frozen)).keys() == load_file(h0).keys()
    names = {key for file in tmp_path.glob("run/cells/**/*.safetensors") for key in load_file(file)}
    assert not [name for name in names if "features" in name]
    h0.unlink()  # neither models nor checkpoints need the file, nor models the rest of the run
    (tmp_path / "run/models/fedaux2-seed1.safetensors").rename(tmp_path / "moved.safetensors")
    pixels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert len(fedaux.load(tmp_path / "moved.safetensors")(pixels)) == 2
    assert len(result.model("fedavg+p", seed=0)(pixels)) == 2


@pytest.mark.usefixtures("without_pages")
def test_a_damaged_frozen_network_is_replaced_when_a_method_starts_over(
    stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    (frozen,) = (tmp_path / "run/frozen").iterdir()
    whole = frozen.read_bytes()
    frozen.write_bytes(whole[:-3])
    with pytest.raises(
        ValueError, match=r"frozen/.*: damaged .*delete or move away .*fedaux\+m-se"
    ):
        fedaux.run(tiny(**STOPPED, rounds=2), out=tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "run/cells/fedaux+m-seed0")
    fedaux.run(tiny(**STOPPED, rounds=2), out=tmp_path / "run", resume=True)
    assert frozen.read_bytes() == whole


@pytest.mark.usefixtures("without_pages")
def test_runs_side_by_side_share_the_file_of_an_intact_frozen_network(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = (stopped / "pretrained").glob("*.safetensors")
    h0 = Path(shutil.copy(own, tmp_path / "h0.safetensors"))
    changes: dict[str, Any] = {"mode": "linear", "output": {"models": False}, "rounds": 1}
    heads = tiny(**changes, method=["fedavg+p"], pretraining={"checkpoint": str(h0)})

    def frozen_of(name: str) -> Path:
        (file,) = (fedaux.run(heads, out=tmp_path / name).directory / "frozen").iterdir()
        return file

    first, second = map(frozen_of, ("first", "second"))
    whole = first.read_bytes()
    assert first.samefile(second)
    first.unlink()
    assert second.read_bytes() == whole
    first.write_bytes(whole[:-3])
    save_checked(second, {"other": torch.zeros(1)})  # intact, but not what its name states
    third = frozen_of("third")
    assert third.read_bytes() == whole
    assert third.stat().st_nlink == 1
    assert frozen_of("fourth").samefile(third)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)  # a file system without hard links
    fifth = frozen_of("fifth")
    assert fifth.read_bytes() == whole
    assert not fifth.samefile(third)


@pytest.mark.usefixtures("without_pages")
def test_a_method_and_seed_that_was_set_aside_starts_over(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run/cells/fedaux+m-seed0").rename(tmp_path / "aside")
    for name in ("run", "whole"):
        fedaux.run(tiny(**STOPPED, rounds=2), out=tmp_path / name, resume=True)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")


@pytest.mark.usefixtures("without_pages")
def test_a_finished_method_and_seed_is_not_read_again(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    for file in (tmp_path / "run/cells").rglob("*.safetensors"):
        file.write_bytes(b"")
    before = rows_of(stopped)
    fedaux.run(tiny(**STOPPED, rounds=1), out=tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run") == before


def test_the_best_method_is_the_best_that_is_no_bound() -> None:
    means = {"fedavg": 0.4, "private-head": 0.8, "fedaux2": 0.7, "pooled+p": 0.9, "feddf": None}
    rows = [{"method": name, "accuracy_mean": mean} for name, mean in means.items()]
    assert best_method({"rows": rows}) == "private-head"
    assert best_method({"rows": [row for row in rows if row["method"] == "pooled+p"]}) == "pooled+p"


def test_a_split_of_many_classes_has_a_line_for_each_client() -> None:
    table = np.array([[5, 0, 1] + [0] * 30, [0, 2, 1] + [0] * 30])
    names = [f"class {number}" for number in range(33)]
    shown = split_table(table, names, how="alpha = 1").table
    assert shown.rows == [(0, 6, 2, "class 0", "83 %"), (1, 3, 2, "class 1", "67 %")]
    assert len(split_table(table[:, :3], names[:3], how="alpha = 1").table.headers) == 5
    line = "Examples per class: least 2, median 2, most 5; class b has 56 % of 9"
    assert classes_line(table[:, [1, 0, 2]], "abc") == line


@pytest.mark.usefixtures("without_pages")
def test_a_sweep_runs_what_a_key_does_not_change_once(tmp_path: Path) -> None:
    class Trained:
        def __init__(self) -> None:
            self.rounds: list[str] = []

        def phase(self, task: Any, round: int, name: str) -> None:
            pass

        def round(self, row: Any) -> None:
            self.rounds.append(row["method"])

    (tmp_path / "sweep.json").touch()
    methods, seen = ["fedavg+p", "fedaux"], {}
    for epsilon in (1.0, 2.0):
        seen[epsilon] = Trained()
        experiment = tiny(method=methods, certainty={"epsilon": epsilon}, rounds=2)
        fedaux.run(experiment, out=tmp_path / f"{epsilon:g}", callback=seen[epsilon])
    assert seen[1.0].rounds == ["fedavg+p"] * 2 + ["fedaux"] * 2
    assert seen[2.0].rounds == ["fedaux"] * 2
    first, second = (rows_of(tmp_path / name) for name in "12")
    assert first[:2] == second[:2]
    assert first[2:] != second[2:]
    assert len(list((tmp_path / "2/models").rglob("*.safetensors"))) == 2
    fedaux.run(
        tiny(method=methods, certainty={"epsilon": 2.0}, rounds=3), out=tmp_path / "2", resume=True
    )
    assert len(rows_of(tmp_path / "2")) == 6
    alone = tmp_path / "alone" / "2"
    fedaux.run(tiny(method=methods, certainty={"epsilon": 2.0}, rounds=3), out=alone)
    extended, whole = (
        [(row["method"], row["accuracy"]) for row in rows_of(place)]
        for place in (tmp_path / "2", alone)
    )
    assert extended == whole


def test_keys_that_change_nothing_are_left_out_of_what_runs_share() -> None:
    noisy, clear = (tiny(certainty={"epsilon": epsilon}) for epsilon in (0.1, 1.0))
    assert digest_of(noisy, "feddf+p") == digest_of(clear, "feddf+p")
    assert digest_of(noisy, "feddf+p") != digest_of(clear, "fedavg+p")
    for method in ("fedaux", "fedaux2", "private-head"):
        assert digest_of(noisy, method) != digest_of(clear, method)
    assert digest_of(tiny(rounds=2), "fedavg") != digest_of(tiny(rounds=3), "fedavg")
    assert digest_of(tiny(local={"epochs": 2}), "fedavg") != digest_of(tiny(), "fedavg")


def test_dropped_answers_are_told_at_the_end(tmp_path: Path) -> None:
    fedaux.run(tiny(method="fedavg", rounds=1, local={"learning_rate": 1e30}), out=tmp_path / "run")
    dropped, kept, *_ = warning_lines(tmp_path / "run")
    assert dropped.startswith("Warning: fedavg: 4 of 4 answers were dropped, first: tensor ")
    assert kept == "Warning: fedavg: 1 of 1 rounds had no usable update and changed nothing"
