"""The page of a folder of runs: its numbers equal the runs', and it shows what there is to
compare."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.latex_checks import check_latex
from helpers.report_runs import (
    LEVELS,
    make_folder,
    make_run,
    read_downloads,
    read_metrics,
    read_table,
)
from rich.console import Console
from scipy.stats import rankdata

from fedaux.formatting import setting_text
from fedaux.report import figures, write_report, write_tables
from fedaux.report.figures import Mark
from fedaux.report.results import (
    differences,
    group,
    mean_ranks,
    read_records,
    read_runs,
    tuned_keys,
)
from fedaux.running.display import warning_lines
from fedaux.sweep.display import MAX_ROWS, sweep_table

ALPHAS, RATES = (0.01, 0.1, 1.0), (0.4, 0.8)
Values = dict[tuple[str, float, float], list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(
        tmp_path_factory.mktemp("report") / "grid", alphas=ALPHAS, rates=RATES, clients=6
    )


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def truth(folder: Path) -> tuple[Values, Values]:
    """Accuracies of the last round and maxima over rounds, a value a seed, by method, alpha and
    C."""
    last: Values = {}
    best: Values = {}
    for alpha in ALPHAS:
        for rate in RATES:
            rows = read_metrics(folder / f"alpha={alpha:g},rate={rate:g},epsilon=1")
            for method in LEVELS:
                for seed in range(3):
                    own = [row for row in rows if (row["method"], row["seed"]) == (method, seed)]
                    measured = [row["accuracy"] for row in own if row["accuracy"] is not None]
                    last.setdefault((method, alpha, rate), []).append(measured[-1])
                    best.setdefault((method, alpha, rate), []).append(max(measured))
    return last, best


@pytest.mark.usefixtures("undrawn")
def test_warnings_of_all_runs_are_told_once_with_their_runs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "grid", alphas=(0.01, 0.1), rates=(0.4,), seeds=1, rounds=1)
    first, _ = (f"alpha={alpha:g},rate=0.4,epsilon=1" for alpha in (0.01, 0.1))
    noisy = "fedaux: hopeless certainty scores of client 1"
    (folder / first / "warnings.json").write_text(json.dumps({"noise": [noisy]}))
    lines = warning_lines(folder)
    assert f"Warning: {first}: {noisy}" in lines
    assert "Warning: feddf+p: 1 of 8 answers were dropped, first: no data" in lines  # in both
    page = html.unescape(write_report(folder).read_text(encoding="utf-8"))
    assert f"<strong>Warning:</strong> {first}: {noisy}." in page
    assert page.count('<p class="notice">') == len(lines)


def test_tables_are_files(tmp_path: Path) -> None:
    levels = {"fedaux": 0.8, "fedaux2": 0.8001, "fedavg": 0.3}
    options: dict[str, Any] = {"levels": levels, "seeds": 1, "rates": (0.4,), "alphas": (0.1, 1.0)}
    folder = make_folder(tmp_path / "grid", **options)
    out = tmp_path / "tables"
    assert set(write_tables(folder, out)) == set(out.iterdir())
    with (out / "records.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    found = {(line["cell"], line["method"], line["accuracy"]) for line in lines}
    records = read_records(folder)
    assert found == {(one["cell"], one["method"], str(one["accuracy"])) for one in records}
    tex = (out / "results.tex").read_text(encoding="utf-8")
    assert check_latex(tex) == [4]
    assert r" $^\dagger$ &" in tex
    assert r"\textbf{" in tex
    assert " † |" in (out / "results.md").read_text(encoding="utf-8")


def cell(values: list[float]) -> str:
    return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f}"


def test_records_say_what_the_runs_measured(folder: Path, truth: tuple[Values, Values]) -> None:
    records = read_records(folder)
    assert len(records) == 6 * 5 * 3
    for record in records:
        place = record["method"], record["split.alpha"], record["participation_rate"]
        assert record["accuracy"] == truth[0][place][record["seed"]]
        assert record["accuracy_max"] == truth[1][place][record["seed"]]
        assert record["complete"]
        assert record["epsilon"] == (1.0 if record["method"] == "fedaux" else None)
    rows = group(records)
    assert len(rows) == 6 * 5
    for row in rows:
        values = truth[0][row["method"], row["split.alpha"], row["participation_rate"]]
        assert row["accuracy_mean"] == pytest.approx(statistics.mean(values))
        assert row["accuracy_std"] == pytest.approx(statistics.stdev(values))
        assert row["seeds_done"] == 3


def test_ranking_shows_last_and_best_round_with_spread(
    text: str, truth: tuple[Values, Values]
) -> None:
    columns = [(alpha, rate) for rate in RATES for alpha in ALPHAS]
    last, best = read_table(text, "results"), read_table(text, "results", number=1)
    ranks = {method: [0.0] * 6 for method in LEVELS}
    for place, (alpha, rate) in enumerate(columns):
        means = [statistics.mean(truth[0][method, alpha, rate]) for method in LEVELS]
        for method, rank in zip(LEVELS, rankdata([-mean for mean in means]), strict=True):
            ranks[method][place] = rank
            shown = re.sub("</?strong>", "", last[method][place])
            assert shown == cell(truth[0][method, alpha, rate])
            assert ("<strong>" in last[method][place]) == (rank == 1)
            assert re.sub("</?strong>", "", best[method][place]) == cell(
                truth[1][method, alpha, rate]
            )
    assert {method: cells[-1] for method, cells in last.items()} == {
        method: f"{statistics.mean(own):.2f}" for method, own in ranks.items()
    }
    assert list(last) == sorted(LEVELS, key=lambda method: statistics.mean(ranks[method]))
    wins = sum(rank == 1 for rank in ranks["fedaux"])
    assert f"fedaux is best in {wins} of 6 settings" in text


def test_every_figure_offers_its_numbers(
    text: str, folder: Path, truth: tuple[Values, Values]
) -> None:
    downloads = read_downloads(text)
    assert list(downloads) == [
        "results.csv",
        "records.csv",
        "curves.csv",
        "settings.csv",
        "privacy.csv",
        "bytes.csv",
    ]
    assert text.count("<figure>") == 4
    assert len(downloads["records.csv"]) == 90
    for row in downloads["settings.csv"]:
        values = truth[0][
            row["method"], float(row["split.alpha"]), float(row["participation_rate"])
        ]
        assert float(row["accuracy"]) == pytest.approx(statistics.mean(values), abs=1e-5)
    curves = [row for row in downloads["curves.csv"] if row["setting"] == "C = 0.8, α = 0.1"]
    metrics = read_metrics(folder / "alpha=0.1,rate=0.8,epsilon=1")
    assert len(curves) == 5 * 9
    for row in curves:
        same = [
            line
            for line in metrics
            if (line["method"], line["round"]) == (row["method"], int(row["round"]))
        ]
        values = [line["accuracy"] for line in same]
        assert float(row["accuracy_mean"]) == pytest.approx(statistics.mean(values), abs=1e-5)
        assert float(row["accuracy_min"]) == pytest.approx(min(values), abs=1e-5)
        assert float(row["accuracy_max"]) == pytest.approx(max(values), abs=1e-5)
    for row in downloads["privacy.csv"]:
        assert row["epsilon"] == ("1" if row["method"] == "fedaux" else "")
    for row in downloads["bytes.csv"]:
        rate = 0.8 if "C = 0.8" in row["setting"] else 0.4
        up = rate * (20.0 + 8 * ("+" in row["method"]) + 3 * (row["method"] == "fedaux"))
        assert float(row["megabytes"]) == pytest.approx(up + 41.25)


@pytest.mark.usefixtures("undrawn")
def test_the_ledgers_epsilon_is_the_one_shown(tmp_path: Path) -> None:
    make_folder(
        tmp_path / "out",
        alphas=(0.01,),
        rates=(0.4,),
        epsilons=(0.1, 2.0),
        levels={"fedaux": 0.8, "fedavg": 0.3},
    )
    rows = read_downloads(write_report(tmp_path / "out").read_text())["privacy.csv"]
    for epsilon in (0.1, 2.0):
        ledger = json.loads(
            (tmp_path / f"out/alpha=0.01,rate=0.4,epsilon={epsilon:g}/ledger.json").read_text()
        )
        worst = max(entry["epsilon"] for entry in ledger["entries"])
        shown = [
            row["epsilon"]
            for row in rows
            if row["setting"] == f"ε = {epsilon:g}" and row["method"] == "fedaux"
        ]
        assert shown == [f"{worst:g}"]
    assert {row["epsilon"] for row in rows if row["method"] == "fedavg"} == {""}


@pytest.mark.usefixtures("undrawn")
def test_what_is_shown_depends_on_what_there_is_to_compare(tmp_path: Path) -> None:
    def sections(root: Path) -> list[str]:
        return re.findall(r'<h2 id="(\w+)">', write_report(root).read_text())

    one = {"fedaux": 0.8}
    single = make_folder(tmp_path / "single", alphas=(0.01,), rates=(0.4,), levels=one)
    assert sections(single) == [
        *(
            "results",
            "curves",
            "classes",
            "split",
            "scores",
            "privacy",
            "communication",
            "time",
            "runs",
            "configuration",
        )
    ], "nothing to compare: the page of the run"
    alphas = make_folder(tmp_path / "alphas", rates=(0.4,), levels=one)
    assert sections(alphas) == [
        "results",
        "curves",
        "settings",
        "privacy",
        "communication",
        "runs",
        "configuration",
    ]
    text = (alphas / "report.html").read_text()
    assert "All methods and settings sent the same within 2 %" in text
    assert "Effect of α" in text
    epsilons = make_folder(
        tmp_path / "epsilons", alphas=(0.01,), rates=(0.4,), epsilons=(0.1, 1.0), levels=one
    )
    assert sections(epsilons) == [
        "results",
        "curves",
        "privacy",
        "communication",
        "runs",
        "configuration",
    ]
    three = make_folder(tmp_path / "three", epsilons=(0.1, 1.0), levels=one, seeds=1, rounds=2)
    assert sections(three) == [
        "results",
        "curves",
        "settings",
        "privacy",
        "communication",
        "runs",
        "configuration",
    ]
    text = (three / "report.html").read_text()
    assert "each number is a mean over C" in text  # which has the least effect here
    assert " ± " not in re.sub(r"<p.*?</p>", "", text)  # one seed has no spread
    assert "The other" not in text


@pytest.mark.usefixtures("undrawn")
def test_seeds_of_several_runs_are_put_together(tmp_path: Path) -> None:
    for seed in range(2):
        directory = make_run(tmp_path / f"seeds={seed}", levels={"fedavg": 0.3}, seeds=1)
        config, metrics = (directory / name for name in ("config.toml", "metrics.jsonl"))
        config.write_text(
            config.read_text().replace("seeds = [\n    0,\n]", f"seeds = [\n    {seed},\n]")
        )
        rows = [
            row | {"seed": seed, "accuracy": row["accuracy"] and row["accuracy"] + seed / 10}
            for row in read_metrics(directory)
        ]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = group(read_records(tmp_path))
    values = [read_metrics(tmp_path / f"seeds={seed}")[-1]["accuracy"] for seed in range(2)]
    assert row["seeds_done"] == 2
    assert row["accuracy_std"] == pytest.approx(statistics.stdev(values))
    (shown,) = read_table(write_report(tmp_path).read_text(), "results").values()
    assert shown[0] == cell(values)


@pytest.mark.usefixtures("undrawn")
def test_runs_that_are_missing_failed_or_unfinished_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "alpha=1", levels={"fedavg": 0.3}, alpha=1.0)
    make_run(tmp_path / "alpha=2", levels={"fedavg": 0.3}, alpha=2.0, recorded=4)
    cells = [
        {"name": f"alpha={alpha}", "settings": {"split.alpha": alpha}, "failed": reason}
        for alpha, reason in ((1, None), (2, None), (3, "<b>no memory</b>"), (4, None))
    ]
    plan = {"format": 1, "name": "grid", "keys": ["split.alpha"], "cells": cells}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    text = write_report(tmp_path).read_text()
    assert "Of 4: 1 failed (alpha=3), 1 unfinished, 1 not started." in text
    states = {
        re.sub("<.*?>", "", name): cells[0] for name, cells in read_table(text, "runs").items()
    }
    assert states == {
        "alpha=1": "finished",
        "alpha=2": "unfinished",
        "alpha=3": "failed: <b>no memory</b>",
        "alpha=4": "not started",
    }
    assert "<b>no memory" not in text
    assert 'href="alpha%3D1/report.html"' in text
    (tmp_path / "sweep.json").write_text('{"keys": 1}')
    with pytest.raises(ValueError, match=r"sweep\.json does not describe a sweep"):
        write_report(tmp_path)


def test_a_folder_without_runs_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.toml and environment\.json missing"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="is not a run directory, nor a folder of them"):
        read_runs(tmp_path)
    with pytest.raises(ValueError, match="nowhere: there is no such folder; should be a run"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "sweep.json").write_text('{"name": "none", "keys": [], "cells": []}')
    text = write_report(tmp_path).read_text()
    assert "Nothing has been evaluated yet." in text


def test_names_from_files_cannot_become_markup(tmp_path: Path) -> None:
    hostile = '"><script>alert(1)</script>'
    for place, value in enumerate((hostile, "plain")):
        directory = make_run(
            tmp_path / f"run-{place}", levels={hostile: 0.5, "fedavg": 0.4}, seeds=1, clients=4
        )
        config = (
            (directory / "config.toml")
            .read_text()
            .replace('source = "letters"', f"source = {json.dumps(value)}")
        )
        (directory / "config.toml").write_text(config)
    text = write_report(tmp_path).read_text()
    assert "<script" not in text
    assert text.count(html.escape(hostile)) > 5


def test_runs_differ_in_what_their_configurations_say() -> None:
    common = {
        "name": "a",
        "method": ["x"],
        "seeds": [0],
        "engine": {"device": "cpu"},
        "split": {"alpha": 1, "n": 2},
    }
    other = common | {
        "name": "b",
        "seeds": [1],
        "engine": {"device": "cuda"},
        "split": {"alpha": 3, "n": 2},
        "rounds": 2,
    }
    keys, settings = differences({"one": common, "two": other})
    assert keys == ("split.alpha", "rounds")
    assert settings == {
        "one": {"split.alpha": 1, "rounds": None},
        "two": {"split.alpha": 3, "rounds": 2},
    }


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("planned", [True, False])
def test_what_is_tuned_for_one_method_is_no_setting_of_all(tmp_path: Path, planned: bool) -> None:
    cells: list[dict[str, Any]] = []
    for alpha, method, mu in product((0.01, 1.0), ("fedavg", "fedprox", "fedaux"), (0.01, 0.5)):
        if mu == (0.5 if (method, alpha) == ("fedprox", 1.0) else 0.01):
            directory = make_run(
                tmp_path / f"{method}-{alpha:g}",
                levels={method: 0.3 + 0.1 * len(cells)},
                alpha=alpha,
            )
            with (directory / "config.toml").open("a") as config:
                config.write(f"\n[local]\nproximal = {mu}\n")
            settings = {"method": [method], "split.alpha": alpha} | (
                {"local.proximal": mu} if "prox" in method else {}
            )
            cells.append({"name": directory.name, "settings": settings, "failed": None})
    keys = ["method", "split.alpha", "local.proximal"]
    if planned:
        plan = {"format": 1, "name": "grid", "keys": keys, "cells": cells}
        (tmp_path / "sweep.json").write_text(json.dumps(plan))
    folder = read_runs(tmp_path)
    assert folder.keys == ("split.alpha",)
    assert folder.tuned == {"local.proximal": {"fedprox": [0.01, 0.5]}}
    assert all("local.proximal" not in record for record in folder.records)
    text = write_report(tmp_path).read_text()
    assert {len(row) for row in read_table(text, "results").values()} == {3}, (
        "two settings and the mean rank"
    )
    assert "fedaux is best in 2 of 2 settings (mean rank 1.00 of 3)" in text
    assert "local.proximal of fedprox: 0.01, 0.5" in text
    if planned:  # planned runs count, too
        more = {"method": ["fedprox"], "split.alpha": 1.0, "local.proximal": 0.1}
        plan["cells"] = [*cells, {"name": "later", "settings": more, "failed": None}]
        (tmp_path / "sweep.json").write_text(json.dumps(plan))
        assert read_runs(tmp_path).keys == ("split.alpha", "local.proximal")


def test_a_setting_is_tuned_where_it_follows_from_method_and_setting() -> None:
    def found(*cells: tuple[str, float, float]) -> list[str]:
        keys = ("split.alpha", "local.proximal")
        settings = [
            (method, {"split.alpha": alpha, "local.proximal": mu}) for method, alpha, mu in cells
        ]
        return list(tuned_keys(keys, settings))

    mu = ["local.proximal"]
    assert found(("fedavg", 1, 0.1), ("fedprox", 1, 0.2)) == mu
    assert found(("fedavg", 1, 0.1), ("fedprox", 1, 0.2), ("fedprox", 2, 0.3)) == mu
    assert found(("fedavg", 1, 0.1), ("fedprox", 1, 0.2), ("fedprox+p", 1, 0.3)) == mu
    assert found(("fedavg", 1, 0.1), ("fedprox", 1, 0.2), ("fedprox", 1, 0.3)) == [], "swept over"
    assert found(("fedavg", 1, 0.1), ("fedavg", 2, 0.2), ("fedprox", 1, 0.2)) == [], (
        "idle methods differ, too"
    )
    assert found(("fedprox", 1, 0.1), ("fedprox+p", 1, 0.2)) == [], "all methods look at it"
    assert found(("own", 1, 0.1), ("fedprox", 1, 0.2)) == [], (
        "nobody knows what a method of others looks at"
    )
    steps = "distillation.steps"
    cells = [
        ("feddf", {"rounds": 1, steps: 10}),
        ("fedavg", {"rounds": 1, steps: 20}),
        ("fedaux", {"rounds": 2}),
    ]
    assert tuned_keys(("rounds", steps), cells) == {steps: {"feddf": [10]}}
    assert (
        tuned_keys(
            ("rounds", "local.epochs"), [("feddf", {"local.epochs": 1}), ("x", {"local.epochs": 2})]
        )
        == {}
    )


def test_mean_ranks_leave_out_settings_that_not_all_have() -> None:
    def row(method: str, setting: str, accuracy: float) -> dict[str, Any]:
        return {"method": method, "setting": setting, "accuracy_mean": accuracy}

    rows = [
        row("a", "x", 0.5),
        row("b", "x", 0.5),
        row("a", "y", 0.9),
        row("b", "y", 0.1),
        row("b", "z", 0.7),
    ]
    assert mean_ranks(rows, lambda row: str(row["setting"])) == {
        "a": (1.5 + 1) / 2,
        "b": (1.5 + 2) / 2,
    }
    assert mean_ranks(rows[-1:] + rows[:1], lambda row: str(row["setting"])) == {}


def test_the_frontier_is_what_nothing_beats() -> None:
    generator = np.random.default_rng(0)
    marks = [
        Mark("m", float(cost), float(value), 0.0, "")
        for cost, value in generator.integers(0, 12, size=(40, 2))
    ]

    def beaten(mark: Mark) -> bool:
        return any(
            (other.cost <= mark.cost and other.accuracy > mark.accuracy)
            or (other.cost < mark.cost and other.accuracy >= mark.accuracy)
            for other in marks
        )

    assert figures.frontier(marks) == sorted({mark for mark in marks if not beaten(mark)})


def test_heat_maps_and_privacy_show_the_numbers_they_are_given() -> None:
    panel = np.array([[0.1, 0.2, math.nan], [0.4, 0.9, 0.6]])
    figure = figures.heat_maps(
        [("fedaux", panel), ("fedavg", panel / 2)],
        rows=["1", "2"],
        columns=["a", "b", "c"],
        labels=("α", "C"),
    )
    first, second = figure.axes
    drawn = first.images[0].get_array()
    assert drawn is not None
    assert np.ma.filled(drawn, math.nan) == pytest.approx(panel, nan_ok=True)
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0.05, 0.9)
    assert [text.get_text() for text in first.texts] == [
        "10.0",
        "20.0",
        "–",
        "40.0",
        "90.0",
        "60.0",
    ]
    assert [text.get_text() for text in first.texts if text.get_fontweight() == "bold"] == ["90.0"]
    marks = [
        Mark("fedaux", cost, value, 0.0, "l")
        for cost, value in ((0.1, 0.5), (math.inf, 0.8), (2.0, 0.7))
    ]
    names = {-1.0: "nothing", 0.1: "0.1", 2.0: "2", math.inf: "∞"}
    axes = figures.against_values(
        [*marks, Mark("fedavg", -1.0, 0.3, 0.0, "k")], xlabel="ε", names=names
    ).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["nothing", "0.1", "2", "∞"]
    (line,) = [line for line in axes.lines if np.size(line.get_xdata()) == 3]
    assert np.asarray(line.get_ydata()).tolist() == [50, 70, 80]


def test_values_are_written_short_and_never_alike() -> None:
    assert [
        setting_text(value)
        for value in (0.01, 100.0, 1e-5, 0.1234, 0.12341, 3000, True, None, [0.5, 1.0])
    ] == [*("0.01", "100", "1e-5", "0.1234", "0.12341", "3,000", "true", "–", "0.5+1")]
    prototypes = [
        {"name": "small", "model": "cnn", "options": {"width": 4}, "share": 1.0},
        {"name": "a", "model": "mlp"},
    ]
    assert setting_text(prototypes) == "small (cnn, width=4)+a (mlp)"


def test_labels_of_settings_stay_apart(folder: Path) -> None:
    runs = read_runs(folder)
    assert runs.short == {"participation_rate": "C", "split.alpha": "α"}
    assert runs.settings_in_order() == [
        f"C = {rate:g}, α = {alpha:g}" for rate in RATES for alpha in ALPHAS
    ]


def test_budgets_of_several_settings_are_drawn_together(tmp_path: Path) -> None:
    few = make_folder(
        tmp_path / "few", alphas=(0.01, 1.0), rates=(0.4,), epsilons=(0.1, 1.0), clients=6
    )
    page = write_report(few).read_text(encoding="utf-8")
    privacy = page.partition('id="privacy"')[2].partition("</section>")[0]
    assert "Each mark is a method at one setting" in privacy
    assert "Methods are side by side at each ε." in privacy


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_keeps_the_spread_of_the_last_round(folder: Path, width: int) -> None:
    rows = group(read_records(folder))
    for number, row in enumerate(rows):
        row["pretraining.learning_rate"] = 1e-4 * number
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(sweep_table("grid", rows))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= width
    ranked = sorted(rows, key=lambda row: -row["accuracy_mean"])[:MAX_ROWS]
    for row in ranked:
        assert f" {100 * row['accuracy_mean']:.1f} ± {100 * row['accuracy_std']:.1f} " in shown
