"""The search for the worst neighbours: data sets that differ in one example and move the vector
far.

Every replacement is tried on data of every shape: from one example to 20,000, from one feature to
512. Besides the distance, each pair shows whether anything else depends on the example that
   differs: what the release states, or whether it fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from fedaux.config import MEAN_COMPONENTS, Certainty
from fedaux.privacy.audit.mechanisms import Build, FixedNoise
from fedaux.privacy.gaussian import delta_of
from fedaux.privacy.mechanisms import (
    Mechanism,
    Noise,
    Public,
    Release,
)

NUM_FEATURES = 4
NUM_CLASSES = 3
Pair = tuple[Tensor, Tensor]
Findings = dict[str, str]
"""What contradicts the promise: the kind of fault, and where it was first seen."""


@dataclass(frozen=True)
class Neighbours:
    """Two data sets [n, F] that differ in their first example, with the same public map."""

    scene: str
    kind: str
    mechanism: Mechanism
    public: Public
    neighbours: Pair
    labels: Pair
    """[n] each."""
    labelled: bool = False
    """Whether releases depend on labels."""
    ratio: float = 0.0
    """Distance of the noiseless vectors over the stated sensitivity."""

    def release(self, side: int, *, noise: Noise) -> Release:
        """Return the release of one of the two data sets."""
        return self.mechanism.release(
            self.neighbours[side], self.public, noise=noise, labels=self.labels[side]
        )

    def noiseless(self, side: int, *, kind: str = "simulated") -> Release:
        """Return the release of one of the two data sets without noise."""
        return self.release(side, noise=FixedNoise(0.0, kind=kind))


@dataclass
class Search:
    """The results of a search."""

    by_scene: dict[str, Neighbours] = field(default_factory=dict)
    """The worst neighbours of each scene."""
    pairs: int = 0
    findings: Findings = field(default_factory=dict)

    @property
    def worst(self) -> Neighbours:
        """The worst neighbours of all."""
        return max(self.by_scene.values(), key=lambda found: found.ratio)

    def try_pair(self, start: Neighbours) -> Neighbours:
        """Measure two neighbours, and keep them if they are the worst of their scene."""
        found = measured(start, self.findings)
        self.pairs += 1
        best = self.by_scene.setdefault(found.scene, found)
        if found.ratio > best.ratio:
            self.by_scene[found.scene] = found
        return found


# Data


def normal(generator: np.random.Generator, rows: int, width: int, *, shift: float = 0.0) -> Tensor:
    """Return independent normal features [rows, width]."""
    return torch.from_numpy(generator.normal(shift, 1.0, (rows, width)))


def gauss(n: int, negatives: int, *, width: int = NUM_FEATURES, shift: float = 0.0) -> Scene:
    """Return normal client data [n, F] beside negatives [M, F], F being the width."""

    def draw(generator: np.random.Generator) -> Pair:
        return normal(generator, n, width, shift=shift), normal(generator, negatives, width)

    return draw


def _clusters(generator: np.random.Generator) -> Pair:
    centres = 4 * normal(generator, 3, NUM_FEATURES)
    examples = centres.repeat(10, 1) + 0.1 * normal(generator, 30, NUM_FEATURES)
    return examples, normal(generator, 90, NUM_FEATURES)


def _point(n: int, negatives: int) -> Scene:
    """All of the client's data at one point, all negatives near the opposite one: the steepest
    regression."""

    def draw(generator: np.random.Generator) -> Pair:
        point = normal(generator, 1, NUM_FEATURES)
        point = point / point.norm()
        return point.repeat(n, 1), -point + 1e-3 * normal(generator, negatives, NUM_FEATURES)

    return draw


Scene = Callable[[np.random.Generator], Pair]
SCENES: dict[str, Scene] = {
    "one example": gauss(1, 8),
    "a few examples": gauss(5, 15, shift=1.0),
    "many examples": gauss(200, 1800, shift=0.5),
    "clusters": _clusters,
    "few at one point": _point(4, 12),
    "many at one point": _point(200, 1800),
}
"""Small client data [n, F] and negatives [M, F], drawn again for every pair."""

SHAPES: dict[str, Scene] = {
    "1 example of 1 feature": gauss(1, 40, width=1),
    "50 examples of 1 feature": gauss(50, 100, width=1, shift=1.0),
    "300 examples of 64 features": gauss(300, 400, width=64, shift=0.5),
    "40 examples of 512 features": gauss(40, 520, width=512, shift=0.1),
    "20,000 examples of 2 features": gauss(20_000, 100, width=2, shift=0.5),
    "6,000 examples of 16 features": gauss(6_000, 100, width=16, shift=0.1),
}
"""Large and small shapes, drawn once per audit; the noise is tested on each."""


# Replacements


def _sideways(examples: Tensor, draw: Tensor) -> Pair:
    """Two outliers against the client's mean, where the loss is steepest, and apart at right
    angles to it."""
    mean = examples.mean(dim=0)
    mean = mean / mean.norm().clamp_min(1e-12)
    across = draw - (draw @ mean) * mean
    across = across / across.norm().clamp_min(1e-12)
    return 20 * (across - 0.5 * mean), 20 * (-across - 0.5 * mean)


REPLACEMENTS: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "another example": lambda examples, draw: (examples[0], draw),
    "zero vector": lambda examples, draw: (examples[0], 0 * draw),
    "20-fold outlier": lambda examples, draw: (examples[0], 20 * draw),
    "million-fold outlier": lambda examples, draw: (examples[0], 1e6 * draw),
    "sign flipped": lambda examples, draw: (examples[0], -examples[0]),
    "opposite outliers": lambda examples, draw: (20 * draw, -20 * draw),
    "sideways outliers": _sideways,
    "largest made smallest": lambda examples, draw: (
        20 * draw,
        examples[examples.norm(dim=1).argmin()],
    ),
    "NaN": lambda examples, draw: (examples[0], math.nan * draw),
    "infinity": lambda examples, draw: (20 * draw, math.inf * draw),
}
"""The two versions of the first example, from the client's examples [n, F] and a random draw
[F]."""


LABELS: dict[str, Callable[[int], tuple[int, int]]] = {
    "same label": lambda first: (first, first),
    "another label": lambda first: (first, (first + 1) % NUM_CLASSES),
    "label -1": lambda first: (first, -1),
    "label of no class": lambda first: (first, NUM_CLASSES),
    "label far below": lambda first: (first, -NUM_CLASSES - 1),
    "label far above": lambda first: (first, 2**40),
    "labels out of range": lambda first: (-1, NUM_CLASSES),
}
"""The two labels of the first example, from the label that it had."""


# The search


def search(
    build: Build,
    section: Certainty,
    *,
    pairs: int,
    generator: np.random.Generator,
    shapes: Mapping[str, Scene] = SHAPES,
) -> Search:
    """Search for the neighbours that lie farthest apart.

    Of `pairs` in the small scenes, three quarters are replacements and the rest gradient ascent.
    Each replacement is also tried once in each of `shapes`, with as many components as features.
    """
    found = Search()
    cases = [(scene, kind) for scene in SCENES for kind in REPLACEMENTS]
    plain = max(len(cases), 3 * pairs // 4)
    if section.components is None:
        section = section.model_copy(update={"components": MEAN_COMPONENTS})
    mechanism = build(section)
    # Beside 60 cases, each of them meets each of the 21 pairs of replacement and class in time.
    labels = cycle(LABELS)
    for number, (scene, kind) in enumerate(islice(cycle(cases), plain)):
        start = _start(scene, mechanism, *SCENES[scene](generator))
        start = _labelled(start, first=number + number // len(cases))
        found.try_pair(_replaced(start, kind, next(labels), generator))
    for scene, draw in shapes.items():
        examples, negatives = draw(generator)
        components = max(section.components or 1, examples.shape[1])
        wide = build(section.model_copy(update={"components": components}))
        start = _start(scene, wide, examples, negatives)
        for first, kind in enumerate(REPLACEMENTS):
            labelled = _labelled(start, first=first)
            found.try_pair(_replaced(labelled, kind, next(labels), generator))
    leading = sorted((found.by_scene[scene] for scene in SCENES), key=lambda pair: -pair.ratio)[:2]
    for start in leading:
        if math.isfinite(start.ratio):
            _ascend(start, found, pairs=max(0, pairs - plain) // len(leading), generator=generator)
    return found


def _start(scene: str, mechanism: Mechanism, examples: Tensor, negatives: Tensor) -> Neighbours:
    """Return a data set twice, with the labels 0, 1, 2, 0, ..., so that some classes may have no
    example."""
    labels = torch.arange(len(examples)) % NUM_CLASSES
    public = mechanism.publish(negatives, num_classes=NUM_CLASSES, sizes=[len(examples)])
    start = Neighbours(scene, "", mechanism, public, (examples, examples), (labels, labels))
    return replace(start, labelled=_depends_on_labels(start))


def _depends_on_labels(start: Neighbours) -> bool:
    """Return whether the noiseless release changes if all examples change their class."""
    ones = torch.ones_like(start.labels[0])
    try:
        found = [replace(start, labels=(one, one)).noiseless(0) for one in (0 * ones, ones)]
    except Exception:  # the search reports it
        return False
    return not torch.equal(found[0].vector, found[1].vector)


def _labelled(start: Neighbours, *, first: int) -> Neighbours:
    """Return the same examples with labels that go round from `first`."""
    labels = (torch.arange(len(start.neighbours[0])) + first) % NUM_CLASSES
    return replace(start, labels=(labels, labels))


def _replaced(
    start: Neighbours, kind: str, label: str, generator: np.random.Generator
) -> Neighbours:
    examples, labels = start.neighbours[0], start.labels[0]
    left, right = REPLACEMENTS[kind](examples, normal(generator, 1, examples.shape[1])[0])
    pair = (_with_first(examples, left), _with_first(examples, right))
    if not start.labelled:
        return replace(start, kind=kind, neighbours=pair)
    first, second = (torch.tensor(one) for one in LABELS[label](int(labels[0])))
    both = (_with_first(labels, first), _with_first(labels, second))
    return replace(start, kind=f"{kind}, {label}", neighbours=pair, labels=both)


def _ascend(
    start: Neighbours, found: Search, *, pairs: int, generator: np.random.Generator
) -> None:
    """Improve both versions of the example by finite-difference gradients and by random moves."""
    best, end = start, found.pairs + pairs

    def attempt(versions: Tensor, *, shift: Tensor | float = 0.0) -> Neighbours:
        left, right = (data + shift for data in best.neighbours)
        moved = (_with_first(left, versions[0]), _with_first(right, versions[1]))
        return found.try_pair(replace(best, neighbours=moved))

    while found.pairs + 2 * NUM_FEATURES + 6 <= end:
        versions = torch.stack([data[0] for data in best.neighbours])  # [2, F]
        size = float(versions.norm()) + 1e-3
        gradient = torch.zeros_like(versions)
        for entry in range(versions.numel()):
            nudge = torch.zeros_like(versions)
            nudge.view(-1)[entry] = 1e-3 * size
            gradient.view(-1)[entry] = attempt(versions + nudge).ratio - best.ratio
        uphill = size * gradient / gradient.norm().clamp_min(1e-30)
        for step in (0.05, 0.5, 5.0):
            attempt(versions + step * uphill)
        attempt(versions + 0.3 * size * normal(generator, 2, NUM_FEATURES))
        attempt(versions * float(generator.choice([0.5, 2.0, 10.0])))
        attempt(versions, shift=0.3 * normal(generator, 1, NUM_FEATURES))
        best = found.by_scene[start.scene]


def _with_first(examples: Tensor, first: Tensor) -> Tensor:
    return torch.cat([first[None], examples[1:]])


def measured(found: Neighbours, findings: Findings) -> Neighbours:
    """Return the neighbours with the l2 distance of their noiseless vectors over the sensitivity.

    Adds to `findings` what else tells the two apart, and noise that is too little for the claim.
    """
    where = f"{found.kind}; data: {found.scene}"
    try:
        left, right = found.noiseless(0), found.noiseless(1)
    except Exception as error:  # a failure reveals as much as a release
        findings.setdefault("a release fails", f"{type(error).__name__}: {error} ({where})")
        return found
    if promise_of(left) != promise_of(right):
        findings.setdefault("what a release states depends on private data", where)
        return found
    if problem := uncalibrated(left):
        findings.setdefault("the stated noise is too little", f"{problem} ({where})")
    ratio = float((left.vector - right.vector).norm()) / left.sensitivity
    return replace(found, ratio=ratio if math.isfinite(ratio) else math.inf)


def promise_of(release: Release) -> tuple[object, ...]:
    """Return what a release states, which must not depend on private data."""
    numbers = (release.sensitivity, release.sigma, release.epsilon, release.delta)
    return (*numbers, release.noise, release.vector.shape)


def uncalibrated(release: Release) -> str:
    """Return why the stated sigma does not give the stated (epsilon, delta); empty if it does."""
    if math.isinf(release.epsilon):
        return ""
    if not (0 < release.sigma < math.inf and 0 < release.sensitivity < math.inf):
        return f"sigma = {release.sigma} at sensitivity {release.sensitivity}"
    delta = delta_of(release.epsilon, noise_multiplier=release.sigma / release.sensitivity)
    if delta <= release.delta * (1 + 1e-6):
        return ""
    return f"it gives delta = {delta:.3g} at epsilon = {release.epsilon:g}, not {release.delta:g}"
