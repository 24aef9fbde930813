from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.broken_mechanisms import BROKEN
from helpers.plain_noise import NoNoise, normal
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.federation.audit import audit_node
from fedaux.privacy import audit as module
from fedaux.privacy.audit import audit, auditable, clopper_pearson, epsilon_bound, to_json, verdict
from fedaux.privacy.audit.distribution import PValue, alarms, p_values, rarest_fault
from fedaux.privacy.audit.neighbours import gauss, search
from fedaux.privacy.ledger import LedgerEntry, entry_of
from fedaux.privacy.mechanisms import MECHANISMS, Mechanism, SimulatedNoise
from fedaux.privacy.paper import NEWTON_FEATURES, minimise, solve
from fedaux.privacy.released_code import claimed_sensitivity, classical_multiplier, regress

SHAPES = {
    "1 example of 1 feature": gauss(1, 40, width=1),
    "60 examples of 16 features": gauss(60, 80, width=16),
    "12 examples of 300 features": gauss(12, 310, width=300),
    "5,500 examples of 2 features": gauss(5500, 40, width=2),
}
"""Smaller cases than in a whole audit, and as varied."""
FEATURES = {"60 examples of 16 features": SHAPES["60 examples of 16 features"]}
QUICK: dict[str, Any] = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "trials": 600,
    "pairs": 60,
    "shapes": SHAPES,
}
RELEASES = 100
"""At four shapes and for the worst pair: 500 in all, which see a fault of 1 % with 99.3 %."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_mechanism_is_found_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    build, word = BROKEN[name]
    monkeypatch.setitem(MECHANISMS, name, build)
    fewer = {"shapes": FEATURES} if name.startswith("heads") else {}  # regressions take time
    result = audit(name, **(QUICK | fewer), releases=RELEASES, noise=("simulated",))
    assert result.violated
    assert f"`{name}` is not (1, 1e-5)-differentially private" in verdict(result)
    if word == "distance":
        assert result.max_sensitivity_ratio > 1.05
    else:
        assert word in " ".join(result.findings)


@pytest.mark.parametrize(
    ("name", "seed"),
    [("mean", 0), ("paper", 4), ("classes", 5), ("heads", 6), ("counts", 7)],
)
def test_correct_mechanisms_pass(name: str, seed: int) -> None:
    less: dict[str, Any] = {}
    if name in ("paper", "heads"):  # regressions take time
        less = {"releases": 40, "shapes": FEATURES}
    result = audit(name, **(QUICK | {"releases": RELEASES} | less), noise=("simulated",), seed=seed)
    assert result.findings == ()
    assert not result.violated
    assert result.tests >= 36
    assert "no proof" in verdict(result)


@pytest.mark.parametrize("epsilon", [0.001, 16.0])
def test_correct_mechanisms_pass_at_the_ends_of_epsilon(epsilon: float) -> None:
    claim = QUICK | {"epsilon": epsilon, "delta": 1e-12, "shapes": FEATURES}
    assert not audit("mean", **claim, releases=40).violated


def test_an_audit_tells_its_steps() -> None:
    steps: list[str] = []
    audit("mean", **QUICK, releases=40, noise=("simulated",), callback=steps.append)
    assert steps[:2] == ["searching 60 pairs of neighbours", "telling 600 noisy releases apart"]
    tested = {step.partition(", ")[2] for step in steps[2:]}
    assert set(SHAPES) <= tested


@pytest.mark.chance
@pytest.mark.slow
def test_secure_noise_is_tested_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opendp")
    quick = QUICK | {"shapes": FEATURES, "releases": 200, "noise": ("secure",)}
    assert not audit("mean", **quick).violated
    assert not audit("classes", **quick).violated
    assert not audit("counts", **quick).violated
    assert not audit("heads", **(quick | {"releases": 40})).violated
    for name in ("half the noise", "uniform noise", "noise used twice"):
        build, word = BROKEN[name]
        monkeypatch.setitem(MECHANISMS, name, build)
        assert word in " ".join(audit(name, **quick).findings)


@pytest.mark.long
@pytest.mark.chance
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "paper", "classes", "counts", "heads"])
def test_a_whole_audit_finds_nothing(name: str) -> None:
    """Of the default mechanism at its full size; of the others, with smaller shapes."""
    pytest.importorskip("flwr")
    pytest.importorskip("opendp")
    whole = name == Certainty().mechanism
    fewer: dict[str, Any] = {} if whole else {"shapes": SHAPES, "releases": RELEASES, "pairs": 300}
    result = audit(name, epsilon=0.1, delta=1e-5, node=audit_node, **fewer)
    assert not result.violated
    assert result.noise == ("simulated", "secure")


@pytest.mark.parametrize("shape", [(40, 1), (40, 7), (60, 80)])
def test_false_alarms_are_as_rare_as_stated(shape: tuple[int, int]) -> None:
    """At a family-wise rate of 5 %, of 100 batteries of tests on true noise at most 5 + 3 sigma may
    fail."""
    generator = seeding.generator(0, "t")
    failed = 0
    for _ in range(100):
        values = p_values(generator.normal(size=shape), resolution=1e-15)
        failed += bool(
            alarms([PValue(test, "", value) for test, value in values.items()], rate=0.05)
        )
    assert failed <= 11


def test_rare_faults_are_seen_at_the_stated_rate() -> None:
    assert rarest_fault(459) == pytest.approx(0.01, abs=1e-4)
    assert 1 - (1 - rarest_fault(700)) ** 700 == pytest.approx(0.99)


@pytest.mark.quickly("mean-1.0")
@pytest.mark.parametrize(("name", "least"), [("mean", 1.0), ("classes", 1.0), ("paper", 0.55)])
def test_hundreds_of_neighbours_stay_within_the_stated_sensitivity(name: str, least: float) -> None:
    """And come near it: `mean` needs all of its noise."""
    result = audit(
        name, epsilon=4.0, delta=1e-5, trials=400_000, pairs=400, noise=(), shapes=FEATURES
    )
    assert least <= result.max_sensitivity_ratio <= 1.0
    assert 0.1 * 4.0 < result.epsilon_lower_bound < 4.0
    assert not result.violated


def test_little_regularisation_makes_the_paper_no_less_private() -> None:
    quick = QUICK | {"pairs": 200, "shapes": {}, "noise": ()}
    result = audit("paper", **quick, certainty=Certainty(regularisation=1e-3))
    assert 0.6 < result.max_sensitivity_ratio <= 1.0
    assert not result.violated


@pytest.mark.parametrize(("epsilon", "trials"), [(0.1, 4_000_000), (4.0, 400_000)])
def test_half_the_noise_is_a_larger_epsilon(
    monkeypatch: pytest.MonkeyPatch, epsilon: float, trials: int
) -> None:
    monkeypatch.setitem(MECHANISMS, "half", BROKEN["half the noise"][0])
    attack: dict[str, Any] = QUICK | {
        "epsilon": epsilon,
        "trials": trials,
        "shapes": {},
        "noise": (),
    }
    broken = audit("half", **attack)
    assert broken.max_sensitivity_ratio <= 1.0  # nothing but the noise is wrong
    assert broken.epsilon_lower_bound > epsilon
    assert broken.violated
    sound = audit("mean", **attack)
    assert 0.3 * epsilon < sound.epsilon_lower_bound < epsilon


def test_the_published_claim_is_false_by_two_orders_of_magnitude() -> None:
    """The features' norm looks at private data: one outlier takes the weight off all other
    examples."""
    claim = QUICK | {"epsilon": 0.1, "trials": 100_000, "pairs": 400, "shapes": FEATURES}
    result = audit("published", **claim, releases=40)
    assert 150 < result.max_sensitivity_ratio < 200
    assert "outlier" in result.worst_kind
    assert result.epsilon_lower_bound > 50 * result.epsilon
    assert result.violated
    assert "is not (0.1, 1e-5)-differentially private" in verdict(result)


def test_without_outliers_the_published_theorem_holds() -> None:
    """Only the norm is wrong: while the largest norm is a negative's, its bound holds."""
    mechanism = auditable()["published"](Certainty())
    public = mechanism.publish(normal(40, 4))
    features = 0.1 * normal(10, 4, seed=1)
    base = mechanism.release(features, public, noise=NoNoise())
    for seed in range(50):
        neighbour = torch.cat([0.1 * normal(1, 4, seed=seed), features[1:]])
        other = mechanism.release(neighbour, public, noise=NoNoise())
        assert float((other.vector - base.vector).norm()) < base.sensitivity


def test_the_released_code_is_off_by_more_than_the_size_of_the_data() -> None:
    claim = QUICK | {"epsilon": 0.1, "trials": 1_000_000, "pairs": 200, "shapes": FEATURES}
    result = audit("released-code", **claim)
    assert result.max_sensitivity_ratio > 2000  # |D_i| + |D-| in the scenes of many examples
    assert result.epsilon_lower_bound > 100 * result.epsilon
    assert result.violated
    assert result.stated_epsilon == math.inf
    assert result.tests == 0  # it promises nothing
    assert "state ε = ∞" in verdict(result)


def test_without_noise_nothing_is_private() -> None:
    result = audit("none", **(QUICK | {"epsilon": 0.1, "trials": 100_000, "shapes": {}}))
    assert result.max_sensitivity_ratio <= 1.0
    assert result.epsilon_lower_bound == result.epsilon_reachable > 8.0
    assert result.violated


def test_infinity_becomes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MECHANISMS, "overflowing", BROKEN["NaN for huge features"][0])
    result = audit("overflowing", **QUICK)
    assert to_json(result)["max_sensitivity_ratio"] == "inf"


def test_features_that_are_not_finite_move_the_papers_vector_no_further_than_others() -> None:
    mechanism = MECHANISMS["paper"](Certainty())
    public = mechanism.publish(normal(40, 4))
    features = normal(10, 4, seed=1)
    base = mechanism.release(features, public, noise=NoNoise())
    for value in (math.nan, math.inf, -math.inf):
        neighbour = torch.cat([torch.full((1, 4), value, dtype=torch.float64), features[1:]])
        other = mechanism.release(neighbour, public, noise=NoNoise())
        assert float((other.vector - base.vector).norm()) <= base.sensitivity


def test_one_seed_gives_one_result() -> None:
    first, again, other = (
        audit(
            "mean",
            **(QUICK | {"trials": 20_000, "shapes": FEATURES}),
            noise=("simulated",),
            releases=40,
            seed=seed,
        )
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first.epsilon_lower_bound != other.epsilon_lower_bound


def test_refinement_never_makes_a_pair_worse() -> None:
    plain, refined = (
        search(
            MECHANISMS["paper"],
            Certainty(),
            pairs=pairs,
            generator=seeding.generator(0, "t"),
            shapes={},
        )
        for pairs in (60, 200)
    )
    assert refined.worst.ratio >= plain.worst.ratio
    left, right = refined.worst.neighbours
    assert torch.equal(left[1:], right[1:])


@pytest.mark.parametrize("trials", [1, 40, 5000])
def test_confidence_intervals_equal_scipys(trials: int) -> None:
    for successes in sorted({0, 1, trials // 3, trials - 1, trials}):
        low, high = clopper_pearson(successes, trials=trials, confidence=0.95)
        peer = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="exact")
        assert (float(low), float(high)) == pytest.approx((peer.low, peer.high), rel=1e-9)


def test_bound_on_epsilon_is_right_where_it_is_known() -> None:
    """Randomised response at epsilon = log 3: p = 3/4, q = 1/4."""
    bound = float(epsilon_bound(3_000_000, 1_000_000, trials=4_000_000, delta=0.0))
    assert math.log(3) - 0.01 < bound < math.log(3)
    assert float(epsilon_bound(0, 0, trials=100, delta=1e-5)) == 0.0
    assert float(epsilon_bound(500, 500, trials=1000, delta=1e-5)) == 0.0


def test_bound_rarely_errs() -> None:
    """With p and q at the very edge of epsilon = 1, at most 5 % of bounds may lie above 1."""
    generator = seeding.generator(0, "t")
    rate = 0.01
    hits, false_alarms = (
        generator.binomial(3000, rate * math.e, 4000),
        generator.binomial(3000, rate, 4000),
    )
    bounds = epsilon_bound(hits, false_alarms, trials=3000, delta=0.0, confidence=0.95)
    assert float((bounds > 1.0).mean()) < 0.05


def test_audits_become_json_and_words() -> None:
    result = audit("none", **(QUICK | {"epsilon": 16.0, "shapes": {}}))
    fields = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert {"max_sensitivity_ratio", "epsilon_lower_bound", "trials", "verdict"} <= set(fields)
    assert fields["stated_epsilon"] == "inf"
    assert "draw more" in fields["verdict"]


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="'maen': not known; did you mean mean"):
        audit("maen", epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="trials = 10: should be at least"):
        audit("mean", epsilon=1.0, delta=1e-5, trials=10)
    with pytest.raises(ValueError, match="releases = 10: should be at least"):
        audit("mean", epsilon=1.0, delta=1e-5, releases=10)
    with pytest.raises(ValueError, match="a node has no such mechanism"):
        audit("published", epsilon=1.0, delta=1e-5, node=audit_node)
    with pytest.raises(ValueError, match="pairs = 10: should be at least"):
        audit("mean", epsilon=1.0, delta=1e-5, pairs=10)
    with pytest.raises(ValueError, match="epsilon"):
        audit("mean", epsilon=0.0, delta=1e-5)


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    with module._one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# The mechanism `released-code`


@pytest.mark.parametrize("regularisation", [1.0, 0.1, 1e-2])
def test_released_code_equals_scikit_learn(regularisation: float) -> None:
    positives, negatives = normal(15, 4, shift=1.0), normal(40, 4, seed=1)
    solution, largest = regress(positives, negatives, regularisation=regularisation)
    inputs = torch.cat([positives, negatives]).numpy()
    assert float(largest) == pytest.approx(np.linalg.norm(inputs, axis=1).max())
    peer = LogisticRegression(C=1 / regularisation, tol=1e-12, solver="newton-cholesky")
    peer.fit(inputs / float(largest), np.r_[np.ones(15), np.zeros(40)])
    assert solution.tolist() == pytest.approx([*peer.coef_[0], *peer.intercept_], abs=1e-6)


def test_released_scores_are_scikit_learns_probabilities() -> None:
    mechanism: Mechanism = MECHANISMS["released-code"](Certainty(regularisation=0.1))
    positives, negatives, points = (
        normal(15, 4, shift=1.0),
        normal(40, 4, seed=1).float(),
        normal(9, 4, seed=2),
    )
    public = mechanism.publish(negatives)
    release = mechanism.release(positives, public, noise=NoNoise())
    scores = mechanism.log_scores(
        release.vector[None], torch.zeros(1), public, mechanism.project(points, public)
    )[0]
    inputs = torch.cat([positives, negatives]).numpy()
    scale = np.linalg.norm(inputs, axis=1).max()
    peer = LogisticRegression(C=10.0, tol=1e-12, solver="newton-cholesky")
    peer.fit(inputs / scale, np.r_[np.ones(15), np.zeros(40)])
    assert scores.exp().tolist() == pytest.approx(
        peer.predict_proba(points.numpy() / scale)[:, 1] + 1e-8, abs=1e-6
    )


def test_released_noise_is_the_papers_and_shrinks_with_the_clients_norm() -> None:
    mechanism = MECHANISMS["released-code"](Certainty(epsilon=0.5, regularisation=0.1))
    public = mechanism.publish(normal(40, 4))
    features = 100 * normal(15, 4, seed=1)
    clean = mechanism.release(features, public, noise=NoNoise())
    assert clean.sigma == pytest.approx(2 / (0.1 * 55) * math.sqrt(2 * math.log(1.25e5)) / 0.5)
    noise = SimulatedNoise(seeding.generator(0, "n"))
    draws = torch.stack(
        [mechanism.release(features, public, noise=noise).vector - clean.vector for _ in range(300)]
    )
    norm = float(features.norm(dim=1).max())
    assert float(draws[:, :-1].std()) == pytest.approx(clean.sigma / norm, rel=0.1)
    assert float(draws[:, -1].std()) == pytest.approx(clean.sigma, rel=0.15)


def test_released_code_states_that_it_is_not_private() -> None:
    mechanism = MECHANISMS["released-code"](Certainty())
    public, noise = mechanism.publish(normal(40, 4)), SimulatedNoise(seeding.generator(0, "n"))
    release = mechanism.release(normal(10, 4, seed=1), public, noise=noise)
    assert (release.epsilon, release.sensitivity, release.noise) == (
        math.inf,
        math.inf,
        "simulated",
    )
    entry = entry_of(release, client=0, num_examples=10, purpose="certainty scores")
    text = json.dumps(entry.to_json(), allow_nan=False)
    assert json.loads(text)["sensitivity"] == "inf"
    assert LedgerEntry.from_json(json.loads(text)) == entry
    with pytest.raises(ValueError, match="nothing to release"):
        mechanism.release(normal(10, 4)[:0], public, noise=noise)
    with pytest.raises(ValueError, match="not finite"):
        mechanism.release(normal(10, 4) / 0.0, public, noise=noise)


def test_the_papers_formulas() -> None:
    assert claimed_sensitivity(100, regularisation=0.1) == pytest.approx(0.2)
    assert classical_multiplier(epsilon=0.1, delta=1e-5) == pytest.approx(48.448, abs=1e-3)


# The solver that both regressions share


def test_many_features_and_few_take_different_ways_to_the_same_place() -> None:
    few, zeros = normal(60, 5), torch.zeros(60, NEWTON_FEATURES).double()
    by_newton = solve(few[:20], few[20:], regularisation=0.01)
    wide = torch.cat([few, zeros], dim=1)
    by_both = solve(wide[:20], wide[20:], regularisation=0.01)
    assert by_both[:5].tolist() == pytest.approx(by_newton.tolist(), abs=1e-6)
    assert float(by_both[5:].norm()) == 0.0


def test_the_solver_converges_where_plain_newton_steps_run_away() -> None:
    """Separable data with next to no penalty: far from quadratic at the start."""
    inputs = torch.cat([normal(30, 3).abs() * 1e3, normal(30, 3, seed=1).abs()])
    penalties = torch.full((3,), 1e-4, dtype=torch.float64)
    weights = minimise(inputs, penalties, tolerance=1e-9)
    gradient = penalties * weights - inputs.T @ torch.sigmoid(-(inputs @ weights)) / 60
    assert float(gradient.norm()) <= 1e-9


def test_the_solver_says_when_rounding_stops_it() -> None:
    with pytest.raises(ValueError, match=r"stopped at .* larger certainty\.regularisation"):
        minimise(
            normal(30, 3), torch.ones(3).double(), tolerance=-1.0
        )  # less than nothing is out of reach
