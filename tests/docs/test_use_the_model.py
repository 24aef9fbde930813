"""docs/after-a-run.md, followed to the letter after the example of docs/your-data.md."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.typing_commands import typed

from fedaux.predict.files import read_card

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.S | re.M)


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    for _, text in blocks("your-data.md") + blocks("after-a-run.md"):
        if name := re.match(r"# (make_images\.py|hospitals\.toml|use_model\.py)\n", text):
            (tmp_path / name[1]).write_text(text, encoding="utf-8")
    commands = [
        line.split()
        for language, text in blocks("after-a-run.md")
        if not language and "runs/watched" not in text
        for line in text.splitlines()
    ]
    assert [command[:2] for command in commands] == [
        ["fedaux", "predict"],
        ["fedaux", "export"],
        ["fedaux", "predict"],
        ["fedaux", "export"],
        ["python", "use_model.py"],
    ]
    before = [["python", "make_images.py"], ["fedaux", "run", "hospitals.toml"]]
    environment = {"FEDAUX_CACHE": "", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    said = typed([*before, *commands], tmp_path, environment=environment)
    assert "Models: runs/hospitals/models" in said[1]
    assert "50 predictions by" in said[2]
    assert "Not protected: The model updates" in said[3]
    assert "61 predictions by" in said[4]
    card = read_card(tmp_path / "model.safetensors")
    metrics = (tmp_path / "runs/hospitals/metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in metrics.splitlines()]
    (figure,) = [row["accuracy"] for row in rows if (row["method"], row["round"]) == ("fedaux", 3)]
    assert card["accuracy"]["last"] == figure
    (example,) = [text for language, text in blocks("after-a-run.md") if language == "text"]
    with (tmp_path / "predictions.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file))
    assert ",".join(table[0]) == example.splitlines()[0]
    assert len(table) == 62
    assert (tmp_path / "model.onnx").is_file()
    assert re.search(r"^hospital_b/\w+/0.png (round|square)$", said[6], flags=re.M)
    listed = (ROOT / "docs/after-a-run.md").read_text(encoding="utf-8").split("## What the card")
    keys = [
        key for line in re.findall(r"^\| (`.*?) \|", listed[1], re.M) for key in line.split(", ")
    ]
    assert {key.strip("`") for key in keys} <= set(card)
