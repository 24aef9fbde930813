"""The notebooks in examples/ run from the first cell to the last."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.encoders import image_encoder
from helpers.paths import ROOT
from helpers.typing_commands import typed

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def executed(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]
) -> list[Any]:
    """Execute a notebook in a folder, with changes of its text; return the outputs of all cells."""
    nbclient = pytest.importorskip("nbclient", reason="the extra dev is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra dev is not installed")
    pytest.importorskip("ipykernel", reason="the extra dev is not installed")
    monkeypatch.setenv("FEDAUX_CACHE", str(folder / "cache"))
    text = path.read_text(encoding="utf-8")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    notebook = nbformat.reads(text, as_version=4)
    context = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=context
    ).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_notebooks_are_stored_without_outputs() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "encoder.ipynb",
        "privacy.ipynb",
        "quickstart.ipynb",
    ]
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert code
        assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
        assert f"](../examples/{path.name})" in page


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed(ROOT / "examples/quickstart.ipynb", tmp_path, monkeypatch)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    (table,) = [
        output["data"]["text/html"]
        for output in outputs
        if output["output_type"] == "execute_result" and "text/html" in output["data"]
    ]
    assert "fedavg+p" in table
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text(encoding="utf-8"))
    scored, averaged = (row["accuracy_mean"] for row in summary["rows"])
    assert scored > averaged  # or the text is wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_privacy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed(ROOT / "examples/privacy.ipynb", tmp_path, monkeypatch)
    for output in outputs:
        if output.get("name") == "stderr":
            assert " certainty scores of" in output["text"]  # as the text says
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    said = json.dumps(outputs, ensure_ascii=False)
    assert "hopeless certainty scores of" in said
    assert "Not protected: " in said

    def accuracy(name: str) -> float:
        file = tmp_path / "runs/privacy" / name / "summary.json"
        return float(json.loads(file.read_text(encoding="utf-8"))["rows"][0]["accuracy_mean"])

    assert accuracy("fedaux-2.0") > accuracy("fedaux-0.05")
    assert accuracy("fedaux-2.0") > accuracy("feddf+p")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_heads_on_a_small_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_encoder(tmp_path / "vit")
    outputs = executed(
        ROOT / "examples/encoder.ipynb",
        tmp_path,
        monkeypatch,
        ('\\"efficientnet-lite0\\"', '\\"hf:./vit\\"'),
        ("[0, 1, 2]", "[0]"),
        ("[0.3, 1.0, 3.0, 10.0]", "[10.0]"),
    )
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "private-head" in json.dumps(outputs)


@pytest.mark.slow
def test_the_program_of_the_python_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    program = re.findall(r"^```python\n(.*?)^```$", page, flags=re.S | re.M)[0]
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    (said,) = typed([["python", "program.py"]], tmp_path)
    assert "fedavg+p" in said
    assert "Report: runs/noise/report.html" in said
