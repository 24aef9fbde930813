"""Weighted ensemble distillation on Iris (the paper's first figure): who is asked decides what is answered.

Three clients with disjoint parts of Iris on its two principal components train linear classifiers that know a class or
two. The mean of their logits is poor, the certainty-weighted mean is not. The paper weights by a kernel density
estimate, which is not private; here every certainty mechanism is put in its place as well. As in the paper, accuracy is
on the points that the clients were trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import gaussian_kde
from sklearn.datasets import load_iris
from torch import Tensor
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.paper.page import Drawing
from fedaux.paper.scoring import drawn, homogeneous, log_scores, promise, silent, variants
from fedaux.paper.writing import COLOURS, MARKERS, Outcome, epsilon_name, markdown_table, write
from fedaux.report.svg import SMOOTH, STYLE

CLASSES = ("setosa", "versicolor", "virginica")
HOLDINGS = ((50, 0, 0), (0, 40, 10), (0, 10, 40))
"""How many examples of each class each client holds: 50 a client, as far apart as the figure of the paper suggests."""
CYCLIC = ((25, 25, 0), (0, 25, 25), (25, 0, 25))
"""Two classes a client, each class at two clients."""
PENALTY = 1e-2
FREE_PENALTY = 1e-4
"""On the intercepts: hardly any, so that who knows one class says this class everywhere, as in the paper's figure."""
CHANGES: tuple[Mapping[str, float], ...] = (
    {},
    {"sharpness": 1.0},
    {"sharpness": 4.0},
    {"regularisation": 0.001},
)
HONEST_EPSILON = 1.0
NUM_NEGATIVES = 1000
GRID_SIDE = 140


Panel = tuple[str, Tensor, Tensor | float, NDArray[np.int64]]
"""A title, class probabilities on the grid [N, C], their opacity and the points to show."""


class Toy(NamedTuple):
    """Points [150, 2], their classes [150], the examples of each client and the clients' models [3 classes, 3]."""

    points: Tensor
    labels: Tensor
    parts: list[NDArray[np.int64]]
    models: list[Tensor]
    negatives: Tensor


def run(
    out: Path | str,
    *,
    seed: int = 0,
    epsilons: Sequence[float] = (0.1, HONEST_EPSILON, 10.0),
    draws: int = 20,
) -> Outcome:
    """Draw the five panels, and measure plain, density-weighted and privately weighted means.

    ``draws`` is how often the noise of a private mechanism is drawn; accuracies are means over the draws.
    """
    toy = build(HOLDINGS, seed=seed)
    points = toy.points
    accuracies = {
        "mean of logits": accuracy(toy, uniform_weights(points)),
        "weighted by density (not private)": accuracy(toy, density_weights(toy, points)),
    }
    rows = measure(toy, seed=seed, epsilons=epsilons, draws=draws)
    controls = []
    for holdings in (HOLDINGS, CYCLIC):
        for intercept_penalty in (FREE_PENALTY, PENALTY):
            other = build(holdings, seed=seed, intercept_penalty=intercept_penalty)
            controls.append(
                {
                    "examples_by_client_and_class": [list(row) for row in holdings],
                    "intercept_penalty": intercept_penalty,
                    "plain": accuracy(other, uniform_weights(points)),
                    "weighted": accuracy(other, density_weights(other, points)),
                }
            )
    numbers = {
        "seed": seed,
        "examples_by_client_and_class": [list(row) for row in HOLDINGS],
        "epsilon_stated": HONEST_EPSILON,
        "delta": Certainty().delta,
        "draws": draws,
        "accuracy": accuracies,
        "accuracy_by_mechanism": rows,
        "controls": controls,
    }
    figures = {
        "toy-iris": Drawing(
            draw_panels(toy, accuracies),
            "What each client alone, their plain mean and their density-weighted mean say; opacity is a client's "
            "certainty, points are those it holds.",
            ("first component", "second component", "class", "client", "plain mean", "weighted by density"),
            point_rows(toy),
        ),
        "toy-iris-mechanisms": Drawing(
            draw_mechanisms(toy, rows, seed=seed),
            f"What the weighted mean says under every mechanism: above without noise, below at ε = {HONEST_EPSILON:g}. "
            f"One draw of noise; the table has means over {draws}.",
            ("weights from", "epsilon", "accuracy"),
            [
                [row["setting"], name, round(reached, 6)]
                for row in rows
                if row["epsilon"] == HONEST_EPSILON
                for name, (_, reached) in zip(("inf", HONEST_EPSILON), both_lines(toy, row, seed=seed), strict=True)
            ],
        ),
    }
    return write(Path(out), "toy-iris", numbers=numbers, markdown=describe(numbers, epsilons), figures=figures)


def build(holdings: Sequence[Sequence[int]], *, seed: int, intercept_penalty: float = FREE_PENALTY) -> Toy:
    """Project Iris, spread it over the clients, train them, and draw public points over the bounding box."""
    data, labels = load_iris(return_X_y=True)
    centred = np.asarray(data) - np.asarray(data).mean(axis=0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    directions *= np.sign(directions[:, :1])  # a component's sign is arbitrary; this one puts setosa at the left
    points, classes = torch.from_numpy(centred @ directions.T), torch.from_numpy(np.asarray(labels)).long()
    generator = seeding.generator(seed, "toy iris")
    orders = [generator.permutation(np.flatnonzero(labels == number)) for number in range(len(CLASSES))]
    ends = np.cumsum(np.asarray(holdings), axis=0)
    parts = [
        np.sort(np.concatenate([order[end - count : end] for order, end, count in zip(orders, row, held, strict=True)]))
        for row, held in zip(ends, holdings, strict=True)
    ]
    models = [train(points[part], classes[part], intercept_penalty=intercept_penalty) for part in parts]
    low, high = box(points)
    negatives = torch.from_numpy(generator.uniform(low, high, size=(NUM_NEGATIVES, 2)))
    return Toy(points, classes, parts, models, negatives)


def box(points: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the corners of the box around points, with a margin of half a unit."""
    return points.amin(dim=0).numpy() - 0.5, points.amax(dim=0).numpy() + 0.5


def train(points: Tensor, labels: Tensor, *, intercept_penalty: float) -> Tensor:
    """Return the weights [C, 3] of a softmax regression on (1, x)."""
    inputs = homogeneous(points)
    weights = torch.zeros(len(CLASSES), inputs.shape[1], dtype=torch.float64, requires_grad=True)
    penalty = torch.tensor([intercept_penalty, PENALTY, PENALTY], dtype=torch.float64)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(inputs @ weights.T, labels) + (penalty * weights.square()).sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def uniform_weights(points: Tensor) -> Tensor:
    """Return equal weights [K, N]: the plain mean."""
    return torch.full((len(HOLDINGS), len(points)), 1 / len(HOLDINGS), dtype=torch.float64)


def densities(toy: Toy, points: Tensor) -> Tensor:
    """Return Gaussian kernel density estimates [K, N] of the clients' data at points (Scott's bandwidth)."""
    estimates = [gaussian_kde(toy.points[part].numpy().T)(points.numpy().T) for part in toy.parts]
    return torch.from_numpy(np.stack(estimates))


def density_weights(toy: Toy, points: Tensor) -> Tensor:
    """Return the paper's certainty of this figure [K, N]: each client's share of the densities."""
    estimates = densities(toy, points)
    return estimates / estimates.sum(dim=0).clamp_min(1e-300)


def private_weights(section: Certainty, toy: Toy, points: Tensor, *, noise: Any) -> Tensor:
    """Return the weights [K, N] that a certainty mechanism gives."""
    clients = [homogeneous(toy.points[part]) for part in toy.parts]
    scores = log_scores(
        section, negatives=homogeneous(toy.negatives), clients=clients, points=homogeneous(points), noise=noise
    )
    return torch.softmax(scores, dim=0)


def predictions(toy: Toy, points: Tensor, weights: Tensor) -> Tensor:
    """Return the softmax of the weighted mean of the clients' logits [N, C] (Eq. 3)."""
    logits = torch.stack([homogeneous(points) @ model.T for model in toy.models])
    return torch.softmax((weights[:, :, None] * logits).sum(dim=0), dim=1)


def accuracy(toy: Toy, weights: Tensor) -> float:
    """Return the share of all Iris points that the weighted mean gets right."""
    return float((predictions(toy, toy.points, weights).argmax(dim=1) == toy.labels).double().mean())


def measure(toy: Toy, *, seed: int, epsilons: Sequence[float], draws: int) -> list[dict[str, Any]]:
    """Return a row for every mechanism, setting and epsilon: mean, least and largest accuracy over draws of noise."""

    def weigh(section: Certainty, noise: Any = silent) -> Tensor:
        return private_weights(section, toy, toy.points, noise=noise)

    rows = []
    for name, section in variants(CHANGES, weigh=weigh):
        found = {math.inf: [accuracy(toy, weigh(section))]}
        kept = promise(section)
        for epsilon in () if kept == "no noise" else epsilons:
            noisy = section.model_copy(update={"epsilon": epsilon})
            found[epsilon] = [accuracy(toy, weigh(noisy, drawn(seed, draw=draw))) for draw in range(draws)]
        for epsilon, values in found.items():
            rows.append(
                {
                    "mechanism": section.mechanism,
                    "setting": name,
                    "certainty": section.model_dump(exclude={"epsilon"}),
                    "epsilon": "inf" if math.isinf(epsilon) else epsilon,
                    "promise": kept,
                    "accuracy": float(np.mean(values)),
                    "least": min(values),
                    "largest": max(values),
                }
            )
    return rows


def describe(numbers: Mapping[str, Any], epsilons: Sequence[float]) -> str:
    """Return the tables."""
    plain = [[name, f"{100 * value:.1f}"] for name, value in numbers["accuracy"].items()]
    controls = [
        [
            "; ".join("/".join(map(str, row)) for row in control["examples_by_client_and_class"]),
            f"{control['intercept_penalty']:g}",
            *(f"{100 * control[key]:.1f}" for key in ("plain", "weighted")),
        ]
        for control in numbers["controls"]
    ]
    columns = [*epsilons, math.inf]
    rows = []
    for setting in dict.fromkeys(row["setting"] for row in numbers["accuracy_by_mechanism"]):
        cells = {float(row["epsilon"]): row for row in numbers["accuracy_by_mechanism"] if row["setting"] == setting}
        rows.append([setting, cells[math.inf]["promise"], *(_cell(cells.get(epsilon)) for epsilon in columns)])
    header = ["weights from", "(ε, δ)", *(f"ε = {epsilon_name(epsilon)}" for epsilon in columns)]
    return (
        "# Iris, three clients, weighted and plain means\n\n"
        "Accuracy in % on all 150 points, which are also the training points, as in the paper.\n\n"
        + markdown_table(["prediction", "accuracy"], plain)
        + f"\nMechanisms, 50 examples a client, δ = {numbers['delta']:g}; mean over {numbers['draws']} draws of noise, "
        f"least to largest in brackets; ε = {numbers['epsilon_stated']:g} is the one to look at.\n\n"
        + markdown_table(header, rows)
        + "\nHow much there is to gain depends on who holds what, and on how sure of themselves the clients are "
        "(L2 penalty on their intercepts):\n\n"
        + markdown_table(["examples by client and class", "penalty", "plain mean", "weighted by density"], controls)
    )


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["least"] == row["largest"]:
        return f"{100 * row['accuracy']:.1f}"
    return f"{100 * row['accuracy']:.1f} ({100 * row['least']:.0f}–{100 * row['largest']:.0f})"


def draw_panels(toy: Toy, accuracies: Mapping[str, float]) -> Figure:
    """Draw the five panels: three clients with certainty as opacity, the plain mean, the weighted mean."""
    plain, weighted = accuracies.values()
    grid = _grid(toy.points)
    certainty = densities(toy, grid)
    opacity = (certainty / certainty.amax(dim=1, keepdim=True)).sqrt()  # the root lets thin places show
    alone = torch.eye(len(toy.parts), dtype=torch.float64)[:, :, None].expand(-1, -1, len(grid))
    panels: list[Panel] = [
        (f"client {client + 1}", predictions(toy, grid, alone[client]), 0.85 * opacity[client], toy.parts[client])
        for client in range(len(toy.parts))
    ]
    everything = np.arange(len(toy.points))
    panels += [
        (f"plain mean: {100 * plain:.0f} %", predictions(toy, grid, uniform_weights(grid)), 0.5, everything),
        (f"weighted: {100 * weighted:.0f} %", predictions(toy, grid, density_weights(toy, grid)), 0.5, everything),
    ]
    return _draw(toy, panels, columns=5)


def draw_mechanisms(toy: Toy, rows: Sequence[Mapping[str, Any]], *, seed: int) -> Figure:
    """Draw what the weighted mean says under every mechanism: above without noise, below at the stated epsilon."""
    grid = _grid(toy.points)
    lines: list[list[Panel]] = [[], []]
    noisy = [row for row in rows if row["epsilon"] == HONEST_EPSILON]  # without noise, `none` is `mean`
    for row in noisy:
        section = _at_stated(row)
        for line, (noise, reached) in zip(lines, both_lines(toy, row, seed=seed), strict=True):
            shares = predictions(toy, grid, private_weights(section, toy, grid, noise=noise))
            if noise is silent:
                title = f"{row['setting'].replace(', ', chr(10))}\nno noise: {100 * reached:.0f} %"
            else:
                claimed = "" if row["promise"] == "proved" else " (claimed)"
                title = f"ε = {HONEST_EPSILON:g}{claimed}\none draw: {100 * reached:.0f} %"
            line.append((title, shares, 0.5, np.arange(len(toy.points))))
    return _draw(toy, [*lines[0], *lines[1]], columns=len(noisy))


def both_lines(toy: Toy, row: Mapping[str, Any], *, seed: int) -> list[tuple[Any, float]]:
    """Return the two noises that a mechanism is drawn with, none and one draw, each with the accuracy it leaves."""
    noises = [silent, drawn(seed, draw=0)]
    section = _at_stated(row)
    return [(noise, accuracy(toy, private_weights(section, toy, toy.points, noise=noise))) for noise in noises]


def _at_stated(row: Mapping[str, Any]) -> Certainty:
    return Certainty(**row["certainty"], epsilon=HONEST_EPSILON)


def point_rows(toy: Toy) -> list[list[object]]:
    """Return a line a point: where it is, its class, who holds it, and what the two means say."""
    said = [
        predictions(toy, toy.points, weights(toy.points)).argmax(dim=1).tolist()
        for weights in (uniform_weights, lambda points: density_weights(toy, points))
    ]
    holder = {int(index): client + 1 for client, part in enumerate(toy.parts) for index in part}
    return [
        [round(x, 4), round(y, 4), CLASSES[label], holder[index], *(CLASSES[kind[index]] for kind in said)]
        for index, ((x, y), label) in enumerate(zip(toy.points.tolist(), toy.labels.tolist(), strict=True))
    ]


def _grid(points: Tensor) -> Tensor:
    low, high = box(points)
    axes = [torch.linspace(float(a), float(b), GRID_SIDE, dtype=torch.float64) for a, b in zip(low, high, strict=True)]
    across, up = torch.meshgrid(*axes, indexing="xy")
    return torch.stack([across.flatten(), up.flatten()], dim=1)


@matplotlib.rc_context(STYLE)
def _draw(toy: Toy, panels: Sequence[Panel], *, columns: int) -> Figure:
    """Draw panels in lines of ``columns``, with the classes explained below."""
    lines = -(-len(panels) // columns)
    titles = [max(title.count("\n") + 1 for title, *_ in panels[columns * line :][:columns]) for line in range(lines)]
    side = 132 if columns <= 5 else 106
    figure = Figure(figsize=(columns * (side + 6) / 72, (lines * (side + 4) + 14 * sum(titles) + 26) / 72))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    low, high = box(toy.points)
    palette = torch.tensor([to_rgb(colour) for colour in COLOURS[: len(CLASSES)]], dtype=torch.float64)
    for axes, (title, shares, opacity, shown) in zip(grid.flat, panels, strict=False):
        alpha = opacity if isinstance(opacity, Tensor) else torch.full((len(shares),), opacity, dtype=torch.float64)
        picture = torch.cat([shares @ palette, alpha[:, None]], dim=1).view(GRID_SIDE, GRID_SIDE, 4).clamp(0, 1)
        extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
        axes.imshow(picture.numpy(), origin="lower", extent=extent, aspect="auto", gid=SMOOTH)
        _scatter(axes, toy, shown)
        axes.set_title(title, fontsize=10.5 if columns <= 5 else 9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_alpha(0.5)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9.5)
    return figure


def _scatter(axes: Axes, toy: Toy, shown: NDArray[np.int64]) -> None:
    for number, name in enumerate(CLASSES):
        chosen = shown[toy.labels.numpy()[shown] == number]
        across, up = toy.points.numpy()[chosen].T
        axes.scatter(
            across,
            up,
            s=13,
            marker=MARKERS[number],
            color=COLOURS[number],
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )
