"""The figures of a run: each picture shows the numbers it is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.report_runs import make_run, read_metrics

from fedaux.report import data_figures, figures, svg
from fedaux.report.figures import Mark
from fedaux.report.run import Point, curve_points


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "demo")


def test_methods_keep_their_colour_and_never_share_a_look() -> None:
    names = [*figures.METHOD_STYLES, *(f"{name}+p" for name in figures.METHOD_STYLES), *"abcdefgh"]
    styles = figures.method_styles(names)
    assert len(set(styles.values())) == len(names)
    assert figures.method_styles(["fedaux"])["fedaux"] == styles["fedaux"]
    assert styles["feddf"].colour == styles["feddf+p"].colour != styles["fedaux"].colour


def test_methods_of_a_usual_comparison_have_colours_of_their_own() -> None:
    peers = ["fedavg", "fedprox", "feddf", "scaffold", "feddyn", "fedadam", "fedavgm"]
    names = [*(f"{peer}+p" for peer in peers), "fedaux", "fedaux2", "private-head"]
    styles = figures.method_styles(names)
    assert len({style.colour for style in styles.values()}) == len(names)


def test_marks_stand_at_their_tick() -> None:
    marks = [Mark("fedavg", -1.0, 0.4, 0.0, "a"), Mark("fedaux2", 0.5, 0.8, 0.0, "b")]
    marks += [Mark("fedaux2", 1.0, 0.9, 0.0, "b"), Mark("fedaux", 1.0, 0.7, 0.0, "c")]
    figure = figures.against_values(marks, xlabel="ε", names={-1.0: "none", 0.5: "0.5", 1.0: "1"})
    axes = figure.axes[0]
    places = [place for line in axes.get_lines() for place in np.asarray(line.get_xdata()).tolist()]
    assert sorted(place for place in places if place < 1.5) == [0.0, 1.0]
    assert [abs(place - 2) < 0.05 for place in places if place > 1.5] == [True, True]


def test_the_curve_that_ends_highest_is_bold() -> None:
    ends = {"fedaux": 0.7, "fedaux2": 0.9, "fedavg": 0.5}
    curves = {
        name: [Point(1, 0.95 - end, 0.0, 1.0, 3), Point(2, end, 0.0, 1.0, 3)]
        for name, end in ends.items()
    }
    axes = figures.labelled_lines(curves).axes[0]
    bold = [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]
    assert bold == ["fedaux2 90.0"]
    widths = [line.get_linewidth() for line in axes.get_lines()]
    assert widths.index(max(widths)) == 1
    alone = figures.labelled_lines({"fedaux": curves["fedaux"]}).axes[0]
    assert alone.texts[0].get_fontweight() == "normal"  # there is nothing to compare


def test_labels_are_spread_without_leaving_the_figure() -> None:
    placed = figures.spread_labels([0.02, 0.03, 0.9, 0.01], gap=0.1)
    assert placed[2] == 0.9
    assert placed[1] > placed[0] > placed[3] >= 0
    assert min(abs(a - b) for a in placed for b in placed if a != b) >= 0.1 - 1e-12


def test_bubbles_have_areas_in_proportion_to_counts() -> None:
    figure = data_figures.split_bubbles(
        [("one", [[100, 0], [0, 25]]), ("two", [[0, 4], [100, 0]])], ["a", "b"]
    )
    first = figure.axes[0].collections[0]
    widths = first.get_widths()  # type: ignore[attr-defined]
    assert np.asarray(first.get_offsets()).tolist() == [[0, 0], [1, 1]]
    assert widths[0] / widths[1] == pytest.approx(2)
    assert [axes.get_title() for axes in figure.axes] == ["one", "two"]
    with pytest.raises(ValueError, match="at least one"):
        data_figures.split_bubbles([], ["a"])


def test_score_matrix_compares_like_with_like() -> None:
    table, weights = [[0, 30], [10, 10]], np.array([[0.1, 0.7], [0.9, 0.3]])
    figure = data_figures.score_matrix(weights, table, ["a", "b"], [7, 4])
    held, weight = (axes.images[0] for axes in figure.axes[:2])
    assert held.get_clim() == weight.get_clim() == (0, 1)
    # Client 4 comes first: its main class is the first one.
    assert np.asarray(held.get_array()) == pytest.approx(np.array([[1, 0.25], [0, 0.75]]))
    assert np.asarray(weight.get_array()) == pytest.approx(np.array([[0.9, 0.3], [0.1, 0.7]]))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["4", "7"]
    with pytest.raises(ValueError, match="do not match"):
        data_figures.score_matrix(weights, table, ["a", "b"], [7])


@pytest.mark.parametrize(
    ("kind", "start"), [("png", b"\x89PNG\r"), ("svg", b"<?xml"), ("pdf", b"%PDF-")]
)
def test_saved_figures_are_the_same_bytes(
    run: Path, tmp_path: Path, kind: str, start: bytes
) -> None:
    paths = [tmp_path / "one" / f"curves.{kind}", tmp_path / "two" / f"curves.{kind}"]
    for path in paths:
        path.parent.mkdir()
        svg.save(figures.labelled_lines(curve_points(read_metrics(run))), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes()[:5] == start
    with pytest.raises(ValueError, match=r"should end in \.png, \.svg or \.pdf"):
        svg.save(figures.labelled_lines({}), tmp_path / "curves.gif")
