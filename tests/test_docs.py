"""What the documents say is there, and their examples run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
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


def test_the_example_of_a_users_own_method_and_model_runs(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/own/summary.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in summary["rows"]] == ["scored", "fedavg"]
    assert summary["complete"]


def test_recipes_that_ship_are_valid_but_for_their_data() -> None:
    from fedaux.reading import load_experiment

    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert [recipe.stem for recipe in recipes] == ["cifar10", "demo", "fedbe-original", "feddf-original"]
    for recipe in recipes:
        assert load_experiment(recipe).name == recipe.stem
