"""The pieces of a page: its style, sections, notes, tables and pictures, and how numbers are written."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from fedaux.report.record import as_number

CSS = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1c2126;--soft:#59636e;--line:#d5dae0;--wash:#f3f5f8;
--link:#0a5ea8;--warn:#8a3c00;--warn-wash:#fff3e6}
@media (prefers-color-scheme:dark){:root{--ground:#14171b;--ink:#e4e8ec;--soft:#a0abb7;--line:#363d46;
--wash:#1d2228;--link:#79bdf5;--warn:#ffb67a;--warn-wash:#2f2216}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.55;overflow-wrap:anywhere;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:52rem;margin:0 auto;padding:2rem 1rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .75rem;letter-spacing:-.01em}
h2{font-size:1.25rem;line-height:1.3;margin:3rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.75rem 0 .5rem}
p{margin:.6rem 0;max-width:42rem}
.kind{margin:0 0 .25rem;color:var(--soft);font-size:.875rem}
.finding{font-size:1.2rem;line-height:1.45;margin:.5rem 0 1rem}
.facts{color:var(--soft);font-size:.925rem}
.notice{background:var(--warn-wash);color:var(--warn);border-left:4px solid;padding:.6rem .9rem}
a{color:var(--link)}
.scroll{overflow-x:auto;overscroll-behavior-x:contain}
.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;min-width:100%}
.caption{color:var(--soft);font-size:.9rem;margin:1.25rem 0 .3rem}
th,td{padding:.4rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{padding-left:.2rem}
.text{text-align:left}
td.wrap{white-space:normal;min-width:9.5rem;overflow-wrap:anywhere}
thead th{white-space:pre;color:var(--soft);font-weight:600;vertical-align:bottom}
tbody th{font-weight:500}
tr.best th,tr.best td{font-weight:700;background:var(--wash)}
figure{margin:1.25rem 0 1.75rem}
figure svg{display:block;height:auto}
figcaption a{white-space:nowrap}
figcaption{color:var(--soft);font-size:.9rem;margin-top:.6rem;max-width:42rem}
details{border:1px solid var(--line);border-radius:6px;margin:1rem 0}
summary{cursor:pointer;padding:.6rem .9rem;font-weight:600}
details>div{padding:0 .9rem .6rem}
pre{margin:0;padding:.2rem .9rem .9rem;overflow-x:auto;overflow-wrap:normal;font-size:.85rem;line-height:1.45;
font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (max-width:30rem){main{padding-top:1.25rem}h1{font-size:1.45rem}.finding{font-size:1.08rem}}
@media print{details,.scroll{overflow:visible}figure,table{break-inside:avoid}}
"""


def section(key: str, title: str, body: str) -> str:
    """A section of the page, with a heading that links and screen readers find by ``key``."""
    return f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escape(title)}</h2>\n{body}</section>'


def note(text: str, *, raw: bool = False) -> str:
    """A paragraph; ``raw`` text is markup already."""
    return f"<p>{text if raw else escape(text)}</p>\n"


def table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    best: int | None = None,
    texts: Sequence[int] = (),
    marked: Collection[tuple[int, int]] = (),
    links: Mapping[int, str] | None = None,
) -> str:
    """A table that scrolls in its own box; the first column names the row, those in ``texts`` are words.

    The row ``best`` and the cells ``marked`` (row, column) stand out; ``links`` are where the names of rows lead.
    """

    def kind(column: int, *, wrap: bool = False) -> str:
        words = column == 0 or column in texts
        return (' class="text wrap"' if wrap and column else ' class="text"') if words else ""

    head = "".join(f'<th scope="col"{kind(column)}>{escape(str(name))}</th>' for column, name in enumerate(header))
    lines = []
    for number, row in enumerate(rows):
        written = [escape(str(cell)) for cell in row]
        cells = "".join(
            f"<td{kind(column, wrap=len(str(cell)) > 18)}>"
            + (f"<strong>{written[column]}</strong>" if (number, column) in marked else written[column])
            + "</td>"
            for column, cell in enumerate(row)
            if column
        )
        mark = ' class="best"' if number == best else ""
        target = (links or {}).get(number)
        name = written[0] if target is None else f'<a href="{escape(target)}">{written[0]}</a>'
        lines.append(f'<tr{mark}><th scope="row" class="text">{name}</th>{cells}</tr>')
    top = f"<thead><tr>{head}</tr></thead>\n" if any(header) else ""
    body = "\n".join(lines)
    return (
        f'<p class="caption">{escape(caption)}</p>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">\n<table>\n'
        f"{top}<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
    )


def picture(svg: str, caption: str, name: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A figure with its caption and a link that saves its numbers."""
    return (
        f'<figure>\n<div class="scroll">{svg}</div>\n<figcaption>{escape(caption)} '
        f"{download(name, header, rows)}</figcaption>\n</figure>\n"
    )


def download(name: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A link that saves a table as CSV; the table is inside the page."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    link = f"data:text/csv;charset=utf-8,{quote(buffer.getvalue())}"
    return f'<a download="{escape(name)}.csv" href="{link}">Save the numbers (CSV)</a>'


def folded(title: str, body: str) -> str:
    """What is there for those who ask for it."""
    return f"<details>\n<summary>{escape(title)}</summary>\n<div>{body}</div>\n</details>\n"


def document(title: str, body: str) -> str:
    """A whole page that loads nothing and runs nothing, which the browser itself is told."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        " style-src 'unsafe-inline'\">\n"
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def short(value: Any) -> str:
    """Three digits that matter: 0.0522, 1e-5."""
    number = as_number(value)
    if math.isnan(number):
        return "–"
    if math.isinf(number):
        return "∞"
    return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", f"{number:.3g}")


def budget(value: Any) -> str:
    """A privacy parameter, :func:`short` but with a decimal where it is whole: 1.0, 0.5, ∞."""
    text = short(value)
    return f"{text}.0" if text.isdigit() else text


def percent(value: Any) -> str:
    """A share in percent with one decimal, without the sign."""
    number = as_number(value)
    return "–" if math.isnan(number) else f"{100 * number:.1f}"


def share(value: Any) -> str | None:
    """A share in percent with its sign, None if it is unknown."""
    number = as_number(value)
    return None if math.isnan(number) else f"{100 * number:.4g} %"


def spread(mean: Any, deviation: Any) -> str:
    """Mean ± standard deviation in percent; the mean alone where there is no deviation."""
    return percent(mean) + ("" if math.isnan(as_number(deviation)) else f" ± {percent(deviation)}")


def decimal(value: Any) -> str:
    """One decimal, thousands set apart: 1,234.6."""
    number = as_number(value)
    return "–" if math.isnan(number) else f"{number:,.1f}"


def megabytes(value: Any) -> str:
    """Bytes in units of 10⁶."""
    number = as_number(value) / 1e6
    if math.isnan(number):
        return "–"
    return f"{number:,.1f}" if number >= 10 else short(number)


def count(value: float) -> str:
    """A whole number with its thousands set apart; others by :func:`short`."""
    return f"{value:,.0f}" if value.is_integer() else short(value)


def interval(values: Iterable[Any], *, form: Callable[[float], str] = count) -> str:
    """The smallest and the largest value, written once if they look the same."""
    known = [number for number in map(as_number, values) if not math.isnan(number)]
    if not known:
        return "–"
    low, high = form(min(known)), form(max(known))
    return low if low == high else f"{low} to {high}"
