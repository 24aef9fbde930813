"""The parts of a page: style, sections, paragraphs, figures and downloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

from matplotlib.figure import Figure

from fedaux.report.svg import as_svg
from fedaux.report.tables import Table, to_csv, to_html


@dataclass
class Parts:
    """The figures and tables of a page, by name."""

    figures: dict[str, Figure] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    numbers: dict[str, Table] = field(default_factory=dict)
    """What the page offers as CSV."""
    unnamed: list[Table] = field(default_factory=list)
    """Tables of a section that has not ended."""


_PARTS: ContextVar[Parts | None] = ContextVar("parts", default=None)
CSS = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1c2126;--soft:#59636e;--line:#d5dae0;
--wash:#f3f5f8;--link:#0a5ea8;--warn:#8a3c00;--warn-wash:#fff3e6}
@media (prefers-color-scheme:dark){:root{--ground:#14171b;--ink:#e4e8ec;--soft:#a0abb7;
--line:#363d46;--wash:#1d2228;--link:#79bdf5;--warn:#ffb67a;--warn-wash:#2f2216}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.55;overflow-wrap:anywhere;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:52rem;margin:0 auto;padding:2rem 1rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .75rem;letter-spacing:-.01em}
h2{font-size:1.25rem;line-height:1.3;margin:3rem 0 .75rem;padding-top:.75rem;
border-top:1px solid var(--line)}
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
pre{margin:0;padding:.2rem .9rem .9rem;overflow-x:auto;overflow-wrap:normal;
font-size:.85rem;line-height:1.45;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (max-width:30rem){main{padding-top:1.25rem}h1{font-size:1.45rem}.finding{font-size:1.08rem}}
@media print{details,.scroll{overflow:visible}figure,table{break-inside:avoid}}
"""


def section(key: str, title: str, body: str) -> str:
    """Return a section of the page; ``key`` is the id of its heading, and names its tables."""
    if (parts := _PARTS.get()) is not None:
        for number, one in enumerate(parts.unnamed, start=1):
            parts.tables[key if number == 1 else f"{key}-{number}"] = one
        parts.unnamed.clear()
    return (
        f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escape(title)}</h2>\n{body}</section>'
    )


def note(text: str, *, raw: bool = False) -> str:
    """Return a paragraph; ``raw`` text is HTML already."""
    return f"<p>{text if raw else escape(text)}</p>\n"


def table(rows: Table, *, name: str = "") -> str:
    """Return a table; without a name, it is called after its section."""
    if (parts := _PARTS.get()) is not None:
        if name:
            parts.tables[name] = rows
        else:
            parts.unnamed.append(rows)
    return to_html(rows)


def picture(
    figure: Figure, key: str, caption: str, numbers: Table, *, label: str = "", name: str = ""
) -> str:
    """Return a figure with its caption and a link that saves its numbers as NAME.csv (default:
    key).

    ``label`` is the text for screen readers, by default the caption.
    """
    if (parts := _PARTS.get()) is not None:
        parts.figures[name or key] = figure
    drawn = as_svg(figure, prefix=key, label=label or caption)
    return (
        f'<figure>\n<div class="scroll">{drawn}</div>\n<figcaption>{escape(caption)} '
        f"{download(name or key, numbers)}</figcaption>\n</figure>\n"
    )


@contextmanager
def collected() -> Iterator[Parts]:
    """Collect the figures and tables of a page while it is written."""
    parts = Parts()
    token = _PARTS.set(parts)
    try:
        yield parts
    finally:
        _PARTS.reset(token)


def download(name: str, numbers: Table, *, text: str = "Save the numbers (CSV)") -> str:
    """Return a link that saves numbers, which the page contains, as CSV."""
    if (parts := _PARTS.get()) is not None:
        parts.numbers[name] = numbers
    link = f"data:text/csv;charset=utf-8,{quote(to_csv(numbers))}"
    return f'<a download="{escape(name)}.csv" href="{link}">{escape(text)}</a>'


def folded(title: str, body: str) -> str:
    """Return content that is folded under its title."""
    return f"<details>\n<summary>{escape(title)}</summary>\n<div>{body}</div>\n</details>\n"


def document(title: str, body: str) -> str:
    """Return a page without external resources and scripts, as its content security policy
    enforces."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        " style-src 'unsafe-inline'\">\n"
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
