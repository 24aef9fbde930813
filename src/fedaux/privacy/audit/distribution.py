"""Tests of the noise: (release - noiseless vector) / sigma should be independent standard normal.

Each test returns a p-value that is exact or nearly so under that hypothesis; the extreme of many
values is multiplied by their number. The rate of false alarms is divided by the number of tests
(Bonferroni), so that an audit raises a false alarm with a probability of at most `FALSE_ALARMS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainc, chdtr, chdtrc, gammainc, ndtr
from scipy.stats import kstwo
from torch import Tensor

from fedaux.privacy.audit.neighbours import Findings, Neighbours, promise_of
from fedaux.privacy.mechanisms import Noise, Release
from fedaux.privacy.secure import lattice_spacing

FALSE_ALARMS = 1e-6
"""Probability that the audit of a correct mechanism reports its noise as wrong."""
POWER = 0.99
BINS = 16
Floats = NDArray[np.float64]


class PValue(NamedTuple):
    """How likely a result as bad as this one would be if the noise were right."""

    test: str
    where: str
    value: float


def rarest_fault(releases: int) -> float:
    """Return the rate r of a fault that N releases detect with a probability of 99 %: 1 - (1 -
    r)^N."""
    return float(1.0 - (1.0 - POWER) ** (1.0 / releases))


def alarms(values: Iterable[PValue], *, rate: float = FALSE_ALARMS) -> Findings:
    """Return the tests that fail at a family-wise rate of false alarms (Bonferroni)."""
    listed = list(values)
    findings: Findings = {}
    for one in sorted(listed, key=lambda one: one.value):
        if one.value <= rate / len(listed):
            findings.setdefault(f"noise: {one.test}", f"p = {one.value:.1e} ({one.where})")
    return findings


def draw(found: Neighbours, noise: Noise, *, releases: int, findings: Findings) -> list[PValue]:
    """Return p-values of the noise in real releases of both neighbours in turn.

    Adds to `findings` what needs no statistics: NaN, failures, and releases that state something
    else.
    """
    where = f"{noise.kind} noise; data: {found.scene}"
    centres = [found.noiseless(side, kind=noise.kind) for side in (0, 1)]
    for side, centre in enumerate(centres):
        if not torch.equal(found.noiseless(side, kind=noise.kind).vector, centre.vector):
            findings.setdefault("the vector under the noise is random", where)
    rows = []
    for number in range(releases):
        side = number % 2
        try:
            release = found.release(side, noise=noise)
        except Exception as error:
            findings.setdefault("a release fails", f"{type(error).__name__}: {error} ({where})")
            return []
        if promise_of(release) != promise_of(centres[side]):
            findings.setdefault("releases of the same data state different promises", where)
        if release.noise != noise.kind:
            findings.setdefault(f"noise is stated as {release.noise}", where)
        rows.append(release.vector.double() - centres[side].vector.double())
    return deviations(torch.stack(rows), centres[0], where=where, findings=findings)


def deviations(
    differences: Tensor, stated: Release, *, where: str, findings: Findings
) -> list[PValue]:
    """Return the p-values of differences [N, k] between releases and noiseless vectors."""
    if not bool(differences.isfinite().all()):
        share = float((~differences.isfinite().all(dim=1)).double().mean())
        findings.setdefault("a release holds NaN or infinity", f"{share:.2g} of releases ({where})")
        return []
    if not 0 < stated.sigma < math.inf:
        return []  # reported by the search
    # The rate of ties follows from the spacing of values: that of the type or of the lattice.
    size = float(stated.vector.abs().amax()) + 8 * stated.sigma
    spacing = torch.finfo(stated.vector.dtype).eps * size
    if stated.noise == "secure":
        spacing = max(spacing, lattice_spacing(stated.sensitivity, size=differences.shape[1]))
    noise = (differences / stated.sigma).numpy()
    values = p_values(noise, resolution=spacing / stated.sigma)
    return [PValue(test, where, value) for test, value in values.items()]


def p_values(noise: Floats, *, resolution: float) -> dict[str, float]:
    """Return p-values for the ways in which noise [N, k] can differ from independent N(0, 1).

    `resolution` is the spacing of the values, which sets the expected rate of ties and exact zeros.
    """
    count, width = noise.shape
    flat = noise.ravel()
    squares = (noise**2).sum(axis=1)  # [N], chi-square of k degrees
    coordinates = (noise**2).sum(axis=0)  # [k], chi-square of N degrees
    values = {
        "total variance": _chi_square(squares.sum(), degrees=flat.size),
        "mean": _normal(flat.sum() / math.sqrt(flat.size)),
        "mean of a coordinate": width * _normal(np.abs(noise.sum(axis=0)).max() / math.sqrt(count)),
        "variance of a coordinate": width
        * min(_chi_square(edge, degrees=count) for edge in (coordinates.min(), coordinates.max())),
        "distribution (Kolmogorov-Smirnov)": _kolmogorov(ndtr(flat)[:, None]),
        "distribution of a coordinate (Kolmogorov-Smirnov)": _kolmogorov(ndtr(noise)),
        "distribution (chi-square of bins)": _binned(ndtr(flat)),
        "squared norms (Kolmogorov-Smirnov)": _kolmogorov(chdtr(width, squares)[:, None]),
        "smallest norm": count * float(chdtr(width, squares.min())),
        "largest norm": count * float(chdtrc(width, squares.max())),
        "zeros": _at_least(int((flat == 0).sum()), expected=0.4 * flat.size * resolution),
        "repeated values": _at_least(_ties(noise), expected=0.2821 * width * count**2 * resolution),
        "successive releases": _cross(noise[0 : count - 1 : 2], noise[1::2]),
        "every second release": _cross(noise[0 : count - 2 : 4], noise[2::4]),
    }
    if width > 1:
        common = noise.sum(axis=1) ** 2 / width
        values |= {
            "neighbouring coordinates": _cross(noise[:, 0 : width - 1 : 2], noise[:, 1::2]),
            "common part of the coordinates": _chi_square(common.sum(), degrees=count),
            "correlation of two coordinates": _most_aligned(noise.T),
            "correlation of two releases": _most_aligned(noise),
        }
    return {test: min(1.0, float(value)) for test, value in values.items()}


def _chi_square(value: float, *, degrees: int) -> float:
    return 2.0 * float(min(chdtr(degrees, value), chdtrc(degrees, value)))


def _normal(value: float) -> float:
    return 2.0 * float(ndtr(-abs(value)))


def _at_least(count: int, *, expected: float) -> float:
    """Return the probability that a Poisson variable is at least `count`."""
    return float(gammainc(count, expected)) if count else 1.0


def _ties(noise: Floats) -> int:
    """Return how many values [N, k] repeat an earlier one of their coordinate, up to sign."""
    ordered = np.sort(np.abs(noise), axis=0)
    return int((np.diff(ordered, axis=0) == 0).sum())


def _kolmogorov(uniform: Floats) -> float:
    """Return the p-value of the largest distance between columns [N, k] and the uniform
    distribution."""
    count, width = uniform.shape
    ordered = np.sort(uniform, axis=0)
    steps = np.arange(count)[:, None]
    distance = max(
        float(((steps + 1) / count - ordered).max()), float((ordered - steps / count).max())
    )
    return float(width * kstwo.sf(distance, count))


def _binned(uniform: Floats) -> float:
    bins = max(4, min(BINS, len(uniform) // 40))  # enough in each for the chi-square approximation
    counts = np.bincount(np.minimum((uniform * bins).astype(int), bins - 1), minlength=bins)
    expected = len(uniform) / bins
    return float(chdtrc(bins - 1, ((counts - expected) ** 2).sum() / expected))


def _cross(left: Floats, right: Floats) -> float:
    """Return the p-value of <left, right>: given either, normal with its squared norm as
    variance."""
    size = math.sqrt(float((left**2).sum()))
    return _normal(float((left * right).sum()) / size) if size > 0 else 0.0


def _most_aligned(rows: Floats) -> float:
    """Return the p-value of the largest |cosine| between two rows [R, d]; its square is
    beta-distributed."""
    count, width = rows.shape
    if width < 2 or count < 2:
        return 1.0
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    cosines = np.abs(unit @ unit.T)
    np.fill_diagonal(cosines, 0.0)
    square = min(1.0, float(cosines.max()) ** 2)
    return float(count * (count - 1) / 2 * betainc((width - 1) / 2, 0.5, 1 - square))
