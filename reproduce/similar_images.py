"""What do certainty scores reveal about private data? (the paper's Empirical Privacy Evaluation)

For a few clients, the public images that they score highest, beside the nearest neighbours in their
own data by cosine similarity of h0's features, once from releases without noise and once as
released. The figures show private images, so they are for simulations only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from fedaux import seeding
from fedaux.core.compute import choose_device
from fedaux.core.task import build_models
from fedaux.data import load_both
from fedaux.privacy.mechanisms import MECHANISMS, SimulatedNoise
from fedaux.report.run import Array
from fedaux.report.svg import SMOOTH, STYLE
from fedaux.report.tables import Table
from fedaux.running import preflight as checks
from fedaux.running.run import ExperimentRunner, NullCallback, split_for
from fedaux.running.run_directory import RunDirectory
from reproduce import datasets
from reproduce.document import Context, Document, Drawing, epsilon_text
from reproduce.scoring import NoNoise

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
    """Mean similarity of all public images to their nearest neighbour, for comparison."""

    def numbers(self) -> dict[str, Any]:
        """Return a client's numbers for the JSON file."""
        return {
            "top_images": self.top.tolist(),
            "neighbours": self.neighbours.tolist(),
            "similarities": [
                [round(value, 6) for value in row] for row in self.similarities.tolist()
            ],
            "mean_similarity_to_nearest": float(self.similarities[:, 0].mean()),
        }


def run(
    context: Context, *, num_clients: int = 4, num_images: int = 5, num_neighbours: int = 4
) -> Document:
    """Draw the highest-scored public images beside their nearest private neighbours, with and
    without noise.

    The clients are the first that hold `num_neighbours` examples, with the first seed.
    """
    experiment = context.experiment
    checks.check(experiment)
    if experiment.text is not None:
        raise ValueError("similar-images: draws images, and the recipe's data are texts")
    seed = experiment.seeds[0]
    device = choose_device(experiment.engine.device)
    data, auxiliary = load_both(experiment)
    data, auxiliary = data.to(device), auxiliary.to(device)
    runner = ExperimentRunner(
        experiment, RunDirectory(context.out, experiment), data, auxiliary, NullCallback()
    )
    task = runner.task("fedaux", seed)
    parts = [torch.from_numpy(part).to(device) for part in split_for(experiment, data, seed)]
    chosen = [client for client, part in enumerate(parts) if len(part) >= num_neighbours][
        :num_clients
    ]
    if not chosen:
        raise ValueError(
            f"split.num_clients = {len(parts)}: no client holds {num_neighbours} examples to show"
        )
    section = experiment.certainty
    mechanism = MECHANISMS[section.mechanism](section)
    found: dict[bool, list[Shown]] = {False: [], True: []}
    epsilon = 0.0
    for prototype, model in build_models(task).items():
        extractor, predictor = (
            runner.extractor(task)(prototype, model),
            task.backend.predictor(model.features),
        )
        # As in a run, a client is scored among all that share its prototype: `mean` depends on how
        # they differ.
        members = [
            client
            for client, part in enumerate(parts)
            if len(part) and task.prototype_of[client] == prototype
        ]
        if not members:
            continue
        negatives, distill, *features = (
            predictor(extractor, images, batch_size=experiment.evaluation.batch_size)
            for images in (
                task.negatives,
                task.distill_set,
                *(data.images[parts[client]] for client in members),
            )
        )
        public = mechanism.publish(negatives)
        projected = mechanism.project(distill, public)
        for noisy, shown in found.items():
            releases = [
                mechanism.release(
                    own,
                    public,
                    # The same noise as in a run of this experiment.
                    noise=SimulatedNoise(seeding.generator(seed, "certainty noise", client=client))
                    if noisy
                    else NoNoise(),
                )
                for client, own in zip(members, features, strict=True)
            ]
            epsilon = max(epsilon, *(release.epsilon for release in releases))
            vectors = torch.stack([release.vector for release in releases])
            sigmas = torch.tensor([release.sigma if noisy else 0.0 for release in releases]).to(
                vectors
            )
            scores = mechanism.log_scores(vectors, sigmas, public, projected)
            for client, own, row in zip(members, features, scores, strict=True):
                if client in chosen:
                    top = row.topk(min(num_images, len(row))).indices
                    near, similarities = nearest(distill[top], own, count=num_neighbours)
                    _, closest = nearest(distill, own, count=1)
                    held = torch.bincount(data.labels[parts[client]], minlength=len(data.classes))
                    main_class = data.classes[int(held.argmax())]
                    neighbours = parts[client][near]
                    shown.append(
                        Shown(
                            client, main_class, top, neighbours, similarities, float(closest.mean())
                        )
                    )
    for shown in found.values():
        shown.sort(key=lambda entry: entry.client)
    numbers: dict[str, Any] = {
        "seed": seed,
        "mechanism": section.mechanism,
        "epsilon": "inf" if math.isinf(epsilon) else epsilon,
        "delta": section.delta,
        "warning": WARNING,
        "clients": [
            {
                "client": quiet.client,
                "main_class": quiet.main_class,
                "without_noise": quiet.numbers(),
                "with_noise": noisy_one.numbers(),
                "mean_similarity_to_nearest_of_all_public": quiet.similarity_of_all,
                "top_images_in_both": len(set(quiet.top.tolist()) & set(noisy_one.top.tolist())),
            }
            for quiet, noisy_one in zip(found[False], found[True], strict=True)
        ],
    }
    privacy = f"{epsilon_text(epsilon)}, δ = {section.delta:g}"
    figures = {
        name: Drawing(
            draw(found[noisy], task.distill_set, data.images, title=title),
            f"Public images that clients score highest, {title}, each beside the client's nearest "
            "private images.",
            neighbour_table(found[noisy]),
        )
        for name, noisy, title in (
            ("similar-images", False, "without noise"),
            ("similar-images-private", True, f"as released at {privacy}"),
        )
    }
    text = (
        f"{datasets.describe(experiment)} Mechanism `{section.mechanism}`, {privacy}, seed {seed}. "
        "Mean cosine similarity to the nearest private image of the client, under h0:"
    )
    title = "public images scored highest, and private images near them"
    return Document(title, numbers, [WARNING, text, client_table(numbers["clients"])], figures)


def nearest(queries: Tensor, features: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """Return indices and cosine similarities [Q, count] of the features [n, F] nearest to
    queries [Q, F]."""
    similarities = (
        functional.normalize(queries.double(), dim=1)
        @ functional.normalize(features.double(), dim=1).T
    )
    values, indices = similarities.topk(count, dim=1)
    return indices, values


def neighbour_table(shown: Sequence[Shown]) -> Table:
    """Return one line per pair of a public image and a private one that a figure shows, by their
    indices."""
    headers = (
        "client",
        "main class",
        "public image",
        "rank of neighbour",
        "private image",
        "cosine similarity",
    )
    rows = [
        [entry.client, entry.main_class, public, rank + 1, private, round(similarity, 6)]
        for entry in shown
        for public, near, similarities in zip(
            entry.top.tolist(), entry.neighbours.tolist(), entry.similarities.tolist(), strict=True
        )
        for rank, (private, similarity) in enumerate(zip(near, similarities, strict=True))
    ]
    return Table(headers, rows)


def client_table(clients: Sequence[Mapping[str, Any]]) -> Table:
    """Return how near the highest-scored images are to private ones, and how many survive the
    noise."""
    rows = [
        [
            row["client"],
            row["main_class"],
            *(
                f"{row[key]['mean_similarity_to_nearest']:.3f}"
                for key in ("without_noise", "with_noise")
            ),
            f"{row['mean_similarity_to_nearest_of_all_public']:.3f}",
            f"{row['top_images_in_both']} of {len(row['without_noise']['top_images'])}",
        ]
        for row in clients
    ]
    return Table(
        [
            "client",
            "main class",
            "top, no noise",
            "top, with noise",
            "all public images",
            "top in both",
        ],
        rows,
    )


@matplotlib.rc_context(STYLE)
def draw(shown: Sequence[Shown], public: Tensor, private: Tensor, *, title: str) -> Figure:
    """Draw one block per client: a row per public image, with its neighbours to the right."""
    tile, gap = 30.0, 10.0
    rows, columns = shown[0].neighbours.shape
    block = (columns + 1) * tile + 2.5 * gap
    width, height = gap + len(shown) * block, 44 + rows * tile + 24
    figure = Figure(figsize=(width / 72, height / 72))

    def write(x: float, y: float, text: str, **look: Any) -> None:
        figure.text(x / width, 1 - y / height, text, **look)

    for index, entry in enumerate(shown):
        left = gap + index * block
        for row in range(rows):
            for column, image in enumerate(
                [public[entry.top[row]], *private[entry.neighbours[row]]]
            ):
                x = left + column * tile + (gap if column else 0)
                y = height - 44 - (row + 1) * tile
                axes = figure.add_axes(
                    (x / width, y / height, (tile - 2) / width, (tile - 2) / height)
                )
                picture = shrink_images(image.cpu().numpy(), side=64).transpose(1, 2, 0)
                picture = np.broadcast_to(picture, (*picture.shape[:2], 3))
                axes.imshow(picture, interpolation="none", gid=SMOOTH)
                axes.set_axis_off()
        write(left + tile / 2, 40, "public", ha="center", fontsize=8)
        write(
            left + tile + gap + columns * tile / 2, 40, "nearest private", ha="center", fontsize=8
        )
        write(left, 26, f"client {entry.client}, mostly class {entry.main_class}", fontsize=9.5)
    write(gap, 11, f"Highest certainty, {title}", fontsize=10.5)
    write(gap, height - 8, WARNING, fontsize=9)
    return figure


def shrink_images(images: Array, *, side: int) -> Array:
    """Average blocks of pixels until both sides of the images [..., H, W] are at most ``side``."""
    *lead, height, width = images.shape
    factor = max(1, -(-max(height, width) // side))
    rows, columns = height // factor, width // factor
    blocks = images[..., : rows * factor, : columns * factor].reshape(
        *lead, rows, factor, columns, factor
    )
    return np.asarray(blocks.mean(axis=(-3, -1)).round(), dtype=np.uint8)
