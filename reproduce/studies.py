"""STUDIES: every table and figure of the paper that is a grid of runs. Their settings:
`recipes/`."""

from __future__ import annotations

from itertools import product
from typing import Any

from reproduce.study import Axis, Grid, Study, Value

SIX_ALPHAS = (0.01, 0.04, 0.16, 0.64, 2.56, 10.24)
LEARNING_RATES = (1e-2, 1e-3, 1e-4, 1e-5)


def alphas(*values: float) -> Axis:
    """Return heterogeneity as an axis."""
    return Axis("alpha", tuple(Value(f"{a:g}", f"α = {a:g}", {"split.alpha": a}) for a in values))


def participation(*values: float) -> Axis:
    """Return the participation rate as an axis."""
    return Axis(
        "C", tuple(Value(f"{c:g}", f"C = {c:g}", {"participation_rate": c}) for c in values)
    )


def one(label: str) -> Axis:
    """Return an axis with one value and no settings: a table of one block."""
    return Axis("table", (Value(label, label),))


def network(label: str, models: dict[str, dict[str, Any]], *, clients: int) -> Value:
    """Return a network, or several at equal shares, with its number of clients."""
    prototypes = [{"name": name, **settings} for name, settings in models.items()]
    changes = {"prototypes": prototypes, "split.num_clients": clients}
    return Value(label, label, changes, central=len(models) == 1)


def public(key: str, label: str, auxiliary: str, **changes: Any) -> Value:
    """Return a set of public data."""
    return Value(
        key,
        label,
        {f"auxiliary.{name}": value for name, value in changes.items()},
        auxiliary=auxiliary,
    )


def rates(
    local: tuple[float, ...], distillation: tuple[float, ...], proximal: tuple[float, ...]
) -> Axis:
    """Return every combination of the three settings that the paper searches."""
    values = []
    for a, b, c in product(local, distillation, proximal):
        changes = {"local.learning_rate": a, "distillation.learning_rate": b, "local.proximal": c}
        values.append(
            Value(f"{a:g}/{b:g}/{c:g}", f"local {a:g}, distillation {b:g}, μ {c:g}", changes)
        )
    return Axis("rates", tuple(values))


RESNET = {"resnet8": {"model": "resnet8"}}
MOBILENET = {"mobilenetv2": {"model": "mobilenetv2"}}
SHUFFLENET = {"shufflenet": {"model": "shufflenet"}}
CNN = {"cnn": {"model": "cnn", "options": {"width": 16}}}
NARROW = {"narrow": {"model": "cnn", "options": {"width": 8}}}
MLP = {"mlp": {"model": "mlp", "options": {"width": 64}}}

NETWORKS = Axis(
    "network",
    (
        network("ResNet-8", RESNET, clients=80),
        network("MobileNetV2", MOBILENET, clients=100),
        network("ShuffleNet", SHUFFLENET, clients=100),
        network("Mixed", RESNET | MOBILENET | SHUFFLENET, clients=60),
    ),
)
SMALL_NETWORKS = Axis(
    "network",
    (
        network("CNN", CNN, clients=10),
        network("MLP", MLP, clients=10),
        network("Mixed", CNN | NARROW | MLP, clients=12),
    ),
)
ONE_SHOT = Axis("network", NETWORKS.values[1:3])
SMALL_ONE_SHOT = Axis("network", SMALL_NETWORKS.values[:2])
AUXILIARY = Axis(
    "auxiliary",
    (
        public("STL-10", "STL-10", "stl10"),
        public("CIFAR-100", "CIFAR-100", "cifar100"),
        public("SVHN", "SVHN", "svhn"),
        *(
            public(name, name, "imagenet32", wordnet=name.lower())
            for name in ("Invertebrates", "Birds", "Devices", "Dogs", "Structures")
        ),
    ),
    ours=(
        public("Animals", "Animals", "imagenet32", wordnet="animals"),
        public("Tiny-ImageNet", "Tiny-ImageNet", "tinyimagenet32"),
        public("Noise", "Noise", "noise"),
    ),
)
SMALL_AUXILIARY = Axis(
    "auxiliary",
    (
        public("letters", "letters", "letters", size=3000),
        public("photographs", "photographs", "photographs"),
        public("noise", "noise", "noise"),
    ),
)
TEXTS = Axis(
    "data", (Value("ag_news", "AG News", data="ag_news"), Value("amazon", "Amazon", data="amazon"))
)
DIGITS = (
    "handwritten digits, letters as public data, 10 clients, a small network, one seed, ε = 0.5"
)
ALPHAS_OF_FIGURE = (
    "the figure's values of α are not in the text; the values of the CIFAR-100 table are taken"
)


def quick(recipe: str, blocks: Axis, columns: Axis, cut: str) -> Grid:
    """Return the quick version of a grid, on handwritten digits."""
    return Grid(f"{recipe}-quick", blocks, columns, "digits", "letters", cut=f"{DIGITS}; {cut}")


FEW_ALPHAS = alphas(0.01, 0.16, 10.24)
TWO_ALPHAS = alphas(0.01, 100.0)
_ARCHITECTURES = Grid("architectures", NETWORKS, alphas(*SIX_ALPHAS))
_ARCHITECTURES_QUICK = quick(
    "architectures",
    SMALL_NETWORKS,
    FEW_ALPHAS,
    "networks: CNN, MLP and both with a narrower CNN; 3 of 6 α; 5 of 100 rounds",
)
_STUDIES = (
    Study(
        "table1",
        "methods by participation rate, iid and not",
        Grid("table1", TWO_ALPHAS, participation(0.2, 0.4, 0.8)),
        quick("table1", TWO_ALPHAS, participation(0.4, 0.8), "C = 0.2 left out; 5 of 100 rounds"),
        quick_time="2 minutes",
    ),
    Study(
        "table2",
        "sets of public data",
        Grid("table2", TWO_ALPHAS, AUXILIARY),
        quick(
            "table2",
            TWO_ALPHAS,
            SMALL_AUXILIARY,
            "public data: letters, pieces of two photographs, noise; 5 of 100 rounds",
        ),
        quick_time="1.5 minutes",
    ),
    Study(
        "table3",
        "one round of all clients",
        Grid("table3", ONE_SHOT, alphas(0.01, 0.04, 0.16, 10.24)),
        quick(
            "table3",
            SMALL_ONE_SHOT,
            FEW_ALPHAS,
            "CNN and MLP for MobileNetV2 and ShuffleNet; 3 of 4 α; 10 of 40 local epochs",
        ),
        quick_time="1 minute",
    ),
    Study(
        "cifar100",
        "many classes: methods over heterogeneity",
        Grid("cifar100", one("CIFAR-100"), alphas(*SIX_ALPHAS), "cifar100"),
        Grid(
            "cifar100-quick",
            one("26 letters"),
            FEW_ALPHAS,
            "letters",
            "digits",
            cut="rendered letters in 26 classes, digits as public data, 10 clients, a small "
            "network, 3 of 6 α, 5 of 100 rounds, ε = 0.5",
        ),
        quick_time="1 minute",
        figure="lines",
        left_open=(
            "the table names neither clients nor participation: 20 clients at C = 0.4, as Table 1",
        ),
    ),
    Study(
        "nlp",
        "texts: methods over heterogeneity, and their curves",
        Grid("nlp", TEXTS, alphas(0.01, 1.0), "ag_news", "bookcorpus"),
        Grid(
            "nlp-quick",
            Axis("data", TEXTS.values[:1]),
            alphas(0.01, 1.0),
            "ag_news",
            "bookcorpus",
            cut="only 1,000 texts of AG News, 600 public sentences, MiniLM for TinyBERT, 3 of 20 "
            "rounds, ε = 1",
        ),
        quick_time="2 minutes per round, 18 rounds; texts from --data-root",
        figure="curves",
        needs_recipe="agnews",
    ),
    Study(
        "hpo",
        "learning rates and μ: the best combination of each method, and the whole grid",
        Grid("hpo", alphas(100.0, 0.01), rates(LEARNING_RATES, LEARNING_RATES, LEARNING_RATES)),
        quick(
            "hpo",
            alphas(100.0, 0.01),
            rates((1e-2, 1e-3), (1e-3, 1e-4), (1e-1, 1e-2)),
            "two values of each setting instead of four; 4 of 50 rounds",
        ),
        quick_time="2 minutes",
        figure="heat",
    ),
    Study(
        "architectures",
        "networks, alone and together, over heterogeneity",
        _ARCHITECTURES,
        _ARCHITECTURES_QUICK,
        quick_time="2 minutes",
        figure="lines",
        central=True,
        left_open=(
            ALPHAS_OF_FIGURE,
            "centralised training is not described: here one client holds all data and starts "
            "from h0",
        ),
    ),
    Study(
        "curves",
        "training curves of `architectures`, whose runs it shares",
        _ARCHITECTURES,
        _ARCHITECTURES_QUICK,
        quick_time="2 minutes, none after architectures",
        figure="curves",
        left_open=(ALPHAS_OF_FIGURE,),
    ),
    Study(
        "linear",
        "only the head is trained: curves over heterogeneity",
        Grid("linear", one("ResNet-8"), alphas(*SIX_ALPHAS)),
        quick("linear", one("CNN"), FEW_ALPHAS, "3 of 6 α; 10 of 100 rounds"),
        quick_time="20 seconds",
        figure="curves",
        left_open=(ALPHAS_OF_FIGURE, "the number of rounds is not stated: 100"),
    ),
)
STUDIES = {study.name: study for study in _STUDIES}
