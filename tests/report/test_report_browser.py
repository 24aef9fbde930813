"""Pages in a browser: on a phone, in light and dark, asking nobody and complaining of nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.report_runs import LEVELS, make_folder, make_run

from fedaux.report import write_report


@pytest.fixture(scope="module", params=["run", "folder"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run, and that of a folder of runs; with four figures each."""
    directory = tmp_path_factory.mktemp("report") / "demo"
    if request.param == "run":
        make_run(directory)
    else:
        make_folder(directory, alphas=(0.01, 1.0), epsilons=(0.5, 2.0), rates=(0.4,), clients=4)
    return write_report(directory).read_text(encoding="utf-8")


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
        *(
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
        ),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *(
            "--enable-logging=stderr",
            f"--user-data-dir={path.parent / 'profile'}",
            "--virtual-time-budget=5000",
        ),
        *("--dump-dom", *flags, path.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_scrolling_sideways(
    text: str, tmp_path: Path, scheme: str
) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(html.escape(text)), encoding="utf-8")
    document, _ = browse(
        probe, f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    )
    found = re.search(r'data-result="([^"]*)"', document)
    assert found, "the probe did not run"
    result = json.loads(html.unescape(found[1]))
    assert result["width"] == 375
    assert result["scroll"] <= 375
    assert result["wide"] > 0  # there are wide tables, and they scroll in their own boxes
    assert len(result["figures"]) == 4
    assert all(width > 250 and height > 100 for width, height in result["figures"])
    assert result["curves"] == len(LEVELS) * (4 if "runs compared" in text else 1)
    ink, ground = (
        [int(part) for part in re.findall(r"\d+", result[key])[:3]] for key in ("ink", "ground")
    )
    assert contrast(ink, ground) > 7
    assert (sum(ground) < sum(ink)) == (scheme == "dark")


@pytest.mark.slow
def test_the_browser_asks_nobody_and_has_nothing_to_complain_about(
    text: str, tmp_path: Path
) -> None:
    document, printed, asked = watch(text, tmp_path / "page")
    assert document.count("<figure>") == 4
    assert "CONSOLE" not in printed
    assert asked == set()

    # The same page with a picture from elsewhere: its own policy blocks that, and the browser says
    # so ...
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
    """Show a page; returns its document, what the browser printed, and the addresses the page asked
    for."""
    directory.mkdir()
    path, log = directory / "report.html", directory / "net.json"
    path.write_text(text, encoding="utf-8")
    document, printed = browse(path, f"--log-net-log={log}")
    requests = re.findall(
        r'"initiator":"([^"]*)".*?"url":"([^"]+)"', log.read_text(encoding="utf-8")
    )
    # "not an origin" is the browser itself, which asks its maker for the time.
    return document, printed, {url for initiator, url in requests if initiator != "not an origin"}


def contrast(one: list[int], other: list[int]) -> float:
    """The contrast ratio of two colours by the Web Content Accessibility Guidelines."""

    def luminance(colour: list[int]) -> float:
        parts = [part / 255 for part in colour]
        linear = [
            part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
