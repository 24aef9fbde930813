"""An attack on the certainty releases: what they promise is put to the test, by search and by statistics.

1. `neighbours`: a search for data sets that differ in one example and move the noiseless vector as far as possible, in
   units of the sensitivity that the mechanism states.
2. `distribution`: thousands of real releases, from both sources of noise. Is the noise Gaussian, of the stated sigma,
   independent and always there?
3. `distinguishing`: an attacker tells noisy releases of the worst pair apart, which gives a lower bound on epsilon.
4. `node`, on request: the same tests on the answers of a real node of a federation, and on its ledger.

An audit refutes; it never proves. The proofs, and what an audit cannot see, are in docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.formatting import privacy_budget
from fedaux.privacy.audit.distinguishing import clopper_pearson, distinguish, epsilon_bound
from fedaux.privacy.audit.distribution import FALSE_ALARMS, PValue, alarms, draw, rarest_fault
from fedaux.privacy.audit.mechanisms import FixedNoise, Unfolded, auditable
from fedaux.privacy.audit.neighbours import REPLACEMENTS, SCENES, SHAPES, Scene, Search, search
from fedaux.privacy.mechanisms import MECHANISMS, Noise, SimulatedNoise
from fedaux.privacy.secure import SecureNoise

__all__ = ["Audit", "audit", "auditable", "clopper_pearson", "epsilon_bound", "to_json", "verdict"]

DIGITS = 9
"""Digits of a reported ratio; what lies behind them is rounding."""
LEAST_RELEASES = 40
SECURE_VALUES = 20_000
"""Values of secure noise drawn at a shape, about 50 microseconds each: wide shapes get fewer releases of it."""


@dataclass(frozen=True)
class Audit:
    """What the attack achieved against the claim that a release is (epsilon, delta)-private."""

    mechanism: str
    epsilon: float
    """The claim."""
    delta: float
    stated_epsilon: float
    """What the release itself states; infinite for mechanisms that promise nothing."""
    max_sensitivity_ratio: float
    """The largest distance found, over the sensitivity claimed; above 1 the claim is false."""
    worst_kind: str
    """Which replacement did it: a row of `REPLACEMENTS`."""
    worst_data: str
    """In which data: a row of `SCENES` or of the shapes."""
    pairs: int
    """Neighbours tried."""
    epsilon_lower_bound: float
    """What the attacker proved, with an error probability of 1e-6; above `epsilon` the claim is false."""
    epsilon_reachable: float
    """The most that this number of trials can prove."""
    trials: int
    """Draws of the distinguishing attack for each of the two worst neighbours."""
    findings: tuple[str, ...]
    """Everything else that contradicts the promise."""
    noise: tuple[str, ...]
    """Sources of noise that were tested."""
    releases: int
    """Real releases at each shape."""
    node: bool
    """Whether the answers of a node were audited as well."""
    tests: int
    """Tests of the noise, with a family-wise rate of false alarms of `FALSE_ALARMS`."""
    seed: int

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        refuted = self.max_sensitivity_ratio > 1 or self.epsilon_lower_bound > self.epsilon
        return refuted or bool(self.findings)


def audit(
    mechanism_name: str,
    *,
    epsilon: float,
    delta: float,
    trials: int = 4_000_000,
    seed: int = 0,
    pairs: int = 2400,
    releases: int = 700,
    noise: tuple[str, ...] | None = None,
    node: Callable[..., list[PValue]] | None = None,
    certainty: Certainty | None = None,
    shapes: Mapping[str, Scene] = SHAPES,
) -> Audit:
    """Attack a mechanism, one of `auditable()`, whose other settings are those of `certainty` or the defaults.

    `noise` names the sources to test: "simulated", "secure"; both when OpenDP is installed. `node`, which is
    `fedaux.federation.audit.audit_node`, also audits the answers of a node. `shapes` are client data and
    negatives by name.
    """
    mechanisms = auditable()
    if mechanism_name not in mechanisms:
        raise ValueError(
            f"mechanism {mechanism_name!r}: not known; there are {', '.join(mechanisms)}"
        )
    least = len(SCENES) * len(REPLACEMENTS)
    for name, given, needed in (
        ("trials", trials, 600),
        ("pairs", pairs, least),
        ("releases", releases, LEAST_RELEASES),
    ):
        if given < needed:
            raise ValueError(f"{name} = {given}: should be at least {needed}")
    if node is not None and mechanism_name not in MECHANISMS:
        raise ValueError(f"mechanism {mechanism_name!r}: a node has no such mechanism")
    claim = {"epsilon": epsilon, "delta": delta, "mechanism": mechanism_name}
    section = Certainty(**((certainty or Certainty()).model_dump() | claim))
    build = mechanisms[mechanism_name]
    with _one_thread():
        found = search(
            Unfolded if mechanism_name == "release" else build,
            section,
            pairs=pairs,
            generator=seeding.generator(seed, "audit neighbours"),
            shapes=shapes,
        )
        worst, mechanism = found.worst, build(section)
        reachable = float(epsilon_bound(trials // 2, 0, trials=trials // 2, delta=delta))
        bound = reachable  # a vector that is not finite gives its data away every time
        if math.isfinite(worst.ratio):
            generator = seeding.generator(seed, "audit noise")
            bound = distinguish(mechanism, worst, delta=delta, trials=trials, generator=generator)
        stated = mechanism.release(
            worst.neighbours[0], mechanism.publish(worst.negatives), noise=FixedNoise(0.0)
        )
        values: list[PValue] = []
        sources = available_noise() if noise is None else noise
        if math.isfinite(stated.epsilon):
            if stated.epsilon > epsilon or stated.delta > delta:
                asked = f"({stated.epsilon:g}, {stated.delta:g}) for ({epsilon:g}, {delta:g})"
                found.findings["a release states more than was asked for"] = asked
            values = tested_noise(found, sources, releases=releases, seed=seed)
            if node is not None:
                values += node(section, releases=releases, seed=seed, findings=found.findings)
    findings = found.findings | alarms(values)
    return Audit(
        mechanism=mechanism_name,
        epsilon=epsilon,
        delta=delta,
        stated_epsilon=stated.epsilon,
        max_sensitivity_ratio=round(worst.ratio, DIGITS),
        worst_kind=worst.kind,
        worst_data=worst.scene,
        pairs=found.pairs,
        epsilon_lower_bound=bound,
        epsilon_reachable=reachable,
        trials=trials,
        findings=tuple(f"{fault}: {where}" for fault, where in findings.items()),
        noise=tuple(sources) if values else (),
        releases=releases,
        node=node is not None,
        tests=len(values),
        seed=seed,
    )


def available_noise() -> tuple[str, ...]:
    """Return the sources of noise that can run here; secure noise needs OpenDP."""
    return ("simulated", "secure") if find_spec("opendp") else ("simulated",)


def tested_noise(
    found: Search, sources: tuple[str, ...], *, releases: int, seed: int
) -> list[PValue]:
    """Return p-values of the noise at each shape and for the worst neighbours of all; adds to the findings."""
    cases = {scene: pair for scene, pair in found.by_scene.items() if scene not in SCENES}
    cases[found.worst.scene] = found.worst
    values: list[PValue] = []
    for source in sources:
        for scene, pair in cases.items():
            if not math.isfinite(pair.ratio):
                continue  # refuted already
            generator = seeding.generator(seed, "audit releases", part=scene)
            noise: Noise = SecureNoise() if source == "secure" else SimulatedNoise(generator)
            count = releases
            if source == "secure":
                width = len(
                    pair.mechanism.release(
                        pair.neighbours[0], pair.public, noise=FixedNoise(0.0)
                    ).vector
                )
                count = min(releases, max(LEAST_RELEASES, SECURE_VALUES // width))
            values += draw(pair, noise, releases=count, findings=found.findings)
    return values


def to_json(audit: Audit) -> dict[str, Any]:
    """Return the audit as JSON can hold it, with the verdict; infinity is the string "inf"."""
    fields = asdict(audit) | {"violated": audit.violated, "verdict": verdict(audit)}
    return {key: "inf" if value == math.inf else value for key, value in fields.items()}


def verdict(audit: Audit) -> str:
    """Return in plain words what was found."""
    claim = f"{privacy_budget(audit.epsilon, audit.delta)}-differentially private"
    searched = (
        f"Over {audit.pairs} neighbours (data sets of one, public, size), replacing one example moved the release by "
        f"up to {audit.max_sensitivity_ratio:.4g} times the sensitivity claimed ({audit.worst_kind}; data: "
        f"{audit.worst_data}). From {audit.trials} noisy releases of each of the two, an attacker showed "
        f"ε ≥ {audit.epsilon_lower_bound:.3g}."
    )
    if audit.tests:
        searched += (
            f" {audit.tests} tests of {' and '.join(audit.noise)} noise{', also at a node' if audit.node else ''}, "
            f"{audit.releases} releases at each shape. A release without noise, or with NaN, that occurs at a rate of "
            f"{100 * rarest_fault(audit.releases):.2g} % is seen with a probability of 99 %; false alarms have a "
            f"probability of {FALSE_ALARMS:g}."
        )
    if audit.violated:
        conclusion = f"`{audit.mechanism}` is not {claim}."
        if audit.findings:
            conclusion += " Faults: " + "; ".join(audit.findings) + "."
    else:
        conclusion = f"Nothing contradicts that `{audit.mechanism}` is {claim}; that is no proof."
        if audit.epsilon_reachable <= audit.epsilon:
            reachable = f"{audit.epsilon_reachable:.3g}"
            conclusion += (
                f" This number of trials cannot show more than ε = {reachable}: draw more."
            )
    if math.isinf(audit.stated_epsilon):
        conclusion += " Its releases say so themselves: they state ε = ∞."
    return f"{conclusion} {searched}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of tiny regressions run many times slower where threads compete for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
