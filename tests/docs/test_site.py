"""The built site in a browser: no errors, mathematics and tables rendered, fit for a phone."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import Tab, opened
from helpers.paths import ROOT

PHONE = 400
PROBE = r"""(() => {
  const article = document.querySelector("article");
  const plain = article.cloneNode(true);
  plain.querySelectorAll("code, pre, .katex, script").forEach((part) => part.remove());
  const text = plain.textContent;
  const tables = [...article.querySelectorAll("table:not(.highlighttable)")];
  const of = (list) => list.map((one) => one.outerHTML.slice(0, 120));
  const wide = [...document.querySelectorAll("body *")].filter((one) => {
    const box = one.getBoundingClientRect();
    const hidden = one.closest("nav, .md-search, .md-sidebar");
    return box.width > 0 && box.right > innerWidth + 1 && !hidden;
  });
  return {
    marked: article.querySelectorAll(".arithmatex").length,
    rendered: article.querySelectorAll(".arithmatex .katex-html").length,
    raw: text.match(/\\\(|\\\[|\$\$|\$[^\s$][^$\n]*\$/g) || [],
    lost: of([...article.querySelectorAll("*")].filter((one) => one instanceof HTMLUnknownElement)),
    emphasised: plain.innerHTML.match(/[\w)]<em>.{0,40}|.{0,40}<\/em>\w/g) || [],
    unstyled: of(tables.filter((table) => !table.closest(".md-typeset__table")
      || getComputedStyle(table).borderTopStyle !== "solid")),
    empty: of([...article.querySelectorAll("tbody tr")].filter(
      (row) => !row.textContent.trim() && !row.querySelector("img, svg"))),
    width: innerWidth,
    scroll: Math.max(document.documentElement.scrollWidth, document.body.scrollWidth),
    wide: of(wide.slice(0, 3)),
    styled: getComputedStyle(article).lineHeight !== "normal",
    pictures: of([...article.querySelectorAll("img")].filter((one) => !one.naturalWidth)),
  };
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs the extra docs: make docs")
    place = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


def source_of(page: Path) -> Path | None:
    """Return the Markdown of a built page; None for pages made from programs and files."""
    name = page.with_suffix(".md")
    places = [ROOT / "docs" / name, ROOT / name, ROOT / name.parent / name.name.upper()]
    places += [ROOT / f"{name.stem.upper()}.md", ROOT / name.parent / f"{name.stem.upper()}.md"]
    return next((place for place in places if place.is_file()), None)


def has_mathematics(source: Path) -> bool:
    text = re.sub(
        r"^```.*?^```$|`[^`]*`", "", source.read_text(encoding="utf-8"), flags=re.S | re.M
    )
    return bool(re.search(r"\$\$.+?\$\$|(?<![\w$\\])\$[^$\s][^$\n]*\$", text, flags=re.S))


def test_generated_tables_are_part_of_their_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs: make docs")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pages = importlib.import_module("site_pages")
    (place,) = pages.INCLUDED.finditer((ROOT / "docs/paper.md").read_text(encoding="utf-8"))
    assert (ROOT / place[1]).is_file()
    (tmp_path / place[1]).parent.mkdir(parents=True)
    (tmp_path / place[1]).write_text("# Results\n\nNo.\n\n## table1\n\n| a |\n", encoding="utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.tables(place) == "### table1\n\n| a |\n\n"


@pytest.mark.slow
def test_every_page_shows_what_its_source_says(site: Path, tab: Tab) -> None:
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=PHONE,
        height=800,
        deviceScaleFactor=1,
        mobile=True,
    )
    problems: dict[str, list[str]] = {}
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    with_mathematics = 0
    for page in pages:
        tab.open(page)
        found = tab.evaluate(PROBE)
        name = page.relative_to(site)
        wrong = list(tab.errors)
        wrong += [
            f"{key}: {found[key]}"
            for key in ("raw", "lost", "emphasised", "unstyled", "empty", "pictures")
            if found[key]
        ]
        if found["rendered"] != found["marked"]:
            wrong.append(f"{found['rendered']} of {found['marked']} formulas are rendered")
        source = source_of(name)
        if source is not None and has_mathematics(source):
            with_mathematics += 1
            wrong += [] if found["rendered"] else ["no formula, but the source has some"]
        if found["scroll"] > PHONE or found["width"] != PHONE:
            wrong.append(
                f"scrolls sideways: {found['scroll']} of {found['width']}, {found['wide']}"
            )
        wrong += [] if found["styled"] else ["has no style"]
        if wrong:
            problems[str(name)] = wrong
    assert len(pages) > 30
    assert with_mathematics >= 2
    assert not problems, "\n".join(f"{name}: {wrong}" for name, wrong in problems.items())


@pytest.mark.slow
def test_the_page_test_sees_what_it_looks_for(site: Path, tab: Tab) -> None:
    """A page with each defect: all of them are found."""
    spoiled = site / "spoiled.html"
    text = (site / "concepts.html").read_text(encoding="utf-8")
    defects = (
        "<p>the product <w, u(x)> of</w,> and w<em>, then w</em> and \\(x\\) and $y$</p>"
        '<div class="highlight"><table class="x"><tbody><tr><td></td></tr></tbody></table></div>'
        '<p><span class="arithmatex">\\(\\nosuchmacro\\)</span></p>'
        '<div style="width:900px">wide</div><img src="missing.png">'
    )
    assert text.count("</article>") == 1
    spoiled.write_text(text.replace("</article>", defects + "</article>"), encoding="utf-8")
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=PHONE,
        height=800,
        deviceScaleFactor=1,
        mobile=False,
    )
    tab.open(spoiled)
    found = tab.evaluate(PROBE)
    spoiled.unlink()
    assert any("nosuchmacro" in line for line in tab.errors)
    assert any("missing.png" in line for line in tab.errors)
    assert found["rendered"] < found["marked"]
    assert "\\(" in found["raw"]
    assert "$y$" in found["raw"]
    for key in ("lost", "emphasised", "unstyled", "empty", "pictures", "wide"):
        assert found[key], key
    assert found["scroll"] > PHONE


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_site_follows_the_colours_of_the_system(site: Path, tab: Tab, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    tab.call("Emulation.setEmulatedMedia", features=[feature])
    tab.open(site / "index.html")
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in re.findall(r"\d+", ground)[:3])
    assert (brightness < 300) == (scheme == "dark"), ground
