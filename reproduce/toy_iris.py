"""Weighted ensembles on Iris (the paper's first figure).

Three clients hold disjoint parts of Iris, projected to two principal components, and train linear
classifiers that know one or two classes. The mean of their logits is poor, the certainty-weighted
mean is not. The paper weights by a kernel density estimate, which is not private; here every
mechanism is measured as well. As in the paper, accuracy is on the training points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import gaussian_kde
from sklearn.datasets import load_iris
from torch import Tensor
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.report.svg import SMOOTH, STYLE
from fedaux.report.tables import Table
from reproduce.document import COLOURS, MARKERS, Document, Drawing
from reproduce.scoring import (
    Toy,
    epsilon_table,
    homogeneous,
    seeded_noise,
    square_grid,
    without_noise,
)
from reproduce.study_figures import new_figure

CLASSES = ("setosa", "versicolor", "virginica")
HOLDINGS = ((50, 0, 0), (0, 40, 10), (0, 10, 40))
"""Examples of each class that each client holds: 50 per client, as far apart as the paper's
figure suggests."""
CYCLIC = ((25, 25, 0), (0, 25, 25), (25, 0, 25))
"""Two classes per client, each class at two clients."""
PENALTY = 1e-2
FREE_PENALTY = 1e-4
"""On intercepts: small, so that a client of one class predicts it everywhere, as in the paper's
figure."""
CHANGES: tuple[Mapping[str, float], ...] = (
    {},
    {"sharpness": 1.0},
    {"sharpness": 4.0},
    {"regularisation": 0.001},
)
FIGURE_EPSILON = 1.0
NUM_NEGATIVES = 1000
GRID_SIDE = 140

Panel = tuple[str, Tensor, Tensor | float, NDArray[np.int64]]
"""A title, class probabilities on the grid [N, C], their opacity and the points to show."""


@dataclass(frozen=True)
class Iris(Toy):
    """Points [150, 2], their classes [150], the examples of each client and the clients' models
    [3 classes, 3]."""

    points: Tensor
    labels: Tensor
    parts: list[NDArray[np.int64]]
    models: list[Tensor]

    def predict(self, points: Tensor, weights: Tensor) -> Tensor:
        """Return the softmax of the weighted mean of the clients' logits [N, C] (Eq. 3), for
        weights [K, N]."""
        logits = torch.stack([homogeneous(points) @ model.T for model in self.models])
        return torch.softmax((weights[:, :, None] * logits).sum(dim=0), dim=1)

    def accuracy(self, weights: Tensor) -> float:
        """Return the share of all points that the weighted mean classifies correctly."""
        return float(
            (self.predict(self.points, weights).argmax(dim=1) == self.labels).double().mean()
        )

    def densities(self, points: Tensor) -> Tensor:
        """Return Gaussian kernel density estimates [K, N] of the clients' data (Scott's
        bandwidth)."""
        return torch.from_numpy(
            np.stack([gaussian_kde(own.numpy().T)(points.numpy().T) for own in self.clients])
        )

    def weights(self, points: Tensor) -> dict[str, Tensor]:
        """Return the weights [K, N] of the plain mean, and the paper's: each client's share of
        the densities."""
        densities = self.densities(points)
        return {
            "plain mean": torch.full_like(densities, 1 / len(self.clients)),
            "weighted by density": densities / densities.sum(dim=0).clamp_min(1e-300),
        }


def run(
    *, seed: int = 0, epsilons: Sequence[float] = (0.1, FIGURE_EPSILON, 10.0), draws: int = 20
) -> Document:
    """Draw the five panels, and measure plain, density-weighted and privately weighted means.

    Accuracies of private mechanisms are means over `draws` of the noise.
    """
    toy = build(HOLDINGS, seed=seed)
    accuracies = {name: toy.accuracy(weights) for name, weights in toy.weights(toy.points).items()}
    rows = measure(toy, seed=seed, epsilons=epsilons, draws=draws)
    controls = [
        {
            "examples_by_client_and_class": [list(row) for row in holdings],
            "intercept_penalty": penalty,
            "accuracy": {
                name: other.accuracy(weights)
                for name, weights in other.weights(other.points).items()
            },
        }
        for holdings in (HOLDINGS, CYCLIC)
        for penalty in (FREE_PENALTY, PENALTY)
        for other in [build(holdings, seed=seed, intercept_penalty=penalty)]
    ]
    numbers = {
        "seed": seed,
        "examples_by_client_and_class": [list(row) for row in HOLDINGS],
        "delta": Certainty().delta,
        "draws": draws,
        "accuracy": accuracies,
        "accuracy_by_mechanism": rows,
        "controls": controls,
    }
    figures = {
        "toy-iris": Drawing(
            draw_panels(toy, accuracies),
            "Predictions of each client alone, of their plain mean and of their density-weighted "
            "mean; opacity is a client's certainty, points are those it holds.",
            point_table(toy),
        ),
        "toy-iris-mechanisms": draw_mechanisms(toy, rows, seed=seed, draws=draws),
    }
    return Document(
        "three clients on Iris, weighted and plain means", numbers, describe(numbers), figures
    )


def build(
    holdings: Sequence[Sequence[int]], *, seed: int, intercept_penalty: float = FREE_PENALTY
) -> Iris:
    """Project Iris, distribute it over the clients, train them, and draw public points over the
    bounding box."""
    data, labels = load_iris(return_X_y=True)
    centred = np.asarray(data) - np.asarray(data).mean(axis=0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    directions *= np.sign(
        directions[:, :1]
    )  # the sign of a component is arbitrary; this one puts setosa at the left
    points, classes = (
        torch.from_numpy(centred @ directions.T),
        torch.from_numpy(np.asarray(labels)).long(),
    )
    generator = seeding.generator(seed, "toy iris")
    orders = [
        generator.permutation(np.flatnonzero(labels == number)) for number in range(len(CLASSES))
    ]
    ends = np.cumsum(np.asarray(holdings), axis=0)
    parts = [
        np.sort(
            np.concatenate(
                [
                    order[end - count : end]
                    for order, end, count in zip(orders, row, held, strict=True)
                ]
            )
        )
        for row, held in zip(ends, holdings, strict=True)
    ]
    models = [
        train(points[part], classes[part], intercept_penalty=intercept_penalty) for part in parts
    ]
    low, high = box(points)
    negatives = torch.from_numpy(generator.uniform(low, high, size=(NUM_NEGATIVES, 2)))
    return Iris([points[part] for part in parts], negatives, points, classes, parts, models)


def box(points: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the corners of the box around points, with a margin of half a unit."""
    return points.amin(dim=0).numpy() - 0.5, points.amax(dim=0).numpy() + 0.5


def train(points: Tensor, labels: Tensor, *, intercept_penalty: float) -> Tensor:
    """Return the weights [C, 3] of a softmax regression on (1, x)."""
    inputs = homogeneous(points)
    weights = torch.zeros(len(CLASSES), inputs.shape[1], dtype=torch.float64, requires_grad=True)
    penalty = torch.tensor([intercept_penalty, PENALTY, PENALTY], dtype=torch.float64)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (
            functional.cross_entropy(inputs @ weights.T, labels)
            + (penalty * weights.square()).sum() / 2
        )
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def measure(toy: Iris, *, seed: int, epsilons: Sequence[float], draws: int) -> list[dict[str, Any]]:
    """Return the accuracy of every mechanism, setting and epsilon."""
    return toy.measure(
        CHANGES, toy.points, judge=toy.accuracy, seed=seed, epsilons=epsilons, draws=draws
    )


def describe(numbers: Mapping[str, Any]) -> list[str | Table]:
    """Return text and tables."""

    def cell(row: Mapping[str, Any]) -> str:
        spread = (
            ""
            if row["least"] == row["largest"]
            else f" ({100 * row['least']:.0f}–{100 * row['largest']:.0f})"
        )
        return f"{100 * row['mean']:.1f}{spread}"

    controls = [
        [
            "; ".join("/".join(map(str, row)) for row in control["examples_by_client_and_class"]),
            f"{control['intercept_penalty']:g}",
            *(f"{100 * value:.1f}" for value in control["accuracy"].values()),
        ]
        for control in numbers["controls"]
    ]
    headers = {"setting": "weights from", "promise": "(ε, δ)"}
    return [
        "Accuracy in % on all 150 points, which are also the training points, as in the paper. "
        "Weights by density, the paper's, are not private.",
        Table(
            ["prediction", "accuracy"],
            [[name, f"{100 * v:.1f}"] for name, v in numbers["accuracy"].items()],
        ),
        f"Mechanisms, 50 examples per client, δ = {numbers['delta']:g}; mean over "
        f"{numbers['draws']} draws of noise, least to largest in brackets; the figure shows ε = "
        f"{FIGURE_EPSILON:g}.",
        epsilon_table(numbers["accuracy_by_mechanism"], headers, text=cell),
        "The gain depends on who holds which classes, and on how confident the clients are (L2 "
        "penalty on their intercepts):",
        Table(["examples by client and class", "penalty", *numbers["accuracy"]], controls),
    ]


def draw_panels(toy: Iris, accuracies: Mapping[str, float]) -> Figure:
    """Draw five panels: three clients with certainty as opacity, the plain mean, the weighted
    mean."""
    grid = square_grid(*box(toy.points), GRID_SIDE)
    densities = toy.densities(grid)
    opacity = (
        densities / densities.amax(dim=1, keepdim=True)
    ).sqrt()  # the root shows regions of low density
    alone = torch.eye(len(toy.parts), dtype=torch.float64)[:, :, None].expand(-1, -1, len(grid))
    panels: list[Panel] = [
        (f"client {client + 1}", toy.predict(grid, alone[client]), 0.85 * opacity[client], part)
        for client, part in enumerate(toy.parts)
    ]
    everything = np.arange(len(toy.points))
    panels += [
        (
            f"{name.removesuffix(' by density')}: {100 * accuracies[name]:.0f} %",
            toy.predict(grid, weights),
            0.5,
            everything,
        )
        for name, weights in toy.weights(grid).items()
    ]
    return _draw(toy, panels, columns=5)


def draw_mechanisms(
    toy: Iris, rows: Sequence[Mapping[str, Any]], *, seed: int, draws: int
) -> Drawing:
    """Draw the weighted mean under every mechanism: above without noise, below at the figure's
    epsilon."""
    grid = square_grid(*box(toy.points), GRID_SIDE)
    panels: list[Panel] = []
    numbers = []
    noisy = [row for row in rows if row["epsilon"] == "inf" and row["promise"] != "no noise"]
    for noise, epsilon in ((without_noise, "inf"), (seeded_noise(seed, draw=0), FIGURE_EPSILON)):
        for row in noisy:
            section = Certainty(**row["certainty"], epsilon=FIGURE_EPSILON)
            on_grid, on_points = (
                torch.softmax(toy.log_scores(section, points, noise=noise), dim=0)
                for points in (grid, toy.points)
            )
            accuracy = toy.accuracy(on_points)
            title = f"{row['setting'].replace(', ', chr(10))}\nno noise: {100 * accuracy:.0f} %"
            if epsilon != "inf":
                claimed = "" if row["promise"] == "proved" else " (claimed)"
                title = f"ε = {epsilon:g}{claimed}\none draw: {100 * accuracy:.0f} %"
            panels.append((title, toy.predict(grid, on_grid), 0.5, np.arange(len(toy.points))))
            numbers.append([row["setting"], epsilon, round(accuracy, 6)])
    caption = (
        "The weighted mean under every mechanism: above without noise, below at ε = "
        f"{FIGURE_EPSILON:g}. One draw of noise; the table has means over {draws}."
    )
    figure = _draw(toy, panels, columns=len(noisy))
    return Drawing(figure, caption, Table(("weights from", "epsilon", "accuracy"), numbers))


def point_table(toy: Iris) -> Table:
    """Return one line per point: its position, its class, its client, and what the two means
    predict."""
    weights = toy.weights(toy.points)
    predicted = [toy.predict(toy.points, each).argmax(dim=1).tolist() for each in weights.values()]
    holder = {int(index): client + 1 for client, part in enumerate(toy.parts) for index in part}
    rows = [
        [
            round(x, 4),
            round(y, 4),
            CLASSES[label],
            holder[index],
            *(CLASSES[kind[index]] for kind in predicted),
        ]
        for index, ((x, y), label) in enumerate(
            zip(toy.points.tolist(), toy.labels.tolist(), strict=True)
        )
    ]
    return Table(("first component", "second component", "class", "client", *weights), rows)


@matplotlib.rc_context(STYLE)
def _draw(toy: Iris, panels: Sequence[Panel], *, columns: int) -> Figure:
    """Draw panels in lines of `columns`, with a legend of the classes below."""
    lines = -(-len(panels) // columns)
    titles = [
        max(title.count("\n") + 1 for title, *_ in panels[columns * line :][:columns])
        for line in range(lines)
    ]
    side, font = (132, 10.5) if columns <= 5 else (106, 9)
    figure = new_figure(columns * (side + 6), lines * (side + 4) + 14 * sum(titles) + 26)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    (left, bottom), (right, top) = box(toy.points)
    palette = torch.tensor(
        [to_rgb(colour) for colour in COLOURS[: len(CLASSES)]], dtype=torch.float64
    )
    for axes, (title, shares, opacity, shown) in zip(grid.flat, panels, strict=True):
        alpha = torch.as_tensor(opacity, dtype=torch.float64).expand(len(shares))
        picture = (
            torch.cat([shares @ palette, alpha[:, None]], dim=1)
            .view(GRID_SIDE, GRID_SIDE, 4)
            .clamp(0, 1)
        )
        axes.imshow(
            picture.numpy(),
            origin="lower",
            extent=(left, right, bottom, top),
            aspect="auto",
            gid=SMOOTH,
        )
        for number, name in enumerate(CLASSES):
            across, up = toy.points.numpy()[shown[toy.labels.numpy()[shown] == number]].T
            look = {
                "marker": MARKERS[number],
                "color": COLOURS[number],
                "edgecolor": "white",
                "linewidth": 0.5,
            }
            axes.scatter(across, up, s=13, label=name, **look)
        axes.set_title(title, fontsize=font)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_alpha(0.5)
    handles, labels = grid[0, -1].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9.5
    )
    return figure
