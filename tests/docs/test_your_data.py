"""docs/your-data.md, followed to the letter."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.typing_commands import typed

from fedaux.config import Experiment
from fedaux.data import SOURCES
from fedaux.running.preflight import problems_of

PAGE = (ROOT / "docs" / "your-data.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.S | re.M)


def test_the_page_names_every_source_of_files() -> None:
    sources = PAGE.split("\n| source | ")[1].split("\n\n")[0]
    first_column = "".join(line.split("|")[1] for line in sources.splitlines()[2:])
    assert set(re.findall(r"`([^`]+)`", first_column)) == {
        name for name, row in SOURCES.items() if row.needs_path
    }


def test_the_fragment_of_a_recipe_is_valid() -> None:
    (fragment,) = [
        text for language, text in BLOCKS if language == "toml" and not text.startswith("#")
    ]
    assert Experiment(**tomllib.loads(fragment)).auxiliary.image_size == 32
    (pretrained,) = [text for _, text in BLOCKS if text.startswith("# minilm.toml")]
    found = problems_of(Experiment(**tomllib.loads(pretrained)))
    assert not [line for line in found if "no such file" not in line and "package" not in line]


@pytest.mark.long
@pytest.mark.slow
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra parquet")
    pytest.importorskip("tokenizers", reason="needs the extra text")
    named = [(re.match(r"# (\S+\.(?:py|toml))\n", text), text) for _, text in BLOCKS]
    files = {name[1]: text for name, text in named if name is not None}
    made = [
        "make_images.py",
        "hospitals.toml",
        "scans.toml",
        "make_parquet.py",
        "make_texts.py",
        "desks.toml",
        "minilm.toml",
        "make_measurements.py",
        "patients.toml",
    ]
    assert list(files) == made
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    commands = [
        line.partition(" #")[0].split()
        for language, text in BLOCKS
        if not language
        for line in text.splitlines()
    ]
    assert [command[:2] for command in commands] == [
        ["python", "make_images.py"],
        ["fedaux", "data"],
        ["fedaux", "run"],
        ["fedaux", "data"],
        ["python", "make_parquet.py"],
        ["fedaux", "data"],
        ["python", "make_texts.py"],
        ["fedaux", "data"],
        ["fedaux", "pretrain"],
        ["fedaux", "run"],
        ["python", "make_measurements.py"],
        ["fedaux", "run"],
        ["fedaux", "pretrain"],
        ["fedaux", "run"],
        ["fedaux", "pretrain"],
    ]
    environment = {
        "FEDAUX_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    said = typed(commands, tmp_path, environment=environment)
    summary = json.loads((tmp_path / "runs/hospitals/summary.json").read_text(encoding="utf-8"))
    assert summary["complete"]
    assert (tmp_path / "runs/hospitals/report.html").is_file()
    split = json.loads((tmp_path / "runs/hospitals/split.json").read_text(encoding="utf-8"))
    assert (split["classes"], split["clients"]) == (
        ["round", "square"],
        ["hospital_a", "hospital_b"],
    )
    assert [sum(row) for row in split["tables"]["0"]] == [64, 40]
    assert split["tables"]["0"][1][0] == 0
    assert re.search(r"round .* square", said[1])
    assert said[3] == said[5]  # one table as CSV and as Parquet
    assert re.search(r"\b64\b", said[3])
    desks = json.loads((tmp_path / "runs/desks/split.json").read_text(encoding="utf-8"))
    assert desks["classes"] == ["shipping", "weather"]
    assert [sum(row) for row in desks["tables"]["0"]] == [48, 48]
    assert desks["tables"]["0"][1][0] == 0
    assert "linear probe" in said[8]
    assert "shipping" in (tmp_path / "runs/desks/report.html").read_text(encoding="utf-8")
    assert "linear probe" in said[12]
    assert "h0 is not measured" in said[14]
    patients = json.loads((tmp_path / "runs/patients/split.json").read_text(encoding="utf-8"))
    assert [sum(row) for row in patients["tables"]["0"]] == [60, 70, 80, 89]
