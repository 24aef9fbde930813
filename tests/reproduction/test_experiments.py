"""The experiments: their numbers mean what their tables say, and they come out the same twice."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from helpers.latex_checks import check_latex
from helpers.study_data import saved

from fedaux.config import Certainty, ConfigError
from fedaux.core.releases import Scorer
from fedaux.core.server import prepare
from fedaux.core.simulation import SimulatedClients
from fedaux.data import load_auxiliary, load_labelled
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.report import svg
from fedaux.running import run as execute
from fedaux.running.run_directory import RunDirectory
from reproduce import (
    ensemble,
    privacy_grid,
    robustness,
    scoring,
    similar_images,
    toy_gaussians,
    toy_iris,
)
from reproduce.document import Context, Outcome, write


def test_what_epsilon_means_to_each_mechanism() -> None:
    assert scoring.promise(Certainty(mechanism="mean")) == "proved"
    assert scoring.promise(Certainty(mechanism="paper")) == "proved"
    assert scoring.promise(Certainty(mechanism="none")) == "no noise"


# Iris


@pytest.fixture(scope="module")
def iris(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return write(
        toy_iris.run(epsilons=(1.0,), draws=2), tmp_path_factory.mktemp("iris"), "toy-iris"
    )


@pytest.mark.slow
def test_iris_weighted_mean_is_clearly_better(iris: Outcome) -> None:
    plain, weighted = iris.numbers["accuracy"].values()
    assert weighted > 0.93
    assert plain < 0.7


def test_iris_clients_hold_disjoint_parts_of_fifty_and_know_a_class_or_two() -> None:
    toy = toy_iris.build(toy_iris.HOLDINGS, seed=0)
    assert sorted(np.concatenate(toy.parts).tolist()) == list(range(150))
    for part, held in zip(toy.parts, toy_iris.HOLDINGS, strict=True):
        assert torch.bincount(toy.labels[part], minlength=3).tolist() == list(held)
        assert len(part) == 50
    everywhere = scoring.homogeneous(toy.points) @ toy.models[0].T
    assert (everywhere.argmax(dim=1) == 0).all(), "who knows one class says it everywhere"


@pytest.mark.slow
def test_iris_covers_every_mechanism_and_the_private_mean_gains(iris: Outcome) -> None:
    rows = iris.numbers["accuracy_by_mechanism"]
    assert {row["mechanism"] for row in rows} == set(MECHANISMS) - {
        "classes",
        "counts",
        "heads",
    }  # need labels
    reached = {(row["setting"], row["epsilon"]): row["mean"] for row in rows}
    assert reached["mean, sharpness 4", "inf"] == reached["none, sharpness 4", "inf"] > 0.9
    assert reached["mean, sharpness 4", 1.0] > 0.9
    assert ("none", 1.0) not in reached, "epsilon means nothing where there is no noise"
    assert not any("sharpness" in row["setting"] for row in rows if row["mechanism"] == "paper")


@pytest.mark.slow
def test_iris_comes_out_the_same_twice(iris: Outcome, tmp_path: Path) -> None:
    files = {file.name: file for file in iris.files}
    assert {file.suffix for file in iris.files} == {".html", ".md", ".json", ".tex", ".png", ".svg"}
    assert check_latex(files["toy-iris.tex"].read_text()) == [2, 4, 4]
    toy = toy_iris.build(toy_iris.HOLDINGS, seed=0)
    assert (
        toy_iris.measure(toy, seed=0, epsilons=(1.0,), draws=2)
        == iris.numbers["accuracy_by_mechanism"]
    )
    figure = toy_iris.draw_panels(toy, iris.numbers["accuracy"])
    for ending in ("png", "svg"):
        again = tmp_path / f"toy-iris.{ending}"
        svg.save(figure, again)
        assert again.read_bytes() == files[again.name].read_bytes()


@pytest.mark.slow
def test_iris_offers_the_numbers_of_its_figures_and_says_what_is_one_draw(iris: Outcome) -> None:
    (page,) = (file.read_text() for file in iris.files if file.suffix == ".html")
    points, mechanisms = saved(page).values()
    plain, weighted = iris.numbers["accuracy"].values()
    for key, reached in (("plain mean", plain), ("weighted by density", weighted)):
        assert sum(line[key] == line["class"] for line in points) / 150 == pytest.approx(reached)
    measured = {
        (row["setting"], row["epsilon"]): row for row in iris.numbers["accuracy_by_mechanism"]
    }
    for line in mechanisms:
        row = measured[
            line["weights from"],
            line["epsilon"] if line["epsilon"] == "inf" else float(line["epsilon"]),
        ]
        assert row["least"] - 1e-6 <= float(line["accuracy"]) <= row["largest"] + 1e-6, (
            "one of the draws"
        )
    assert "One draw of noise; the table has means over 2." in page
    (drawn,) = (file.read_text() for file in iris.files if file.name == "toy-iris-mechanisms.svg")
    assert "one draw: " in drawn


# Gaussians


def test_true_weights_equal_densities_by_hand() -> None:
    toy = toy_gaussians.build(10, seed=0, shape="slanted")
    weights = toy.true_weights(toy.points[:5])
    for column, point in enumerate(toy.points[:5].numpy()):
        densities = []
        for mean, covariance in zip(toy.means, toy.covariances, strict=True):
            offset = point - mean
            square = offset @ np.linalg.inv(covariance) @ offset
            densities.append(
                math.exp(-square / 2) / (2 * math.pi * math.sqrt(np.linalg.det(covariance)))
            )
        for row, density in enumerate(densities):
            assert float(weights[row, column]) == pytest.approx(density / sum(densities))


@pytest.fixture(scope="module")
def errors() -> dict[tuple[str, float], float]:
    toy = toy_gaussians.build(50, seed=0)
    changes: list[dict[str, float]] = [{}, {"sharpness": 9.0}]
    rows = toy_gaussians.measure(toy, changes, seed=0, epsilons=(0.1, 1.0, 10.0), draws=3)
    return {(row["setting"], float(row["epsilon"])): row["mean"] for row in rows}


def test_calibrated_mean_is_near_the_true_weights_and_the_paper_is_not(
    errors: dict[tuple[str, float], float],
) -> None:
    equal = toy_gaussians.build(1, seed=0).equal_error()
    assert errors["none, sharpness 9", math.inf] < 0.03
    assert errors["none, sharpness 9", math.inf] < errors["none", math.inf] < equal
    assert errors["paper", math.inf] > 10 * errors["none, sharpness 9", math.inf]
    assert errors["paper", math.inf] < equal + 0.001


def test_errors_shrink_with_epsilon(errors: dict[tuple[str, float], float]) -> None:
    curve = [errors["mean, sharpness 9", epsilon] for epsilon in (0.1, 1.0, 10.0, math.inf)]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > 5 * curve[-1]


@pytest.mark.parametrize("spread", [1.0, 1.5, 3.0])
def test_calibrated_sharpness_is_the_ratio_of_variances(spread: float) -> None:
    found = toy_gaussians.calibrate(dimension=2, spread=spread, seed=0)
    assert found["unclipped"]["sharpness"] == pytest.approx(
        spread**2, rel=0.13
    )  # the grid's step is 12 %
    assert found["unclipped"]["error"] < 0.01
    if found["clipped_share"] > 0.5:
        assert found["clipped"]["sharpness"] > 1.4 * spread**2, (
            "clipped means are short, and want more sharpness"
        )


CLIPPED = ("clipped", "unclipped")


@pytest.mark.slow
def test_gaussians_write_the_same_numbers_twice(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sizes": (20,), "epsilons": (1.0,), "draws": 1, "dimensions": (2,)}
    first = write(toy_gaussians.run(**options), tmp_path / "a", "toy-gaussians")
    second = toy_gaussians.run(**options)
    assert {**first.numbers, **second.numbers} == first.numbers
    assert {row["mechanism"] for row in first.numbers["errors"]} == {
        name for name, build in MECHANISMS.items() if build(Certainty()).scores == "alone"
    }
    assert json.loads((tmp_path / "a" / "toy-gaussians.json").read_text()) == json.loads(
        json.dumps(first.numbers)
    )
    assert check_latex((tmp_path / "a" / "toy-gaussians.tex").read_text()) == [5, 5, 5, 7, 3]
    weights, errors = saved((tmp_path / "a" / "toy-gaussians.html").read_text()).values()
    toy = toy_gaussians.build(20, seed=0)
    points = torch.tensor(
        [[float(line["x"]), float(line["y"])] for line in weights[:400]], dtype=torch.float64
    )
    true = toy.true_weights(points)
    assert [float(line["true weights"]) for line in weights] == pytest.approx(
        true.flatten().tolist(), abs=1e-3
    )
    assert min(float(line["error"]) for line in errors if line["sharpness"]) == pytest.approx(
        min(
            min(row[key]["curve"])
            for row in first.numbers["calibration_without_noise"]
            for key in CLIPPED
        ),
        abs=1e-6,
    )


# The grid


GRID = {"mean": {"epsilon": (0.5,), "delta": (1e-6, 1e-4), "components": (2,)}}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_grid_runs_each_cell_once(tmp_path: Path) -> None:
    context = Context(tmp_path, tiny(rounds=1))
    outcome = write(privacy_grid.run(context, grids=GRID), tmp_path, "privacy")
    names = [name for row in outcome.numbers["rows"] for name in row["cells"]]
    assert len(names) == len(set(names)) == 1 + 1 + 2, "no scores, the ceiling, two deltas"
    stamps = {
        name: (tmp_path / "cells" / name / "summary.json").stat().st_mtime_ns for name in names
    }
    for row in outcome.numbers["rows"]:
        (name,) = row["cells"]
        stored = json.loads((tmp_path / "cells" / name / "summary.json").read_text())["rows"][0]
        assert row["last"]["mean"] == pytest.approx(stored["accuracy_mean"], abs=1e-6)
        assert stored["method"] == ("fedaux" if row["settings"] else "feddf+p")
        assert stored["epsilon"] == row["settings"].get("epsilon")
    assert check_latex((tmp_path / "privacy.tex").read_text()) == [3]
    (offered,) = saved((tmp_path / "privacy.html").read_text()).values()
    assert [f"{line['cell']}-seed0" for line in offered] == names
    assert [float(line["accuracy"]) for line in offered] == [
        row["last"]["mean"] for row in outcome.numbers["rows"]
    ]
    assert privacy_grid.run(context, grids=GRID).numbers["rows"] == outcome.numbers["rows"]
    assert {
        name: (tmp_path / "cells" / name / "summary.json").stat().st_mtime_ns for name in names
    } == stamps
    more = privacy_grid.run(Context(tmp_path, tiny(rounds=1, seeds=[0, 1])), grids=GRID)
    assert {
        name: (tmp_path / "cells" / name / "summary.json").stat().st_mtime_ns for name in names
    } == stamps
    for row, before in zip(more.numbers["rows"], outcome.numbers["rows"], strict=True):
        first, second = (
            json.loads((tmp_path / "cells" / name / "summary.json").read_text())["rows"][0][
                "accuracy_mean"
            ]
            for name in row["cells"]
        )
        assert first == pytest.approx(before["last"]["mean"], abs=1e-6)
        assert row["last"]["mean"] == pytest.approx((first + second) / 2, abs=1e-6)
        assert row["last"]["deviation"] == pytest.approx(
            abs(first - second) / math.sqrt(2), abs=1e-5
        )
    longer = privacy_grid.run(Context(tmp_path, tiny(rounds=2)), grids=GRID)
    for row in longer.numbers["rows"]:
        (name,) = row["cells"]
        lines = (tmp_path / "cells" / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == [1, 2], "extended, not run again"
    with pytest.raises(ConfigError, match=r"local\.epochs = 2"):
        privacy_grid.run(Context(tmp_path, tiny(rounds=2, local={"epochs": 2})), grids=GRID)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_robustness_runs_what_a_method_reads_and_finds_where_it_is_behind(tmp_path: Path) -> None:
    methods = ["fedavg+p", "private-head", "fedaux2"]
    context = Context(tmp_path, tiny(method=methods, rounds=1))
    document = robustness.run(context, alphas=(0.1, 100.0), epsilons=(0.5, 1.0), rates=(0.5, 1.0))
    found = sorted(path.name for path in (tmp_path / "cells").glob("method=*"))
    by_method = [sum(f"method={name}," in one for one in found) for name in methods]
    assert by_method == [4, 4, 8], "alpha and C; alpha and epsilon; all three"
    assert not list(tmp_path.glob("cells/*/models")), "nobody reads them"
    rows = document.numbers["rows"]
    assert len(rows) == 8
    for row in rows:
        means = {name: one["mean"] for name, one in row["last"].items()}
        best = max(means["fedavg+p"], means["private-head"])
        assert robustness.behind(row) == pytest.approx(best - means["fedaux2"])
    last = rows[0]["last"]
    (summary,) = tmp_path.glob("cells/method=fedaux2,*alpha=0.1,*rate=0.5,*=0.5,*/summary.json")
    stored = json.loads(summary.read_text())["rows"][0]
    assert last["fedaux2"]["mean"] == pytest.approx(100 * stored["accuracy_mean"], abs=1e-4)
    first, second = robustness.findings(
        [
            {"settings": {"α": alpha}, "last": {name: {"mean": mean} for name, mean in of.items()}}
            for alpha, of in (
                (1.0, {"fedavg+p": 50.0, "fedaux2": 60.0}),
                (2.0, {"fedavg+p": 50.0, "fedcounts": 60.0, "fedaux2": 47.5}),
            )
        ]
    )
    assert "ahead in 1 of 2 settings, and more than 1 point behind in 1" in first
    assert "α = 2: 2.5 points behind" in second


def grid_row(
    last: float, best: float, deviation: float | None = None, **settings: Any
) -> dict[str, Any]:
    """Return what a grid measures at one setting."""
    measured = {
        key: {"mean": mean, "deviation": deviation}
        for key, mean in (("last", last), ("best", best))
    }
    return {"cells": ["x-seed0"], "settings": settings, **measured}


def grid_numbers(*, mode: str = "full", seeds: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return what a grid of the paper's size would measure: the more epsilon the better, best
    rounds 10 above."""
    deviation = 0.02 if len(seeds) > 1 else None
    rows = [
        grid_row(accuracy, accuracy + 0.1, deviation, **chosen)
        for chosen in privacy_grid.settings_of(tiny(), privacy_grid.PAPER_GRIDS)
        for accuracy in [
            min(0.1 + chosen.get("epsilon", 0.0) / 2 + chosen.get("delta", 0.0) * 100, 0.7)
        ]
    ]
    return {
        **{
            "base": {"mode": mode},
            "method": "fedaux",
            "rounds": 10,
            "seeds": list(seeds),
            "rows": rows,
        },
        **{"unfinished": [], "version": "own", "data": ""},
    }


def test_grid_tells_the_last_and_the_best_round_of_every_line() -> None:
    text = privacy_grid.describe(grid_numbers()).to_markdown()
    assert "last round / maximum of 10 rounds, seed 0" in text
    assert "Without scores (feddf+p): 10.0 / 20.0." in text
    assert "74.6 at no noise" in text
    assert "| mean | ε = 0.01 | ε = 0.04 | ε = 0.1 | ε = 0.5 | ε = 1 | almost no noise |" in text
    ends = "35.0 / 45.0 | 60.0 / 70.0 | 70.0 / 80.0 |"
    assert f"| δ = 1e-6 | 10.5 / 20.5 | 12.0 / 22.0 | 15.0 / 25.0 | {ends}" in text
    assert text.count("| λ 0.01, δ = 1e-4 | 11.5 / 21.5 |") == 2, "paper and release"
    assert text.count("70.0 / 80.0 |\n") == 10, (
        "without noise delta means nothing: every line ends in its ceiling"
    )
    several = privacy_grid.describe(grid_numbers(seeds=(0, 1, 2))).to_markdown()
    assert "mean ± standard deviation over seeds 0, 1, 2" in several
    assert "| δ = 1e-6 | 10.5 ± 2.0 / 20.5 ± 2.0 |" in several


def test_heads_alone_are_not_held_against_the_paper_s_privacy_analysis() -> None:
    text = privacy_grid.describe(grid_numbers(mode="linear")).to_markdown()
    assert "mode = 'linear'" in text
    assert "74.6" not in text


def test_three_mechanisms_fit_a_page() -> None:
    figure = privacy_grid.draw(grid_numbers()["rows"])
    assert len(figure.axes) == 3
    assert 72 * figure.get_figwidth() <= 720
    for axes in figure.axes:
        assert [tick.get_text() for tick in axes.get_xticklabels()][-1] == "almost\nno\nnoise"
        assert {len(line.get_xdata()) for line, *_ in axes.containers} == {6}, (
            "every line reaches its ceiling"
        )


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_grid_shows_what_is_done_and_names_what_is_not(tmp_path: Path) -> None:
    limited = Context(tmp_path, tiny(rounds=1), sweeping={"time_limit": 1e-9})
    nothing = privacy_grid.run(limited, grids=GRID)
    assert len(nothing.numbers["unfinished"]) == 4
    assert "- 0 of 4 settings are finished" in nothing.to_markdown()
    name = "mean-components2-epsilon0.5-delta1e-06-seed0"
    (tmp_path / "cells" / name).write_text("a file where a run would have its directory")
    some = write(
        privacy_grid.run(Context(tmp_path, tiny(rounds=1)), grids=GRID), tmp_path, "privacy"
    )
    assert [line.partition(":")[0] for line in some.numbers["unfinished"]] == [name]
    assert [row["cells"] for row in some.numbers["rows"] if row["last"] is None] == [[name]]
    assert "- 3 of 4 settings are finished" in some.markdown
    assert f"- `{name}: " in (tmp_path / "privacy.md").read_text()
    assert (tmp_path / "privacy.html").exists()


def test_grid_says_how_far_the_papers_figures_are_where_the_settings_are_its_own() -> None:
    ceiling = privacy_grid.ALMOST_NO_NOISE
    rows = [
        grid_row(0.2, 0.3),
        grid_row(0.6, 0.75, mechanism="paper", regularisation=0.01, epsilon=ceiling, delta=1e-6),
        grid_row(0.5, 0.616, mechanism="paper", regularisation=0.01, epsilon=0.04, delta=1e-6),
        grid_row(0.7, 0.7, mechanism="paper", regularisation=0.1, epsilon=ceiling, delta=1e-6),
        grid_row(0.7, 0.8, mechanism="paper", regularisation=0.1, epsilon=0.04, delta=1e-6),
        grid_row(0.7, 0.7, mechanism="mean", epsilon=ceiling, delta=1e-6),
        grid_row(0.7, 0.9, mechanism="mean", epsilon=0.04, delta=1e-6),
    ]
    numbers = grid_numbers() | {"rows": rows, "version": "paper"}
    close, far = privacy_grid.findings(numbers)  # only these two settings have a published figure
    assert (
        close == "`paper`, λ = 0.01, no noise: maximum 75.0, the paper states 74.6: within 1 point."
    )
    assert far.endswith(
        "ε = 0.04, δ = 1e-6: maximum 61.6, the paper states 70.8: 9.2 points below."
    )
    text = privacy_grid.describe(numbers).to_markdown()
    assert "| λ 0.01, δ = 1e-6 | 50.0 / 61.6 | 60.0 / 75.0 |" in text
    (quick,) = privacy_grid.findings(numbers | {"version": "quick"})
    assert "do not compare" in quick
    assert "points below" not in quick


def test_grid_refuses_unknown_mechanisms(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no mechanism magic"):
        privacy_grid.run(Context(tmp_path, tiny()), grids={"magic": {"epsilon": (1.0,)}})


# The teacher itself


def test_ensemble_measures_plain_means_and_each_mechanism(tmp_path: Path) -> None:
    lines: list[str] = []
    context = Context(tmp_path, tiny(seeds=[0, 1]), on_line=lines.append)
    outcome = write(
        ensemble.run(context, alphas=(0.1, 10.0), mechanisms=("mean",)), tmp_path, "ensemble"
    )
    kinds = ["plain logits", "plain probabilities", "mean logits", "mean probabilities"]
    assert [row["weights"] for row in outcome.numbers["rows"]] == kinds * 4
    assert len(lines) == 16
    first, second = (100 * row["accuracy"] for row in outcome.numbers["rows"][:8:4])
    assert (
        f"| plain logits | {(first + second) / 2:.1f} ± {abs(first - second) / math.sqrt(2):.1f} |"
        in outcome.markdown
    )
    assert check_latex((tmp_path / "ensemble.tex").read_text()) == [3]


# Similar images


def test_nearest_neighbours_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, features = (
        torch.randn(5, 7, generator=generator),
        torch.randn(30, 7, generator=generator),
    )
    indices, similarities = similar_images.nearest(queries, features, count=4)
    for row, query in enumerate(queries.double()):
        found = []
        for index, feature in enumerate(features.double()):
            product = sum(float(a * b) for a, b in zip(query, feature, strict=True))
            found.append((product / (float(query.norm()) * float(feature.norm())), index))
        expected = sorted(found, reverse=True)[:4]
        assert indices[row].tolist() == [index for _, index in expected]
        assert similarities[row].tolist() == pytest.approx([value for value, _ in expected])


@pytest.mark.parametrize("mechanism", ["mean", "paper"])
def test_similar_images_shows_private_images_and_says_so(tmp_path: Path, mechanism: str) -> None:
    base = tiny(certainty={"mechanism": mechanism})
    document = similar_images.run(
        Context(tmp_path, base), num_clients=2, num_images=3, num_neighbours=2
    )
    outcome = write(document, tmp_path, "similar-images")
    assert "simulations only" in outcome.markdown
    assert outcome.markdown.startswith("# similar-images: public images")
    assert (
        "Data: handwritten digits (embedded); public data: rendered letters (embedded)."
        in outcome.markdown
    )
    assert check_latex((tmp_path / "similar-images.tex").read_text()) == [6]
    assert "simulations only" in (tmp_path / "similar-images.svg").read_text()
    for side, offered in zip(
        ("without_noise", "with_noise"),
        saved((tmp_path / "similar-images.html").read_text()).values(),
        strict=True,
    ):
        own = [
            (row["client"], index)
            for row in outcome.numbers["clients"]
            for line in row[side]["neighbours"]
            for index in line
        ]
        assert [(int(line["client"]), int(line["private image"])) for line in offered] == own
    parts = execute.split_for(base, load_labelled(base.data), 0)
    assert len(outcome.numbers["clients"]) == 2
    for row in outcome.numbers["clients"]:
        for side in ("without_noise", "with_noise"):
            assert len(set(row[side]["top_images"])) == 3
            assert {index for line in row[side]["neighbours"] for index in line} <= set(
                parts[row["client"]].tolist()
            )
            assert all(line == sorted(line, reverse=True) for line in row[side]["similarities"])


def test_large_images_are_drawn_as_means_of_blocks() -> None:
    images = np.zeros((3, 1, 96, 50), dtype=np.uint8)
    images[1, :, ::2] = 200
    small = similar_images.shrink_images(images, side=48)
    assert small.shape == (3, 1, 48, 25)
    assert small.max(axis=(1, 2, 3)).tolist() == small.min(axis=(1, 2, 3)).tolist() == [0, 100, 0]
    assert (similar_images.shrink_images(images, side=96) == images).all()


def test_similar_images_are_those_that_a_run_scores_highest(tmp_path: Path) -> None:
    base = tiny(certainty={"epsilon": 0.5})
    outcome = similar_images.run(
        Context(tmp_path, base), num_clients=2, num_images=3, num_neighbours=2
    )
    data, auxiliary = load_labelled(base.data), load_auxiliary(base.auxiliary)
    runner = execute.ExperimentRunner(
        base, RunDirectory(tmp_path, base), data, auxiliary, execute.NullCallback()
    )
    task = runner.task("fedaux", 0)
    clients = SimulatedClients(task, data.images, data.labels, execute.split_for(base, data, 0))
    state, preparation = prepare(
        task, clients, extractor=runner.extractor(task), callback=execute.NullCallback()
    )
    scorer = Scorer(task, preparation)
    present = sorted(state.releases)
    for row in outcome.numbers["clients"]:
        scores = scorer.log_scores(state.releases, present)[present.index(row["client"])]
        assert scores.topk(3).indices.tolist() == row["with_noise"]["top_images"]
