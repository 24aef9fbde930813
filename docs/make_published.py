"""Write reproduce/published.md from the figures that ship with the package: python
docs/make_published.py."""

from __future__ import annotations

from pathlib import Path

from fedaux.report.tables import Table, to_markdown
from reproduce import published

PAGE = Path(__file__).parents[1] / "reproduce/published.md"
HEADING = """# The paper's tables

Sattler, Korjakow, Rischke, Samek: *FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning* (2021),
as printed.
Accuracy in %, mean ± deviation.
Written by `python docs/make_published.py` from `reproduce/published.toml`.
A test compares that file with the paper's source.
How to run them here: [the paper](../docs/paper.md).
"""


def render() -> str:
    """Return the page."""
    parts = [HEADING]
    for name, table in published.tables().items():
        if "blocks" not in table:
            continue
        parts.append(f"## {name}\n\nIn the paper, {table['where']}: {table['says']}.\n")
        for title, block in table["blocks"].items():
            rows = [
                [f"`{method}`", *(cell.replace("±", " ± ") for cell in cells)]
                for method, cells in block.items()
                if method != "columns"
            ]
            parts.append(to_markdown(Table([title, *block["columns"]], rows)))
    claims = [[name, claim["value"]] for name, claim in published.tables()["claims"].items()]
    table = to_markdown(Table(["where", "value"], claims))
    parts.append(f"## In the text\n\nFigures that appear only in the text.\n\n{table}")
    subsets = [
        [name, *cells] for name, cells in published.tables()["subsets"].items() if name != "label"
    ]
    table = to_markdown(Table(["subset", "WordNet id", "images"], subsets))
    parts.append(f"## Subsets of ImageNet\n\n{table}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
