"""What a study shows: its runs resume, tables hold what they measured, words and figures fit the
numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.latex_checks import check_latex
from helpers.study_data import saved
from helpers.typing_commands import called

from fedaux.recipes import load_experiment
from fedaux.report.latex import to_latex
from fedaux.report.tables import to_markdown
from reproduce import command, comparison, published, study_figures, study_page
from reproduce.document import Document
from reproduce.experiments import EXPERIMENTS
from reproduce.planning import CENTRAL, Request
from reproduce.study import quick_base

# From runs to tables

SMALL = ["rounds=2", "pretraining.epochs=1", "auxiliary.size=200", "engine.threads=1"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    out = tmp_path_factory.mktemp("table1")
    only = ["alpha=0.01", "C=0.4", "method=[fedavg,fedaux]"]
    outcome = command.reproduce("table1", Request(out, quick=True, only=only, overrides=SMALL))
    assert {file.suffix for file in outcome.files} == {
        ".html",
        ".md",
        ".json",
        ".tex",
        ".png",
        ".svg",
    }
    assert check_latex((out / "table1.tex").read_text()) == [3]
    return out, outcome.numbers


@pytest.mark.slow
def test_a_study_measures_what_its_runs_measured(small: tuple[Path, Mapping[str, Any]]) -> None:
    out, numbers = small
    rows = {row["method"]: row for row in numbers["rows"]}
    assert set(rows) == {"fedavg", "fedaux"}
    for method, row in rows.items():
        summary = json.loads(
            (out / f"cells/alpha=0.01,C=0.4,method={method},seed=0/summary.json").read_text()
        )["rows"][0]
        assert row["best"]["mean"] == pytest.approx(100 * summary["accuracy_max_mean"], abs=1e-3)
        assert row["last"]["mean"] == pytest.approx(100 * summary["accuracy_mean"], abs=1e-3)
    text = (out / "table1.md").read_text()
    for row in rows.values():
        assert f"{row['best']['mean']:.1f}" in text
    assert "Cut for the quick version" in text
    assert text.startswith(
        "# table1, quick version: methods by participation rate, iid and not (2 methods; α = "
        "0.01; C = "
    )
    assert "cannot be compared with its figures" in text


@pytest.mark.slow
def test_the_page_of_a_study_offers_the_numbers_of_its_figure(
    small: tuple[Path, Mapping[str, Any]],
) -> None:
    out, numbers = small
    (offered,) = saved((out / "table1.html").read_text()).values()
    shown = {
        line["method"]: (float(line["best round"]), float(line["last round"])) for line in offered
    }
    assert shown == {
        row["method"]: (row["best"]["mean"], row["last"]["mean"]) for row in numbers["rows"]
    }


@pytest.mark.slow
def test_finished_runs_are_not_run_again_and_more_can_be_added(
    small: tuple[Path, Mapping[str, Any]],
) -> None:
    out, numbers = small
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/summary.json")}
    assert len(stamps) == 2
    only = ["alpha=0.01", "C=0.4", "method=fedavg"]
    outcome = command.reproduce(
        "table1", Request(out, quick=True, only=only, overrides=SMALL, seeds=2)
    )
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    (row,) = outcome.numbers["rows"]
    (before,) = [other for other in numbers["rows"] if other["method"] == "fedavg"]
    assert row["best"]["values"][0] == before["best"]["values"][0]
    assert len(row["best"]["values"]) == 2
    assert "±" in outcome.markdown


@pytest.mark.slow
def test_qualitative_counts_every_pass(tmp_path: Path) -> None:
    changes = ["rounds=1", "pretraining.epochs=1", "auxiliary.size=200", "engine.threads=1"]
    changes += ["local.epochs=2", "distillation.steps=3", "method=['feddf', 'fedaux2']"]
    request = Request(tmp_path / "out", quick=True, overrides=changes)
    outcome = command.reproduce("qualitative", request)
    feddf, _, fedaux2 = outcome.numbers["columns"]
    section = load_experiment(tmp_path / "out/run/config.toml")
    assert feddf["clients"]["examples trained"] == 2 * 1438
    assert feddf["server"]["distillation examples"] == 3 * section.distillation.batch_size
    table = json.loads((tmp_path / "out/run/split.json").read_text())["tables"]["0"]
    steps = sum(2 * math.ceil(sum(held) / section.local.batch_size) for held in table)
    rehearsed = steps * section.rehearsal.batch_size
    assert fedaux2["clients"]["examples trained"] == 2 * 1438 + rehearsed
    with pytest.raises(ValueError, match="mode = 'linear': qualitative counts"):
        command.reproduce("qualitative", replace(request, overrides=["mode=linear"]))


@pytest.mark.slow
def test_qualitative_counts_what_was_sent(tmp_path: Path) -> None:
    changes = ["rounds=1", "pretraining.epochs=1", "auxiliary.size=200", "engine.threads=1"]
    outcome = command.reproduce("qualitative", Request(tmp_path, quick=True, overrides=changes))
    columns = {(column["method"], column["phase"]): column for column in outcome.numbers["columns"]}
    assert list(columns) == [
        *(
            ("fedavg", "a round"),
            ("feddf", "a round"),
            ("fedaux", "preparation"),
            ("fedaux", "a round"),
        )
    ]
    ledger = json.loads((tmp_path / "run/ledger.json").read_text())["entries"]
    before = columns["fedaux", "preparation"]
    assert (
        (before["epsilon"], before["delta"])
        == (ledger[0]["epsilon"], ledger[0]["delta"])
        == (0.5, 1e-5)
    )
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        column = columns[line["method"], "a round"]
        assert column["bytes_up"] * column["participants"] == pytest.approx(line["bytes_up"])
        assert column["bytes_up"] == outcome.numbers["model_bytes"], "a client sends one model"
    assert before["bytes_down"] == before["sent"]["extractor"] + before["sent"]["public"]
    # The network by hand: three convolutions on 8 x 8, 4 x 4 and 2 x 2 places, two operations a
    # weight and place.
    weights = [(1 * 16 * 9, 64), (16 * 32 * 9, 16), (32 * 32 * 9, 4), (128 * 10, 1)]
    by_hand = sum(2 * number * places_ for number, places_ in weights)
    trained = columns["fedavg", "a round"]["clients"]
    assert trained["flops"] == pytest.approx(3 * by_hand * trained["examples trained"])
    assert trained["examples trained"] == 1438, "all clients, all examples, one epoch"
    assert columns["fedavg", "a round"]["server"]["flops"] == 0
    assert "0.5, 1e-05" in outcome.markdown
    assert outcome.markdown.startswith("# qualitative, quick version: ")
    assert (
        "Data: handwritten digits (embedded); public data: rendered letters (embedded)."
        in outcome.markdown
    )
    assert check_latex((tmp_path / "qualitative.tex").read_text()) == [5]


def test_split_becomes_even_with_alpha(tmp_path: Path) -> None:
    outcome = command.reproduce("split", Request(tmp_path, quick=True))
    rows = outcome.numbers["rows"]
    shares = [row["share_of_main_class"] for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8
    assert shares[-1] < 0.15
    for table in outcome.numbers["tables"].values():
        assert np.array(table).shape == (20, 10)
        assert np.array(table).sum() == 1438
    assert check_latex((tmp_path / "split.tex").read_text()) == [4]
    (held,) = saved((tmp_path / "split.html").read_text()).values()
    tables_ = outcome.numbers["tables"]
    assert len(held) == 4 * 20 * 10
    assert all(
        int(line["examples"]) == tables_[line["alpha"]][int(line["client"])][int(line["class"])]
        for line in held
    )


@pytest.mark.parametrize("name", [name for name, entry in EXPERIMENTS.items() if entry.data])
def test_changes_apply_on_top_of_the_quick_version(name: str, tmp_path: Path) -> None:
    entry, plain = EXPERIMENTS[name], quick_base(name).to_dict()
    assert plain["seeds"] == (0,) or plain["seeds"] == [0]
    changed, _ = command.base_of(name, entry, Request(tmp_path, quick=True, seeds=2), None)
    assert changed.to_dict() == plain | {"seeds": changed.to_dict()["seeds"]}
    assert list(changed.seeds) == [0, 1]
    changed, _ = command.base_of(
        name, entry, Request(tmp_path, quick=True, overrides=["local.epochs=7"]), None
    )
    assert changed.to_dict() == plain | {"local": plain["local"] | {"epochs": 7}}
    assert {"split": plain["split"]["num_clients"] == 20, "privacy": plain["rounds"] == 3}.get(
        name, True
    )


@pytest.mark.slow
def test_a_seed_that_is_stated_changes_nothing_about_the_split(tmp_path: Path) -> None:
    plain = command.reproduce("split", Request(tmp_path / "a", quick=True))
    stated = command.reproduce("split", Request(tmp_path / "b", quick=True, seeds=1))
    assert stated.numbers == plain.numbers
    assert stated.markdown == plain.markdown
    start = "# split, quick version: 20 clients, 10 classes, α = 0.01, 0.1, 1, 100"
    assert plain.markdown.startswith(f"{start}\n\nData: handwritten digits (embedded). Means")


# Words and tables


def numbers_of(
    best: Mapping[str, float], printed: Mapping[str, float], *, quick: bool = False
) -> dict[str, Any]:
    rows = [
        {
            **{
                "block": "α = 0.01",
                "column": "C = 0.4",
                "method": method,
                "settings": {},
                "runs": 2,
                "finished": 2,
            },
            "published": {"text": f"{printed[method]} ± 0.1", "mean": printed[method]}
            if method in printed
            else None,
            "best": {"mean": value, "deviation": 0.5, "values": [value]},
            "last": {"mean": value - 1, "deviation": None, "values": [value - 1]},
        }
        for method, value in best.items()
    ]
    return {
        **{
            "study": "table1",
            "quick": quick,
            "rows": rows,
            "rounds": 5,
            "seeds": [0, 1],
            "unfinished": [],
        },
        **{"blocks": ["α = 0.01"], "columns": ["C = 0.4"], "methods": list(best)},
    }


def test_findings_say_who_leads_and_how_far_figures_are_apart() -> None:
    said = comparison.findings(
        numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2})
    )
    assert said == [
        "fedaux is best in 1 of 1 columns, by up to 30.0 points (α = 0.01, C = 0.4, over fedavg).",
        "The paper's best method is best here too, or within 1 point of it, in 1 of 1 columns.",
        "0 of 2 figures are within 1 point of the published ones, 1 below and 1 above.",
        "Furthest below: fedaux, α = 0.01, C = 0.4, 60.0 against 71.2 ± 0.1, 11.2 points.",
        "Furthest above: fedavg, α = 0.01, C = 0.4, 30.0 against 23.6 ± 0.1, 6.4 points.",
    ]
    lost = comparison.findings(
        numbers_of({"fedavg": 72.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2})
    )
    assert lost[0] == "fedaux is best in 0 of 1 columns."
    assert lost[1].endswith(
        "in 0 of 1 columns; not in α = 0.01, C = 0.4: fedaux is 12.0 points behind fedavg."
    )
    quick = comparison.findings(
        numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedaux": 71.2}, quick=True)
    )
    assert not any("published" in line for line in quick)
    close = comparison.findings(
        numbers_of({"fedavg": 24.0, "fedaux": 71.0}, {"fedavg": 23.6, "fedaux": 71.2})
    )
    assert close[-1].startswith("2 of 2 figures are within 1 point")


def test_findings_of_a_part_speak_of_what_was_run() -> None:
    printed = {"fedavg": 23.6, "feddf": 30.0, "fedaux": 71.2}
    without = comparison.findings(numbers_of({"fedavg": 30.0, "feddf": 20.0}, printed))
    assert without[0].startswith("0 of 2 figures"), (
        "nothing about fedaux, the paper's best, which was not run"
    )
    extra = comparison.findings(
        numbers_of({"fedavg": 30.0, "fedaux": 60.0, "fedaux+m": 65.0}, printed)
    )
    assert extra[0] == "fedaux is best in 0 of 1 columns."
    assert (
        extra[1]
        == "The paper's best method is best here too, or within 1 point of it, in 1 of 1 columns."
    )
    numbers = numbers_of({"fedavg": 30.0, "fedaux": 60.0}, printed)
    other = numbers_of({"fedavg": 30.0, "feddf": 20.0}, printed)["rows"]
    numbers["rows"] += [row | {"column": "C = 0.8"} for row in other]
    assert comparison.findings(numbers)[0].startswith("fedaux is best in 1 of 1 columns, by")


def test_the_paper_s_order_is_of_all_methods_that_it_prints() -> None:
    assert len(published.ranking("table1", "α = 0.01", "C = 0.4")) == 9
    assert max(published.ranking("hpo", "α = 0.01", "best combination").values()) == 0.7501
    assert published.ranking("architectures", "ResNet-8", "α = 0.01") == {
        "feddf": 18.2,
        "fedaux": 78.1,
    }
    assert published.ranking("table1", "α = 0.01", "C = 0.3") == {}


def test_the_command_says_by_its_status_that_runs_are_missing(tmp_path: Path) -> None:
    words = [
        "reproduce",
        "table1",
        "--quick",
        "--out",
        str(tmp_path),
        "--only",
        "alpha=0.01",
        "--time-limit",
        "1e-9",
    ]
    done = called(*words, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "Nothing is measured yet." in done.stdout
    assert "alpha=0.01,C=0.4,method=fedaux,seed=0: not started" in done.stdout
    assert check_latex((tmp_path / "table1.tex").read_text()) == [4]


def test_unfinished_runs_are_told_and_left_out() -> None:
    numbers = numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {})
    numbers["rows"][1] |= {"best": None, "last": None, "finished": 0}
    assert comparison.findings(numbers)[0] == "2 of 4 runs are finished; the others are left out."
    (table,) = study_page.block_tables(numbers)
    assert [row[0] for row in table.rows] == ["fedavg", "fedavg"]
    numbers["rows"] = []
    assert comparison.findings(numbers) == ["Nothing is measured yet."]


def test_tables_are_the_same_in_markdown_latex_and_html() -> None:
    numbers = numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2})
    (table,) = study_page.block_tables(numbers)
    kinds = ["published", "best round", "last round", "best less published"]
    assert [(row[0], row[1]) for row in table.rows] == [
        (m, k) for m in ("fedavg", "fedaux") for k in kinds
    ]
    text = to_markdown(table)
    assert "| fedaux | published | **71.2 ± 0.1** |" in text
    assert "| fedaux | best round | **60.0 ± 0.5** |" in text
    assert "| fedavg | last round | 29.0 |" in text
    assert "| fedaux | best less published | -11.2 |" in text
    tex = to_latex(table, label="tab:x")
    assert r"fedaux & published & \textbf{71.2 $\pm$ 0.1}" in tex
    assert check_latex(tex) == [3]
    html = Document("title <b>", {}, ["some `code`", table]).to_html()
    assert "<h1>title &lt;b&gt;</h1>" in html
    assert "<code>code</code>" in html
    assert "<strong>60.0 ± 0.5</strong>" in html
    assert not re.search(r"https?://(?!www.w3.org)", html), "the page loads nothing"


def test_every_kind_of_figure_can_be_drawn() -> None:
    numbers = numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2})
    central = {**numbers["rows"][0], "method": CENTRAL, "column": "", "published": None}
    for row in numbers["rows"]:
        row["settings"] = {"local.learning_rate": 1e-3} | (
            {"distillation.learning_rate": 1e-4} if row["method"] == "fedaux" else {}
        )
        row["curve"] = [[1, 20.0, 10.0, 30.0], [2, 30.0, 20.0, 40.0]]
    for name, draw in study_figures.FIGURES.items():
        rows = numbers["rows"] + ([central] if name == "lines" else [])
        figure = draw({**numbers, "rows": rows})
        assert len(figure.axes) == (2 if name == "heat" else 1)
        table = study_figures.figure_table(name, {**numbers, "rows": rows})
        lines = table.rows
        assert {len(line) for line in lines} == {len(table.headers)}
        assert ("over seeds" in study_figures.drawn(name, {**numbers, "rows": rows}).caption) == (
            name != "heat"
        )
        assert (
            "over seeds"
            not in study_figures.drawn(name, {**numbers, "rows": rows, "seeds": [0]}).caption
        )
        assert (len(lines), lines[0][-1]) == ((4, 30.0) if name == "curves" else (len(rows), 23.6))
        if name == "dots":
            assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
                "fedavg",
                "fedaux",
            ]
            shown = sorted(float(line.get_xdata()[0]) for line in figure.axes[0].lines)  # type: ignore[index,arg-type]
            assert {23.6, 71.2, 30.0, 60.0} <= set(shown)


def test_titles_name_what_was_run() -> None:
    numbers = {
        "methods": ["fedaux"],
        "blocks": ["α = 0.01", "α = 100"],
        "columns": ["C = 0.4", "C = 0.8"],
    }
    assert study_page.scope(numbers) == "1 method; α = 0.01, 100; C = 0.4, 0.8"
    several = {
        "methods": ["fedavg", "fedaux"],
        "blocks": ["CNN", "MLP"],
        "columns": ["local 1, μ 2", "local 1, μ 3"],
    }
    assert study_page.scope(several) == "2 methods; CNN, MLP; 2 combinations"
    shows = {str(row[0]): str(row[1]) for row in command.listing().rows}
    assert shows["table1"].endswith("(9 methods; α = 0.01, 100; C = 0.2, 0.4, 0.8)")
    assert "64 combinations" in shows["hpo"]


def test_best_combinations_stand_beside_the_printed_ones() -> None:
    numbers = numbers_of({"fedaux": 60.0}, {})
    other = {
        **numbers["rows"][0],
        "settings": {"local.learning_rate": 1e-2, "distillation.learning_rate": 1e-5},
    }
    numbers["rows"][0]["settings"] = {
        "local.learning_rate": 1e-3,
        "distillation.learning_rate": 1e-4,
    }
    other["best"] = {"mean": 65.0, "deviation": None, "values": [65.0]}
    numbers["rows"].append(other)
    (row,) = study_page.best_combinations(numbers["rows"])
    assert row["best"]["mean"] == 65.0
    assert row["published"]["mean"] == pytest.approx(75.01)
    (table,) = study_page.combination_tables(numbers)
    assert [list(row[2:]) for row in table.rows] == [
        ["0.001", "0.0001", "–", "75.01"],
        ["0.01", "1e-05", "–", "65.0"],
        ["0.01", "1e-05", "–", "59.0"],
    ]


def test_curves_of_a_block_have_one_scale_wherever_its_rows_are_broken() -> None:
    columns = [f"α = {value}" for value in (0.01, 0.1, 1, 10)]
    rows = [
        {
            "block": block,
            "column": column,
            "method": "fedaux",
            "curve": [[1, at, at, at], [2, at + 5, at, at + 9]],
        }
        for block, first in (("one", 10), ("other", 60))
        for column, at in zip(columns, range(first, first + 40, 10), strict=True)
    ]
    figure = study_figures.curves(
        {"blocks": ["one", "other"], "columns": columns, "methods": ["fedaux"], "rows": rows}
    )
    limits = [axes.get_ylim() for axes in figure.axes if axes.get_visible()]
    assert len(set(limits[:4])) == len(set(limits[4:])) == 1
    assert limits[0] != limits[4]
    assert limits[0][0] <= 10
    assert limits[0][1] >= 49


# What differs from the paper


def paper_data(folder: Path) -> Path:
    """Write a few images as CIFAR-10, and some that stand in for STL-10."""
    generator = np.random.default_rng(0)
    for file, count in (("data_batch_1", 60), ("test_batch", 20)):
        rows = generator.integers(256, size=(count, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(count) % 10
        (folder / "cifar10").mkdir(parents=True, exist_ok=True)
        (folder / "cifar10" / f"{file}.bin").write_bytes(rows.tobytes())
    (folder / "cifar-100-binary").mkdir()
    rows = generator.integers(20, size=(40, 3074), dtype=np.uint8)
    for file in ("train", "test"):
        (folder / "cifar-100-binary" / f"{file}.bin").write_bytes(rows.tobytes())
    return folder


def test_split_needs_labelled_data_alone(tmp_path: Path) -> None:
    outcome = command.reproduce(
        "split", Request(tmp_path / "out", data_root=paper_data(tmp_path / "data"))
    )
    assert outcome.markdown.startswith("# split: 20 clients, 10 classes")
    assert "Data: CIFAR-10. Means" in outcome.markdown
    assert all(np.array(table).sum() == 60 for table in outcome.numbers["tables"].values())


@pytest.mark.slow
def test_what_stands_in_is_said_in_every_file(tmp_path: Path) -> None:
    root = paper_data(tmp_path / "data")
    changes = [
        "rounds=1",
        "pretraining.epochs=1",
        "engine.device=cpu",
        'prototypes=[{name="mlp",model="mlp"}]',
    ]
    request = Request(tmp_path / "out", data_root=root, auxiliary="cifar100", overrides=changes)
    limited = Request(
        tmp_path / "table", data_root=root, auxiliary="cifar100", sweeping={"time_limit": 1e-9}
    )
    for name, asked in (("qualitative", request), ("table1", limited)):
        outcome = command.reproduce(name, asked)
        if name == "qualitative":
            assert outcome.markdown.startswith("# qualitative: ")
            assert "Data: CIFAR-10; public data: CIFAR-100." in outcome.markdown
            assert "- changed: `rounds=1`.\n" in outcome.markdown
        assert outcome.markdown.count("CIFAR-100 stands in for STL-10.") == 1
        for ending in ("md", "html", "tex"):
            assert (
                "CIFAR-100 stands in for STL-10" in (asked.out / f"{name}.{ending}").read_text()
            ), (name, ending)
        assert (
            "CIFAR-100 stands in for STL-10"
            in json.loads((asked.out / f"{name}.json").read_text())["notes"]
        )
