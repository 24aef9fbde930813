"""Mechanisms with a fault each, for the audit to find. All but the last few break `mean`, and most
lie about it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor
from torch.nn import functional

from fedaux.config import Certainty
from fedaux.privacy.classes import ClassSums
from fedaux.privacy.counts import ClassCounts
from fedaux.privacy.heads import PrivateHeads
from fedaux.privacy.mean import PrivateMean
from fedaux.privacy.mechanism import integer_sums
from fedaux.privacy.mechanisms import Mechanism, Noise, Public, Release, SimulatedNoise

PUBLISHED: dict[tuple[str, int], Public] = {}


class Mean(PrivateMean):
    """`mean`, with its public map remembered: many audits of one seed look at the same
    negatives."""

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
        digest = hashlib.sha256(negatives.numpy().tobytes()).hexdigest()
        key = (digest, self._components)
        if key not in PUBLISHED:
            PUBLISHED[key] = super().publish(negatives)
        return PUBLISHED[key]


Bend = Callable[[Tensor], Tensor]


class BentNoise:
    """Turns standard normal noise [k] into something else; no noise stays none, so that nothing
    else looks odd."""

    def __init__(self, noise: Noise, bend: Bend) -> None:
        self._noise, self._bend = noise, bend
        self.kind = noise.kind

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        zeros = torch.zeros_like(vector)
        standard = self._noise.perturb(zeros, sensitivity=sensitivity / sigma, sigma=1.0)
        return vector + sigma * self._bend(standard)


def bent(make: Callable[[], Bend]) -> type[Mean]:
    """Return `mean` with noise bent by what `make` returns for each instance."""

    class Bent(Mean):
        def __init__(self, section: Certainty) -> None:
            super().__init__(section)
            self._bend = make()

        def release(
            self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
        ) -> Release:
            return super().release(features, public, noise=BentNoise(noise, self._bend))

    return Bent


def uniform(standard: Tensor) -> Tensor:
    """The same standard deviation, but no tails: some outputs are possible for one data set
    only."""
    return math.sqrt(3) * (2 * torch.from_numpy(ndtr(standard.numpy())) - 1)


def laplace(standard: Tensor) -> Tensor:
    """The same standard deviation, but other tails."""
    tail = torch.from_numpy(ndtr(-standard.abs().numpy()))
    return standard.sign() * -torch.log(2 * tail) / math.sqrt(2)


def sometimes(change: Bend, *, rate: float = 0.01) -> Callable[[], Bend]:
    """Return noise that is changed in a share of releases."""

    generator = np.random.default_rng(0)

    def bend(standard: Tensor) -> Tensor:
        drawn = float(standard.abs().sum()) > 0
        return change(standard) if drawn and generator.random() < rate else standard

    return lambda: bend


def reused(sign: float) -> Callable[[], Bend]:
    """Every second release repeats the noise of the one before it, or its negative."""

    def make() -> Bend:
        before: list[Tensor] = []

        def bend(standard: Tensor) -> Tensor:
            if before:
                return sign * before.pop()
            if float(standard.abs().sum()) > 0:
                before.append(standard)
            return standard

        return bend

    return make


def partly_repeated() -> Bend:
    """Each release's noise shares a part with the one before it."""
    before: list[Tensor] = []

    def bend(standard: Tensor) -> Tensor:
        if float(standard.abs().sum()) == 0:
            return standard
        mixed = 0.4 * before.pop() + math.sqrt(0.84) * standard if before else standard
        before.append(mixed)
        return mixed

    return bend


def correlated(standard: Tensor) -> Tensor:
    """Of variance 1 in each coordinate, with a common part that can be subtracted."""
    if len(standard) == 1:
        return standard
    mixed = math.sqrt(0.7) * standard + math.sqrt(0.3) * standard[0]
    mixed[0] = standard[0]
    return mixed


def paired(standard: Tensor) -> Tensor:
    """The last coordinate repeats the first."""
    return torch.cat([standard[:-1], standard[:1]]) if len(standard) > 1 else standard


def half_of_them(standard: Tensor) -> Tensor:
    """No noise on the second half of the coordinates."""
    return torch.where(torch.arange(len(standard)) < (len(standard) + 1) // 2, standard, 0.0)


def not_on_the_last_of_many(standard: Tensor) -> Tensor:
    """No noise on the last coordinate of a wide vector."""
    if len(standard) > 256:
        standard[-1] = 0.0
    return standard


def random_scale() -> Bend:
    """Noise whose variance is right on average and differs between releases."""
    generator = np.random.default_rng(0)
    return lambda standard: standard * float(generator.choice([0.5, math.sqrt(1.75)]))


class NoNoise(Mean):
    """No noise at all, under a finite epsilon."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        return replace(
            super().release(features, public, noise=noise),
            vector=self.project(features, public).mean(dim=0),
        )


class NoNoiseOnOne(Mean):
    """A client with one example is forgotten."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        release = super().release(features, public, noise=noise)
        return (
            replace(release, vector=self.project(features, public)[0])
            if len(features) == 1
            else release
        )


class SubsampledAboveThousands(Mean):
    """Above 5,000 examples only the first 5,000 are averaged; the sensitivity is still stated as 2
    / n."""

    def project(self, features: Tensor, public: Public) -> Tensor:
        return super().project(features[:5000], public)


class TwoHalvesWhenWide(Mean):
    """The two halves of wide vectors are clipped one by one, so that the norm can be the root
    of 2."""

    def project(self, features: Tensor, public: Public) -> Tensor:
        projected = super().project(features, public)
        if features.shape[1] <= 256:
            return projected
        halves = projected.chunk(2, dim=1)
        return torch.cat(
            [half / half.norm(dim=1, keepdim=True).clamp_min(1e-9) for half in halves], dim=1
        )


class Unclipped(Mean):
    """Whitened features as they are."""

    def project(self, features: Tensor, public: Public) -> Tensor:
        return torch.nan_to_num(
            (features.double() - public["centre"]) @ public["whitening"].double()
        )


class AffineAfterClipping(Mean):
    """Clipped first and stretched afterwards."""

    def project(self, features: Tensor, public: Public) -> Tensor:
        projected = super().project(features, public)
        return 0.5 + 1.5 * projected


class StatedPrivateSigma(Mean):
    """The noise follows the spread of the private features, and the release says how much it
    was."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        factor = 1 + float(self.project(features, public).norm(dim=1).mean())
        release = super().release(
            features, public, noise=BentNoise(noise, lambda standard: factor * standard)
        )
        return replace(release, sigma=factor * release.sigma)


class HiddenPrivateSigma(Mean):
    """The noise follows the spread of the private features, and the release hides it."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        factor = 0.5 + float(self.project(features, public).norm(dim=1).mean())
        return super().release(
            features, public, noise=BentNoise(noise, lambda standard: factor * standard)
        )


class SeededByData(Mean):
    """Whoever guesses the data can compute the noise."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        seed = int.from_bytes(hashlib.sha256(features.numpy().tobytes()).digest()[:8], "little")
        own = SimulatedNoise(np.random.default_rng(seed))
        return super().release(features, public, noise=own)


class OwnNoise(Mean):
    """Noise beside the noise that was passed in: too much of it, from an unknown source."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        release = super().release(features, public, noise=noise)
        return replace(
            release, vector=release.vector + release.sigma * torch.randn(len(release.vector))
        )


class Cheap(Mean):
    """Says honestly how little noise it adds, and claims the same epsilon."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        release = super().release(
            features, public, noise=BentNoise(noise, lambda standard: standard / 2)
        )
        return replace(release, sigma=release.sigma / 2)


class Averaged(Mean):
    """The mean of two releases, at the price of one."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        first, second = (
            super(Averaged, self).release(features, public, noise=noise) for _ in range(2)
        )
        return replace(first, vector=(first.vector + second.vector) / 2)


class Mislabelled(Mean):
    """Seeded noise that is stated as secure."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        return replace(super().release(features, public, noise=noise), noise="secure")


class Refusing(Mean):
    """An error that depends on one example is a release without noise."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        if not bool(features.isfinite().all()):
            raise ValueError("features are not finite")
        return super().release(features, public, noise=noise)


class Overflowing(Mean):
    """One example of a huge norm turns the vector into NaN."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        release = super().release(features, public, noise=noise)
        overflows = bool((features.norm(dim=1) > 1e5).any())
        return replace(release, vector=release.vector * (math.nan if overflows else 1.0))


class Generous(Mean):
    """Asked for one epsilon, it spends and states twice as much."""

    def __init__(self, section: Certainty) -> None:
        super().__init__(section.model_copy(update={"epsilon": 2 * section.epsilon}))


class Classes(ClassSums):
    """`classes`, to be broken in its rows, its labels or its noise."""

    def rows(self, features: Tensor, public: Public) -> Tensor:
        return functional.pad(self.project(features, public), (0, 1), value=1.0)

    def sums(self, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
        return integer_sums(rows, labels, count=classes)

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        assert labels is not None
        stated = super().release(features, public, noise=noise, labels=labels)
        usable = torch.where(features.isfinite().all(dim=1), labels, -1)
        sums = self.sums(self.rows(features, public), usable, int(public["classes"]))
        return replace(stated, vector=self.noisy(sums, noise, stated.sigma))

    def noisy(self, sums: Tensor, noise: Noise, sigma: float) -> Tensor:
        return noise.perturb(sums.flatten(), sensitivity=2.0, sigma=sigma)


class ClippedWithConstant(Classes):
    """The constant is appended first, and rows are clipped to the norm that they may then have."""

    def rows(self, features: Tensor, public: Public) -> Tensor:
        white = (features.double() - public["centre"]) @ public["whitening"].double()
        rows = functional.pad(torch.nan_to_num(white, posinf=0.0, neginf=0.0), (0, 1), value=1.0)
        norms: Tensor = rows.norm(dim=1, keepdim=True).clamp_min(math.sqrt(2))
        return math.sqrt(2) * rows / norms


class NoiseOnHeldClasses(Classes):
    """Rows of classes without examples stay zero, and show that there are none."""

    def noisy(self, sums: Tensor, noise: Noise, sigma: float) -> Tensor:
        held = (sums[:, -1:] != 0).expand_as(sums).flatten()
        return torch.where(held, super().noisy(sums, noise, sigma), 0.0)


class CountsWithoutNoise(Classes):
    """Only features get noise."""

    def noisy(self, sums: Tensor, noise: Noise, sigma: float) -> Tensor:
        vector = super().noisy(sums, noise, sigma).reshape(sums.shape)
        return torch.cat([vector[:, :-1], sums[:, -1:]], dim=1).flatten()


class LabelAsIndex(Classes):
    """Label -1 wraps around to the last class, and others fail."""

    def sums(self, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
        sums = torch.zeros(classes, rows.shape[1], dtype=torch.float64)
        for row, label in zip(rows, labels.tolist(), strict=True):
            sums[label] += row
        return sums


class StrangeLabelsEverywhere(Classes):
    """An example whose label is unknown counts for every class."""

    def sums(self, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
        strange = (labels < 0) | (labels >= classes)
        return super().sums(rows, labels, classes) + (rows * strange[:, None]).sum(dim=0)


class CountsOfAdditions(ClassCounts):
    """States that one example moves the counts by 1, as if it were added and not replaced."""

    def _scale(self) -> tuple[float, float]:
        sensitivity, sigma = super()._scale()
        return 1.0, sigma / sensitivity


class StrangeLabelsCount(ClassCounts):
    """An example of no class counts twice in every class."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        assert labels is not None, "given by the audit"
        release = super().release(features, public, noise=noise, labels=labels)
        strange = (labels < 0) | (labels >= int(public["classes"]))
        return replace(release, vector=release.vector + 2 * strange.sum())


class HeavyClass(Classes):
    """The rows of one class count half as much again."""

    heavy = 0

    def sums(self, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
        weights = torch.where(labels == self.heavy, 1.5, 1.0)
        return super().sums(rows * weights[:, None], labels, classes)


class HeavyLastClass(HeavyClass):
    """So do examples of a class that the audit's first example need not have."""

    heavy = 2


class LargerConstant(Classes):
    """Counts are scaled up to have less noise."""

    def rows(self, features: Tensor, public: Public) -> Tensor:
        return 2.0 * super().rows(features, public) - functional.pad(
            self.project(features, public), (0, 1)
        )


class HalfSensitivity(PrivateHeads):
    """As if one of the two examples moved the head, not both: the proof without its factor 2."""

    def _scale(self, num_examples: int, num_classes: int) -> tuple[float, float, float]:
        penalty, sensitivity, sigma = super()._scale(num_examples, num_classes)
        return penalty, sensitivity / 2, sigma / 2


class UnclippedHeads(PrivateHeads):
    """Features are scaled and not clipped."""

    def project(self, features: Tensor, public: Public) -> Tensor:
        scaled = torch.nan_to_num((features.double() - public["centre"]) / public["bound"], 0, 0, 0)
        return functional.pad(scaled.clamp(-50, 50), (0, 1), value=1.0) / math.sqrt(2)


BROKEN: dict[str, tuple[Callable[[Certainty], Mechanism], str]] = {
    "half the noise": (bent(lambda: lambda standard: standard / 2), "total variance"),
    "uniform noise": (bent(lambda: uniform), "distribution"),
    "Laplace noise": (bent(lambda: laplace), "distribution"),
    "no noise": (NoNoise, "noise: zeros"),
    "no noise in 1 %": (bent(sometimes(torch.zeros_like)), "noise: zeros"),
    "almost no noise in 1 %": (bent(sometimes(lambda standard: 1e-3 * standard)), "smallest norm"),
    "tenfold noise in 1 %": (bent(sometimes(lambda standard: 10 * standard)), "largest norm"),
    "NaN in 1 %": (bent(sometimes(lambda standard: math.nan * standard)), "NaN or infinity"),
    "no noise on one example": (NoNoiseOnOne, "1 example of 1 feature"),
    "noise used twice": (bent(reused(1.0)), "repeated values"),
    "noise used twice, negated": (bent(reused(-1.0)), "repeated values"),
    "noise that is partly used again": (bent(partly_repeated), "successive releases"),
    "noise seeded by the data": (SeededByData, "noise: zeros"),
    "correlated coordinates": (bent(lambda: correlated), "common part of the coordinates"),
    "two equal coordinates": (bent(lambda: paired), "correlation of two coordinates"),
    "noise on half of the coordinates": (bent(lambda: half_of_them), "variance of a coordinate"),
    "no noise on one of many coordinates": (
        bent(lambda: not_on_the_last_of_many),
        "300 features",
    ),
    "noise of random scale": (bent(random_scale), "squared norms"),
    "hidden sigma from private data": (HiddenPrivateSigma, "variance"),
    "stated sigma from private data": (StatedPrivateSigma, "depends on private data"),
    "noise of its own": (OwnNoise, "is random"),
    "less noise than epsilon needs": (Cheap, "too little"),
    "two releases for one": (Averaged, "total variance"),
    "seeded noise called secure": (Mislabelled, "stated as secure"),
    "wrong above 5,000 examples": (SubsampledAboveThousands, "distance"),
    "wrong for wide features": (TwoHalvesWhenWide, "distance"),
    "no clipping": (Unclipped, "distance"),
    "affine map after clipping": (AffineAfterClipping, "distance"),
    "NaN for huge features": (Overflowing, "distance"),
    "an error for NaN": (Refusing, "a release fails"),
    "twice the epsilon": (Generous, "more than was asked for"),
    "classes: clipped with the constant": (ClippedWithConstant, "distance"),
    "classes: a larger constant": (LargerConstant, "distance"),
    "classes: unknown labels in every class": (StrangeLabelsEverywhere, "distance"),
    "classes: a heavy class": (HeavyClass, "distance"),
    "classes: a heavy last class": (HeavyLastClass, "distance"),
    "classes: labels as indices": (LabelAsIndex, "a release fails"),
    "classes: noise on held classes only": (NoiseOnHeldClasses, "noise: zeros"),
    "classes: counts without noise": (CountsWithoutNoise, "noise: zeros"),
    "counts: the sensitivity of adding one example": (CountsOfAdditions, "distance"),
    "counts: unknown labels in every class": (StrangeLabelsCount, "distance"),
    "heads: half the sensitivity": (HalfSensitivity, "distance"),
    "heads: no clipping": (UnclippedHeads, "distance"),
}
"""Each fault with a word of the finding that must name it; `distance`: the search must find a ratio
above 1."""
