"""What the documents say is there, and their examples run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.typing_commands import typed

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing


def test_files_of_the_reading_order_exist() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Reading order")[1]
    first_columns = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert len(first_columns) > 10
    for column in first_columns:
        names = re.findall(r"`([^`]+)`", column)
        folder = Path(names[0]).parent
        for name in names:
            assert (ROOT / name).exists() or (ROOT / folder / name).exists(), name


@pytest.fixture(scope="module")
def extending() -> tuple[dict[str, str], list[str], str]:
    """The files of docs/extending.md by the name in their first line, its commands, its program without a file."""
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    files = {
        name[1]: content
        for _, content in blocks
        if (name := re.match(r"# (\S+\.(?:py|toml))\n", content))
    }
    assert list(files) == ["own.py", "own.toml", "test_own.py"]
    (commands,) = [content for language, content in blocks if not language]
    (program,) = [
        content
        for language, content in blocks
        if language == "python" and content not in files.values()
    ]
    return files, [line.partition("#")[0].strip() for line in commands.splitlines()], program


@pytest.mark.slow
def test_the_worked_example_of_a_plugin_runs(
    extending: tuple[dict[str, str], list[str], str], tmp_path: Path
) -> None:
    files, commands, _ = extending
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert [command.split()[:2] for command in commands] == [
        ["pytest", "test_own.py"],
        ["fedaux", "data"],
        ["fedaux", "run"],
    ]
    tested, *others = [command.split() for command in commands]
    done = subprocess.run(
        [sys.executable, "-m", *tested], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    said = typed(others, tmp_path)
    assert "720" in said[0]
    summary = json.loads((tmp_path / "runs/own/summary.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in summary["rows"]] == ["entropy+m", "feddf+m"]
    assert summary["complete"]
    assert all(row["accuracy_max_mean"] > 0.4 for row in summary["rows"])  # chance is 0.2


@pytest.mark.slow
def test_the_example_without_a_file_runs(
    extending: tuple[dict[str, str], list[str], str], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(extending[2], encoding="utf-8")
    typed([["python", "program.py"]], tmp_path)
    summary = json.loads((tmp_path / "runs/own/summary.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in summary["rows"]] == ["scored", "fedavg"]
    assert summary["complete"]


@pytest.mark.slow
def test_the_worked_example_of_a_sweep_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    (recipe,) = [content for language, content in blocks if language == "toml"]
    (commands,) = [content for language, content in blocks if not language]
    (program,) = [content for language, content in blocks if language == "python"]
    (tmp_path / "grid.toml").write_text(recipe, encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in commands.splitlines()]
    assert {line[0] for line in lines} == {"fedaux"}
    (tmp_path / "reading.py").write_text(program, encoding="utf-8")
    *said, answer = typed([*lines, ["python", "reading.py"]], tmp_path)
    assert said[0].startswith("Sweep: 2 cells, 8 rounds in total\n  split.alpha = 0.01, 1\n")
    assert "  2 finished before, 0 to be continued\n" in said[1]
    assert said[2].startswith("Sweep: 2 cells, 4 rounds in total\n  method = fedavg+p, fedaux\n")
    assert said[3] == "runs/grid/report.html\n"
    cells = json.loads((tmp_path / "runs/grid/sweep.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["name"] for cell in cells] == ["alpha=0.01", "alpha=1", "alpha=100"]
    assert len(answer.splitlines()) == 3 * 2


def test_recipes_that_ship_are_valid_but_for_their_data() -> None:
    from fedaux.recipes import load_experiment

    recipes = sorted((ROOT / "recipes").glob("*.toml"), key=lambda recipe: recipe.stem)
    news = ["agnews", "agnews-minilm", "agnews-quick"]
    shipped = (
        "cifar10 cifar10-linear cifar10-mixed cifar10-one-shot demo fedaux-paper fedaux-released"
    )
    assert [recipe.stem for recipe in recipes] == [
        *news,
        *shipped.split(),
        "fedbe-original",
        "feddf-original",
    ]
    for recipe in recipes:
        assert load_experiment(recipe).name == recipe.stem
