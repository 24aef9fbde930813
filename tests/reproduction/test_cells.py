"""Cells of the paper's tables: every one can run, and results become tables that can be checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.image_files import pixels, png
from helpers.study_data import write_images

from fedaux.config import ConfigError
from reproduce import __main__ as command
from reproduce import cells as listed
from reproduce import results, sitting, tables
from reproduce.cells import Cell, all_cells
from reproduce.running import UNFINISHED, Work, run_one

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TINY = (
    "rounds=2",
    "split.num_clients=4",
    "engine.device=cpu",
    "pretraining.kind=none",
    'prototypes=[{name="cnn",model="cnn",options={width=4}}]',
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a little of every data set."""
    folder = write_images(tmp_path_factory.mktemp("data"))

    def write(place: str, columns: dict[str, list[Any]]) -> None:
        file = folder / place / "train-00000-of-00001.parquet"
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pydict(columns), file)

    write("tinyimagenet32/data", {"image": [png(image) for image in pixels(40)]})
    write("ag_news", {"text": ["news", "sport"] * 20, "label": [0, 1] * 20})
    write("book_sentences", {"text": ["a sentence"] * 20})
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in the place of `reproduce/results`."""
    for module in (results, tables):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "PAGE", tmp_path / "README.md")
    return tmp_path


def work_in(folder: Path, root: Path) -> Work:
    return Work(root, folder / "state", folder / "new", "abc", TINY, pretrain=True)


def result(cell: Cell, *, last: float, **changes: Any) -> dict[str, Any]:
    """Return what a results file of a cell could hold, with a maximum of 90."""
    curve = [*[10.0] * (cell.rounds - 2), 90.0, last]
    return {
        "cell": cell.name,
        "label": [],
        "command": cell.command(),
        "settings": cell.settings(),
        "edition": cell.edition,
        "data": cell.data,
        "public": cell.public,
        "h0": {},
        "commit": "abc",
        "device": "a GPU",
        "versions": {},
        "seconds": 300.0,
        "side_by_side": 3,
        "accuracy": curve,
    } | changes


def test_cells_have_names_of_their_own_and_table_1_is_first() -> None:
    names = [cell.name for cell in all_cells()]
    assert len(set(names)) == len(names)
    assert names[0] == "table1/alpha=0.01,C=0.4,fedaux,seed=0"
    whole = [name for name in names if name.startswith("table1/") and name.endswith("seed=0")]
    assert len(whole) == 2 * 3 * 12 + 2


def test_every_cell_is_a_valid_experiment_on_the_data(root: Path) -> None:
    seen: dict[tuple[str, str, str], Cell] = {}
    for cell in all_cells():
        seen.setdefault((cell.table, cell.row.name, cell.place), cell)
    for cell in seen.values():
        assert cell.missing(root, pretrain=True) == ""
        experiment = cell.experiment(root)
        assert list(experiment.method) == [cell.row.method], cell.name
        assert experiment.rounds == cell.rounds


def test_a_cell_asks_for_its_h0_and_its_data(root: Path, tmp_path: Path) -> None:
    cell = all_cells()[0]
    assert "h0/resnet8-tinyimagenet32.safetensors" in cell.missing(root, pretrain=False)
    assert "CIFAR-10: none of" in cell.missing(tmp_path, pretrain=True)


def test_the_row_of_fedaux2_follows_its_recipe() -> None:
    (cell,) = [c for c in all_cells() if c.name == "table1/alpha=0.01,C=0.4,fedaux2,seed=0"]
    assert cell.changes["rehearsal.examples"] == 40000
    assert cell.rounds == 100


def test_a_result_is_of_its_settings_and_its_edition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = all_cells()[0]
    results.save(cell, folder, result(cell, last=50.0))
    (found,) = results.read_all(folder).values()
    assert results.is_current(cell, found)
    assert not results.is_current(cell, None)
    assert not results.is_current(cell, found, ["rounds=7"])
    monkeypatch.setitem(listed.EDITIONS, cell.row.method, 2)
    assert not results.is_current(cell, found)


def test_a_damaged_result_names_its_file(folder: Path) -> None:
    cell = all_cells()[0]
    results.save(cell, folder, result(cell, last=50.0, accuracy=[1.0]))
    with pytest.raises(ValueError, match=r"seed=0.json: 1 accuracies"):
        results.read_all(folder)


def test_the_page_has_means_and_printed_figures_and_is_checked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_fedaux = [cell for cell in all_cells() if "table1/alpha=0.01,C=0.4,fedaux,s" in cell.name]
    for cell, last in zip(of_fedaux, (50.0, 52.0, 54.0), strict=True):
        results.save(cell, folder, result(cell, last=last))
    assert tables.check() == 1  # there is no page
    tables.write()
    assert "| `fedaux` | 52.0 ± 2.0 / 90.0 ± 0.0 (3) | 71.2 ± 2.1 |" in tables.PAGE.read_text()
    assert tables.check() == 0
    results.save(of_fedaux[0], folder, result(of_fedaux[0], last=80.0))
    assert tables.check() == 1
    tables.write()
    results.save(of_fedaux[0], folder / "table9", result(of_fedaux[0], last=80.0))
    assert tables.check() == 1
    assert "no such cell" in capsys.readouterr().err


def test_measured_times_replace_guesses() -> None:
    cells = all_cells()
    cell = cells[0]
    before = sitting.Estimate(cells, {})(cell)
    assert before == sitting.guess(cell)
    found = {cell.name: result(cell, last=1.0, seconds=6 * before)}
    estimate = sitting.Estimate(cells, found)
    assert estimate(cell) == pytest.approx(2 * before)  # three side by side
    found = {cell.name: result(cell, last=1.0, seconds=6 * before, device="cpu")}
    assert sitting.Estimate(cells, found)(cell) == before


def test_the_first_cell_that_fits_is_chosen(tmp_path: Path, root: Path) -> None:
    cells = [cell for cell in all_cells() if cell.name.startswith("table1/alpha=0.01,C=0.4")]
    estimate, work = sitting.Estimate(cells, {}), work_in(tmp_path, root)
    choose = sitting._choose
    assert choose(cells, work, estimate, 1000.0, whole=True) == cells[0]
    small = choose(cells, work, estimate, estimate(cells[3]) + 30.0, whole=True)
    assert small is not None
    assert small.row.method == "fedprox+p"
    assert choose(cells, work, estimate, 5.0, whole=True) is None
    assert choose(cells, work, estimate, 5.0, whole=False) == cells[0]


@pytest.mark.filterwarnings("ignore")
def test_a_cell_stops_after_a_round_goes_on_and_leaves_a_result(tmp_path: Path, root: Path) -> None:
    (cell,) = [c for c in all_cells() if c.name == "table1/alpha=0.01,C=0.4,fedavg,seed=0"]
    work = work_in(tmp_path, root)
    assert run_one(cell, work, until=0.0) == UNFINISHED
    assert sitting.progress(cell, work) == (0, None)
    assert run_one(cell, work) == 0
    assert not work.folder(cell).exists()
    found = results.read_all(work.out)[cell.name]
    assert len(found["accuracy"]) == 2
    assert results.is_current(cell, found, TINY)
    assert not results.is_current(cell, found)
    assert json.loads(results.file_of(cell, work.out).read_text())["commit"] == "abc"


def test_a_trial_must_not_write_into_the_repository(root: Path) -> None:
    assert command.main(["--next", "--data", str(root), "--set", "rounds=1"]) == 2
    with pytest.raises((ConfigError, ValueError), match="--data"):
        command._run(command.parser().parse_args(["--next", "--data", "nowhere"]))


@pytest.mark.slow
def test_a_sitting_runs_missing_cells_in_processes_of_their_own(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["fedavg", "fedprox"]
    wanted = [f"table1/alpha=0.01,C=0.4,{name},seed=0" for name in names]
    cells = [cell for cell in all_cells() if cell.name in wanted]
    work = Work(root, tmp_path / "state", tmp_path / "new", "abc", TINY, pretrain=True, at_once=2)
    assert sitting.sitting(cells, work, {}, minutes=5) == 0
    found = results.read_all(work.out)
    assert sorted(found) == sorted(wanted)
    assert sitting.sitting(cells, work, found, minutes=5) == 0
    assert "nothing to do" in capsys.readouterr().out
