"""Do scores approximate the distribution weights of domain adaptation? (the paper's appendix on its
motivation)

Three clients hold Gaussian data D_i; Mansour et al. (2008) weight them by D_i(x) / sum_j D_j(x).
The paper claims that s_i(x) / sum_j s_j(x) is close to it on the support of the data. Here the
distance is measured, for every mechanism.

For clients of covariance sigma^2 I and negatives of covariance tau^2 I, `mean` has log s_i(x) =
sharpness / tau^2 (<mu_i, x> - |mu_i|^2 / 2) + a term that all clients share, and log D_i(x) has 1 /
sigma^2 in its place: the calibrated sharpness is tau^2 / sigma^2, the variance of the negatives
over that of a client, unless clipping matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.privacy.mean import PrivateMean
from fedaux.privacy.mechanisms import Noise
from fedaux.report.figures import DASHES, FADE
from fedaux.report.svg import SMOOTH, STYLE
from fedaux.report.tables import Table
from reproduce.document import COLOURS, MARKERS, Document, Drawing, epsilon_text
from reproduce.scoring import (
    Toy,
    epsilon_table,
    promise,
    seeded_noise,
    square_grid,
    without_noise,
)
from reproduce.study_figures import GREY, new_figure, tidy

RADIUS = 2.0
"""Distance of the clients' means from the origin, at three angles; each client's variance is 1
(on average)."""
SPREAD = 3.0
"""Standard deviation tau of the public data, around the origin."""
MAIN = "round clients, wide public data (τ = 3 σ)"
CASES = {
    MAIN: ("round", SPREAD),
    "round clients, public data as wide as a client (τ = σ)": ("round", 1.0),
    "slanted clients, wide public data (τ = 3 σ)": ("slanted", SPREAD),
}
"""Shape of the clients and spread of the public data; the first is drawn, and measured
for every n."""
CHANGES: tuple[Mapping[str, float], ...] = (
    {},
    {"sharpness": 1.0},
    {"sharpness": SPREAD**2},
    {"regularisation": 0.001},
)
NUM_NEGATIVES = 2000
NUM_POINTS = 2000
SHARPNESSES = np.logspace(-2, 2, 81)
FIGURE_EPSILON = 1.0
EVERY = 4
"""Step between the points of a plane whose numbers are saved."""


@dataclass(frozen=True)
class Gaussians(Toy):
    """Clients N(means[i], covariances[i]), and points of their mixture to judge on."""

    means: NDArray[np.float64]
    covariances: NDArray[np.float64]
    points: Tensor

    def true_weights(self, points: Tensor) -> Tensor:
        """Return D_i(x) / sum_j D_j(x) [3, N]."""
        logs = []
        for mean, covariance in zip(self.means, self.covariances, strict=True):
            offset = points.numpy() - mean
            squares = (offset @ np.linalg.inv(covariance) * offset).sum(axis=1)
            logs.append(-0.5 * (squares + np.linalg.slogdet(covariance)[1]))
        return torch.softmax(torch.from_numpy(np.stack(logs)), dim=0)

    def error(self, weights: Tensor) -> float:
        """Return the mean of |s_i / sum_j s_j - D_i / sum_j D_j| over clients and points of the
        mixture."""
        return float((weights - self.true_weights(self.points)).abs().mean())

    def equal_error(self) -> float:
        """Return the error of equal weights, the plain mean."""
        return self.error(torch.full((3, len(self.points)), 1 / 3, dtype=torch.float64))

    def best_sharpness(self, logs: Sequence[Tensor]) -> dict[str, Any]:
        """Return the sharpness with the smallest mean error, for log scores at sharpness 1 under
        several noises."""
        truth = self.true_weights(self.points)
        curve = [
            float(
                np.mean(
                    [
                        float((torch.softmax(value * log, dim=0) - truth).abs().mean())
                        for log in logs
                    ]
                )
            )
            for value in SHARPNESSES
        ]
        best = int(np.argmin(curve))
        return {"sharpness": float(SHARPNESSES[best]), "error": curve[best], "curve": curve}


def run(
    *,
    seed: int = 0,
    sizes: Sequence[int] = (50, 500, 5000),
    epsilons: Sequence[float] = (0.1, FIGURE_EPSILON, 10.0),
    draws: int = 5,
    dimensions: Sequence[int] = (2, 16, 64),
) -> Document:
    """Measure the distance of every mechanism's weights to the true ones over n and epsilon, and
    `mean`'s sharpness.

    Errors are means over `draws` of the noise. Sharpness is calibrated in each of `dimensions`; 2
    is drawn.
    """
    middle = sizes[len(sizes) // 2]
    rows = []
    references = {}
    for case, (shape, spread) in CASES.items():
        for size in sizes if case == MAIN else [middle]:
            toy = build(size, seed=seed, shape=shape, spread=spread)
            found = measure(toy, CHANGES, seed=seed, epsilons=epsilons, draws=draws)
            rows += [{"case": case, "examples": size} | row for row in found]
        references[case] = toy.equal_error()
    numbers = {
        "seed": seed,
        "radius": RADIUS,
        "spread_of_negatives": SPREAD,
        "delta": Certainty().delta,
        "draws": draws,
        "error_of_equal_weights": references,
        "errors": rows,
        "calibration_without_noise": [
            calibrate(dimension=dimension, spread=spread, seed=seed)
            for dimension in dimensions
            for spread in (1.0, 1.5, 3.0)
        ],
        "calibration_with_noise": calibrate_noisy(
            seed=seed, sizes=sizes, epsilons=epsilons, draws=draws
        ),
    }
    caption = (
        f"Mean error of the weights over ε, {middle} examples per client (left), and of mean over "
        "its sharpness without noise (right); dotted: equal weights, and the default."
    )
    figures = {
        "toy-gaussians": draw_weights(build(middle, seed=seed), seed=seed),
        "toy-gaussians-errors": Drawing(
            draw_errors(numbers, size=middle), caption, error_table(numbers, size=middle)
        ),
    }
    return Document(
        "three Gaussians, certainty and distribution weights", numbers, describe(numbers), figures
    )


def build(
    size: int, *, seed: int, shape: str = "round", dimension: int = 2, spread: float = SPREAD
) -> Gaussians:
    """Draw three clients of `size` examples, the negatives N(0, spread^2 I), and points of the
    clients' mixture.

    `round` gives every client the identity as covariance; `slanted` gives each an ellipse of its
    own.
    """
    angles = np.radians([90.0, 210.0, 330.0])
    means = np.zeros((3, dimension))
    means[:, 0], means[:, 1] = RADIUS * np.cos(angles), RADIUS * np.sin(angles)
    covariances = np.tile(np.eye(dimension), (3, 1, 1))
    if shape == "slanted":
        for index, angle in enumerate(np.radians([0.0, 60.0, 100.0])):
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            covariances[index, :2, :2] = turn @ np.diag([1.7, 0.3]) @ turn.T

    def draw(generator: np.random.Generator, client: int, count: int) -> Tensor:
        return torch.from_numpy(
            generator.multivariate_normal(means[client], covariances[client], size=count)
        )

    clients = [
        draw(seeding.generator(seed, "toy gaussians", client=client), client, size)
        for client in range(3)
    ]
    public = seeding.generator(seed, "toy gaussians", part="negatives").normal(
        0, spread, (NUM_NEGATIVES, dimension)
    )
    judge = seeding.generator(seed, "toy gaussians", part="points")
    points = torch.cat([draw(judge, client, NUM_POINTS // 3) for client in range(3)])
    return Gaussians(clients, torch.from_numpy(public), means, covariances, points)


def measure(
    toy: Gaussians,
    changes: Sequence[Mapping[str, float]],
    *,
    seed: int,
    epsilons: Sequence[float],
    draws: int,
) -> list[dict[str, Any]]:
    """Return the error of every mechanism, setting and epsilon."""
    return toy.measure(
        changes, toy.points, judge=toy.error, seed=seed, epsilons=epsilons, draws=draws
    )


def unit_scores(toy: Gaussians, *, clipped: bool) -> tuple[Tensor, float]:
    """Return `mean`'s log scores at sharpness 1 without noise, and the share of the clients'
    examples it clips.

    Scores are proportional to sharpness. A clipping norm a thousand times as large turns clipping
    off.
    """
    mechanism = PrivateMean(Certainty(sharpness=1.0, components=toy.points.shape[1]))
    public = mechanism.publish(toy.negatives)
    everyone = torch.cat(list(toy.clients))
    share = float((mechanism.project(everyone, public).norm(dim=1) > 1 - 1e-9).double().mean())
    if not clipped:
        public["bound"] = public["bound"] * 1000
        public["mean"] = mechanism.project(toy.negatives, public).mean(dim=0).float()
    vectors = torch.stack([mechanism.project(client, public).mean(dim=0) for client in toy.clients])
    projected = mechanism.project(toy.points, public)
    return mechanism.log_scores(vectors, torch.zeros(3).to(vectors), public, projected), share


def calibrate(*, dimension: int, spread: float, seed: int) -> dict[str, Any]:
    """Return the sharpness at which `mean` is closest to the true weights, with and without
    clipping."""
    toy = build(5000, seed=seed, dimension=dimension, spread=spread)
    found: dict[str, Any] = {"dimension": dimension, "spread": spread, "predicted": spread**2}
    for name, clipped in (("unclipped", False), ("clipped", True)):
        logs, found["clipped_share"] = unit_scores(toy, clipped=clipped)
        at_predicted = toy.error(torch.softmax(spread**2 * logs, dim=0))
        found[name] = toy.best_sharpness([logs]) | {"error_at_predicted": at_predicted}
    return found


def calibrate_noisy(
    *, seed: int, sizes: Sequence[int], epsilons: Sequence[float], draws: int
) -> list[dict[str, Any]]:
    """Return the best sharpness of `mean` for each number of examples and epsilon, and without
    noise."""
    rows = []
    for size in sizes:
        toy = build(size, seed=seed)
        for epsilon in (*epsilons, math.inf):
            quiet = math.isinf(epsilon)
            section = Certainty(mechanism="mean", sharpness=1.0, epsilon=1.0 if quiet else epsilon)
            noises = (
                [without_noise]
                if quiet
                else [seeded_noise(seed, draw=draw) for draw in range(2 * draws)]
            )
            found = toy.best_sharpness(
                [toy.log_scores(section, toy.points, noise=noise) for noise in noises]
            )
            del found["curve"]
            rows.append({"examples": size, "epsilon": "inf" if quiet else epsilon} | found)
    return rows


def describe(numbers: Mapping[str, Any]) -> list[str | Table]:
    """Return text and tables."""

    def best(row: Mapping[str, Any]) -> str:
        return f"{row['sharpness']:.2g} ({row['error']:.3f})"

    headers = {"setting": "weights from", "promise": "(ε, δ)", "examples": "n"}
    tables = [
        epsilon_table(
            [row for row in numbers["errors"] if row["case"] == case],
            headers,
            text=lambda row: f"{row['mean']:.3f}",
            caption=f"{case[0].upper()}{case[1:]}; equal weights have an error of {reference:.3f}",
        )
        for case, reference in numbers["error_of_equal_weights"].items()
    ]
    calibration = Table(
        [
            "dimensions",
            "τ / σ",
            "clipped",
            "τ² / σ²",
            "best unclipped",
            "best clipped",
            "clipped, at τ² / σ²",
        ],
        [
            [
                row["dimension"],
                f"{row['spread']:g}",
                f"{100 * row['clipped_share']:.0f} %",
                f"{row['predicted']:g}",
                best(row["unclipped"]),
                best(row["clipped"]),
                f"{row['clipped']['error_at_predicted']:.3f}",
            ]
            for row in numbers["calibration_without_noise"]
        ],
        caption="The calibrated sharpness of `mean` without noise, n = 5000 (error in brackets)",
    )
    title = "The best sharpness of `mean` under noise, round clients, τ / σ = 3"
    return [
        "Mean absolute error between s_i / Σ s_j and D_i / Σ D_j over clients and points of their "
        f"mixture; δ = {numbers['delta']:g}, means over {numbers['draws']} draws of noise. "
        f"Sharpness {SPREAD**2:g} is the variance of the negatives over that of a client where τ "
        "= 3 σ.",
        *tables,
        calibration,
        epsilon_table(
            numbers["calibration_with_noise"], {"examples": "n"}, text=best, caption=title
        ),
    ]


def _drawn_errors(numbers: Mapping[str, Any], size: int) -> list[Mapping[str, Any]]:
    return [row for row in numbers["errors"] if (row["case"], row["examples"]) == (MAIN, size)]


def error_table(numbers: Mapping[str, Any], *, size: int) -> Table:
    """Return the numbers of `draw_errors`: over epsilon, then over the sharpness."""
    header = ("weights from", "epsilon", "spread of public data", "clipped", "sharpness", "error")
    listed = _drawn_errors(numbers, size)
    rows: list[list[object]] = [
        [row["setting"], row["epsilon"], SPREAD, "", "", row["mean"]] for row in listed
    ]
    for row in numbers["calibration_without_noise"]:
        for key in ("unclipped", "clipped") if row["dimension"] == 2 else ():
            curve = zip(SHARPNESSES.tolist(), row[key]["curve"], strict=True)
            rows += [
                ["mean", "inf", row["spread"], key == "clipped", round(x, 6), round(y, 6)]
                for x, y in curve
            ]
    return Table(header, rows)


@matplotlib.rc_context(STYLE)
def draw_weights(toy: Gaussians, *, seed: int) -> Drawing:
    """Draw the data, the true weights, and every mechanism's: a row per client, a column per
    mechanism.

    Private mechanisms are drawn with noise; contours show where the data is.
    """
    reach, side = 5.0, 80
    grid = square_grid((-reach, -reach), (reach, reach), side)
    line = grid[:side, 0]
    density = np.exp(-0.5 * ((grid.numpy()[None] - toy.means[:, None]) ** 2).sum(axis=2)).sum(
        axis=0
    )
    columns = [("true weights\n\n", toy.true_weights(grid))]
    for setting, section, noise, distance in _defaults_and_best(toy, seed=seed):
        name, _, change = setting.partition(", ")
        kept = promise(section)
        price = {"no noise": kept, "proved": f"ε = {FIGURE_EPSILON:g}"}.get(
            kept, f"ε = {FIGURE_EPSILON:g}, {kept}"
        )
        title = f"{name}\n{change or 'defaults'}\n{price}: {distance:.2f}"
        columns.append((title, torch.softmax(toy.log_scores(section, grid, noise=noise), dim=0)))
    figure = new_figure((len(columns) + 1) * 100, 3 * 92 + 76)
    panels = figure.subplots(3, len(columns) + 1, squeeze=False, sharex=True, sharey=True)
    for client, (first, *others) in enumerate(panels):
        first.scatter(*toy.negatives.numpy()[:300].T, s=2, color="#999999", linewidth=0)
        first.scatter(*toy.clients[client].numpy()[:200].T, s=4, color=COLOURS[1], linewidth=0)
        first.set_ylabel(f"client {client + 1}")
        for axes, (title, weights) in zip(others, columns, strict=True):
            picture = weights[client].view(side, side).numpy()
            extent = (-reach, reach, -reach, reach)
            axes.imshow(
                picture, cmap=FADE, vmin=0, vmax=1, origin="lower", extent=extent, gid=SMOOTH
            )
            axes.contour(
                line,
                line,
                density.reshape(side, side),
                levels=[0.1],
                colors="#555555",
                linewidths=0.8,
            )
            axes.set_title(title if client == 0 else "", fontsize=8.5)
    panels[0, 0].set_title("data (200)\nand public data\n", fontsize=8.5)
    for axes in panels.flat:
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
        axes.spines[:].set_alpha(0.5)
    some = [up * side + right for up in range(0, side, EVERY) for right in range(0, side, EVERY)]
    numbers = [
        [
            client + 1,
            *(round(place, 3) for place in grid[index].tolist()),
            *(round(float(weights[client, index]), 4) for _, weights in columns),
        ]
        for client in range(3)
        for index in some
    ]
    caption = (
        "The data of each client, its true weight at every point, and the weight that each "
        "mechanism gives it, from 0 (white) to 1; in the titles the mean error. One draw of noise. "
        f"Numbers are given for every {EVERY}th point across and up."
    )
    headers = ("client", "x", "y", *(" ".join(title.split()) for title, _ in columns))
    return Drawing(figure, caption, Table(headers, numbers))


def _defaults_and_best(
    toy: Gaussians, *, seed: int
) -> list[tuple[str, Certainty, Callable[[int], Noise], float]]:
    """Return each mechanism with its defaults and with its best settings, with one draw of
    noise, and its error."""
    found: dict[str, list[tuple[str, Certainty, Callable[[int], Noise], float]]] = {}
    for setting, variant in toy.variants(CHANGES, toy.points):
        noise = without_noise if promise(variant) == "no noise" else seeded_noise(seed, draw=0)
        section = variant.model_copy(update={"epsilon": FIGURE_EPSILON})
        distance = toy.error(torch.softmax(toy.log_scores(section, toy.points, noise=noise), dim=0))
        found.setdefault(section.mechanism, []).append((setting, section, noise, distance))
    chosen = []
    for entries in found.values():
        best = min(entries, key=lambda entry: entry[3])
        chosen += [entry for entry in entries if entry is entries[0] or entry is best]
    return chosen


@matplotlib.rc_context(STYLE)
def draw_errors(numbers: Mapping[str, Any], *, size: int) -> Figure:
    """Draw the error over epsilon for every mechanism, and the error of `mean` over its
    sharpness."""
    figure = new_figure(760, 300)
    left, right = figure.subplots(1, 2, sharey=True)
    listed = _drawn_errors(numbers, size)
    epsilons = sorted({float(row["epsilon"]) for row in listed})
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in listed))
    seen: list[str] = []
    for setting in dict.fromkeys(row["setting"] for row in listed if row["promise"] != "no noise"):
        rows = sorted(
            (row for row in listed if row["setting"] == setting),
            key=lambda row: float(row["epsilon"]),
        )
        mechanism = rows[0]["mechanism"]
        look = mechanisms.index(mechanism)
        left.plot(
            [epsilons.index(float(row["epsilon"])) for row in rows],
            [row["mean"] for row in rows],
            color=COLOURS[look],
            marker=MARKERS[look],
            markersize=4.5,
            linestyle=DASHES[seen.count(mechanism) % len(DASHES)],
            linewidth=1.6,
            label=setting + ("" if rows[0]["promise"] == "proved" else " (ε claimed)"),
        )
        seen.append(mechanism)
    for index, row in enumerate(
        row for row in numbers["calibration_without_noise"] if row["dimension"] == 2
    ):
        for key, dash, suffix in (
            ("unclipped", DASHES[1], ", not clipped"),
            ("clipped", DASHES[0], ""),
        ):
            label = f"τ/σ = {row['spread']:g}{suffix}"
            right.plot(
                SHARPNESSES, row[key]["curve"], color=COLOURS[index], ls=dash, lw=1.6, label=label
            )
        right.plot(
            [row["predicted"]], [0], marker="|", markersize=14, color=COLOURS[index], clip_on=False
        )
    equal, default = numbers["error_of_equal_weights"][MAIN], Certainty().sharpness
    for axes in (left, right):
        axes.axhline(equal, color=GREY, linewidth=1, linestyle=":")
        tidy(axes)
        axes.legend(frameon=False, fontsize=8.5, loc="best", handlelength=3.2, handleheight=0.8)
    note: Any = {"textcoords": "offset points", "fontsize": 9}
    left.annotate("equal weights", (len(epsilons) - 1, equal), (0, 3), ha="right", **note)
    left.set_xticks(
        range(len(epsilons)), [epsilon_text(epsilon).removeprefix("ε = ") for epsilon in epsilons]
    )
    left.set_xlabel(f"ε, {size} examples per client")
    left.set_ylabel("mean error of the weights")
    left.set_ylim(bottom=0)
    right.axvline(default, color=GREY, linewidth=1, linestyle=":")
    right.annotate("default", (default, 0.45), (3, 0), **note)
    right.set_xscale("log")
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.set_xlabel("sharpness of mean, no noise (ticks: τ²/σ²)")
    return figure
