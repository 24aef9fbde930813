"""The page of a run: what it says, and that it is whole."""

from __future__ import annotations

import html
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from helpers.report_runs import CLASSES, LEVELS, make_run, read_downloads, read_metrics, read_table
from safetensors.numpy import save_file

from fedaux.report import figures, page, svg, write_report
from fedaux.report.results import Runs
from fedaux.report.run import Run, curve_points
from fedaux.report.tables import to_html
from fedaux.report.verdict import last_accuracies, verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "demo")


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    path = write_report(run)
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


def test_finding_and_result_table_hold_the_numbers_of_the_metrics(run: Path, text: str) -> None:
    metrics = read_metrics(run)

    def last(method: str) -> list[float]:
        return [
            row["accuracy"] for row in metrics if row["method"] == method and row["round"] == 10
        ]

    def best(method: str) -> list[float]:
        mine = [row for row in metrics if row["method"] == method and row["accuracy"] is not None]
        return [max(row["accuracy"] for row in mine if row["seed"] == seed) for seed in range(3)]

    def cell(values: list[float]) -> str:
        return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f}"

    points = 100 * (statistics.mean(last("fedaux")) - statistics.mean(last("feddf+p")))
    assert (
        f"fedaux reached {100 * statistics.mean(last('fedaux')):.1f} % in the last round, "
        f"{points:.1f} points above "
        "feddf+p, the next method. The clients' releases are "
        "(1, 1e-5)-differentially private."
    ) in html.unescape(text)
    table = read_table(text, "results")
    assert list(table) == ["fedaux", "feddf+p", "fedavg+p", "feddf", "fedavg"]
    for method, cells in table.items():
        assert cells[:2] == [cell(last(method)), cell(best(method))]
    assert table["fedaux"][2:] == ["3", "(1, 1e-5)", "22.5", "41.2", "1,234.6"]
    assert table["fedavg"][3] == "–"
    assert "not finished" not in text


def test_sections_stand_in_order_and_headings_do_not_skip(text: str) -> None:
    assert re.findall(r'<h2 id="(\w+)">', text) == [
        *(
            "results",
            "curves",
            "classes",
            "split",
            "scores",
            "privacy",
            "communication",
            "time",
            "configuration",
        )
    ]
    assert text.count("<h1>") == 1
    assert text.index("<h1>") < text.index("<h2")
    assert '<html lang="en">' in text
    assert (
        len(re.findall(r'<svg[^>]* role="img" aria-label="[^"]+"', text))
        == text.count("<figure>")
        == 4
    )


def test_every_figure_offers_its_numbers(run: Path, text: str) -> None:
    downloads = read_downloads(text)
    assert list(downloads) == [
        *(
            "results.csv",
            "records.csv",
            "curves.csv",
            "confusion.csv",
            "split_seed_0.csv",
            "scores.csv",
        )
    ]
    summary = json.loads((run / "summary.json").read_text())["rows"]
    assert {row["method"]: float(row["accuracy_mean"]) for row in downloads["results.csv"]} == {
        row["method"]: pytest.approx(row["accuracy_mean"]) for row in summary
    }
    assert len(downloads["records.csv"]) == 5 * 3
    metrics = read_metrics(run)
    rows = downloads["curves.csv"]
    assert len(rows) == 5 * 9  # round 2 was not evaluated
    for row in rows:
        same = [
            line
            for line in metrics
            if line["method"] == row["method"] and line["round"] == int(row["round"])
        ]
        assert float(row["accuracy_mean"]) == pytest.approx(
            sum(line["accuracy"] for line in same) / 3, abs=1e-5
        )
        assert float(row["accuracy_min"]) == pytest.approx(
            min(line["accuracy"] for line in same), abs=1e-5
        )
        assert float(row["accuracy_max"]) == pytest.approx(
            max(line["accuracy"] for line in same), abs=1e-5
        )
    table = json.loads((run / "split.json").read_text())["tables"]["0"]
    assert [[int(row[name]) for name in CLASSES] for row in downloads["split_seed_0.csv"]] == table
    scores = downloads["scores.csv"]
    for name in CLASSES:
        column = [row for row in scores if row["class"] == name]
        assert sum(float(row["weight"]) for row in column) == pytest.approx(1, abs=1e-4)
        held = sum(int(row["examples"]) for row in column)
        for row in column:
            assert float(row["share_held"]) == pytest.approx(int(row["examples"]) / held, abs=1e-5)


def test_figures_by_class_come_from_the_last_round(run: Path, text: str) -> None:
    last = [row for row in read_metrics(run) if row["round"] == 10]
    downloads = read_downloads(text)["confusion.csv"]
    for method in LEVELS:
        own = [row["confusion"] for row in last if row["method"] == method]
        expected = np.sum(own, axis=0)
        counts = [int(row["examples"]) for row in downloads if row["method"] == method]
        assert counts == expected.ravel().tolist()
        balanced = [row["balanced_accuracy"] for row in last if row["method"] == method]
        mean, deviation = statistics.mean(balanced), statistics.stdev(balanced)
        assert f"{100 * mean:.1f} ± {100 * deviation:.1f}" in text
    hits = sum(row["confusion"][3][3] for row in last if row["method"] == "fedaux")
    cells = re.search(r'<th scope="row" class="text">3</th>(.*?)</tr>', text)
    assert cells
    assert f"<td>{hits / 3:.1f}</td>" in cells[1]  # of 100 test examples per class and seed
    assert "How fedaux classifies the test examples" in text


@pytest.mark.usefixtures("undrawn")
def test_most_of_the_weight_on_public_data_is_a_warning(text: str, tmp_path: Path) -> None:
    assert "hardly teach" not in text
    directory = make_run(tmp_path / "run", levels={"fedaux": 0.8}, seeds=1, rounds=1)
    (line,) = read_metrics(directory)
    line["public_weight_by_client"] = {"0": 0.8, "1": 0.1, "2": 0.05, "4": 0.05}
    line["public_weight_by_class"] = [0.82] + [0.02] * 9
    (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    noise = "clients 1 with 3 examples: the noise is 2 times the largest possible signal."
    (directory / "warnings.json").write_text(json.dumps({"noise": [noise]}))
    split = json.loads((directory / "split.json").read_text())
    split["names"] = [f"hospital_{client}" for client in range(20)]
    (directory / "split.json").write_text(json.dumps(split))
    page = html.unescape(write_report(directory).read_text())
    assert page.count('<p class="notice">') == 4
    assert "fedaux: 1 of 8 answers were dropped, first: no data" in page
    assert noise in page
    assert "hospital_0 has 80 % of the weight on public data" in page
    assert "class 0 has 82 % of the soft labels on public data" in page
    assert "hospital_4" in page
    assert not re.search(r"\bclient \d", page)


def test_the_verdict_stands_below_the_finding(run: Path, text: str) -> None:
    metrics = read_metrics(run)
    table = verdict(last_accuracies(metrics))
    assert table is not None
    shown = to_html(table)
    assert shown in text
    assert text.index('class="finding"') < text.index(shown) < text.index("<h2")


@pytest.mark.usefixtures("undrawn")
def test_bounds_are_no_rivals(tmp_path: Path) -> None:
    levels = {"fedaux": 0.8, "feddf+p": 0.6, "local-only+p": 0.2, "pooled+p": 0.95}
    page = write_report(make_run(tmp_path / "run", levels=levels)).read_text()
    assert re.search(r"fedaux reached .* points above feddf\+p, the only other method", page)
    assert re.search(r"<tr class=best><th[^>]*>fedaux<", page)
    assert re.search(r"pooled\+p 9[\d.]+</th><td><strong>\+1\d", page)


def test_overlap_of_scores_and_data_is_stated(run: Path, text: str) -> None:
    rows = read_downloads(text)["scores.csv"]
    overlap = sum(min(float(row["share_held"]), float(row["weight"])) for row in rows) / len(
        CLASSES
    )
    assert f"overlap by {overlap:.2f} (1 = identical" in text


def test_privacy_section_says_what_is_and_what_is_not_protected(run: Path, text: str) -> None:
    ledger = json.loads((run / "ledger.json").read_text())
    entries = ledger["entries"]
    clients = {entry["client"] for entry in entries}
    sizes = [entry["num_examples"] for entry in entries]
    cells = read_table(text, "privacy")["fedaux"]
    assert cells[:5] == [
        *("mean, for certainty scores, noise simulated", str(len(clients)), "1", "1e-5"),
        f"{min(sizes)} to {max(sizes)}",
    ]
    assert cells[5] == f"{2 / max(sizes):.3g} to {2 / min(sizes):.3g}"
    plain = html.unescape(text)
    assert ledger["neighbours"] in plain
    assert f"<strong>Not protected:</strong> {ledger['unprotected']}" in plain
    assert "anyone who knows the seed can remove it" in plain


@pytest.mark.usefixtures("undrawn")
def test_epsilons_that_differ_between_clients_are_a_range(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", epsilon="inf")
    ledger = json.loads((directory / "ledger.json").read_text())
    ledger["entries"][0]["epsilon"] = 35.25
    ledger["entries"].append(ledger["entries"][0])
    (directory / "ledger.json").write_text(json.dumps(ledger))
    text = write_report(directory).read_text()
    assert read_table(text, "privacy")["fedaux"][2] == "35.25 to ∞"
    assert "up to 2 times in one run" in text
    assert "means no differential privacy" in text
    assert read_table(text, "results")["fedaux"][3] == "(∞, 1e-5)"
    assert html.escape("The clients' releases are not differentially private.") in text


def test_communication_and_time(text: str) -> None:
    assert read_table(text, "communication")["feddf"] == [
        *("22.5", "41.2", "0.316", "0.316", str(8 * 30), str(7 * 30), "30 no data")
    ]
    assert read_table(text, "time")["feddf"] == ["0.5", "0.01", "0.2", "0.3", "0.04", "1.05"]


def test_configuration_is_verbatim_and_folded(run: Path, text: str) -> None:
    folded = re.search(r"<details>.*?<pre>(.*?)</pre>", text, re.S)
    assert folded
    assert html.unescape(folded[1]) == (run / "config.toml").read_text()
    versions = read_table(text, "configuration")
    assert versions["torch"] == ["2.13.0"]
    assert versions["config SHA-256"] == ["ab" * 32]


def test_names_from_files_cannot_become_markup(tmp_path: Path) -> None:
    hostile = '$\\frac$"><script>alert(1)</script>'
    directory = make_run(
        tmp_path / "run", levels={"fedaux": 0.8, hostile: 0.7}, seeds=1, name=hostile
    )
    split = json.loads((directory / "split.json").read_text())
    split["classes"] = [hostile] * 10
    (directory / "split.json").write_text(json.dumps(split))
    ledger = json.loads((directory / "ledger.json").read_text())
    for entry in ledger["entries"]:
        entry.update(mechanism=hostile, noise=hostile)
    ledger.update(neighbours=hostile, unprotected=hostile)
    (directory / "ledger.json").write_text(json.dumps(ledger))
    (directory / "environment.json").write_text(json.dumps({hostile: hostile}))
    metrics = [{**row, "clients_dropped": {"3": hostile}} for row in read_metrics(directory)]
    metrics[0]["accuracy_by_prototype"] = {hostile: 0.5, "cnn": 0.5}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    text = write_report(directory).read_text()
    assert "<script" not in text
    assert text.count(html.escape(hostile)) > 10
    assert read_downloads(text)["curves.csv"][-1]["method"] == hostile


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", recorded=4)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"method": "fedaux", "seed": 2, "rou')  # cut off while it was written
    text = write_report(directory).read_text()
    assert "This run is not finished." in text
    assert "24 of 30 for each of fedavg, fedavg+p, feddf, feddf+p, fedaux." in text
    assert "So far fedaux reached" in text
    assert {row["seeds"] for row in read_downloads(text)["curves.csv"]} == {"2", "3"}


@pytest.mark.usefixtures("undrawn")
def test_a_summary_that_claims_more_than_the_metrics_is_not_believed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", levels={"fedaux": 0.8, "fedavg": 0.3})
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:-1]))
    text = write_report(directory).read_text()
    assert (
        "This run is not finished.</strong> Rounds recorded over all seeds: fedavg 29 of 30."
        in text
    )


def test_a_run_that_just_started_has_a_report(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    for name in (
        "metrics.jsonl",
        "summary.json",
        "ledger.json",
        "split.json",
        "scores.safetensors",
    ):
        (directory / name).unlink()
    text = write_report(directory).read_text()
    assert "Nothing has been evaluated yet." in text
    assert "0 of 30 for each of fedavg" in text
    assert "There is no ledger" in text
    assert "<svg" not in text
    (directory / "metrics.jsonl").touch()
    assert write_report(directory).read_text() == text


@pytest.mark.usefixtures("undrawn")
def test_a_method_with_one_seed_so_far_has_no_spread(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", recorded=0)
    rows = [row for row in read_metrics(directory) if row["method"] != "feddf" or row["seed"] == 0]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = read_table(write_report(directory).read_text(), "results")
    assert {method for method, cells in table.items() if "±" in cells[0]} == set(LEVELS) - {"feddf"}


@pytest.mark.usefixtures("undrawn")
def test_without_a_summary_the_last_accuracies_are_shown(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", levels={"fedavg": 0.3}, seeds=1)
    (directory / "summary.json").unlink()
    last = read_metrics(directory)[-1]["accuracy"]
    text = write_report(directory).read_text()
    assert f"So far fedavg reached {100 * last:.1f} % in its last recorded round." in text
    assert "Every round is recorded, but the summary is missing or not final." in text


@pytest.mark.parametrize(
    ("means", "deviation", "expected"),
    [
        (
            {"fedaux": 0.80, "feddf+p": 0.823},
            0.0,
            "feddf+p reached 82.3 % in the last round, 2.3 points above fedaux, the only other",
        ),
        (
            {"fedaux": 0.80, "fedavg": 0.8001, "feddf": 0.1},
            0.0,
            "fedavg reached 80.0 % in the last round, level with fedaux, 70.0 points above feddf",
        ),
        (
            {"fedaux2": 0.8076, "fedaux": 0.7, "private-head": 0.808, "fedavg": 0.4},
            0.01,
            "private-head reached 80.8 % in the last round, level with fedaux2, 10.8 points above "
            "fedaux, the next method",
        ),
        (
            {"fedaux2": 0.80, "fedavg": 0.79},
            0.02,
            "fedaux2 reached 80.0 % in the last round, 1.0 points above fedavg, the only other",
        ),
        (
            {"fedaux": 0.5, "fedaux2": 0.6, "fedavg": 0.7},
            0.0,
            "fedavg reached 70.0 % in the last round, 10.0 points above fedaux2, the next method",
        ),
        (
            {"fedavg": 0.40, "feddf": 0.5},
            0.0,
            "feddf reached 50.0 % in the last round, 10.0 points above fedavg",
        ),
        ({"fedavg": 0.40}, 0.0, "fedavg reached 40.0 % in the last round."),
        ({"fedavg": None}, None, "Nothing has been evaluated yet."),
    ],
)
def test_finding_is_honest(
    means: dict[str, float | None], deviation: float | None, expected: str
) -> None:
    half = 0.0 if deviation is None else deviation / statistics.stdev([-1, 1])
    metrics = [
        {
            "method": name,
            "seed": seed,
            "round": 1,
            "accuracy": None if mean is None else mean + sign * half,
        }
        for name, mean in means.items()
        for seed, sign in enumerate((-1, 1))
    ]
    run = Run(
        "demo", "", {"rounds": 1, "seeds": [0, 1]}, {}, metrics, {}, {"complete": True}, {}, None
    )
    assert expected in page.finding(Runs("demo", {"demo": run}))


def test_only_a_run_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing: there is no such folder; should be a run dir"):
        write_report(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError,
        match=r"empty is not a run directory, nor a folder of them: config\.toml and "
        r"environment\.json missing",
    ):
        write_report(tmp_path / "empty")
    directory = make_run(tmp_path / "run", levels={"fedavg": 0.3}, seeds=1)
    (directory / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is not valid JSON"):
        write_report(directory)
    (directory / "summary.json").write_text("{}")
    (directory / "metrics.jsonl").write_text('{"method": "fedavg"}\n{}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1, is not a valid round"):
        write_report(directory)
    (directory / "metrics.jsonl").unlink()
    (directory / "scores.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"scores\.safetensors has no valid certainty scores"):
        write_report(directory)
    assert [path.name for path in directory.iterdir() if "report" in path.name] == []


def test_one_round_and_equal_weights(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", levels={"fedaux": 0.8}, seeds=1, rounds=1)
    weights = np.full((20, 10), 0.05, dtype=np.float32)
    words = {"method": "fedaux", "seed": "0", "clients": json.dumps(list(range(20)))}
    save_file({"weights_by_class": weights}, directory / "scores.safetensors", metadata=words)
    curves = figures.labelled_lines(curve_points(read_metrics(directory)))
    assert curves.axes[0].get_xticks().tolist() == [1]
    text = write_report(directory).read_text()
    overlap = re.search(
        r"overlap by ([\d.]+) \(1 = identical; equal weights would reach ([\d.]+)\)", text
    )
    assert overlap
    assert overlap[1] == overlap[2]  # these weights are equal
    assert text.count("<figure>") == 4
    assert " ± " not in re.sub(r"<p.*?</p>", "", text)  # one seed has no spread


def test_a_page_is_replaced_whole_and_stays_the_same(run: Path, text: str) -> None:
    before = (run / "report.html").stat().st_ino
    assert write_report(run).read_text() == text
    assert (run / "report.html").stat().st_ino != before  # another file took its place
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_svg_follows_the_colour_of_the_page_and_ids_do_not_clash(text: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 100
    targets = re.findall(r'href="#([^"]+)"', text) + re.findall(r"url\(#([^)]+)\)", text)
    assert targets
    assert set(targets) <= set(ids)
    assert svg.INK not in text
    assert text.count("currentColor") > 100
    assert "DejaVu" not in text
    assert text.count("<style") == 1
