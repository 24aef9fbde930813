"""The report of a run: what it says, that it is whole, and that a browser shows it without asking anyone."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import save_file

from fedaux.report import figures, page, record, svg, write_report

CLASSES = [str(number) for number in range(10)]
LEVELS = {"fedavg": 0.30, "fedavg+p": 0.48, "feddf": 0.36, "feddf+p": 0.56, "fedaux": 0.80}
EPSILON = {"fedaux": 1.0}


def make_run(
    directory: Path,
    *,
    levels: Mapping[str, float] = LEVELS,
    seeds: int = 3,
    rounds: int = 10,
    recorded: int | None = None,
    clients: int = 20,
    name: str = "demo",
    epsilon: float | str = 1.0,
) -> Path:
    """Write a run directory as the library does, with made-up numbers; ``recorded`` rounds of the last seed."""
    directory.mkdir(parents=True)
    generator = np.random.default_rng(0)
    methods, last = list(levels), rounds if recorded is None else recorded
    config = {
        "name": name,
        "method": methods,
        "seeds": list(range(seeds)),
        "rounds": rounds,
        "participation_rate": 0.4,
        "data": {"source": "digits", "test_fraction": 0.2},
        "auxiliary": {"source": "letters"},
        "split": {"num_clients": clients, "alpha": 0.01},
        "certainty": {"mechanism": "mean", "epsilon": 1.0, "delta": 1e-5},
    }
    (directory / "config.toml").write_text(tomli_w.dumps(config))
    environment = {
        "fedaux": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0",
        "numpy": "2.4.0",
        "platform": "Linux-6.1-x86_64",
        "device": "cpu",
        "threads": 2,
        "started": "2026-01-01T10:00:00Z",
    }
    (directory / "environment.json").write_text(json.dumps(environment))

    metrics: list[dict[str, Any]] = []
    for method, level in levels.items():
        for seed in range(seeds):
            for number in range(1, (last if seed == seeds - 1 else rounds) + 1):
                accuracy = level * (1 - 0.6 * 0.65**number) + generator.normal(0, 0.012)
                evaluated = number != 2
                metrics.append(
                    {
                        "method": method,
                        "seed": seed,
                        "round": number,
                        "accuracy": accuracy if evaluated else None,
                        "loss": 1.1 if evaluated else None,
                        "accuracy_by_prototype": {"cnn": accuracy} if evaluated else {},
                        "clients_asked": [0, 1, 2, 3, 4, 5, 6, 7],
                        "clients_answered": [0, 1, 2, 4, 5, 6, 7],
                        "clients_dropped": {"3": "no data"},
                        "seconds": {"train": 0.5, "average": 0.01, "teach": 0.2, "distill": 0.3, "evaluate": 0.04},
                        "bytes_up": 7 * 316_000,
                        "bytes_down": 8 * 316_000,
                    }
                )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))

    tables = {str(seed): make_table(generator, clients=clients) for seed in range(seeds)}
    (directory / "split.json").write_text(json.dumps({"classes": CLASSES, "alpha": 0.01, "tables": tables}))
    entries = [
        {
            "method": "fedaux",
            "seed": seed,
            "client": client,
            "num_examples": sum(counts),
            "mechanism": "mean",
            "purpose": "certainty scores",
            "sensitivity": 2 / sum(counts),
            "sigma": 7.46 / sum(counts),
            "epsilon": epsilon,
            "delta": 1e-5,
            "noise": "simulated",
        }
        for seed, table in tables.items()
        for client, counts in enumerate(table)
        if "fedaux" in levels and any(counts)
    ]
    ledger = {
        "neighbours": "data sets that differ by replacing one example; the number of examples n_i is public",
        "entries": entries,
        "unprotected": "The model updates of local training are sent without differential privacy.",
    }
    (directory / "ledger.json").write_text(json.dumps(ledger))
    rows = [summary_row(method, metrics, epsilon=epsilon) for method in methods if metrics]
    summary = {
        "name": name,
        "rows": rows,
        "seeds": list(range(seeds)),
        "config_sha256": "ab" * 32,
        "rounds": rounds,
        "complete": last == rounds,
    }
    (directory / "summary.json").write_text(json.dumps(summary))

    if "fedaux" in levels:
        shares = np.asarray(tables["0"]) / np.maximum(np.asarray(tables["0"]).sum(axis=0), 1)
        noise = generator.dirichlet([1.0] * clients, size=10).T
        weights = np.ascontiguousarray(0.6 * shares + 0.4 * noise, dtype=np.float32)
        save_file(
            {"weights_by_class": weights, "top_images": make_images(tables["0"])},
            directory / "scores.safetensors",
            metadata={"method": "fedaux", "seed": "0", "clients": json.dumps(list(range(clients)))},
        )
    return directory


def make_table(generator: np.random.Generator, *, clients: int) -> list[list[int]]:
    """A split [clients, 10] in which nearly every client holds one or two classes."""
    shares = generator.dirichlet([0.08] * clients, size=10).T
    return [[int(count) for count in row] for row in np.ceil(140 * np.where(shares > 0.02, shares, 0))]


def make_images(table: list[list[int]]) -> Any:
    """uint8 [clients, 8, 1, 28, 28]: as many bright bars as the number of the client's main class."""
    images = np.full((len(table), 8, 1, 28, 28), 20, dtype=np.uint8)
    for client, counts in enumerate(table):
        for bar in range(int(np.argmax(counts)) + 1):
            for image in range(8):
                images[client, image, 0, 2 * bar + 2 : 2 * bar + 3, 2 : 10 + 2 * image] = 230
    return images


def summary_row(method: str, metrics: list[dict[str, Any]], *, epsilon: float | str) -> dict[str, Any]:
    """A method's row of the summary."""
    seeds = sorted({row["seed"] for row in metrics if row["method"] == method})
    runs = [
        [row["accuracy"] for row in metrics if (row["method"], row["seed"]) == (method, seed) and row["accuracy"]]
        for seed in seeds
    ]
    last, best = [run[-1] for run in runs if run], [max(run) for run in runs if run]
    return {
        "method": method,
        "accuracy_mean": statistics.mean(last),
        "accuracy_std": statistics.pstdev(last),
        "accuracy_max_mean": statistics.mean(best),
        "accuracy_max_std": statistics.pstdev(best),
        "epsilon": epsilon if method in EPSILON else None,
        "delta": 1e-5 if method in EPSILON else None,
        "seconds": 1234.56,
        "bytes_up": 22_500_000,
        "bytes_down": 41_250_000,
    }


def read_table(text: str, heading: str, *, number: int = 0) -> dict[str, list[str]]:
    """The cells of a section's table by the name of the row, read as a stranger would: from the markup."""
    section = re.search(rf'<h2 id="{heading}">.*?</section>', text, re.S)
    assert section, f"no section {heading}"
    body = re.findall(r"<tbody>(.*?)</tbody>", section[0], re.S)[number]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr.*?</tr>", body, re.S)]
    return {html.unescape(row[0]): [html.unescape(cell) for cell in row[1:]] for row in rows}


def read_downloads(text: str) -> dict[str, list[dict[str, str]]]:
    """The CSV behind each link, by file name."""
    links = re.findall(r'<a download="([^"]+)" href="data:text/csv;charset=utf-8,([^"]*)"', text)
    return {name: list(csv.DictReader(io.StringIO(unquote(data)))) for name, data in links}


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


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
        return [row["accuracy"] for row in metrics if row["method"] == method and row["round"] == 10]

    def best(method: str) -> list[float]:
        mine = [row for row in metrics if row["method"] == method and row["accuracy"] is not None]
        return [max(row["accuracy"] for row in mine if row["seed"] == seed) for seed in range(3)]

    def cell(values: list[float]) -> str:
        return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.pstdev(values):.1f}"

    points = 100 * (statistics.mean(last("fedaux")) - statistics.mean(last("feddf+p")))
    assert (
        f"fedaux reached {100 * statistics.mean(last('fedaux')):.1f} % in the last round, {points:.1f} points above "
        "feddf+p, the best of the others, at (1.0, 1e-5)-differentially private scores."
    ) in html.unescape(text)
    table = read_table(text, "results")
    assert list(table) == ["fedaux", "feddf+p", "fedavg+p", "feddf", "fedavg"]
    for method, cells in table.items():
        assert cells[:2] == [cell(last(method)), cell(best(method))]
    assert table["fedaux"][2:] == ["1.0", "1e-5", "1,234.6", "22.5", "41.2"]
    assert table["fedavg"][2:4] == ["–", "–"]
    assert "not finished" not in text


def test_sections_stand_in_order_and_headings_do_not_skip(text: str) -> None:
    assert re.findall(r'<h2 id="(\w+)">', text) == [
        *("results", "curves", "split", "scores", "privacy", "communication", "time", "configuration")
    ]
    assert text.count("<h1>") == 1
    assert text.index("<h1>") < text.index("<h2")
    assert '<html lang="en">' in text
    assert len(re.findall(r'<svg[^>]* role="img" aria-label="[^"]+"', text)) == text.count("<figure>") == 4


def test_every_figure_offers_its_numbers(run: Path, text: str) -> None:
    downloads = read_downloads(text)
    assert list(downloads) == ["learning_curves.csv", "split_seed_0.csv", "scores.csv", "main_classes.csv"]
    metrics = read_metrics(run)
    rows = downloads["learning_curves.csv"]
    assert len(rows) == 5 * 9  # round 2 was not evaluated
    for row in rows:
        same = [line for line in metrics if line["method"] == row["method"] and line["round"] == int(row["round"])]
        assert float(row["accuracy_mean"]) == pytest.approx(sum(line["accuracy"] for line in same) / 3, abs=1e-5)
        assert float(row["accuracy_min"]) == pytest.approx(min(line["accuracy"] for line in same), abs=1e-5)
        assert float(row["accuracy_max"]) == pytest.approx(max(line["accuracy"] for line in same), abs=1e-5)
    table = json.loads((run / "split.json").read_text())["tables"]["0"]
    assert [[int(row[name]) for name in CLASSES] for row in downloads["split_seed_0.csv"]] == table
    scores = downloads["scores.csv"]
    for name in CLASSES:
        column = [row for row in scores if row["class"] == name]
        assert sum(float(row["weight"]) for row in column) == pytest.approx(1, abs=1e-4)
        held = sum(int(row["examples"]) for row in column)
        for row in column:
            assert float(row["share_held"]) == pytest.approx(int(row["examples"]) / held, abs=1e-5)


def test_overlap_of_scores_and_data_is_stated(run: Path, text: str) -> None:
    rows = read_downloads(text)["scores.csv"]
    overlap = sum(min(float(row["share_held"]), float(row["weight"])) for row in rows) / len(CLASSES)
    assert f"they overlap by {overlap:.2f} (1 = identical" in text


def test_privacy_section_says_what_is_and_what_is_not_protected(run: Path, text: str) -> None:
    ledger = json.loads((run / "ledger.json").read_text())
    entries = ledger["entries"]
    clients = {entry["client"] for entry in entries}
    sizes = [entry["num_examples"] for entry in entries]
    cells = read_table(text, "privacy")["fedaux"]
    assert cells[:5] == [
        *("mean, for certainty scores, noise simulated", str(len(clients)), "1.0", "1e-5"),
        f"{min(sizes)} to {max(sizes)}",
    ]
    assert cells[5] == f"{2 / max(sizes):.3g} to {2 / min(sizes):.3g}"
    plain = html.unescape(text)
    assert ledger["neighbours"] in plain
    assert f"<strong>Not protected:</strong> {ledger['unprotected']}" in plain
    assert "whoever knows the seed" in plain


def test_epsilons_that_differ_between_clients_are_a_range(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", epsilon="inf")
    ledger = json.loads((directory / "ledger.json").read_text())
    ledger["entries"][0]["epsilon"] = 35.25
    ledger["entries"].append(ledger["entries"][0])
    (directory / "ledger.json").write_text(json.dumps(ledger))
    text = write_report(directory).read_text()
    assert read_table(text, "privacy")["fedaux"][2] == "35.2 to ∞"
    assert "up to 2 times in one run" in text
    assert "means no differential privacy" in text
    assert read_table(text, "results")["fedaux"][2] == "∞"
    assert "with scores that are not differentially private." in text


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
    directory = make_run(tmp_path / "run", levels={"fedaux": 0.8, hostile: 0.7}, seeds=1, name=hostile)
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
    assert read_downloads(text)["learning_curves.csv"][-1]["method"] == hostile


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", recorded=4)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"method": "fedaux", "seed": 2, "rou')  # cut off while it was written
    text = write_report(directory).read_text()
    assert "This run is not finished." in text
    assert "24 of 30 for each of fedavg, fedavg+p, feddf, feddf+p, fedaux." in text
    assert "So far fedaux reached" in text
    assert {row["seeds"] for row in read_downloads(text)["learning_curves.csv"]} == {"2", "3"}


def test_a_summary_that_claims_more_than_the_metrics_is_not_believed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", levels={"fedaux": 0.8, "fedavg": 0.3})
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:-1]))
    text = write_report(directory).read_text()
    assert "This run is not finished.</strong> Rounds recorded over all seeds: fedavg 29 of 30." in text


def test_a_run_that_just_started_has_a_report(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "summary.json", "ledger.json", "split.json", "scores.safetensors"):
        (directory / name).unlink()
    text = write_report(directory).read_text()
    assert "Nothing has been measured yet." in text
    assert "0 of 30 for each of fedavg" in text
    assert "nothing can be said about privacy" in text
    assert "<svg" not in text
    (directory / "metrics.jsonl").touch()
    assert write_report(directory).read_text() == text


def test_a_method_with_one_seed_so_far_has_no_spread(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", recorded=0)
    summary = json.loads((directory / "summary.json").read_text())
    for row in summary["rows"]:
        row.update(seeds_done=1 if row["method"] == "feddf" else 2, accuracy_std=0.0)
    (directory / "summary.json").write_text(json.dumps(summary))
    table = read_table(write_report(directory).read_text(), "results")
    assert {method for method, cells in table.items() if "±" in cells[0]} == set(LEVELS) - {"feddf"}


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
        ({"fedaux": 0.80, "feddf+p": 0.823}, 0.0, "fedaux reached 80.0 % in the last round, 2.3 points below feddf+p"),
        ({"fedaux": 0.80, "fedavg": 0.8001, "feddf": 0.1}, 0.0, "level with fedavg, the best of the others"),
        ({"fedaux": 0.80, "fedavg": 0.79}, 0.02, "the only other method (a difference within the spread over seeds)"),
        ({"fedavg": 0.40, "feddf": 0.5}, 0.0, "feddf reached 50.0 % in the last round, 10.0 points above fedavg"),
        ({"fedavg": 0.40}, 0.0, "fedavg reached 40.0 % in the last round."),
        ({"fedavg": None}, None, "Nothing has been measured yet."),
    ],
)
def test_finding_is_honest(means: dict[str, float | None], deviation: float | None, expected: str) -> None:
    rows = [{"method": name, "accuracy_mean": mean, "accuracy_std": deviation} for name, mean in means.items()]
    summary = {"rows": rows, "seeds": [0, 1], "complete": True}
    assert expected in page.finding(record.Run("demo", "", {}, {}, [], {}, summary, {}, None))


def test_only_a_run_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty is not a run directory: config\.toml and environment\.json missing"):
        write_report(tmp_path / "empty")
    directory = make_run(tmp_path / "run", levels={"fedavg": 0.3}, seeds=1)
    (directory / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is not valid JSON"):
        write_report(directory)
    (directory / "summary.json").write_text("{}")
    (directory / "metrics.jsonl").write_text('{"method": "fedavg"}\n{}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1, is not a round"):
        write_report(directory)
    (directory / "metrics.jsonl").unlink()
    (directory / "scores.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"scores\.safetensors does not hold certainty scores"):
        write_report(directory)
    assert [path.name for path in directory.iterdir() if "report" in path.name] == []


def test_one_round_and_text_without_images(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", levels={"fedaux": 0.8}, seeds=1, rounds=1)
    weights = np.full((20, 10), 0.05, dtype=np.float32)
    words = {"method": "fedaux", "seed": "0", "clients": json.dumps(list(range(20)))}
    save_file({"weights_by_class": weights}, directory / "scores.safetensors", metadata=words)
    assert figures.learning_curves(read_metrics(directory)).axes[0].get_xticks().tolist() == [1]
    text = write_report(directory).read_text()
    overlap = re.search(r"they overlap by ([\d.]+) \(1 = identical; equal weights would reach ([\d.]+)\)", text)
    assert overlap
    assert overlap[1] == overlap[2]  # these weights are equal
    assert text.count("<figure>") == 3
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


def test_methods_keep_their_colour_and_never_share_a_look() -> None:
    names = [*figures.METHOD_STYLES, *(f"{name}+p" for name in figures.METHOD_STYLES), *"abcdefgh"]
    styles = figures.method_styles(names)
    assert len(set(styles.values())) == len(names)
    assert figures.method_styles(["fedaux"])["fedaux"] == styles["fedaux"]
    assert styles["feddf"].colour == styles["feddf+p"].colour != styles["fedaux"].colour


def test_labels_are_spread_without_leaving_the_figure() -> None:
    placed = figures.spread_labels([0.02, 0.03, 0.9, 0.01], gap=0.1)
    assert placed[2] == 0.9
    assert placed[1] > placed[0] > placed[3] >= 0
    assert min(abs(a - b) for a in placed for b in placed if a != b) >= 0.1 - 1e-12


def test_bubbles_have_areas_in_proportion_to_counts() -> None:
    figure = figures.split_bubbles([("one", [[100, 0], [0, 25]]), ("two", [[0, 4], [100, 0]])], ["a", "b"])
    first = figure.axes[0].collections[0]
    widths = first.get_widths()  # type: ignore[attr-defined]
    assert np.asarray(first.get_offsets()).tolist() == [[0, 0], [1, 1]]
    assert widths[0] / widths[1] == pytest.approx(2)
    assert [axes.get_title() for axes in figure.axes] == ["one", "two"]
    with pytest.raises(ValueError, match="at least one"):
        figures.split_bubbles([], ["a"])


def test_score_matrix_compares_like_with_like() -> None:
    table, weights = [[0, 30], [10, 10]], np.array([[0.1, 0.7], [0.9, 0.3]])
    figure = figures.score_matrix(weights, table, ["a", "b"], [7, 4])
    held, weight = (axes.images[0] for axes in figure.axes[:2])
    assert held.get_clim() == weight.get_clim() == (0, 1)
    # Client 4 comes first: its main class is the first one.
    assert np.asarray(held.get_array()) == pytest.approx(np.array([[1, 0.25], [0, 0.75]]))
    assert np.asarray(weight.get_array()) == pytest.approx(np.array([[0.9, 0.3], [0.1, 0.7]]))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["4", "7"]
    with pytest.raises(ValueError, match="do not fit together"):
        figures.score_matrix(weights, table, ["a", "b"], [7])


@pytest.mark.parametrize("channels", [1, 3])
def test_top_images_stand_in_the_row_of_their_client(channels: int) -> None:
    images = np.zeros((2, 3, channels, 96, 96), dtype=np.uint8)
    images[1] = 200
    figure = figures.top_images(images, table=[[0, 5], [5, 0]], classes=["cat", "dog"], clients=[3, 8])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "client 8, class cat",
        "client 3, class dog",
    ]
    mosaic = np.asarray(figure.axes[0].images[0].get_array())
    assert mosaic.shape == (2 * 50, 3 * 50, 4)  # halved to 48 pixels, with gaps of 2
    assert mosaic[10, 10].tolist() == [200, 200, 200, 255]
    assert mosaic[60, 10].tolist() == [0, 0, 0, 255]
    assert mosaic[49, 10, 3] == 0
    with pytest.raises(ValueError, match="C = 1 or 3"):
        figures.top_images(images[:, :, :, 0], table=[[0, 5], [5, 0]], classes=["cat", "dog"], clients=[3, 8])


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG\r"), ("svg", b"<?xml"), ("pdf", b"%PDF-")])
def test_saved_figures_are_the_same_bytes(run: Path, tmp_path: Path, kind: str, start: bytes) -> None:
    paths = [tmp_path / "one" / f"curves.{kind}", tmp_path / "two" / f"curves.{kind}"]
    for path in paths:
        path.parent.mkdir()
        svg.save(figures.learning_curves(read_metrics(run)), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes()[:5] == start
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg or \.pdf"):
        svg.save(figures.learning_curves([]), tmp_path / "curves.gif")


PROBE = """<!doctype html><title>probe</title><iframe id="frame" style="width:375px;height:800px;border:0" srcdoc="{}">
</iframe><script>
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const box = (element) => element.getBoundingClientRect();
  const result = {{
    width: frame.contentWindow.innerWidth,
    scroll: Math.max(root.scrollWidth, page.body.scrollWidth),
    wide: [...page.querySelectorAll("table")].filter((table) => box(table).width > 375).length,
    figures: [...page.querySelectorAll("figure svg")].map((svg) => [box(svg).width, box(svg).height]),
    curves: [...page.querySelectorAll("#curves + figure [id^=curves-line2d] > path")]
      .map((path) => box(path)).filter((line) => line.width > 100 && line.height > 10).length,
    ink: getComputedStyle(page.querySelector("#curves + figure text")).fill,
    ground: getComputedStyle(page.body).backgroundColor,
  }};
  document.body.dataset.result = JSON.stringify(result);
}};
</script>"""


def browse(path: Path, *flags: str) -> tuple[str, str]:
    """Open a file in headless Chromium; returns the document it made of it, and what it printed."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Debian's chromium on PATH")
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *("--enable-logging=stderr", f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=5000"),
        *("--dump-dom", *flags, path.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_scrolling_sideways(text: str, tmp_path: Path, scheme: str) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(html.escape(text)), encoding="utf-8")
    document, _ = browse(probe, f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")
    found = re.search(r'data-result="([^"]*)"', document)
    assert found, "the probe did not run"
    result = json.loads(html.unescape(found[1]))
    assert result["width"] == 375
    assert result["scroll"] <= 375
    assert result["wide"] > 0  # there are wide tables, and they scroll in their own boxes
    assert len(result["figures"]) == 4
    assert all(width > 250 and height > 100 for width, height in result["figures"])
    assert result["curves"] == len(LEVELS)
    ink, ground = ([int(part) for part in re.findall(r"\d+", result[key])[:3]] for key in ("ink", "ground"))
    assert contrast(ink, ground) > 7
    assert (sum(ground) < sum(ink)) == (scheme == "dark")


def test_the_browser_asks_nobody_and_has_nothing_to_complain_about(text: str, tmp_path: Path) -> None:
    document, printed, asked = watch(text, tmp_path / "page")
    assert document.count("<figure>") == 4
    assert "CONSOLE" not in printed
    assert asked == set()

    # The same page with a picture from elsewhere: its own policy blocks that, and the browser says so ...
    pixel = "http://127.0.0.1:9/pixel.png"
    spoiled = text.replace("</main>", f'<img src="{pixel}" alt=""></main>')
    _, printed, asked = watch(spoiled, tmp_path / "spoiled")
    assert "Content Security Policy" in printed
    assert asked == set()
    # ... and without the policy the request is seen, so that this test would have seen others.
    policy = re.search(r"<meta http-equiv[^>]+>", spoiled)
    assert policy
    _, _, asked = watch(spoiled.replace(policy[0], ""), tmp_path / "open")
    assert asked == {pixel}


def watch(text: str, directory: Path) -> tuple[str, str, set[str]]:
    """Show a page; returns its document, what the browser printed, and the addresses the page asked for."""
    directory.mkdir()
    path, log = directory / "report.html", directory / "net.json"
    path.write_text(text, encoding="utf-8")
    document, printed = browse(path, f"--log-net-log={log}")
    requests = re.findall(r'"initiator":"([^"]*)".*?"url":"([^"]+)"', log.read_text(encoding="utf-8"))
    # "not an origin" is the browser itself, which asks its maker for the time.
    return document, printed, {url for initiator, url in requests if initiator != "not an origin"}


def contrast(one: list[int], other: list[int]) -> float:
    """The contrast ratio of two colours by the Web Content Accessibility Guidelines."""

    def luminance(colour: list[int]) -> float:
        parts = [part / 255 for part in colour]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
