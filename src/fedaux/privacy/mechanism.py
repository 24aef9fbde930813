"""The interface of certainty mechanisms: publish, release, score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedaux.config import Certainty
from fedaux.privacy.bounds import MOST_COMPONENTS, require_size
from fedaux.privacy.gaussian import noise_multiplier

SCORES = "certainty scores"
Public = dict[str, Tensor]
"""What a mechanism derives from public data alone and sends to every client."""


@dataclass(frozen=True)
class Release:
    """What a client releases, with its privacy cost.

    `sensitivity` is the proved bound on the l2 distance between the noiseless vectors of
    neighbouring data sets, which differ by replacing one example, the number of examples being
    public.
    """

    vector: Tensor
    mechanism: str
    sensitivity: float
    sigma: float
    epsilon: float
    delta: float
    noise: str


@dataclass(frozen=True)
class Limits:
    """The possible range of a release of n examples: noiseless vectors of norm at most `radius`,
    plus Gaussian noise of at most `sigma` per coordinate."""

    radius: float
    sensitivity: float
    sigma: float

    def largest_norm(self, width: int) -> float:
        """Return radius + sigma (sqrt(k) + 10), which an honest release exceeds with a probability
        below e^-50."""
        return (self.radius + self.sigma * (math.sqrt(width) + 10.0)) * (1.0 + 1e-6) + 1e-9

    def problem(self, vector: Tensor) -> str | None:
        """Return why a vector [k] cannot be such a release, or None."""
        largest, norm = self.largest_norm(len(vector)), float(vector.double().norm())
        if norm <= largest:  # NaN is not
            return None
        return f"released a vector of norm {norm:.3g}, should be at most {largest:.3g}"


UNKNOWN_LIMITS = Limits(radius=1e6, sensitivity=math.inf, sigma=0.0)
"""For mechanisms that do not state their limits: larger vectors would swamp others."""


class Noise(Protocol):
    """A source of Gaussian noise; `kind` is "simulated" or "secure"."""

    kind: str

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return vector [k] + N(0, sigma^2 I), as private as that for every epsilon >= 0.

        `sensitivity` bounds the l2 distance between vectors of neighbours; sources that round need
        it.
        """
        ...


class SimulatedNoise:
    """Seeded noise for simulations: reproducible, so without protection, as the ledger states."""

    kind = "simulated"

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return vector [k] + N(0, sigma^2 I), drawn in double precision."""
        return vector + torch.from_numpy(self._generator.normal(0.0, sigma, len(vector))).to(
            vector.device
        )


class Mechanism:
    """One way to release something about a client's examples. `release` runs where the data is; the
    rest needs public data and releases. Subclasses override what they do otherwise."""

    purpose: str = SCORES
    """The name of the release in the ledger."""
    reads_features: bool = True
    """Whether releases depend on features; without, neither h0 nor public examples are needed."""
    scores: Literal["alone", "together", "none"] = "alone"
    """Whether a client's scores follow from its own release, from all releases, or do not exist."""
    is_sum: bool = False
    """Whether releases are sums, which grow with the number of examples."""
    stream: str = ""
    """Part of the simulated noise's stream, for releases beside scores."""
    remedy: str = "raise certainty.epsilon"
    """What helps if noise drowns a release."""

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
        """Derive what clients need from the negatives' features [M, F], the number of classes and
        the clients' numbers of examples, if known (server)."""
        raise NotImplementedError

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release a vector about the client's features [n, F] and labels [n] (client)."""
        raise NotImplementedError

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release of n examples; uses public numbers only."""
        return UNKNOWN_LIMITS

    def noise_share(
        self, num_examples: int, *, feature_width: int, num_negatives: int, num_classes: int
    ) -> float | None:
        """Return the noise of a release over its largest signal; None if no sensitivity is known
        beforehand, and the price counts as infinite."""
        return None

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Prepare public features [N, F] for scoring, once (server)."""
        raise NotImplementedError

    def log_scores(
        self,
        vectors: Tensor,
        sigmas: Tensor,
        public: Public,
        projected: Tensor,
        *,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return log s_i(x) [K, N] of released vectors [K, D] with noise sigmas [K] on projected
        features (server); `sizes` [K] are the clients' numbers of examples.

        Raises ValueError if `scores` is "none".
        """
        raise ValueError(f"{type(self).__name__} has no scores; mechanism mean has, for example")


class GaussianMechanism(Mechanism):
    """A mechanism whose noise gives the (epsilon, delta) of its settings."""

    def __init__(self, section: Certainty) -> None:
        self._epsilon, self._delta = section.epsilon, section.delta

    @property
    def _multiplier(self) -> float:
        """Sigma over sensitivity."""
        return noise_multiplier(epsilon=self._epsilon, delta=self._delta)

    def _released(
        self, vector: Tensor, mechanism: str, noise: Noise, sensitivity: float, sigma: float
    ) -> Release:
        """Return a vector [D] with noise, as the release of a mechanism of this name."""
        noisy = noise.perturb(vector, sensitivity=sensitivity, sigma=sigma)
        return Release(noisy, mechanism, sensitivity, sigma, self._epsilon, self._delta, noise.kind)


def require_shapes(public: Public, expected: Mapping[str, tuple[int | None, ...]]) -> None:
    """Raise ValueError where a tensor of the public map has another shape; None stands for any
    length.

    The map comes from the server. Broadcasting by another shape could make one example part of many
    rows, or lay examples along the axis that is cut to norm 1, and no sensitivity would hold.
    """
    for name, shape in expected.items():
        held = tuple(public[name].shape) if name in public else None
        if (
            held is None
            or len(held) != len(shape)
            or any(w not in (None, h) for h, w in zip(held, shape, strict=True))
        ):
            raise ValueError(f"the public map's tensor {name} is missing or has the wrong shape")


def number_of_classes(public: Public, *, width: int) -> int:
    """Return the number of classes of a public map, for releases of `width` numbers per class.
    Raises ValueError if it cannot be one.

    It uses public numbers only: whether a client fails does not depend on its data.
    """
    require_shapes(public, {"classes": ()})
    value = float(public["classes"])
    if not 1 <= value <= MOST_COMPONENTS / width or value != int(value):
        raise ValueError(
            f"the public map has {value:g} classes of {width} numbers: should be a whole number "
            f"of classes, and at most {MOST_COMPONENTS} numbers in all"
        )
    return int(value)


def products(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows [n, F] times a matrix [F, k], each row rounded as if it were alone.

    A matrix product chooses the order of its sums by n and by the place of a row. Here it adds
    integers whose sums stay below 2^53, which is exact in any order.
    """
    bits = (53 - math.ceil(math.log2(max(2, len(matrix))))) // 2
    (unit, left), (scale, right) = (
        _digits(rows, dim=1, bits=bits),
        _digits(matrix, dim=0, bits=bits),
    )
    total = torch.zeros((), dtype=rows.dtype, device=rows.device)
    for place in (2, 1, 0):
        total = total / 2**bits
        for one in range(place + 1):
            total = total + left[one] @ right[place - one]
    return total * unit * scale


def _digits(numbers: Tensor, *, dim: int, bits: int) -> tuple[Tensor, list[Tensor]]:
    """Return u and integers d_0, d_1, d_2 of at most 2^bits, with numbers close to
    u (d_0 + d_1 / 2^bits + d_2 / 4^bits); u follows from the largest number along `dim`."""
    unit = numbers.abs().amax(dim, keepdim=True).clamp_min(1e-200) / 2**bits
    rest, digits = numbers / unit, []
    for _ in range(3):
        digits.append(rest.round().nan_to_num(0.0))
        rest = (rest - digits[-1]) * 2**bits
    return unit, digits


def _norms(rows: Tensor) -> Tensor:
    """Return the norms [n, 1] of rows [n, k], each rounded as if its row were alone."""
    squares = rows.square()
    while (width := squares.shape[1]) > 1:
        squares = functional.pad(squares, (0, width % 2))
        left, right = squares.tensor_split(2, dim=1)
        squares = left + right
    return squares.sqrt()


def within_unit_ball(rows: Tensor) -> Tensor:
    """Return rows [N, k] clipped to norm 1; non-finite rows, and rows whose norm overflows, become
    0.

    The map comes from the server. If it overflows on some examples, the client must not fail: the
    failure would reveal them without noise.
    """
    numbers = torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, 0.0)
    return numbers / _norms(numbers).clamp_min(1.0)


def integer_mean(rows: Tensor) -> Tensor:
    """Return the mean [k] of rows [n, k] of norm at most 1, summed exactly.

    Each coordinate is rounded to a multiple of 2^-32 and summed as integers, so that the error does
    not grow with n. `bounds` states the n and k for which the sums fit.
    """
    require_size(len(rows), width=rows.shape[1])
    total = (rows * 2.0**32).round().to(torch.int64).sum(dim=0)
    return total.double() / (2.0**32 * len(rows))


def integer_sums(rows: Tensor, groups: Tensor, *, count: int) -> Tensor:
    """Return the sums [count, k] of rows [n, k] by group [n], exactly, on the same lattice.

    Entries of rows should be at most 1 in size. A group outside 0 .. count - 1 is left out.
    """
    require_size(len(rows), width=count * rows.shape[1])
    known = (groups >= 0) & (groups < count)
    # One more group collects all other examples; no index is ever negative or too large.
    index = torch.where(known, groups, count).long()
    total = torch.zeros(count + 1, rows.shape[1], dtype=torch.int64, device=rows.device)
    total.index_add_(0, index, (rows * 2.0**32).round().to(torch.int64))
    return total[:count].double() / 2.0**32
