"""Figures as files, and as SVG elements in the colours of a page."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK = "#010203"  # a placeholder for the page's text colour: as_svg() replaces it by currentColor
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
SMOOTH = "smooth"  # the id of images whose pixels a browser may blend
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.labelsize": 10.5,
    "axes.titlesize": 10.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.7,
    "axes.facecolor": "none",
    "figure.facecolor": "white",
    "figure.dpi": 72,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",
    "image.composite_image": False,
}

# Metadata to leave out, so that files are reproducible.
UNDATED: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def save(figure: Figure, path: Path) -> None:
    """Write a figure on white, as PNG, SVG or PDF by the suffix of ``path``, reproducibly."""
    kind = path.suffix.lower()
    if kind not in UNDATED:
        raise ValueError(f"{path.name}: the name of a figure should end in .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        figure.savefig(path, format=kind[1:], dpi=200, facecolor="white", metadata=UNDATED[kind])


def as_svg(figure: Figure, *, prefix: str, label: str) -> str:
    """Return a figure as an ``<svg>`` element of a page.

    Text and axes have the colour of the page's text, the background is transparent. Every id starts
    with ``prefix``, which must be unique on a page; ``label`` is the text for screen readers.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": prefix}):
        figure.savefig(
            buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None}
        )
    root = ET.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # a style would affect the whole page
                parent.remove(child)
    for element in root.iter():
        if element.get("id") == SMOOTH:
            element.attrib.pop("style", None)
        element.tag = element.tag.partition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            element.set(key.rpartition("}")[2], _inline(key.rpartition("}")[2], value, prefix))
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.set("role", "img")
    root.set("aria-label", label)
    # A page may enlarge a figure; a phone shrinks it by at most a fifth and then scrolls.
    sizes = f"width:100%;max-width:{1.6 * width:.0f}px;min-width:{0.8 * width:.0f}px"
    root.set("style", f"stroke-linejoin:round;{sizes};aspect-ratio:{width:g}/{height:g}")
    return ET.tostring(root, encoding="unicode")


def _inline(key: str, value: str, prefix: str) -> str:
    """Return an attribute of an SVG element for a page with several figures."""
    if key == "id":
        return f"{prefix}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    if key == "style":
        value = value.replace("'DejaVu Sans'", FONTS)
    return re.sub(r"url\(#", f"url(#{prefix}-", value).replace(INK, "currentColor")
