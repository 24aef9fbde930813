"""Do scores approximate the distribution weights of domain adaptation? (the paper's appendix on its motivation)

Three clients hold Gaussian data D_i; Mansour et al. (2008) weight them by D_i(x) / sum_j D_j(x). The paper claims that
s_i(x) / sum_j s_j(x) comes near on the support of the data. Here the distance is measured, for every mechanism.

For clients of covariance sigma^2 I and negatives of covariance tau^2 I, `mean` has log s_i(x) = sharpness / tau^2
(<mu_i, x> - |mu_i|^2 / 2) + what all clients share, and log D_i(x) has 1 / sigma^2 in that place: the calibrated
sharpness is tau^2 / sigma^2, the variance of the negatives over that of a client, wherever clipping does not bite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.paper.page import Drawing
from fedaux.paper.scoring import drawn, homogeneous, log_scores, promise, silent, variants
from fedaux.paper.writing import COLOURS, MARKERS, Outcome, epsilon_name, markdown_table, write
from fedaux.privacy.mean import PrivateMean
from fedaux.privacy.mechanisms import Noise
from fedaux.report.figures import FADE
from fedaux.report.svg import SMOOTH, STYLE

RADIUS = 2.0
"""Distance of the clients' means from the origin, at three angles; each client's variance is 1 (on average)."""
SPREAD = 3.0
"""Standard deviation tau of the public data, around the origin."""
MAIN = "round clients, wide public data (τ = 3 σ)"
CASES = {
    MAIN: ("round", SPREAD),
    "round clients, public data as wide as a client (τ = σ)": ("round", 1.0),
    "slanted clients, wide public data (τ = 3 σ)": ("slanted", SPREAD),
}
"""Shape of the clients and spread of the public data; the first is drawn, and measured for every n."""
NUM_NEGATIVES = 2000
NUM_POINTS = 2000
SHARPNESSES = np.logspace(-2, 2, 81)
FIGURE_EPSILON = 1.0
EVERY = 4
"""Of the points across a drawn plane, which ones the numbers beside the figure have."""


class Toy(NamedTuple):
    """Gaussians N(means[i], covariances[i]), their data, negatives, points to judge on, the points' true weights."""

    means: NDArray[np.float64]
    covariances: NDArray[np.float64]
    clients: list[Tensor]
    negatives: Tensor
    points: Tensor
    truth: Tensor


def run(
    out: Path | str,
    *,
    seed: int = 0,
    sizes: Sequence[int] = (50, 500, 5000),
    epsilons: Sequence[float] = (0.1, FIGURE_EPSILON, 10.0),
    draws: int = 5,
    dimensions: Sequence[int] = (2, 16, 64),
) -> Outcome:
    """Measure the distance of every mechanism's weights to the true ones over n and epsilon, and `mean`'s sharpness.

    ``draws`` is how often the noise of a private mechanism is drawn; errors are means over the draws.
    ``dimensions`` are those in which sharpness is calibrated; 2 is drawn.
    """
    middle = sizes[len(sizes) // 2]
    changes: list[Mapping[str, float]] = [{}, {"sharpness": 1.0}, {"sharpness": SPREAD**2}, {"regularisation": 0.001}]
    rows = []
    references = {}
    for case, (shape, spread) in CASES.items():
        for size in sizes if case == MAIN else [middle]:
            toy = build(size, seed=seed, shape=shape, spread=spread)
            found = measure(toy, changes, seed=seed, epsilons=epsilons, draws=draws)
            rows += [{"case": case, "examples": size} | row for row in found]
        references[case] = equal_error(toy)
    calibration = [
        calibrate(dimension=dimension, spread=spread, seed=seed)
        for dimension in dimensions
        for spread in (1.0, 1.5, 3.0)
    ]
    noisy = calibrate_noisy(seed=seed, sizes=sizes, epsilons=[*epsilons, math.inf], draws=draws)
    numbers = {
        "seed": seed,
        "radius": RADIUS,
        "spread_of_negatives": SPREAD,
        "delta": Certainty().delta,
        "draws": draws,
        "error_of_equal_weights": references,
        "errors": rows,
        "calibration_without_noise": calibration,
        "calibration_with_noise": noisy,
    }
    figures = {
        "toy-gaussians": draw_weights(build(middle, seed=seed), changes, seed=seed),
        "toy-gaussians-errors": Drawing(
            draw_errors(numbers, size=middle),
            f"Mean error of the weights over ε, {middle} examples a client (left), and of mean over its sharpness "
            "without noise (right); dotted: equal weights, and the default.",
            *error_rows(numbers, size=middle),
        ),
    }
    return write(Path(out), "toy-gaussians", numbers=numbers, markdown=describe(numbers, epsilons), figures=figures)


def build(size: int, *, seed: int, shape: str = "round", dimension: int = 2, spread: float = SPREAD) -> Toy:
    """Draw three clients of ``size`` examples, the negatives N(0, spread^2 I), and points of the clients' mixture.

    ``round`` gives every client the identity as covariance; ``slanted`` gives each an ellipse of its own.
    """
    angles = np.radians([90.0, 210.0, 330.0])
    means = np.zeros((3, dimension))
    means[:, 0], means[:, 1] = RADIUS * np.cos(angles), RADIUS * np.sin(angles)
    covariances = np.tile(np.eye(dimension), (3, 1, 1))
    if shape == "slanted":
        for index, angle in enumerate(np.radians([0.0, 60.0, 100.0])):
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            covariances[index, :2, :2] = turn @ np.diag([1.7, 0.3]) @ turn.T
    clients = [
        torch.from_numpy(
            seeding.generator(seed, "toy gaussians", client=index).multivariate_normal(
                means[index], covariances[index], size=size
            )
        )
        for index in range(3)
    ]
    public = seeding.generator(seed, "toy gaussians", part="negatives").normal(0, spread, (NUM_NEGATIVES, dimension))
    judge = seeding.generator(seed, "toy gaussians", part="points")
    points = np.concatenate(
        [judge.multivariate_normal(means[index], covariances[index], size=NUM_POINTS // 3) for index in range(3)]
    )
    truth = true_weights(means, covariances, torch.from_numpy(points))
    return Toy(means, covariances, clients, torch.from_numpy(public), torch.from_numpy(points), truth)


def true_weights(means: NDArray[np.float64], covariances: NDArray[np.float64], points: Tensor) -> Tensor:
    """Return D_i(x) / sum_j D_j(x) [3, N]."""
    logs = []
    for mean, covariance in zip(means, covariances, strict=True):
        offset = points.numpy() - mean
        squares = (offset @ np.linalg.inv(covariance) * offset).sum(axis=1)
        logs.append(-0.5 * (squares + np.linalg.slogdet(covariance)[1]))
    return torch.softmax(torch.from_numpy(np.stack(logs)), dim=0)


def scores_of(section: Certainty, toy: Toy, points: Tensor, *, noise: Callable[[int], Noise]) -> Tensor:
    """Return log s_i(x) [3, N] of a mechanism on h0(x) = (1, x)."""
    return log_scores(
        section,
        negatives=homogeneous(toy.negatives),
        clients=[homogeneous(client) for client in toy.clients],
        points=homogeneous(points),
        noise=noise,
    )


def error(toy: Toy, logs: Tensor) -> float:
    """Return the mean of |s_i / sum_j s_j - D_i / sum_j D_j| over clients and points of the mixture."""
    return float((torch.softmax(logs, dim=0) - toy.truth).abs().mean())


def equal_error(toy: Toy) -> float:
    """Return the error of equal weights, the plain mean: a mechanism above it does harm."""
    return error(toy, torch.zeros(3, len(toy.points), dtype=torch.float64))


def measure(
    toy: Toy, changes: Sequence[Mapping[str, float]], *, seed: int, epsilons: Sequence[float], draws: int
) -> list[dict[str, Any]]:
    """Return the error of every mechanism, setting and epsilon."""

    def logs(section: Certainty, noise: Callable[[int], Noise] = silent) -> Tensor:
        return scores_of(section, toy, toy.points, noise=noise)

    rows = []
    for setting, section in variants(changes, weigh=logs):
        kept = promise(section)
        found = {math.inf: [error(toy, logs(section))]}
        for epsilon in () if kept == "no noise" else epsilons:
            noisy = section.model_copy(update={"epsilon": epsilon})
            found[epsilon] = [error(toy, logs(noisy, drawn(seed, draw=draw))) for draw in range(draws)]
        for epsilon, values in found.items():
            rows.append(
                {
                    "mechanism": section.mechanism,
                    "setting": setting,
                    "promise": kept,
                    "epsilon": "inf" if math.isinf(epsilon) else epsilon,
                    "error": float(np.mean(values)),
                }
            )
    return rows


def unit_scores(toy: Toy, *, clipped: bool) -> tuple[Tensor, float]:
    """Return `mean`'s log scores at sharpness 1 without noise, and the share of the clients' examples it clips.

    They are proportional to sharpness. Clipping at a thousandfold norm leaves the formula and takes the clipping away.
    """
    mechanism = PrivateMean(Certainty(sharpness=1.0, components=toy.points.shape[1]))
    public = mechanism.publish(toy.negatives)
    everyone = torch.cat(toy.clients)
    share = float((mechanism.project(everyone, public).norm(dim=1) > 1 - 1e-9).double().mean())
    if not clipped:
        public["bound"] = public["bound"] * 1000
        public["mean"] = mechanism.project(toy.negatives, public).mean(dim=0).float()
    vectors = torch.stack([mechanism.project(client, public).mean(dim=0) for client in toy.clients])
    projected = mechanism.project(toy.points, public)
    return mechanism.log_scores(vectors, torch.zeros(3).to(vectors), public, projected), share


def calibrate(*, dimension: int, spread: float, seed: int, size: int = 5000) -> dict[str, Any]:
    """Return the sharpness at which `mean` comes nearest to the true weights, with and without clipping."""
    toy = build(size, seed=seed, dimension=dimension, spread=spread)
    found: dict[str, Any] = {"dimension": dimension, "spread": spread, "predicted": spread**2}
    for name, clipped in (("unclipped", False), ("clipped", True)):
        logs, share = unit_scores(toy, clipped=clipped)
        curve = [error(toy, sharpness * logs) for sharpness in SHARPNESSES]
        best = int(np.argmin(curve))
        found[name] = {"sharpness": float(SHARPNESSES[best]), "error": curve[best], "curve": curve}
        found["clipped_share"] = share
        found[name]["error_at_predicted"] = error(toy, spread**2 * logs)
    return found


def calibrate_noisy(*, seed: int, sizes: Sequence[int], epsilons: Sequence[float], draws: int) -> list[dict[str, Any]]:
    """Return the best sharpness of `mean` as it is, for each number of examples and epsilon."""
    rows = []
    for size in sizes:
        toy = build(size, seed=seed)
        for epsilon in epsilons:
            section = Certainty(mechanism="mean", sharpness=1.0, epsilon=1.0 if math.isinf(epsilon) else epsilon)
            noises = [silent] if math.isinf(epsilon) else [drawn(seed, draw=draw) for draw in range(2 * draws)]
            logs = [scores_of(section, toy, toy.points, noise=noise) for noise in noises]
            curve = [float(np.mean([error(toy, value * log) for log in logs])) for value in SHARPNESSES]
            best = int(np.argmin(curve))
            rows.append(
                {
                    "examples": size,
                    "epsilon": "inf" if math.isinf(epsilon) else epsilon,
                    "sharpness": float(SHARPNESSES[best]),
                    "error": curve[best],
                }
            )
    return rows


def describe(numbers: Mapping[str, Any], epsilons: Sequence[float]) -> str:
    """Return the tables."""
    columns = [*epsilons, math.inf]
    text = (
        "# Three Gaussians: certainty weights and distribution weights\n\n"
        "Mean absolute error between s_i / Σ s_j and D_i / Σ D_j over clients and points of their mixture; "
        f"δ = {numbers['delta']:g}, means over {numbers['draws']} draws of noise. Sharpness {SPREAD**2:g} is the "
        "variance of the negatives over that of a client where τ = 3 σ.\n"
    )
    for case, reference in numbers["error_of_equal_weights"].items():
        rows = []
        listed = [row for row in numbers["errors"] if row["case"] == case]
        for setting, promised, size in dict.fromkeys((r["setting"], r["promise"], r["examples"]) for r in listed):
            cells = {
                float(row["epsilon"]): f"{row['error']:.3f}"
                for row in listed
                if (row["setting"], row["examples"]) == (setting, size)
            }
            rows.append([setting, promised, size, *(cells.get(epsilon, "–") for epsilon in columns)])
        header = ["weights from", "(ε, δ)", "n", *(f"ε = {epsilon_name(epsilon)}" for epsilon in columns)]
        text += f"\n## {case[0].upper()}{case[1:]}; equal weights have an error of {reference:.3f}\n\n"
        text += markdown_table(header, rows)
    rows = [
        [
            row["dimension"],
            f"{row['spread']:g}",
            f"{100 * row['clipped_share']:.0f} %",
            f"{row['predicted']:g}",
            *(f"{row[key]['sharpness']:.2g} ({row[key]['error']:.3f})" for key in ("unclipped", "clipped")),
            f"{row['clipped']['error_at_predicted']:.3f}",
        ]
        for row in numbers["calibration_without_noise"]
    ]
    text += "\n## The sharpness at which `mean` is calibrated, without noise, n = 5000 (error in brackets)\n\n"
    header = ["dimensions", "τ / σ", "clipped", "τ² / σ²", "best unclipped", "best clipped", "clipped, at τ² / σ²"]
    text += markdown_table(header, rows)
    listed = numbers["calibration_with_noise"]
    rows = [
        [
            size,
            *(
                f"{row['sharpness']:.2g} ({row['error']:.3f})"
                for epsilon in columns
                for row in listed
                if row["examples"] == size and float(row["epsilon"]) == epsilon
            ),
        ]
        for size in dict.fromkeys(row["examples"] for row in listed)
    ]
    text += "\n## The best sharpness of `mean` under noise, round clients, τ / σ = 3\n\n"
    return text + markdown_table(["n", *(f"ε = {epsilon_name(epsilon)}" for epsilon in columns)], rows)


def error_rows(numbers: Mapping[str, Any], *, size: int) -> tuple[Sequence[str], list[list[object]]]:
    """Return head and lines of what `draw_errors` shows: over epsilon, then over the sharpness."""
    header = ("weights from", "epsilon", "spread of public data", "clipped", "sharpness", "error")
    listed = [row for row in numbers["errors"] if (row["case"], row["examples"]) == (MAIN, size)]
    rows: list[list[object]] = [[row["setting"], row["epsilon"], SPREAD, "", "", row["error"]] for row in listed]
    for row in numbers["calibration_without_noise"]:
        for key in ("unclipped", "clipped") if row["dimension"] == 2 else ():
            curve = zip(SHARPNESSES.tolist(), row[key]["curve"], strict=True)
            rows += [["mean", "inf", row["spread"], key == "clipped", round(x, 6), round(y, 6)] for x, y in curve]
    return header, rows


@matplotlib.rc_context(STYLE)
def draw_weights(toy: Toy, changes: Sequence[Mapping[str, float]], *, seed: int) -> Drawing:
    """Draw the data, the true weights, and those of every mechanism: a row a client, a column a mechanism.

    Private mechanisms are drawn with noise; contours show where the data is.
    """
    reach, side = 5.0, 80
    line = torch.linspace(-reach, reach, side, dtype=torch.float64)
    across, up = torch.meshgrid(line, line, indexing="xy")
    grid = torch.stack([across.flatten(), up.flatten()], dim=1)
    density = np.exp(-0.5 * ((grid.numpy()[None] - toy.means[:, None]) ** 2).sum(axis=2)).sum(axis=0)
    columns = [("true weights\n\n", true_weights(toy.means, toy.covariances, grid))]
    for setting, section, noise in _defaults_and_best(toy, changes, seed=seed):
        distance = error(toy, scores_of(section, toy, toy.points, noise=noise))
        name, _, change = setting.partition(", ")
        kept = promise(section)
        price = {"no noise": kept, "proved": f"ε = {FIGURE_EPSILON:g}"}.get(kept, f"ε = {FIGURE_EPSILON:g}, {kept}")
        title = f"{name}\n{change or 'defaults'}\n{price}: {distance:.2f}"
        columns.append((title, torch.softmax(scores_of(section, toy, grid, noise=noise), dim=0)))
    figure = Figure(figsize=((len(columns) + 1) * 100 / 72, (3 * 92 + 76) / 72))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(3, len(columns) + 1, squeeze=False, sharex=True, sharey=True)
    extent = (-reach, reach, -reach, reach)
    for client in range(3):
        axes = panels[client, 0]
        axes.scatter(*toy.negatives.numpy()[:300].T, s=2, color="#999999", linewidth=0)
        axes.scatter(*toy.clients[client].numpy()[:200].T, s=4, color=COLOURS[1], linewidth=0)
        axes.set_ylabel(f"client {client + 1}")
        for axes, (title, weights) in zip(panels[client, 1:], columns, strict=True):
            picture = weights[client].view(side, side).numpy()
            axes.imshow(picture, cmap=FADE, vmin=0, vmax=1, origin="lower", extent=extent, gid=SMOOTH)
            axes.contour(line, line, density.reshape(side, side), levels=[0.1], colors="#555555", linewidths=0.8)
            if client == 0:
                axes.set_title(title, fontsize=8.5)
    panels[0, 0].set_title("data (200)\nand public data\n", fontsize=8.5)
    for axes in panels.flat:
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
        axes.spines[:].set_alpha(0.5)
    some = [up * side + right for up in range(0, side, EVERY) for right in range(0, side, EVERY)]
    numbers = [
        [client + 1, *(round(place, 3) for place in grid[index].tolist()), *(round(w, 4) for w in weights)]
        for client in range(3)
        for index, weights in zip(
            some, torch.stack([column[client, some] for _, column in columns], dim=1).tolist(), strict=True
        )
    ]
    caption = (
        "The data of each client, its true weight at every point, and the weight that each mechanism gives it, from 0 "
        f"(white) to 1; in the titles the mean error. One draw of noise. The numbers are those of every {EVERY}th "
        "point across and up."
    )
    header = ("client", "x", "y", *(" ".join(title.split()) for title, _ in columns))
    return Drawing(figure, caption, header, numbers)


def _defaults_and_best(
    toy: Toy, changes: Sequence[Mapping[str, float]], *, seed: int
) -> list[tuple[str, Certainty, Callable[[int], Noise]]]:
    """Return each mechanism as it comes, and as it serves best here, with noise where it has any."""
    found: dict[str, list[tuple[float, str, Certainty, Callable[[int], Noise]]]] = {}
    for setting, section in variants(changes, weigh=lambda s: scores_of(s, toy, toy.points, noise=silent)):
        noise = silent if promise(section) == "no noise" else drawn(seed, draw=0)
        section = section.model_copy(update={"epsilon": FIGURE_EPSILON})
        distance = error(toy, scores_of(section, toy, toy.points, noise=noise))
        found.setdefault(section.mechanism, []).append((distance, setting, section, noise))
    chosen = []
    for entries in found.values():
        best = min(entries, key=lambda entry: entry[0])
        chosen += [entry[1:] for entry in entries if entry is entries[0] or entry is best]
    return chosen


@matplotlib.rc_context(STYLE)
def draw_errors(numbers: Mapping[str, Any], *, size: int) -> Figure:
    """Draw the error over epsilon for every mechanism, and the error of `mean` over its sharpness."""
    figure = Figure(figsize=(760 / 72, 300 / 72))
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    listed = [row for row in numbers["errors"] if (row["case"], row["examples"]) == (MAIN, size)]
    finite = sorted({float(row["epsilon"]) for row in listed if row["epsilon"] != "inf"})
    places = {epsilon: index for index, epsilon in enumerate([*finite, math.inf])}
    names = list(dict.fromkeys(row["mechanism"] for row in listed))
    dashes = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
    seen: dict[str, int] = {}
    for setting in dict.fromkeys(row["setting"] for row in listed if row["promise"] != "no noise"):
        rows = sorted((row for row in listed if row["setting"] == setting), key=lambda row: float(row["epsilon"]))
        mechanism = rows[0]["mechanism"]
        turn = seen[mechanism] = seen.get(mechanism, -1) + 1
        left.plot(
            [places[float(row["epsilon"])] for row in rows],
            [row["error"] for row in rows],
            color=COLOURS[names.index(mechanism)],
            marker=MARKERS[names.index(mechanism)],
            markersize=4.5,
            linestyle=dashes[turn % len(dashes)],
            linewidth=1.6,
            label=setting + ("" if rows[0]["promise"] == "proved" else " (ε claimed)"),
        )
    left.set_xticks(list(places.values()), [epsilon_name(epsilon) for epsilon in places])
    left.set_xlabel(f"ε, {size} examples a client")
    left.set_ylabel("mean error of the weights")
    for axes in (left, right):
        axes.axhline(numbers["error_of_equal_weights"][MAIN], color="#777777", linewidth=1, linestyle=":")
        axes.grid(axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    left.annotate(
        "equal weights",
        (places[math.inf], numbers["error_of_equal_weights"][MAIN]),
        (0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    planar = [row for row in numbers["calibration_without_noise"] if row["dimension"] == 2]
    for index, row in enumerate(planar):
        for key, style in (("unclipped", dashes[1]), ("clipped", dashes[0])):
            label = f"τ/σ = {row['spread']:g}" + (", not clipped" if key == "unclipped" else "")
            right.plot(
                SHARPNESSES, row[key]["curve"], color=COLOURS[index], linestyle=style, linewidth=1.6, label=label
            )
        right.plot([row["predicted"]], [0], marker="|", markersize=14, color=COLOURS[index], clip_on=False)
    default = Certainty().sharpness
    right.axvline(default, color="#777777", linewidth=1, linestyle=":")
    right.annotate("default", (default, 0.45), (3, 0), textcoords="offset points", fontsize=9)
    right.set_xscale("log")
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.set_xlabel("sharpness of mean, no noise (ticks: τ²/σ²)")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8.5, loc="best", handlelength=3.2, handleheight=0.8)
    left.set_ylim(bottom=0)
    return figure
