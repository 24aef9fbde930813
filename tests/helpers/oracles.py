"""Slow twins: each formula as plain loops over numbers, which the fast versions must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nt_xent_loop(projections: Sequence[Sequence[float]], *, temperature: float) -> float:
    """SimCLR's Eq. 1, averaged over all 2N rows; rows i and i + N are two views of one image."""
    rows = len(projections)
    pairs = rows // 2

    def cosine(first: Sequence[float], second: Sequence[float]) -> float:
        product = sum(a * b for a, b in zip(first, second, strict=True))
        return (
            product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))
        )

    total = 0.0
    for i in range(rows):
        partner = i + pairs if i < pairs else i - pairs
        positive = math.exp(cosine(projections[i], projections[partner]) / temperature)
        everything = 0.0
        for j in range(rows):
            if j != i:
                everything += math.exp(cosine(projections[i], projections[j]) / temperature)
        total += -math.log(positive / everything)
    return total / rows


def softmax_loop(logits: Sequence[float]) -> list[float]:
    """Softmax of one row."""
    peak = max(logits)
    exponentials = [math.exp(value - peak) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def mean_soft_labels_loop(logits: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Eq. 2 for logits[client][example][class]."""
    clients, examples, classes = len(logits), len(logits[0]), len(logits[0][0])
    labels = []
    for x in range(examples):
        mean = [sum(logits[i][x][c] for i in range(clients)) / clients for c in range(classes)]
        labels.append(softmax_loop(mean))
    return labels


def weighted_soft_labels_loop(
    logits: Sequence[Sequence[Sequence[float]]], scores: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Eq. 3 for logits[client][example][class] and scores[client][example]."""
    clients, examples, classes = len(logits), len(logits[0]), len(logits[0][0])
    labels = []
    for x in range(examples):
        total = sum(scores[i][x] for i in range(clients))
        row = [
            sum(scores[i][x] * logits[i][x][c] for i in range(clients)) / total
            for c in range(classes)
        ]
        labels.append(softmax_loop(row))
    return labels


def kl_divergence_loop(
    teacher: Sequence[Sequence[float]], logits: Sequence[Sequence[float]]
) -> float:
    """D_KL(teacher || softmax(logits)) of Eq. 1, averaged over the examples; 0 log 0 is 0."""
    total = 0.0
    for target, row in zip(teacher, logits, strict=True):
        student = softmax_loop(row)
        total += sum(
            p * (math.log(p) - math.log(q)) for p, q in zip(target, student, strict=True) if p > 0
        )
    return total / len(teacher)


def weighted_average_loop(values: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[float]:
    """FedAVG: sum_i |D_i| theta_i / sum_l |D_l|, for values[client][parameter]."""
    total = sum(sizes)
    return [
        sum(sizes[i] * values[i][p] for i in range(len(values))) / total
        for p in range(len(values[0]))
    ]


def trimmed_mean_loop(values: Sequence[Sequence[float]], trim: int) -> list[float]:
    """The mean of each parameter without its `trim` lowest and highest values."""
    result = []
    for p in range(len(values[0])):
        ordered = sorted(own[p] for own in values)
        for _ in range(trim):
            ordered.remove(min(ordered))
            ordered.remove(max(ordered))
        result.append(sum(ordered) / len(ordered))
    return result


def clipped_loop(values: Sequence[Sequence[float]], before: Sequence[float]) -> list[list[float]]:
    """Every update shortened to the lower median of the norms."""
    norms = [
        math.sqrt(sum((a - b) ** 2 for a, b in zip(own, before, strict=True))) for own in values
    ]
    limit = sorted(norms)[(len(norms) - 1) // 2]
    return [
        [b + min(1.0, limit / norm) * (a - b) for a, b in zip(own, before, strict=True)]
        for own, norm in zip(values, norms, strict=True)
    ]


def certainty_objective_loop(
    weights: Sequence[float],
    positives: Sequence[Sequence[float]],
    negatives: Sequence[Sequence[float]],
    regularisation: float,
) -> float:
    """J of Eq. 4, with the loss log(1 + exp(-t z)) that makes a client's own data score high."""
    total = 0.0
    for target, group in ((1.0, positives), (-1.0, negatives)):
        for features in group:
            margin = target * sum(w * u for w, u in zip(weights, features, strict=True))
            total += math.log1p(math.exp(-margin))
    average = total / (len(positives) + len(negatives))
    return average + 0.5 * regularisation * sum(w * w for w in weights)


def private_mean_loop(
    features: Sequence[Sequence[float]],
    centre: Sequence[float],
    whitening: Sequence[Sequence[float]],
    bound: float,
) -> list[float]:
    """The noiseless release of the `mean` mechanism: centre, whiten, divide by the bound, clip to
    norm 1, average."""
    width = len(whitening[0])
    total = [0.0] * width
    for row in features:
        shifted = [value - middle for value, middle in zip(row, centre, strict=True)]
        mapped = [
            sum(shifted[f] * whitening[f][k] for f in range(len(row))) / bound for k in range(width)
        ]
        norm = math.sqrt(sum(value * value for value in mapped))
        for k in range(width):
            total[k] += mapped[k] / max(1.0, norm)
    return [value / len(features) for value in total]


def doubly_stochastic_loop(shares: list[list[float]], *, iterations: int) -> list[list[float]]:
    """The split's alternating normalisation on plain numbers: rows to classes / clients, then
    columns to 1."""
    clients, classes = len(shares), len(shares[0])
    for _ in range(iterations):
        for i in range(clients):
            total = sum(shares[i])
            shares[i] = [value / total * classes / clients for value in shares[i]]
        for j in range(classes):
            total = sum(shares[i][j] for i in range(clients))
            for i in range(clients):
                shares[i][j] /= total
    return shares


def moments_loop(
    values: Sequence[Sequence[float]], sizes: Sequence[int]
) -> tuple[list[float], list[float]]:
    """FedBE's Gaussian: mean and variance of values[client][parameter], each client counting by its
    size."""
    mean = weighted_average_loop(values, sizes)
    variance = []
    for p, middle in enumerate(mean):
        squares = [
            size * (row[p] - middle) * (row[p] - middle)
            for row, size in zip(values, sizes, strict=True)
        ]
        variance.append(sum(squares) / sum(sizes))
    return mean, variance


def mean_probabilities_loop(
    logits: Sequence[Sequence[Sequence[float]]], shares: Sequence[float]
) -> list[list[float]]:
    """sum_i r_i softmax(f_i(x)) / sum_j r_j for logits[model][example][class]."""
    examples, classes = len(logits[0]), len(logits[0][0])
    labels = []
    for x in range(examples):
        rows = [softmax_loop(model[x]) for model in logits]
        labels.append(
            [
                sum(r * row[c] for r, row in zip(shares, rows, strict=True)) / sum(shares)
                for c in range(classes)
            ]
        )
    return labels


def sharpen_loop(probabilities: Sequence[float], *, temperature: float) -> list[float]:
    """MixMatch's sharpening of one row: p^(1/T), normalised."""
    powers = [value ** (1 / temperature) for value in probabilities]
    return [value / sum(powers) for value in powers]


def class_sums_loop(
    projected: list[list[float]], labels: list[int], *, classes: int, finite: list[bool]
) -> list[list[float]]:
    """Sum (u(x), 1) over the examples of each class, one by one."""
    sums = [[0.0] * (len(projected[0]) + 1) for _ in range(classes)]
    for row, label, good in zip(projected, labels, finite, strict=True):
        for c in range(classes):
            if good and label == c:
                sums[c] = [total + value for total, value in zip(sums[c], [*row, 1.0], strict=True)]
    return sums


def shares_loop(sums: list[list[list[float]]]) -> list[list[float]]:
    """P(client | class) from the counts of class sums [K][C][k + 1]."""
    classes = range(len(sums[0]))
    totals = [sum(own[c][-1] for own in sums) for c in classes]
    return [[own[c][-1] / totals[c] for c in classes] for own in sums]


def class_discriminant_loop(
    sums: list[list[list[float]]], points: list[list[float]], *, scale: float
) -> list[list[float]]:
    """Discriminant of exact class sums [K][C][k + 1]: clients are weighted by their counts."""
    classes, width = len(sums[0]), len(sums[0][0]) - 1
    counts = [[own[c][-1] for own in sums] for c in range(classes)]
    everything = sum(sum(own) for own in counts)
    prior = [sum(own) / everything for own in counts]
    means = [
        [
            sum(n * own[c][j] for n, own in zip(counts[c], sums, strict=True))
            / sum(n * n for n in counts[c])
            for j in range(width)
        ]
        for c in range(classes)
    ]
    centre = [sum(prior[c] * means[c][j] for c in range(classes)) for j in range(width)]
    logits = []
    for point in points:
        row = []
        for c in range(classes):
            shift = [means[c][j] - centre[j] for j in range(width)]
            inner = sum(shift[j] * (point[j] - centre[j]) for j in range(width))
            half = sum(value * value for value in shift) / 2
            row.append(scale * (inner - half) + math.log(prior[c]))
        logits.append(row)
    return logits
