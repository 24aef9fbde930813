"""Tests of the noise: releases minus the noiseless vector, over sigma, should be independent standard normal numbers.

Each test returns a p-value that is exact or nearly so under that hypothesis. Where a test takes the extreme of many,
its p-value is multiplied by their number. An audit divides its family-wise rate of false alarms by the number of tests
(Bonferroni), so that together they raise a false alarm with a probability of at most `FALSE_ALARMS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainc, chdtr, chdtrc, gammainc, ndtr
from scipy.stats import kstwo
from torch import Tensor

from fedaux.privacy.audit.mechanisms import FixedNoise
from fedaux.privacy.audit.neighbours import Findings, Neighbours
from fedaux.privacy.mechanisms import Noise, Release
from fedaux.privacy.secure import lattice_spacing

FALSE_ALARMS = 1e-6
"""Probability that an audit of a correct mechanism reports its noise as wrong."""
POWER = 0.99
BINS = 16
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PValue:
    """How likely a result as bad as this one would be if the noise were right."""

    test: str
    where: str
    value: float


def rarest_fault(releases: int) -> float:
    """Return the rate r at which a fault that shows in one release is seen with 99 %: 1 - (1 - r)^N = 0.99."""
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
    """Return p-values of the noise in releases of both neighbours in turn, each through the mechanism's `release`.

    Adds to `findings` what needs no statistics: NaN, failures, and releases that state something else than before.
    """
    where = f"{noise.kind} noise; data: {found.scene}"
    centres = []
    for features in found.neighbours:
        twice = [
            found.mechanism.release(features, found.public, noise=FixedNoise(0.0, kind=noise.kind))
            for _ in range(2)
        ]
        if not torch.equal(twice[0].vector, twice[1].vector):
            findings.setdefault("the vector under the noise is random", where)
        centres.append(twice[0])
    rows = []
    for number in range(releases):
        side = number % 2
        try:
            release = found.mechanism.release(found.neighbours[side], found.public, noise=noise)
        except Exception as error:
            findings.setdefault("a release fails", f"{type(error).__name__}: {error} ({where})")
            return []
        if _promise(release) != _promise(centres[side]):
            findings.setdefault("releases of the same data state different promises", where)
        if release.noise != noise.kind:
            findings.setdefault(f"noise is stated as {release.noise}", where)
        rows.append(release.vector.double() - centres[side].vector.double())
    return deviations(torch.stack(rows), centres[0], where=where, findings=findings)


def deviations(
    differences: Tensor, stated: Release, *, where: str, findings: Findings
) -> list[PValue]:
    """Return the p-values of differences [N, k] between releases and noiseless vectors, given what was stated."""
    if not bool(differences.isfinite().all()):
        share = float((~differences.isfinite().all(dim=1)).double().mean())
        findings.setdefault("a release holds NaN or infinity", f"{share:.2g} of releases ({where})")
        return []
    if not 0 < stated.sigma < math.inf:
        return []  # reported by the search
    # Values repeat as often as their spacing makes them: that of the type or, for secure noise, of the lattice.
    size = float(stated.vector.abs().amax()) + 8 * stated.sigma
    spacing = torch.finfo(stated.vector.dtype).eps * size
    if stated.noise == "secure":
        spacing = max(spacing, lattice_spacing(stated.sensitivity, size=differences.shape[1]))
    resolution = spacing / stated.sigma
    values = p_values((differences / stated.sigma).numpy(), resolution=resolution)
    return [PValue(test, where, value) for test, value in values.items()]


def _promise(release: Release) -> tuple[object, ...]:
    shape = tuple(release.vector.shape)
    numbers = (release.sensitivity, release.sigma, release.epsilon, release.delta)
    return (*numbers, release.noise, shape)


def p_values(noise: Floats, *, resolution: float) -> dict[str, float]:
    """Return a p-value for each way in which noise [N, k] can differ from independent standard normal numbers.

    `resolution` is the spacing of the values: ties and exact zeros are expected at that rate.
    """
    count, width = noise.shape
    flat = noise.ravel()
    squares = (noise**2).sum(axis=1)  # [N], chi-square of k degrees
    by_coordinate = (noise**2).sum(axis=0)  # [k], chi-square of N degrees
    values = {
        "total variance": _chi_square(squares.sum(), degrees=flat.size),
        "mean": _normal(flat.sum() / math.sqrt(flat.size)),
        "mean of a coordinate": width * _normal(np.abs(noise.sum(axis=0)).max() / math.sqrt(count)),
        "variance of a coordinate": width
        * min(_chi_square(edge, degrees=count) for edge in _edges(by_coordinate)),
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


def _edges(values: Floats) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _chi_square(value: float, *, degrees: int) -> float:
    return 2.0 * float(min(chdtr(degrees, value), chdtrc(degrees, value)))


def _normal(value: float) -> float:
    return 2.0 * float(ndtr(-abs(value)))


def _at_least(count: int, *, expected: float) -> float:
    """Return the probability that a Poisson number is at least `count`."""
    return float(gammainc(count, expected)) if count else 1.0


def _ties(noise: Floats) -> int:
    """Return how many values [N, k] repeat an earlier one of their coordinate, up to sign."""
    ordered = np.sort(np.abs(noise), axis=0)
    return int((np.diff(ordered, axis=0) == 0).sum())


def _kolmogorov(uniform: Floats) -> float:
    """Return the p-value of the largest distance between columns [N, k] and the uniform distribution."""
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
    """Return the p-value of <left, right>: given either, normal with its squared norm as variance."""
    size = math.sqrt(float((left**2).sum()))
    return _normal(float((left * right).sum()) / size) if size > 0 else 0.0


def _most_aligned(rows: Floats) -> float:
    """Return the p-value of the largest |cosine| between two of the rows [R, d]; its square is beta-distributed."""
    count, width = rows.shape
    if width < 2 or count < 2:
        return 1.0
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    cosines = np.abs(unit @ unit.T)
    np.fill_diagonal(cosines, 0.0)
    square = min(1.0, float(cosines.max()) ** 2)
    return float(count * (count - 1) / 2 * betainc((width - 1) / 2, 0.5, 1 - square))
