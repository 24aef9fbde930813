"""The paper's figures in the package equal its source, number by number, and studies stand
where they stand."""

from __future__ import annotations

import importlib
import re

import pytest
from helpers.paths import ROOT, shared

from fedaux.data import wordnet
from reproduce import published
from reproduce.studies import STUDIES

TEX = shared("paper/fedaux.tex")
NUMBER = r"\d+(?:\.\d+)?(?:e-\d+)?"


@pytest.fixture(scope="module")
def tex() -> str:
    if not TEX.exists():
        pytest.skip("the paper's source is not at hand: shared/paper/fedaux.tex")
    return TEX.read_text(encoding="utf-8")


def rows_of(tex: str, label: str) -> list[list[str]]:
    """Return the cells of a table's body as plain text, by an independent way: no macro is known by
    name but bold."""
    after = tex.split(f"\\label{{{label}}}")[1]
    body = after.split("\\begin{tabular}")[1].split("\\end{tabular}")[0].split("\\midrule", 1)[1]
    lines = body.replace("\\midrule", " ").replace("\\bottomrule", " ").split("\\\\")
    cells = [
        [re.sub(r"\\(?:textbf|textsc)|[{}]", "", cell).strip() for cell in line.split("&")]
        for line in lines
    ]
    return [line for line in cells if len(line) > 1]


def figures_of(cells: list[str]) -> list[str]:
    found = []
    for cell in cells:
        if match := re.fullmatch(rf"({NUMBER})(?:\$\\pm\$({NUMBER}))?", cell):
            found.append(match[1] + (f"±{match[2]}" if match[2] else ""))
    return found


def method_of(cell: str) -> str:
    match = re.match(r"Fed[A-Za-z]+(\+P)?", cell)
    assert match, cell
    return match[0].lower()


@pytest.mark.parametrize(
    ("name", "count"),
    [("table1", 54), ("table2", 48), ("table3", 56), ("cifar100", 24), ("nlp", 12)],
)
def test_every_accuracy_is_the_printed_one(tex: str, name: str, count: int) -> None:
    table = published.tables()[name]
    printed: dict[str, list[str]] = {}
    for line in rows_of(tex, table["label"]):
        names = [cell for cell in line if cell.startswith("Fed")]
        own = [
            cell
            for cell in line
            if cell not in names and not (name == "table2" and cell in ("0.01", "100.00"))
        ]
        printed.setdefault(method_of(names[0]), []).extend(figures_of(own))
    stored: dict[str, list[str]] = {}
    for block in table["blocks"].values():
        for method, values in block.items():
            if method != "columns":
                assert len(values) == len(block["columns"])
                stored.setdefault(method, []).extend(values)
    assert stored == printed
    assert sum(map(len, printed.values())) == count


def test_every_hyperparameter_is_the_printed_one(tex: str) -> None:
    table = published.tables()["hpo"]
    lines = rows_of(tex, table["label"])
    printed = [[method_of(line[0]), *line[2:]] for line in lines]
    stored = [
        [method, *values]
        for block in table["blocks"].values()
        for method, values in block.items()
        if method != "columns"
    ]
    assert stored == printed
    assert [line[1] for line in lines if line[1]] == ["100", "0.01"]
    assert list(table["blocks"]) == ["α = 100", "α = 0.01"]


def test_mu_is_the_printed_one_at_the_nearer_alpha(tex: str) -> None:
    found: dict[tuple[str, float], float] = {}
    alpha = 0.0
    for line in rows_of(tex, "tab:HPO"):
        alpha = float(line[1] or alpha)
        if line[4] != "-":
            found[method_of(line[0]), alpha] = float(line[4])
    assert set(found) == {
        (method, alpha) for method in ("fedprox", "fedprox+p") for alpha in (0.01, 100.0)
    }
    for (method, alpha), mu in found.items():
        assert published.tuned_proximal(method, alpha) == mu
    for method in ("fedprox", "fedprox+p"):
        for alpha in (0.001, 0.04, 0.16, 0.64, 1.0):
            assert published.tuned_proximal(method, alpha) == found[method, 0.01]
        for alpha in (1.01, 2.56, 10.24, 1000.0):
            assert published.tuned_proximal(method, alpha) == found[method, 100.0]
    assert published.tuned_proximal("fedaux", 0.01) is None
    assert published.tuned_proximal("fedavg+m", 100.0) is None


def test_headings_are_the_printed_ones(tex: str) -> None:
    def heading(label: str) -> str:
        return (
            tex.split(f"\\label{{{label}}}")[1].split("\\begin{tabular}")[1].split("\\midrule")[0]
        )

    tables = published.tables()
    for name in ("table1", "table3", "cifar100", "nlp"):
        said = [
            float(number)
            for number in re.findall(
                rf"\$(?:C=|\\alpha=)?({NUMBER})\$", heading(tables[name]["label"])
            )
        ]
        columns = [
            column for block in tables[name]["blocks"].values() for column in block["columns"]
        ]
        expected = [float(column.split(" = ")[1]) for column in columns]
        if name == "table1":
            expected = [0.01, 100.0, *expected]
        assert said == expected, name
    assert [name.strip(" .\\\n") for name in heading("tab:aux_data").split("&")[-8:]] == [
        *("STL-10", "CIFAR-100", "SVHN", "Invertebr", "Birds", "Devices", "Dogs", "Structures")
    ]


def test_figures_in_the_text_stand_there(tex: str) -> None:
    plain = re.sub(r"\\emph\{", "", tex)
    for name, claim in published.tables()["claims"].items():
        near = re.sub(r"\\emph\{", "", claim["near"])
        assert near in plain, name
        assert claim["value"] in near, name


def test_settings_that_the_defaults_and_recipes_take_stand_there(tex: str) -> None:
    (pretrained,) = re.findall(r"Pre-training strategy:.*", tex)
    assert re.search(
        r"Adam optimizer, learning rate set to \$10\^\{-3\}\$ and a batch-size of 512", pretrained
    )
    (appendix,) = re.findall(r"As mentioned in section 4\.3.*", tex)
    for said in (
        r"$\epsilon = 0.1$ and $\delta=10^{-5}$",
        "1 epoch for local training and distillation, ten clients and 100\\% participation rate",
        "160000 disjoint data points, which were sampled from BookCorpus",
        "ADAM optimizer with a learning rate of $10^{-5}$ was used for both local training and "
        "distillation",
        "logistic regression classifier was set to $0.01$",
        "The batch size for $D_i, D^{-}$ and $D_{distill}$ was 32",
    ):
        assert said in appendix


def test_subsets_are_the_printed_ones(tex: str) -> None:
    printed = {line[0].split()[-1].lower(): line[1:] for line in rows_of(tex, "tab:wordnetids")}
    stored = {key: value for key, value in published.tables()["subsets"].items() if key != "label"}
    assert stored == printed
    assert {name: wnid for name, (wnid, _) in stored.items()} == wordnet.ROOTS


def test_studies_have_the_places_of_the_printed_tables() -> None:
    for name in ("table1", "table2", "table3", "cifar100", "nlp", "hpo"):
        grid, blocks = STUDIES[name].grid, published.tables()[name]["blocks"]
        assert [value.label for value in grid.blocks.values] == list(blocks)
        if name != "hpo":
            for block in blocks.values():
                assert [value.label for value in grid.columns.values] == block["columns"]


def test_figures_are_found_by_place() -> None:
    found = published.printed("table1", "α = 0.01", "C = 0.4", "fedaux")
    assert found is not None
    assert (found.mean, found.deviation, found.spaced) == (71.2, 2.1, "71.2 ± 2.1")
    alone = published.printed("cifar100", "CIFAR-100", "α = 2.56", "fedaux")
    assert alone is not None
    assert (alone.mean, alone.deviation) == (62.5, None)
    said = published.printed("architectures", "ResNet-8", "α = 0.01", "fedaux")
    assert said is not None
    assert said.mean == 78.1
    assert published.printed("table1", "α = 0.01", "C = 0.4", "fedaux+m") is None
    assert published.printed("linear", "ResNet-8", "α = 0.01", "fedaux") is None


def test_the_page_of_printed_tables_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = ROOT / "docs"
    monkeypatch.syspath_prepend(str(docs))
    module = importlib.import_module("make_published")
    assert module.render() == module.PAGE.read_text(encoding="utf-8"), (
        "run python docs/make_published.py"
    )
