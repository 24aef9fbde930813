"""Audit of certainty releases: attacks their privacy claim by search and by statistics.

1. `neighbours` searches for data sets that differ in one example and move the noiseless vector as
   far as possible, in units of the stated sensitivity.
2. `distribution` draws real releases from both noise sources: is the noise Gaussian, of the stated
   sigma, independent and always present?
3. `distinguishing` tells noisy releases of the worst pair apart: a lower bound on epsilon.
4. `node`, on request, runs the same tests on the answers of a federation's node, and on its ledger.

An audit can refute a claim, but not prove it. Proofs and limits of the audit: docs/proofs.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.config_errors import nearest
from fedaux.formatting import privacy_budget
from fedaux.privacy.audit.distinguishing import clopper_pearson, distinguish, epsilon_bound
from fedaux.privacy.audit.distribution import FALSE_ALARMS, PValue, alarms, draw, rarest_fault
from fedaux.privacy.audit.mechanisms import FixedNoise, Unfolded, auditable
from fedaux.privacy.audit.neighbours import REPLACEMENTS, SCENES, SHAPES, Scene, Search, search
from fedaux.privacy.mechanisms import MECHANISMS, Noise, SimulatedNoise
from fedaux.privacy.secure import SecureNoise

__all__ = ["Audit", "audit", "auditable", "clopper_pearson", "epsilon_bound", "to_json", "verdict"]

DIGITS = 9
"""Digits of a reported ratio; the rest is rounding error."""
LEAST_RELEASES = 40
SECURE_VALUES = 20_000
"""Values of secure noise drawn per shape, at about 50 microseconds each."""


@dataclass(frozen=True)
class Audit:
    """The result of attacking the claim that a release is (epsilon, delta)-private."""

    mechanism: str
    epsilon: float
    """The claim."""
    delta: float
    stated_epsilon: float
    """What the release itself states; infinite for mechanisms without privacy."""
    max_sensitivity_ratio: float
    """The largest distance found over the claimed sensitivity; above 1 the claim is false."""
    worst_kind: str
    """The replacement: a row of `REPLACEMENTS`."""
    worst_data: str
    """The data: a row of `SCENES` or of the shapes."""
    pairs: int
    """Neighbours tried."""
    epsilon_lower_bound: float
    """Proved with an error probability of 1e-6; above `epsilon` the claim is false."""
    epsilon_reachable: float
    """The largest bound that this number of trials can prove."""
    trials: int
    """Draws of the distinguishing attack for each of the two worst neighbours."""
    findings: tuple[str, ...]
    """Everything else that contradicts the claim."""
    noise: tuple[str, ...]
    """Noise sources that were tested."""
    releases: int
    """Real releases per shape."""
    node: bool
    """Whether the answers of a node were audited as well."""
    tests: int
    """Number of tests of the noise."""
    seed: int

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        too_far = self.max_sensitivity_ratio > 1
        return too_far or self.epsilon_lower_bound > self.epsilon or bool(self.findings)


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
    callback: Callable[[str], None] = lambda step: None,
) -> Audit:
    """Attack a mechanism, one of `auditable()`; its other settings come from `certainty`.

    `noise` names the sources to test, "simulated" and "secure": by default both if OpenDP is
    installed. `node`, which is `fedaux.federation.audit.audit_node`, also audits the answers of a
    node. `shapes` are client data and negatives by name. `callback` receives the name of
    each step.
    """
    mechanisms = auditable()
    if mechanism_name not in mechanisms:
        guess = nearest(mechanism_name, mechanisms) or f"; there are {', '.join(mechanisms)}"
        raise ValueError(f"mechanism {mechanism_name!r}: not known{guess}")
    least = {"trials": 600, "pairs": len(SCENES) * len(REPLACEMENTS), "releases": LEAST_RELEASES}
    for name, given in (("trials", trials), ("pairs", pairs), ("releases", releases)):
        if given < least[name]:
            raise ValueError(f"{name} = {given}: should be at least {least[name]}")
    if node is not None and mechanism_name not in MECHANISMS:
        raise ValueError(f"mechanism {mechanism_name!r}: a node has no such mechanism")
    claim = {"epsilon": epsilon, "delta": delta, "mechanism": mechanism_name}
    section = Certainty(**((certainty or Certainty()).model_dump() | claim))
    build = mechanisms[mechanism_name]
    with _one_thread():
        callback(f"searching {pairs} pairs of neighbours")
        found = search(
            Unfolded if mechanism_name == "released-code" else build,
            section,
            pairs=pairs,
            generator=seeding.generator(seed, "audit neighbours"),
            shapes=shapes,
        )
        # The search may look at other units; the attack is on the mechanism itself.
        worst = replace(found.worst, mechanism=build(section))
        reachable = float(epsilon_bound(trials // 2, 0, trials=trials // 2, delta=delta))
        bound = reachable  # a non-finite vector reveals its data every time
        if math.isfinite(worst.ratio):
            callback(f"telling {trials} noisy releases apart")
            generator = seeding.generator(seed, "audit noise")
            bound = distinguish(worst, delta=delta, trials=trials, generator=generator)
        stated = worst.release(0, noise=FixedNoise(0.0))
        values: list[PValue] = []
        if noise is None:
            noise = ("simulated", "secure") if find_spec("opendp") else ("simulated",)
        if math.isfinite(stated.epsilon):
            if stated.epsilon > epsilon or stated.delta > delta:
                asked = f"({stated.epsilon:g}, {stated.delta:g}) for ({epsilon:g}, {delta:g})"
                found.findings["a release states more than was asked for"] = asked
            values = check_noise(found, noise, releases=releases, seed=seed, callback=callback)
            if node is not None:
                callback("testing a node")
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
        noise=noise if values else (),
        releases=releases,
        node=node is not None,
        tests=len(values),
        seed=seed,
    )


def check_noise(
    found: Search,
    sources: tuple[str, ...],
    *,
    releases: int,
    seed: int,
    callback: Callable[[str], None],
) -> list[PValue]:
    """Return p-values of the noise at each shape and for the worst neighbours; adds to the
    findings."""
    cases = {scene: pair for scene, pair in found.by_scene.items() if scene not in SCENES}
    cases[found.worst.scene] = found.worst
    values: list[PValue] = []
    for source in sources:
        for scene, pair in cases.items():
            if not math.isfinite(pair.ratio):
                continue  # refuted already
            noise: Noise = SimulatedNoise(seeding.generator(seed, "audit releases", part=scene))
            count = releases
            if source == "secure":
                noise, width = SecureNoise(), len(pair.noiseless(0).vector)
                count = min(releases, max(LEAST_RELEASES, SECURE_VALUES // width))
            callback(f"testing {source} noise: {count} releases, {scene}")
            values += draw(pair, noise, releases=count, findings=found.findings)
    return values


def to_json(audit: Audit) -> dict[str, Any]:
    """Return the audit and its verdict for JSON; infinity is the string "inf"."""
    fields = asdict(audit) | {"violated": audit.violated, "verdict": verdict(audit)}
    return {key: "inf" if value == math.inf else value for key, value in fields.items()}


def verdict(audit: Audit) -> str:
    """Return the result in plain words."""
    claim = f"{privacy_budget(audit.epsilon, audit.delta)}-differentially private"
    if audit.violated:
        text = f"`{audit.mechanism}` is not {claim}."
        if audit.findings:
            text += f" Faults: {'; '.join(audit.findings)}."
    else:
        text = f"Nothing contradicts that `{audit.mechanism}` is {claim}; this is no proof."
        if audit.epsilon_reachable <= audit.epsilon:
            most = f"{audit.epsilon_reachable:.3g}"
            text += f" {audit.trials} trials cannot show more than ε = {most}: draw more."
    if math.isinf(audit.stated_epsilon):
        text += " Its releases state ε = ∞."
    text += (
        f" Over {audit.pairs} pairs of neighbours, replacing one example moved the release by up "
        f"to {audit.max_sensitivity_ratio:.4g} times the claimed sensitivity ({audit.worst_kind}; "
        f"data: {audit.worst_data}). From {audit.trials} noisy releases of each, an attacker "
        f"proved ε ≥ {audit.epsilon_lower_bound:.3g}."
    )
    if audit.tests:
        text += (
            f" {audit.tests} tests of {' and '.join(audit.noise)} "
            f"noise{', also at a node' if audit.node else ''}, {audit.releases} releases per "
            "shape. A release without noise, or with NaN, that occurs at a rate of "
            f"{100 * rarest_fault(audit.releases):.2g} % is detected with a probability of 99 %; "
            f"the probability of a false alarm is {FALSE_ALARMS:g}."
        )
    return text


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: many small regressions are several times slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
