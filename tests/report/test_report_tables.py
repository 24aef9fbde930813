"""Tables as data, their renderers, and how numbers are written."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter

import pytest
from rich.console import Console

from fedaux.formatting import (
    interval,
    mean_and_deviation,
    megabytes,
    over_seeds,
    privacy_budget,
    short,
)
from fedaux.report.tables import Table, TerminalTable, bold_row, to_csv, to_html, to_markdown

HEADERS = ("method", "last\nround", "note")
TABLE = Table(
    HEADERS,
    [("fedaux", "71.2 ± 2.1", "a | b"), ("[red]<i>", 3, "")],
    "lrl",
    "Results & more",
    {(0, 1)},
    {1: 'x"y.html'},
)


def test_markdown_has_alignment_bold_cells_and_no_broken_rows() -> None:
    assert to_markdown(TABLE).splitlines() == [
        "| method | last round | note |",
        "| --- | ---: | --- |",
        r"| fedaux | **71.2 ± 2.1** | a \| b |",
        "| [red]<i> | 3 |  |",
    ]


def test_html_escapes_what_it_is_given() -> None:
    text = to_html(TABLE)
    assert '<p class="caption">Results &amp; more</p>' in text
    assert "<strong>71.2 ± 2.1</strong>" in text
    assert '<a href="x&quot;y.html">[red]&lt;i&gt;</a>' in text
    assert re.findall(r'<th scope="col"([^>]*)>', text) == [' class="text"', "", ' class="text"']
    whole = to_html(Table(HEADERS, TABLE.rows, bold=bold_row(1, HEADERS)))
    assert whole.count("<tr class=best>") == 1
    assert "<strong>" not in whole
    assert "<thead>" not in to_html(Table(("", ""), [("a", "b")]))


def printed(table: Table, *, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(TerminalTable(table))
    return captured.get()


def test_terminal_shows_cells_as_they_are() -> None:
    text = printed(Table(HEADERS, TABLE.rows, "lrr", "Results"), width=34)
    assert "[red]<i>" in text
    assert " 71.2 ± 2.1 " in text
    assert text.startswith("Results")


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_a_narrow_terminal_truncates_nothing_and_breaks_no_number(width: int) -> None:
    headers = ("method", *(f"figure {number}" for number in range(9)), "remark")
    numbers = [[f"{1000 * row + column}.25 ± 0.{column}1" for column in range(9)] for row in (1, 2)]
    remark = "a longer remark of several words that may be wrapped wherever there is a space"
    rows = [(f"method{number}", *own, remark) for number, own in enumerate(numbers)]
    lines = printed(Table(headers, rows, "l" + "r" * 9 + "l"), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for own in numbers:
        assert all(any(number in line for line in lines) for number in own)
    assert set(remark.split()) <= set(" ".join(lines).split())


def test_a_table_that_is_split_repeats_all_that_tells_its_rows_apart() -> None:
    rows = [("fedaux", str(alpha), *["0.123456789"] * 9) for alpha in (0.01, 0.1)]
    table = Table(("method", "alpha", *map(str, range(9))), rows, keys=2)
    lines = [line for line in printed(table, width=60).splitlines() if "0.123456789" in line]
    assert len(lines) > 4
    assert {tuple(line.split()[:2]) for line in lines} == {("fedaux", "0.01"), ("fedaux", "0.1")}
    parts = Counter(tuple(line.split()[:2]) for line in lines)
    assert len(set(parts.values())) == 1


def test_csv_can_be_read_back() -> None:
    rows = [['a,"b"', "1"], ["c\nd", "2"]]
    assert list(csv.reader(io.StringIO(to_csv(Table(("x", "y"), rows))))) == [["x", "y"], *rows]


def test_rows_must_fit_the_headers() -> None:
    with pytest.raises(ValueError, match="2 headers"):
        Table(("a", "b"), [(1, 2, 3)])
    with pytest.raises(ValueError, match="2 headers"):
        Table(("a", "b"), [(1, 2)], "l")


def test_numbers_are_written_in_one_way() -> None:
    assert mean_and_deviation(0.7123, 0.0211) == "71.2 ± 2.1"
    assert mean_and_deviation(0.7123) == "71.2"
    assert mean_and_deviation(71.23, 0.0, scale=1) == "71.2 ± 0.0"
    assert mean_and_deviation(None, 0.1) == "–"
    assert privacy_budget(0.5, 1e-5) == "(0.5, 1e-5)"
    assert privacy_budget(12.3456, 1e-6) == "(12.35, 1e-6)"
    assert privacy_budget("inf", 1e-5) == privacy_budget(math.inf, 1e-5) == "(∞, 1e-5)"
    assert privacy_budget(None, None) == "–"
    assert [short(value) for value in (0.05223, 1e-5, 1e20, None, math.inf)] == [
        "0.0522",
        "1e-5",
        "1e20",
        "–",
        "∞",
    ]
    assert [megabytes(value) for value in (61_700, 22_500_000, 1.5e9, None)] == [
        "0.0617",
        "22.5",
        "1,500.0",
        "–",
    ]
    assert interval([3, None, 1200]) == "3 to 1,200"
    assert interval([0.5, 0.5]) == "0.5"
    assert interval([]) == "–"
    assert over_seeds([]) == (None, None)
    assert over_seeds([0.5]) == (0.5, 0.0)
    mean, deviation = over_seeds([1.0, 3.0])
    assert mean == 2.0
    assert deviation == pytest.approx(math.sqrt(2))
