from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import tiny
from rich.console import Console

import fedaux
from fedaux.privacy import mean
from fedaux.privacy.accounting import Query, composed_epsilon
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.ledger import NEIGHBOURS
from fedaux.privacy.mechanisms import MECHANISMS, SimulatedNoise
from fedaux.running.privacy_plan import (
    NOISE_LIMIT,
    PrivacyPlan,
    least_examples,
    noise_warnings,
    privacy_plan,
)
from fedaux.seeding import generator

needs_accountant = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None,
    reason="needs the extra privacy (dp-accounting)",
)

SIZES = (50, 0, 400, 5000)


def plan(**changes: Any) -> PrivacyPlan:
    return privacy_plan(
        tiny(**changes), SIZES, input_shape=(1, 8, 8), num_negatives=40, num_classes=10
    )


def printed(shown: PrivacyPlan) -> str:
    console = Console(file=io.StringIO(), width=160)
    for part in shown.render():
        console.print(part, soft_wrap=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_scores_cost_what_the_recipe_says_and_updates_are_named_unprotected() -> None:
    shown = plan(method=["fedaux", "fedavg"])
    scored, plain = shown.groups
    assert (scored.methods, plain.methods) == (("fedaux",), ("fedavg",))
    assert [client.client for client in scored.clients] == [0, 2, 3]
    assert all(
        client.scores is not None and client.scores.cost == (1.0, 1e-5) for client in scored.clients
    )
    assert all(client.scores is None and client.worst is None for client in plain.clients)
    text = printed(shown)
    assert NEIGHBOURS in text
    assert "n_i is public" in text
    assert "not protected" in text
    assert "without differential privacy" in text
    assert "client 1" in text


@pytest.mark.parametrize("mechanism", ["mean", "paper"])
def test_the_noise_is_the_one_that_the_mechanism_adds(mechanism: str) -> None:
    experiment = tiny(certainty={"mechanism": mechanism})
    shown = plan(certainty={"mechanism": mechanism})
    width = 4 if mechanism == "mean" else 32
    made = MECHANISMS[mechanism](experiment.certainty)
    features = torch.randn(400, 32, generator=torch.Generator().manual_seed(0))
    noise = SimulatedNoise(generator(0, "certainty noise"))
    release = made.release(features, made.publish(features[:40]), noise=noise)
    scores = shown.groups[0].clients[1].scores
    assert scores is not None
    signal = 1.0 if mechanism == "mean" else math.sqrt(2 * math.log(2) / 0.1)
    assert scores.noise_share == pytest.approx(release.sigma * math.sqrt(width) / signal)


def test_small_clients_are_warned_with_the_size_that_would_do() -> None:
    shown = plan(certainty={"epsilon": 0.1, "components": 16})
    needed = math.ceil(2 * noise_multiplier(epsilon=0.1, delta=1e-5) * 4 / NOISE_LIMIT)
    warning = next(line for line in shown.sentences() if line.startswith("Warning"))
    assert warning.startswith("Warning: fedaux: ")
    assert "certainty scores of clients 0, 2 with 50 to 400 examples" in warning
    assert f"would take {needed} examples" in warning
    assert not plan(certainty={"epsilon": 50.0}).warnings()


@pytest.mark.parametrize(
    ("components", "hinted"), [(4, True), (12, False), (13, False), (26, True), (32, True)]
)
def test_components_that_do_not_suit_the_noise_are_named_with_the_number_that_does(
    components: int, hinted: bool
) -> None:
    shown = plan(certainty={"epsilon": 0.1, "components": components})
    assert (
        mean.suitable_components(400, epsilon=0.1, delta=1e-5) == 13
    )  # 400 is the middle of three sizes
    hints = [line for line in shown.sentences() if line.startswith("Hint")]
    assert len(hints) == hinted
    assert all(
        line.startswith(
            f"Hint: certainty.components = {components}; for the scores of fedaux about 13 suit a "
            "client with 400 examples"
        )
        for line in hints
    )
    assert not [
        line
        for line in plan(certainty={"mechanism": "paper"}).sentences()
        if line.startswith("Hint")
    ]
    wide = plan(certainty={"epsilon": 1e3, "components": 96})  # both more than there are features
    assert not [line for line in wide.sentences() if line.startswith("Hint")]


def test_the_least_size_is_the_least() -> None:
    assert least_examples(lambda n: 10 / n, limit=0.5) == 20
    assert least_examples(lambda n: 0.1 / n, limit=0.5) == 1
    assert least_examples(lambda n: 1.0, limit=0.5) is None


@needs_accountant
def test_protected_updates_are_planned_for_expected_and_all_rounds() -> None:
    local = {"batch_size": 64, "privacy": {"noise_multiplier": 2.0}}
    shown = plan(rounds=4, participation_rate=0.5, local=local)
    assert shown.expected_rounds == 3  # 2 of the 3 clients that hold examples are asked a round
    client = shown.groups[0].clients[1]
    steps = math.ceil(400 / 64)
    query = Query(2.0, 64 / 400)
    release = Query(noise_multiplier(epsilon=1.0, delta=1e-5))
    assert client.update == (composed_epsilon({query: steps}, delta=1e-5), 1e-5)
    assert client.expected == (composed_epsilon({query: 3 * steps, release: 1}, delta=1e-5), 1e-5)
    assert client.worst == (composed_epsilon({query: 4 * steps, release: 1}, delta=1e-5), 1e-5)
    text = printed(shown)
    assert "3 of 4 rounds" in text
    assert "without differential privacy" not in text


def test_mechanisms_without_protection_say_so() -> None:
    for mechanism in ("none", "released-code"):
        assert "∞" in printed(plan(certainty={"mechanism": mechanism}))


def test_sizes_must_fit_the_population() -> None:
    with pytest.raises(ValueError, match=r"should be 4, split\.num_clients"):
        privacy_plan(tiny(), (1, 2), input_shape=(1, 8, 8), num_negatives=40, num_classes=10)


def test_a_run_warns_before_pretraining_that_noise_drowns_the_scores(tmp_path: Path) -> None:
    """The same line as `fedaux privacy`, in Python and for the report, before any phase."""
    phases = []

    class Stops:
        def phase(self, task: Any, round: int, name: str) -> None:
            phases.append(name)
            raise KeyboardInterrupt

        def round(self, row: Any) -> None:
            pass

    noisy = tiny(certainty={"epsilon": 0.01}, method=["fedavg+p", "fedaux"])
    with (
        pytest.raises(KeyboardInterrupt),
        pytest.warns(UserWarning, match="times the largest possible signal") as caught,
    ):
        fedaux.run(noisy, out=tmp_path / "run", callback=Stops())
    assert phases == ["pretrain"]
    stored = json.loads((tmp_path / "run" / "warnings.json").read_text())["noise"]
    assert stored == [str(one.message) for one in caught]


def test_noise_warnings_are_those_of_the_plan() -> None:
    shape: dict[str, Any] = {"input_shape": (1, 8, 8), "num_negatives": 40, "num_classes": 10}
    noisy = tiny(certainty={"epsilon": 0.1})
    expected = privacy_plan(noisy, SIZES, **shape).warnings()
    assert expected
    private = tiny(certainty={"epsilon": 0.1}, local={"privacy": {}})  # needs no accountant
    for experiment in (noisy, private):
        assert [f"Warning: {line}" for line in noise_warnings(experiment, SIZES, **shape)] == (
            expected
        )
    assert noise_warnings(tiny(method="feddf+p"), SIZES, **shape) == []


def test_clients_are_called_by_their_names() -> None:
    silos = [f"data/hospital_{letter}" for letter in "abcd"]
    shown = plan(certainty={"epsilon": 0.1}, data={"source": "folder", "clients": silos})
    text = printed(shown)
    assert "No examples, never selected: hospital_b." in text
    assert "certainty scores of hospital_a with 50 examples" in text
    assert "hospital_d" in text
    assert "client 0" not in text


def test_heads_are_planned_beside_scores_with_their_exact_total() -> None:
    section = {"epsilon": 0.1, "head_epsilon": 0.5, "components": 4}
    shown = plan(method=["fedauxfdp", "fedaux"], certainty=section)
    heads, scored = shown.groups
    assert (heads.methods, scored.methods, scored.heads) == (("fedauxfdp",), ("fedaux",), None)
    assert heads.heads is not None
    head, (epsilon, delta) = heads.heads
    assert (head, delta) == ((0.5, 1e-5), 1e-5)
    assert 0.5 < epsilon < 0.52  # the sums are (0.6, 2e-5)
    text = printed(shown)
    assert "(0.5141, 1e-5)" in text
    assert "head" in text
    warnings = shown.warnings()
    assert len(warnings) == len(set(warnings)) == 1  # two groups, one release
    unprotected = plan(method="fedauxfdp", certainty=section | {"mechanism": "none"})
    assert unprotected.groups[0].heads == ((0.5, 1e-5), (math.inf, 1e-5))


def test_class_sums_are_planned_with_what_they_can_be_worth() -> None:
    shown = plan(method=["private-head", "fedaux"], certainty={"epsilon": 0.1, "components": None})
    heads, scored = shown.groups
    assert (heads.methods, scored.methods) == (("private-head",), ("fedaux",))
    assert heads.certainty is not None
    assert (heads.certainty.mechanism, heads.certainty.components) == ("classes", 24)
    assert heads.reliability is not None
    worst, best = heads.reliability
    assert 0 < worst < best < 1
    text = printed(shown)
    assert "private-head: good where clients hold few classes" in text
    assert "class sums with 24 components" in text
    assert f"{worst:.2f} if every client holds all classes and {best:.2f} if each holds one" in text
    assert "class sums" in text
    alone = plan(method="private-head", certainty={"epsilon": 0.01, "components": 4})
    assert "No model update leaves a client" in printed(alone)
    assert "Warning: private-head: hopeless class sums" in printed(alone)


@pytest.mark.parametrize(
    ("epsilon", "verdict", "warned"),
    [
        (0.03, "private-head: hopeless class sums", True),
        (0.05, "private-head: doubtful class sums", False),
        (0.1, "private-head: good where clients hold few classes, otherwise doubtful", False),
        (0.5, "private-head: good class sums", False),
    ],
)
def test_class_sums_warn_where_even_good_features_would_not_help(
    epsilon: float, verdict: str, warned: bool
) -> None:
    section = {"epsilon": epsilon, "components": 12}
    shown = plan(method=["private-head", "fedaux2"], certainty=section)
    assert verdict in printed(shown)
    assert any("class means" in line for line in shown.warnings()) == warned
    assert "fedaux2: " not in "".join(shown.sentences())  # it trains what noise hides


@pytest.mark.parametrize(("epsilon", "word"), [(0.1, "hopeless"), (0.5, "doubtful")])
def test_scores_are_called_doubtful_or_hopeless_first(epsilon: float, word: str) -> None:
    (warning,) = plan(certainty={"epsilon": epsilon, "components": 4}).warnings()
    assert warning.startswith(f"Warning: fedaux: {word} certainty scores of client")
