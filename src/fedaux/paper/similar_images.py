"""What do certainty scores show of private data? (the paper's Empirical Privacy Evaluation)

For a few clients, the public images that they score highest, beside the nearest neighbours in their own data by
cosine similarity of h0's features, once from releases without noise and once as released. The figures show private
images, so they are for simulations only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Experiment
from fedaux.core.task import build_models
from fedaux.data import load_both
from fedaux.fast.inference import Predictor
from fedaux.paper import places
from fedaux.paper.page import Drawing
from fedaux.paper.scoring import Silence
from fedaux.paper.study import quick_base
from fedaux.paper.writing import TITLES, Outcome, Version, epsilon_name, markdown_table, write
from fedaux.privacy.mechanisms import MECHANISMS, SimulatedNoise
from fedaux.report.figures import shrink_images
from fedaux.report.svg import SMOOTH, STYLE
from fedaux.running import preflight as checks
from fedaux.running.run import Silent, Work, choose_device, split_for
from fedaux.running.run_directory import RunDirectory

WARNING = "Shows private images: for simulations only."


@dataclass(frozen=True)
class Shown:
    """One client: the public images it scores highest, and their neighbours in its data."""

    client: int
    main_class: str
    top: Tensor
    """Indices of public images in the distill set [M], highest score first."""
    neighbours: Tensor
    """Indices of the client's images in the training data [M, k], nearest first."""
    similarities: Tensor
    """Cosine similarity of each neighbour [M, k]."""
    similarity_of_all: float
    """Mean similarity of all public images to their nearest neighbour, to compare with."""


def run(
    out: Path | str,
    *,
    base: Experiment | None = None,
    num_clients: int = 4,
    num_images: int = 5,
    num_neighbours: int = 4,
    version: Version = "own",
    notes: Sequence[str] = (),
) -> Outcome:
    """Draw the highest-scored public images beside their nearest private neighbours, with and without noise.

    Without ``base``, the embedded demo; the first seed counts. Clients are the first that hold ``num_neighbours``.
    """
    experiment, version = (quick_base("similar-images"), "quick") if base is None else (base, version)
    checks.check(experiment)
    if experiment.text is not None:
        raise ValueError("similar-images: draws images, and the recipe's data are texts")
    out = Path(out)
    seed = experiment.seeds[0]
    device = choose_device(experiment.engine.device)
    data, auxiliary = load_both(experiment)
    data, auxiliary = data.to(device), auxiliary.to(device)
    work = Work(experiment, RunDirectory(out, experiment), data, auxiliary, Silent())
    task = work.task("fedaux", seed)
    parts = split_for(experiment, data, seed)
    chosen = [client for client, part in enumerate(parts) if len(part) >= num_neighbours][:num_clients]
    if not chosen:
        raise ValueError(f"split.num_clients = {len(parts)}: no client holds {num_neighbours} examples to show")
    models = build_models(task)
    extractors = {name: work.extractor(task)(name, model) for name, model in models.items()}
    predictors = {name: Predictor(model.features, task.compute) for name, model in models.items()}

    def features_of(prototype: str, images: Tensor) -> Tensor:
        return predictors[prototype](extractors[prototype], images, batch_size=experiment.evaluation.batch_size)

    section = experiment.certainty
    mechanism = MECHANISMS[section.mechanism](section)
    public = {name: mechanism.publish(features_of(name, task.negatives)) for name in models}
    distill = {name: features_of(name, task.distill_images) for name in models}
    features = {
        client: features_of(task.prototype_of[client], data.images[torch.from_numpy(part).to(device)])
        for client, part in enumerate(parts)
        if len(part)
    }
    found: dict[bool, list[Shown]] = {False: [], True: []}
    epsilon = 0.0
    for name in models:
        # As in a run, a client is scored among all that share its prototype: `mean` looks at how they differ.
        members = [client for client in features if task.prototype_of[client] == name]
        projected = mechanism.project(distill[name], public[name])
        for noisy, shown in found.items():
            releases = [
                mechanism.release(
                    features[client],
                    public[name],
                    # The noise is the one that a run of this experiment draws.
                    noise=SimulatedNoise(seeding.generator(seed, "certainty noise", client=client))
                    if noisy
                    else Silence(),
                )
                for client in members
            ]
            if not releases:
                continue
            epsilon = max(epsilon, *(release.epsilon for release in releases))
            vectors = torch.stack([release.vector for release in releases])
            sigmas = torch.tensor([release.sigma if noisy else 0.0 for release in releases]).to(vectors)
            scores = mechanism.log_scores(vectors, sigmas, public[name], projected)
            for client, row in zip(members, scores, strict=True):
                if client not in chosen:
                    continue
                part = torch.from_numpy(parts[client]).to(device)
                top = row.topk(min(num_images, len(row))).indices
                found_at, similarities = nearest(distill[name][top], features[client], count=num_neighbours)
                _, closest = nearest(distill[name], features[client], count=1)
                held = torch.bincount(data.labels[part], minlength=len(data.classes))
                main_class = data.classes[int(held.argmax())]
                shown.append(Shown(client, main_class, top, part[found_at], similarities, float(closest.mean())))
    for shown in found.values():
        shown.sort(key=lambda entry: entry.client)
    numbers = {
        "version": version,
        "data": places.told(experiment),
        "seed": seed,
        "mechanism": section.mechanism,
        "epsilon": "inf" if np.isinf(epsilon) else epsilon,
        "delta": section.delta,
        "warning": WARNING,
        "clients": [_numbers(*pair) for pair in zip(found[False], found[True], strict=True)],
    }
    price = f"ε = {epsilon_name(epsilon)}, δ = {section.delta:g}"
    figures = {
        name: Drawing(
            draw(found[noisy], task.distill_images, data.images, title=title),
            f"Public images that clients score highest, {title}, each beside the client's nearest private images.",
            ("client", "main class", "public image", "rank of neighbour", "private image", "cosine similarity"),
            neighbour_rows(found[noisy]),
        )
        for name, noisy, title in (
            ("similar-images", False, "without noise"),
            ("similar-images-private", True, f"as released at {price}"),
        )
    }
    return write(out, "similar-images", numbers=numbers, markdown=describe(numbers), figures=figures, notes=notes)


def nearest(queries: Tensor, features: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """Return indices and cosine similarities [Q, count] of the features [n, F] nearest to queries [Q, F]."""
    similarities = functional.normalize(queries.double(), dim=1) @ functional.normalize(features.double(), dim=1).T
    values, indices = similarities.topk(count, dim=1)
    return indices, values


def _numbers(quiet: Shown, noisy: Shown) -> dict[str, Any]:
    def side(shown: Shown) -> dict[str, Any]:
        return {
            "top_images": shown.top.tolist(),
            "neighbours": shown.neighbours.tolist(),
            "similarities": [[round(value, 6) for value in row] for row in shown.similarities.tolist()],
            "mean_similarity_to_nearest": float(shown.similarities[:, 0].mean()),
        }

    return {
        "client": quiet.client,
        "main_class": quiet.main_class,
        "without_noise": side(quiet),
        "with_noise": side(noisy),
        "mean_similarity_to_nearest_of_all_public": quiet.similarity_of_all,
        "top_images_in_both": len(set(quiet.top.tolist()) & set(noisy.top.tolist())),
    }


def neighbour_rows(shown: Sequence[Shown]) -> list[list[object]]:
    """Return a line for every pair of a public image and a private one that a figure shows, by their indices."""
    return [
        [entry.client, entry.main_class, public, rank + 1, private, round(similarity, 6)]
        for entry in shown
        for public, near, similarities in zip(
            entry.top.tolist(), entry.neighbours.tolist(), entry.similarities.tolist(), strict=True
        )
        for rank, (private, similarity) in enumerate(zip(near, similarities, strict=True))
    ]


def describe(numbers: Mapping[str, Any]) -> str:
    """Return the table: how near the highest-scored images are to private ones, and how many survive the noise."""
    rows = [
        [
            row["client"],
            row["main_class"],
            *(f"{row[key]['mean_similarity_to_nearest']:.3f}" for key in ("without_noise", "with_noise")),
            f"{row['mean_similarity_to_nearest_of_all_public']:.3f}",
            f"{row['top_images_in_both']} of {len(row['without_noise']['top_images'])}",
        ]
        for row in numbers["clients"]
    ]
    header = ["client", "main class", "top, no noise", "top, with noise", "all public images", "top in both"]
    return (
        f"# similar-images{TITLES[numbers['version']]}: public images scored highest, and private images near them\n\n"
        f"{WARNING}\n\n{numbers['data']} Mechanism "
        f"`{numbers['mechanism']}`, ε = {numbers['epsilon']}, δ = {numbers['delta']:g}, seed {numbers['seed']}. Mean "
        "cosine similarity to the nearest private image of the client, under h0:\n\n" + markdown_table(header, rows)
    )


@matplotlib.rc_context(STYLE)
def draw(shown: Sequence[Shown], public: Tensor, private: Tensor, *, title: str) -> Figure:
    """Draw a block a client: a row a public image, with its neighbours to the right behind a gap."""
    tile, gap = 30.0, 10.0
    rows, columns = shown[0].neighbours.shape if shown else (1, 1)
    width = gap + len(shown) * ((columns + 1) * tile + 2.5 * gap)
    height = 44 + rows * tile + 24
    figure = Figure(figsize=(width / 72, height / 72))
    for index, entry in enumerate(shown):
        left = gap + index * ((columns + 1) * tile + 2.5 * gap)
        for row in range(rows):
            line = [public[entry.top[row]], *private[entry.neighbours[row]]]
            for column, image in enumerate(line):
                x = left + column * tile + (gap if column else 0)
                y = height - 44 - (row + 1) * tile
                axes = figure.add_axes((x / width, y / height, (tile - 2) / width, (tile - 2) / height))
                picture = shrink_images(image.cpu().numpy(), side=64).transpose(1, 2, 0)
                picture = np.broadcast_to(picture, (*picture.shape[:2], 3))
                axes.imshow(picture, interpolation="none", gid=SMOOTH)
                axes.set_axis_off()
        middle = left + tile / 2
        figure.text(middle / width, 1 - 40 / height, "public", ha="center", fontsize=8)
        across = left + tile + gap + columns * tile / 2
        figure.text(across / width, 1 - 40 / height, "nearest private", ha="center", fontsize=8)
        name = f"client {entry.client}, mostly class {entry.main_class}"
        figure.text(left / width, 1 - 26 / height, name, fontsize=9.5)
    figure.text(gap / width, 1 - 11 / height, f"Highest certainty, {title}", fontsize=10.5)
    figure.text(gap / width, 8 / height, WARNING, fontsize=9)
    return figure
