"""What the documents say is there, and their examples run."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from statistics import mean, stdev

import pytest
from helpers.encoders import image_encoder
from helpers.paths import ROOT
from helpers.typing_commands import typed
from PIL import Image

from fedaux.config import Experiment

PAGES = [
    page for folder in (".", "docs", "notes", "reproduce") for page in (ROOT / folder).glob("*.md")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_lines_are_short_outside_tables_and_code(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    lines = [re.sub(r"`[^`]*`", "", line) for line in text.splitlines() if not line.startswith("|")]
    assert not [line for line in lines if len(line) > 200]


def words(folder: str) -> int:
    """Return the words of the pages in a folder, without generated pages, code and formulas."""
    pages = [page for page in (ROOT / folder).glob("*.md") if page.name != "configuration.md"]
    texts = [
        re.sub(
            r"^```.*?^```$|\$\$.*?\$\$|\$[^$\n]*\$",
            "",
            page.read_text(encoding="utf-8"),
            flags=re.S | re.M,
        )
        for page in pages
    ]
    return sum(bool(re.search(r"\w", word)) for text in texts for word in text.split())


def test_pages_are_few_and_short() -> None:
    assert len(list((ROOT / "docs").glob("*.md"))) <= 15
    assert words("docs") <= 18_000
    assert words("notes") <= 10_000


def test_no_page_repeats_the_table_of_another() -> None:
    seen: dict[str, str] = {}
    for page in (ROOT / "docs").glob("*.md"):
        for row in set(re.findall(r"^\|.{60,}\|$", page.read_text(encoding="utf-8"), re.M)):
            assert seen.setdefault(row, page.name) == page.name, row


def test_diagrams_show_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    module = importlib.import_module("make_diagrams")
    for name, drawn in {"whole": module.whole(), "code": module.code()}.items():
        file = ROOT / f"docs/images/{name}.svg"
        assert drawn == file.read_text(encoding="utf-8"), "run python docs/make_diagrams.py"
    assert ">core<" in drawn


def test_the_recipe_of_the_readme_is_valid() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.S | re.M)
    found = Experiment(**tomllib.loads(recipe))
    assert found.encoder is not None
    assert (found.mode, len(found.data.clients)) == ("linear", 3)


@pytest.mark.slow
def test_the_quickstart_with_an_encoder(tmp_path: Path) -> None:
    """The page's recipe and commands, with a small encoder in the place of the hub's."""
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.S | re.M)
    (recipe,) = [content for language, content in blocks if language == "toml"]
    (block,) = [content for language, content in blocks if not language]
    image_encoder(tmp_path / "small", "dinov2")
    for place in (
        "hospital_a/round",
        "hospital_a/square",
        "hospital_b/square",
        "public",
        "new_images",
    ):
        (tmp_path / place).mkdir(parents=True)
        for number in range(20):
            image = Image.new("RGB", (30 + number, 40), (12 * number, 99, 200))
            image.save(tmp_path / place / f"{number}.png")
    assert "hf:facebook/dinov2-small" in recipe
    recipe = recipe.replace("hf:facebook/dinov2-small", "hf:small")
    (tmp_path / "photos.toml").write_text(recipe, encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    assert [line[1] for line in lines] == ["data", "privacy", "run", "predict"]
    said = typed(lines, tmp_path, environment={"FEDAUX_CACHE": str(tmp_path / "cache")})
    assert re.search(r"round .* square", said[0])
    assert "(0.5, 1e-5)" in said[1]
    assert "20 predictions by" in said[3]


@pytest.mark.slow
def test_the_commands_to_watch_a_run_work(tmp_path: Path) -> None:
    page = (ROOT / "docs/after-a-run.md").read_text(encoding="utf-8")
    block = re.findall(r"^```\n(.*?)^```$", page, flags=re.S | re.M)[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[0] for line in lines] == ["fedaux", "tail", "fedaux", "fedaux"]
    typed([line for line in lines if line[0] == "fedaux"], tmp_path)
    assert (tmp_path / "runs/watched/report.html").is_file()
    shown = subprocess.run(lines[1], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["round"] == 2


def test_mathematics_survives_rendering() -> None:
    text = (ROOT / "docs/proofs.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$", "", text, flags=re.S | re.M)
    assert text.count("$") > 400
    assert not re.findall(
        r"<\w+[',]|(?<![\w*])\w\*[\s,)|]", prose
    )  # `<w, x>` becomes a tag, `w*` emphasis


def test_the_map_of_the_code_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("## A map of the code")[1].split("```")[1]
    package, *top = re.findall(r"^(\S+/) *", tree, flags=re.M)
    assert all((ROOT / folder).is_dir() for folder in (package, *top))
    named = set(re.findall(r"^  (\w+)/", tree, flags=re.M))
    there = {
        path.name
        for path in (ROOT / package).iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert named == there
    files = {
        name
        for line in re.findall(r"^  ((?:\w+\.py ?)+)", tree, flags=re.M)
        for name in line.split()
    }
    assert files == {
        path.name for path in (ROOT / package).glob("*.py") if not path.name.startswith("__")
    }


def test_figures_show_the_numbers_of_the_tables() -> None:
    results = (ROOT / "reproduce/measured.md").read_text(encoding="utf-8")
    sections = {
        "methods": "## Whole networks: Table 1, one column",
        "participation": "### Participation, and memory",
        "privacy": "### What honest privacy costs",
        "encoder": "## An encoder",
        "hospitals": "### Hospitals",
    }
    tables = tomllib.loads((ROOT / "notes/figures.toml").read_text(encoding="utf-8"))
    assert set(tables) == set(sections)
    for name, heading in sections.items():
        section = re.split(r"^##", results.split(f"\n{heading}\n")[1], flags=re.M)[0]
        values = re.findall(r"\d+\.\d", json.dumps(list(tables[name].values())))
        assert values
        assert set(values) <= set(re.findall(r"\d+\.\d", section)), name


def test_the_quickstart_shows_the_run_of_its_figure() -> None:
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    lines = (ROOT / "notes/demo-metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last: dict[str, list[float]] = {}
    for line in map(json.loads, lines):
        if line["round"] == 5:
            last.setdefault(line["method"], []).append(100 * line["accuracy"])
    assert len(last) == 5
    for method, values in last.items():
        assert re.search(
            rf"^{re.escape(method)} +{mean(values):.1f} ± {stdev(values):.1f} ", page, flags=re.M
        ), method


@pytest.fixture(scope="module")
def extending() -> tuple[dict[str, str], list[str], str]:
    """The files of docs/write-a-method.md by the name in their first line, its commands, its
    program without a file."""
    text = (ROOT / "docs/write-a-method.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    files = {
        name[1]: content
        for _, content in blocks
        if (name := re.match(r"# (\S+\.(?:py|toml))\n", content))
    }
    assert list(files) == ["own.py", "own.toml"]
    (commands,) = [content for language, content in blocks if not language]
    (program,) = [
        content
        for language, content in blocks
        if language == "python" and "import fedaux\n" in content
    ]
    return files, [line.partition("#")[0].strip() for line in commands.splitlines()], program


@pytest.mark.slow
def test_the_worked_example_of_a_plugin_runs(
    extending: tuple[dict[str, str], list[str], str], tmp_path: Path
) -> None:
    files, commands, _ = extending
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    lines = [command.split() for command in commands]
    assert [line[:2] for line in lines] == [["fedaux", "data"], ["fedaux", "run"]]
    said = typed(lines, tmp_path)
    assert "720" in said[0]
    summary = json.loads((tmp_path / "runs/own/summary.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in summary["rows"]] == ["entropy+m", "feddf+m"]
    assert summary["complete"]
    assert all(row["accuracy_max_mean"] > 0.4 for row in summary["rows"])  # chance is 0.2


@pytest.mark.slow
def test_the_example_without_a_file_runs(
    extending: tuple[dict[str, str], list[str], str], tmp_path: Path
) -> None:
    """The page's program, with less pretraining."""
    program = extending[2].replace("rounds=2,", "rounds=2, pretraining={'epochs': 1},")
    assert program != extending[2]
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    typed([["python", "program.py"]], tmp_path)
    summary = json.loads((tmp_path / "runs/own/summary.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in summary["rows"]] == ["scored", "fedavg"]
    assert summary["complete"]


@pytest.mark.long
@pytest.mark.slow
def test_the_worked_example_of_a_sweep_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    (recipe,) = [content for language, content in blocks if language == "toml"]
    (commands,) = [content for language, content in blocks if not language]
    (program,) = [
        content for language, content in blocks if language == "python" and "ray" not in content
    ]
    (tmp_path / "grid.toml").write_text(recipe, encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in commands.splitlines()]
    assert {line[0] for line in lines} == {"fedaux"}
    (tmp_path / "reading.py").write_text(program, encoding="utf-8")
    *said, answer = typed([*lines, ["python", "reading.py"]], tmp_path)
    assert said[0].startswith("Sweep: 2 cells, 8 rounds in total\n  split.alpha = 0.01, 1\n")
    assert "  2 finished before, 0 to be continued\n" in said[1]
    plan = "Sweep: 2 cells, 4 rounds in total\n  method = [fedavg+p], [fedaux]\n"
    assert said[2].startswith(plan)
    assert said[3] == "runs/grid/report.html\n"
    cells = json.loads((tmp_path / "runs/grid/sweep.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["name"] for cell in cells] == ["alpha=0.01", "alpha=1", "alpha=100"]
    assert len(answer.splitlines()) == 3 * 2


def test_recipes_that_ship_are_valid_but_for_their_data() -> None:
    from fedaux.recipes import load_experiment

    recipes = sorted((ROOT / "recipes").glob("*.toml"), key=lambda recipe: recipe.stem)
    news = ["agnews", "agnews-minilm", "agnews-quick"]
    shipped = (
        "cifar10 cifar10-fedaux2 cifar10-linear cifar10-mixed cifar10-one-shot demo "
        "fedaux-paper fedaux-released lite0"
    )
    assert [recipe.stem for recipe in recipes] == [*news, *shipped.split()]
    for recipe in recipes:
        assert load_experiment(recipe).name == recipe.stem
