"""Draw docs/images/whole.svg and code.svg: `python docs/make_diagrams.py`. The second one follows
the imports in src/fedaux."""

from __future__ import annotations

import ast
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
PACKAGE = Path(__file__).parents[1] / "src/fedaux"
INK, GREY = "#1f2937", "#6b7280"
PUBLIC, PRIVATE, OPEN, PLAIN = "#0d9488", "#2563eb", "#c2410c", "#374151"
"""Colours: public, private or protected, not protected, not secret."""
PALE = {PUBLIC: "#ecfdf5", PRIVATE: "#eff6ff", OPEN: "#fff7ed", PLAIN: "#ffffff", GREY: "#f9fafb"}
PARTS = {
    "cli": "the commands",
    "federation": "the same rounds over Flower",
    "sweep": "a grid of runs",
    "run": "one run: checks, files, resume",
    "running": "one run: checks, files, resume",
    "predict": "trained models",
    "pretrain": "h0 by self-supervision",
    "report": "the HTML page",
    "encoders": "frozen networks of others",
    "fast": "optional speed",
    "core": "the methods and their verbs",
    "privacy": "releases, noise, ledger, audit",
    "models": "a head after features",
    "data": "formats, splits, batches",
}


def text(
    x: float, y: float, words: str, *, size: int = 14, colour: str = INK, bold: bool = False
) -> str:
    """Return words around a point."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="{size}" fill="{colour}"{weight}>{words}</text>'


def box(
    x: float, y: float, width: float, height: float, title: str, *lines: str, colour: str = PLAIN
) -> str:
    """Return a rectangle with a title and smaller lines below it."""
    middle, top = x + width / 2, y + height / 2 - 8 * len(lines) + 5
    drawn = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{PALE[colour]}" stroke="{colour}" stroke-width="1.5"/>',
        text(middle, top, title, bold=True),
    ]
    drawn += [
        text(middle, top + 17 * n, line, size=12, colour=GREY) for n, line in enumerate(lines, 1)
    ]
    return "\n".join(drawn)


def panel(x: float, y: float, width: float, height: float, title: str, line: str) -> str:
    """Return a large rectangle with its title at the top."""
    return "\n".join(
        [
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" fill="{PALE[GREY]}" stroke="#9ca3af"/>',
            text(x + width / 2, y + 24, title, size=16, bold=True),
            text(x + width / 2, y + 42, line, size=12, colour=GREY),
        ]
    )


def arrow(*points: tuple[float, float], colour: str = PLAIN, thick: float = 1.6) -> str:
    """Return a line through points that ends in an arrow."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="{path}" stroke="{colour}" stroke-width="{thick:g}" fill="none" marker-end="url(#{colour[1:]})"/>'


def picture(width: int, height: int, label: str, parts: list[str]) -> str:
    """Return a file with a white ground, and a description for readers who see no pictures."""
    heads = "".join(
        f'<marker id="{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
        for colour in (PUBLIC, PRIVATE, OPEN, PLAIN, "#9ca3af")
    )
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" fill="{INK}" role="img" aria-label="{label}">'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([opening, f"<defs>{heads}</defs>", ground, *parts, "</svg>"]) + "\n"


def whole() -> str:
    """Return the picture of who holds what, what travels, and what is protected."""
    parts = [panel(8, 8, 236, 424, "Clients", "each its own labelled data")]
    for row, holds in enumerate(("cats, dogs", "ships", "trucks, birds")):
        parts.append(
            box(
                22,
                64 + 84 * row,
                208,
                70,
                f"client {row + 1}",
                holds,
                "images and labels stay",
                colour=PRIVATE,
            )
        )
    parts.append(
        box(
            22,
            318,
            208,
            100,
            "node",
            "own budget (ε, δ) and ledger:",
            "refuses requests beyond it;",
            "downloads and unpickles nothing",
            colour=PRIVATE,
        )
    )
    parts.append(panel(536, 8, 356, 424, "Server", "public, unlabeled data; test data"))
    parts += [
        box(552, 64, 156, 62, "h0", "an encoder,", "or pretrained here", colour=PUBLIC),
        box(722, 64, 156, 62, "public data", "negatives,", "distill set", colour=PUBLIC),
        box(
            552,
            160,
            156,
            62,
            "certainty scores",
            "who knows this",
            "public example?",
            colour=PRIVATE,
        ),
        box(722, 160, 156, 62, "4. soft labels", "clients' predictions,", "weighted"),
        box(552, 262, 156, 62, "received models", "3. averaged; predict", "public examples"),
        box(722, 262, 156, 62, "5. distill", "agree with", "the soft labels"),
        box(552, 364, 326, 54, "server model", "evaluated, exported, sent in the next round"),
    ]
    parts += [
        arrow((722, 95), (710, 95), colour=PUBLIC),
        arrow((800, 126), (800, 158), colour=PUBLIC),
        arrow((708, 191), (720, 191), colour=PRIVATE),
        arrow((800, 222), (800, 260)),
        arrow((708, 293), (720, 293)),
        arrow((700, 262), (740, 224)),
        arrow((800, 324), (800, 362)),
    ]
    rows = [
        (84, False, PUBLIC, "once: h0 and a public map", "public"),
        (184, True, PRIVATE, "once: a noisy release", "protected: (ε, δ), proved"),
        (284, True, OPEN, "2. every round: the trained model", "not protected, unless DP-SGD"),
        (384, False, PLAIN, "1. every round: the server model", "not secret"),
    ]
    for y, up, colour, title, line in rows:
        ends = ((248, y), (532, y)) if up else ((532, y), (248, y))
        parts += [
            arrow(*ends, colour=colour, thick=2.2),
            text(390, y - 10, title, size=13, bold=True),
            text(390, y + 19, line, size=12, colour=colour),
        ]
    label = "Clients keep images and labels. Once, the server sends h0 and a public map, and each client answers with a noisy, differentially private release. In every round the server sends its model, and clients send trained models, which are not protected unless DP-SGD is used. The server averages, builds soft labels on public data and distills."
    return picture(900, 440, label, parts)


def imported() -> dict[str, set[str]]:
    """Return the packages that each package of src/fedaux imports."""
    names = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    found: dict[str, set[str]] = {}
    for name in names:
        targets: set[str] = set()
        for file in (PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    targets |= {f"{node.module}.{alias.name}" for alias in node.names}
                elif isinstance(node, ast.Import):
                    targets |= {alias.name for alias in node.names}
        parts = [target.split(".") for target in targets]
        found[name] = {
            part[1] for part in parts if part[0] == "fedaux" and len(part) > 1
        } & names - {name}
    return found


def code() -> str:
    """Return the picture of the packages: an arrow from each to the ones that it imports, without
    arrows that follow from others."""
    graph = imported()

    def below(name: str) -> set[str]:
        return graph[name].union(*(below(one) for one in graph[name]))

    def row(name: str) -> int:
        return max((row(one) + 1 for one in graph if name in graph[one]), default=0)

    rows: dict[int, list[str]] = {}
    for name in sorted(graph):
        rows.setdefault(row(name), []).append(name)
    places = {
        name: (400 + 250 * (column - (len(members) - 1) / 2), 16 + 74 * number)
        for number, members in rows.items()
        for column, name in enumerate(members)
    }
    parts = []
    for name, (x, y) in places.items():
        follows = set().union(*(below(one) for one in graph[name]))
        for other in sorted(graph[name] - follows):
            end, top = places[other]
            points = [(x, y + 48), (end, top - 2)]
            if top - y > 100:  # past a row, on the outside
                points = [(x, y + 48), (x, top + 24), (end + (110 if x > end else -110), top + 24)]
            parts.append(arrow(*points, colour="#9ca3af"))
    for name, (x, y) in sorted(places.items()):
        colour = {"core": OPEN, "privacy": PRIVATE, "fast": PUBLIC}.get(name, PLAIN)
        parts.append(box(x - 108, y, 216, 48, name, PARTS.get(name, ""), colour=colour))
    end = 16 + 74 * len(rows)
    parts.append(
        box(
            52,
            end,
            696,
            48,
            "config, recipes, seeding, files",
            "settings, randomness, atomic files: imported by all packages",
            colour=GREY,
        )
    )
    label = (
        "Packages and their imports: "
        + "; ".join(
            f"{name} imports {', '.join(sorted(graph[name])) or 'no other'}"
            for name in sorted(graph)
        )
        + "."
    )
    return picture(800, end + 64, label, parts)


def main() -> None:
    """Write both pictures."""
    for name, drawn in {"whole": whole(), "code": code()}.items():
        (IMAGES / f"{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
