"""The command line as people meet it: a process, its output and its exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tomli_w
from helpers.experiments import TINY, tiny
from helpers.paths import ROOT
from helpers.programs import run_program
from helpers.typing_commands import called

import fedaux
from fedaux.config import ConfigError
from fedaux.core.algorithms import METHODS


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(TINY))
    return path


def test_version_and_help(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedaux", "--version"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert told.stdout == f"fedaux {fedaux.__version__}\n"
    text = called("--help", cwd=tmp_path).stdout
    assert all(command in text for command in ("run", "data", "report", "methods"))


def test_help_wraps_at_the_width_of_the_terminal_and_describes_arguments(tmp_path: Path) -> None:
    text = called("run", "--help", cwd=tmp_path).stdout
    assert "--resume" in text
    assert "checkpoints, summary and report. " in text  # a line of the source ends after `and`
    assert "see `fedaux recipes`." in text
    assert "The federation's folder" in called("federate", "link", "--help", cwd=tmp_path).stdout
    listed = called("recipes", cwd=tmp_path).stdout
    assert "demo " in listed
    assert "Handwritten digits at ten clients" in listed


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rnu"], "rnu: no such command; did you mean run?"),
        (["federate", "lnk"], "lnk: no such command; did you mean link?"),
        (["run", "--resme"], "--resme: no such option; did you mean --resume?"),
        (["run", "--rounds", "3"], "--rounds: no such option; settings are given as --set rounds="),
        (["--versoin"], "--versoin: no such option; did you mean --version?"),
        (["report"], "Missing argument"),
    ],
)
def test_a_mistyped_word_gets_one_suggestion(words: list[str], line: str, tmp_path: Path) -> None:
    said = called(*words, cwd=tmp_path)
    assert said.returncode == 2
    assert line in said.stderr
    assert said.stderr.lower().count("did you mean") == line.count("did you mean")


def test_help_and_import_do_not_load_torch() -> None:
    done = run_program("light_imports.py")
    assert done.returncode == 0, done.stderr


def test_methods_are_listed(tmp_path: Path) -> None:
    listed = called("methods", cwd=tmp_path).stdout
    assert set(METHODS) <= set(listed.split())


@pytest.mark.slow
@pytest.mark.usefixtures("pages")
def test_run_report_and_resume(recipe: Path, tmp_path: Path) -> None:
    done = called(
        "run", str(recipe), "--set", "rounds=2", "--set", "method=[feddf+p, fedaux]", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stdout
    assert "test accuracy in %, seed 0" in done.stdout
    assert "(ε, δ) = (1, 1e-5)" in done.stdout
    assert "replacing one example" in done.stdout
    assert "Not protected: The model updates" in done.stdout
    assert "Points by which a row is above a column" in done.stdout  # the verdict
    summary = json.loads((tmp_path / "runs/tiny/summary.json").read_text())
    assert [row["method"] for row in summary["rows"]] == ["feddf+p", "fedaux"]
    best = max(summary["rows"], key=lambda row: float(row["accuracy_mean"]))["method"]
    assert f"for `fedaux predict runs/tiny PATH --method {best} --seed 0`" in done.stdout

    (tmp_path / "runs/tiny/report.html").unlink()
    assert called("report", "runs/tiny", cwd=tmp_path).stdout == "runs/tiny/report.html\n"
    assert (tmp_path / "runs/tiny/report.html").exists()
    files = called("report", "runs/tiny", "--figures", "figures", cwd=tmp_path).stdout.split()[1:]
    assert {"figures/curves.png", "figures/curves.svg", "figures/curves.pdf"} <= set(files)
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    for file in map(Path, files):
        assert (tmp_path / file).read_bytes().startswith(starts[file.suffix])

    refused = called("run", str(recipe), cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: runs/tiny already contains a run; continue it with --resume (resume=True), "
        "or choose another directory with --out (out=)\n"
    )
    other = called("run", str(recipe), "--resume", cwd=tmp_path)
    assert other.returncode == 2
    assert "method = ['fedaux']: the run has ['feddf+p', 'fedaux']" in other.stderr


def test_all_mistakes_are_told_at_once_without_a_traceback(recipe: Path, tmp_path: Path) -> None:
    wrong = called(
        "run",
        str(recipe),
        "--set",
        "split.alpha=-1",
        "--set",
        "local.epoch=5",
        "--set",
        "method=fedauxx",
        "--set",
        "split.num_clients=5000",
        cwd=tmp_path,
    )
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines() == [
        f"error: {recipe}: 4 problems in the configuration",
        "split.alpha = -1: should be greater than 0",
        "local.epoch: unknown key; did you mean local.epochs?",
        "method = 'fedauxx': not known; did you mean fedaux or fedaux2?",
        "split.num_clients = 5000: more clients than the 480 training examples",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_warning_is_one_line_and_the_run_goes_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "file"))
    said = called("run", str(recipe), "--set", "rounds=1", cwd=tmp_path)
    assert said.returncode == 0
    (told,) = [line for line in said.stderr.splitlines() if "warning" in line.lower()]
    assert told.startswith(f"warning: FEDAUX_CACHE: {tmp_path / 'file'}")


@pytest.mark.usefixtures("pages")
def test_missing_files_are_named(tmp_path: Path) -> None:
    missing = called("run", "nothing.toml", cwd=tmp_path)
    assert missing.returncode == 2
    assert (
        "nothing.toml: no such file or recipe; the recipes are agnews, agnews-minilm,"
        in missing.stderr
    )
    empty = called("report", str(tmp_path), cwd=tmp_path)
    assert empty.returncode == 2
    assert str(tmp_path) in empty.stderr
    assert "Traceback" not in empty.stderr


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ConfigError(["rounds = 0: should be at least 1"]), 2),
        (ValueError("--seed -1: should be at least 0"), 2),
        (FileNotFoundError(2, "No such file or directory", "data.csv"), 2),
        (PermissionError(13, "Permission denied", "runs"), 2),
        (OSError(28, "No space left on device", "runs/demo"), 1),
        (SystemExit(3), 3),
        (SystemExit(130), 130),
    ],
)
def test_the_exit_status_tells_mistakes_from_failures(
    raised: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> None:
        raise raised

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of the packages that the command line is made of
        from fedaux import cli
    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert said.startswith("error: ") == isinstance(raised, Exception)
    page = (ROOT / "docs/after-a-run.md").read_text(encoding="utf-8")
    assert f"\n| {status} | " in page


def test_a_recipe_without_a_name_is_called_as_its_file(tmp_path: Path) -> None:
    (tmp_path / "first try.toml").write_text(
        tomli_w.dumps({k: v for k, v in TINY.items() if k != "name"})
    )
    done = called(
        "run", "first try.toml", "--set", "rounds=1", "--set", "method=fedavg", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first-try"]


@pytest.mark.slow
def test_data_prints_the_table_and_draws_the_picture(recipe: Path, tmp_path: Path) -> None:
    shown = called(
        "data",
        str(recipe),
        "--out",
        "bubbles.svg",
        "--alpha",
        "0.01",
        "--alpha",
        "10",
        cwd=tmp_path,
    )
    assert shown.returncode == 0, shown.stderr
    assert "480" in shown.stdout  # all examples are somewhere
    assert "Examples per class: least " in shown.stdout
    picture = (tmp_path / "bubbles.svg").read_text()
    assert "α = 0.01" in picture
    assert "α = 10" in picture
    many = called(
        "data",
        str(recipe),
        "--set",
        "split.num_clients=470",
        "--set",
        "split.alpha=0.01",
        cwd=tmp_path,
    )
    assert "clients are empty and take no part" in many.stdout
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "--alpha -1.0: should be greater than 0"
        in called("data", "--alpha", "-1", cwd=tmp_path).stderr
    )


def test_privacy_is_planned_before_anything_runs(recipe: Path, tmp_path: Path) -> None:
    planned = called("privacy", str(recipe), "--set", "certainty.epsilon=0.01", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "(0.01, 1e-5)" in planned.stdout
    assert "replacing one example" in planned.stdout
    assert "Warning: " in planned.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_audit_prints_what_machines_need(tmp_path: Path) -> None:
    done = called(
        "audit", "--epsilon", "1", "--trials", "5000", "--releases", "40", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["max_sensitivity_ratio"] <= 1
    assert found["epsilon_lower_bound"] < 1
    assert found["trials"] == 5000
    assert found["releases"] == 40
    assert found["findings"] == []
    assert "did you mean mean" in called("audit", "--mechanism", "maen", cwd=tmp_path).stderr


def test_reproduce_lists_runs_and_refuses(recipe: Path, tmp_path: Path) -> None:
    assert "toy-gaussians" in called("reproduce", "--list", cwd=tmp_path).stdout
    done = called(
        "reproduce", "ensemble", "--recipe", str(recipe), "--with", "alphas=[0.5]", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "runs/ensemble/ensemble.json").read_text())["rows"]
    assert {"plain logits", "mean logits", "mean probabilities", "released-code logits"} <= {
        row["weights"] for row in rows
    }
    assert "did you mean toy-iris?" in called("reproduce", "toy-irs", cwd=tmp_path).stderr
    assert (
        "has no such option"
        in called("reproduce", "toy-iris", "--with", "x=1", cwd=tmp_path).stderr
    )


@pytest.mark.slow
def test_a_terminal_shows_a_live_bar(recipe: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "fedaux", "run", str(recipe), "--set", "method=fedavg"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "140"}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=slave, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            output += piece
    os.close(master)
    assert process.returncode == 0
    text = output.decode(errors="replace")
    assert "ETA" in text
    assert "round 3/3" in text
    assert "━" in text


def test_python_does_what_the_command_line_does(recipe: Path, tmp_path: Path) -> None:
    assert (
        called("run", str(recipe), "--set", "rounds=1", "--out", "a", cwd=tmp_path).returncode == 0
    )
    result = fedaux.run(tiny(rounds=1), out=tmp_path / "b")
    first = json.loads((tmp_path / "a/summary.json").read_text())["rows"][0]
    assert first["accuracy_mean"] == result.summary["rows"][0]["accuracy_mean"]
