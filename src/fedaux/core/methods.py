"""METHODS: one row per method. A method is a choice on a few axes; everything else is shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fedaux.config import Certainty, ExperimentFields

STARTS = ("scratch", "pretrained", "private-head")
MEMORIES = ("predictions", "weights")
CORRECTIONS = ("scaffold", "feddyn")
EXCHANGES = ("models", "nothing", "data")
SHARED_PHASES = ("pretrain", "features")
"""Phases whose results later methods use too: h0, and features under it in linear mode."""


@dataclass(frozen=True)
class Method:
    """What distinguishes one federated method from another."""

    name: str
    start: Literal["scratch", "pretrained", "private-head"]
    """Initial weights: random; the features of h0 from self-supervised pretraining; or these and
    the linear head that the clients' private class sums give (`core/private_head.py`)."""
    objectives: tuple[str, ...] = ()
    """What local training minimises besides cross-entropy: keys of
    `fedaux.core.objectives.OBJECTIVES`."""
    teacher: str | None = None
    """The key of `fedaux.core.teachers.TEACHERS`; None means no distillation."""
    scores: bool = False
    """Whether clients release certainty scores in the preparation phase."""
    memory: tuple[Literal["predictions", "weights"], ...] = ()
    """What counts of absent clients (`+m`): predictions for the teacher, weights in the average."""
    anchor: float = 0.0
    """Share of the private head's soft labels in the server's beliefs, times the reliability of the
    releases, divided by the round's number."""
    server_rate: float = 1.0
    """The server's parameters become old + rate * (average - old). In linear mode a rate above 1
    falls to a tenth of it over the rounds."""
    head_by_class: bool = False
    """Whether row c of the head is averaged over clients in proportion to their examples of class
    c, which their private class sums tell. Robust averages (`aggregation`) ignore it: a client
    could claim a whole class."""
    smoothing: float = 0.0
    """Decay of the server model's average over rounds, which is evaluated; 0 evaluates the last."""
    correction: Literal["scaffold", "feddyn"] | None = None
    """What clients add to their gradients (`core/corrections.py`); such a method averages clients
    equally, as its paper does."""
    mechanism: str | None = None
    """The mechanism of the clients' release; None means `certainty.mechanism`."""
    calibrated: bool = False
    """Whether clients release class sums of the trained features after the last round instead of
    scores before the first, from which the server trains the head again
    (`core/calibration.py`)."""
    heads: bool = False
    """Whether clients also release linear heads on h0's features (`core/heads.py`), which teach in
    every round."""
    trains: bool = True
    """Whether clients train. If not, no client is asked in a round; the server goes on by itself if
    there is a teacher, and else only measures the start."""
    exchange: Literal["models", "nothing", "data"] = "models"
    """What clients share: models; nothing (each trains alone); data (one model of all of it)."""

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ValueError(
                f"method {self.name}: start = {self.start!r}; should be one of {', '.join(STARTS)}"
            )
        if foreign := [what for what in self.memory if what not in MEMORIES]:
            raise ValueError(
                f"method {self.name}: memory = {foreign[0]!r}; should be of {', '.join(MEMORIES)}"
            )
        if "predictions" in self.memory and self.teacher is None:
            raise ValueError(
                f"method {self.name}: remembers predictions and has no teacher that would use them"
            )
        if self.start == "private-head" and not self.scores:
            raise ValueError(
                f"method {self.name}: start = 'private-head' needs the clients' releases; scores "
                "should be True"
            )
        by_class = self.teacher in ("belief", "private-head") or self.anchor > 0
        if (by_class or self.head_by_class) and self.mechanism != "classes":
            raise ValueError(
                f"method {self.name}: mechanism = {self.mechanism!r}; should be 'classes', which "
                "its teacher, its anchor or head_by_class needs"
            )
        if self.calibrated and not (self.scores and self.mechanism == "classes"):
            raise ValueError(
                f"method {self.name}: calibrated needs scores = True and mechanism = 'classes'"
            )
        if self.calibrated and (self.teacher is not None or self.start == "private-head"):
            raise ValueError(
                f"method {self.name}: calibrated, so releases come after the last round; there "
                "should be no teacher, and start should not be 'private-head'"
            )
        if self.heads and (self.trains or not self.scores or self.teacher is None):
            raise ValueError(
                f"method {self.name}: heads = True, so clients do not train; trains should be "
                "False, scores True, and there should be a teacher"
            )
        if not self.trains and self.teacher not in (None, "private-head") and not self.heads:
            raise ValueError(
                f"method {self.name}: teacher = {self.teacher!r} needs models of clients, which do "
                "not train; should be 'private-head'"
            )
        if self.correction is not None and self.correction not in CORRECTIONS:
            raise ValueError(
                f"method {self.name}: correction = {self.correction!r}; should be one of "
                f"{', '.join(CORRECTIONS)}"
            )
        if self.correction is not None and (self.memory or self.exchange != "models"):
            raise ValueError(
                f"method {self.name}: correction = {self.correction!r} goes with exchange = "
                "'models' and without a memory"
            )
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"method {self.name}: exchange = {self.exchange!r}; should be one of "
                f"{', '.join(EXCHANGES)}"
            )
        if self.exchange != "models" and (self.teacher is not None or self.scores):
            raise ValueError(
                f"method {self.name}: exchange = {self.exchange!r}, so there is no teacher and "
                "there are no scores; should be 'models'"
            )
        if self.exchange == "nothing" and "weights" not in self.memory:
            raise ValueError(
                f"method {self.name}: exchange = 'nothing', so each client goes on from its own "
                "model; memory should contain 'weights'"
            )

    @property
    def from_h0(self) -> bool:
        """Whether the method starts from h0."""
        return self.start != "scratch"

    def certainty(self, section: Certainty) -> Certainty:
        """Return the settings of this method's release: a recipe's, with the method's mechanism."""
        if self.mechanism is None:
            return section
        return section.model_copy(update={"mechanism": self.mechanism})

    @property
    def proximal(self) -> bool:
        """Whether local training adds mu/2 ||theta - theta_server||^2 (`local.proximal` is mu)."""
        return "proximal" in self.objectives

    @property
    def scores_first(self) -> bool:
        """Whether clients release scores before they train."""
        return self.scores and not self.calibrated

    @property
    def remembers(self) -> bool:
        """Whether the server keeps something of each client between rounds."""
        return bool(self.memory) or self.correction is not None

    @property
    def is_bound(self) -> bool:
        """Whether it is a reference point, not a federated method."""
        return self.exchange != "models"

    def looks_at(self, key: str) -> bool:
        """Whether a setting has an effect on this method."""
        if key.startswith("local.") and not self.trains:
            return False
        return not (key.startswith("distillation.") and self.teacher is None) and not (
            key == "local.proximal" and not self.proximal
        )


def _and_from_h0(*methods: Method) -> dict[str, Method]:
    """Return methods that start from scratch, each followed by the same from h0, `+p`."""
    named: dict[str, Method] = {}
    for method in methods:
        named[method.name] = method
        named[f"{method.name}+p"] = replace(method, name=f"{method.name}+p", start="pretrained")
    return named


METHODS: dict[str, Method] = {
    **_and_from_h0(Method("fedavg", start="scratch")),
    "fedavg+m": Method("fedavg+m", start="scratch", memory=("weights",)),
    "fedavg+p+m": Method("fedavg+p+m", start="pretrained", memory=("weights",)),
    **_and_from_h0(
        Method("fedprox", start="scratch", objectives=("proximal",)),
        Method("fedlc", start="scratch", objectives=("fedlc",)),
        Method("fedrs", start="scratch", objectives=("fedrs",)),
        Method("fedntd", start="scratch", objectives=("not-true",)),
        Method(
            "fedvls",
            start="scratch",
            objectives=("balanced-softmax", "vacant-class", "suppression"),
        ),
        Method("scaffold", start="scratch", correction="scaffold"),
        Method("feddyn", start="scratch", objectives=("proximal",), correction="feddyn"),
        Method("ccvr", start="scratch", scores=True, mechanism="classes", calibrated=True),
        Method("feddf", start="scratch", teacher="mean"),
    ),
    "feddf+m": Method("feddf+m", start="scratch", teacher="mean", memory=("predictions",)),
    "feddf+p+m": Method("feddf+p+m", start="pretrained", teacher="mean", memory=("predictions",)),
    **_and_from_h0(Method("fedbe", start="scratch", teacher="bayesian")),
    "fedaux": Method("fedaux", start="pretrained", teacher="mixture", scores=True),
    "fedaux+m": Method(
        "fedaux+m", start="pretrained", teacher="mixture", scores=True, memory=("predictions",)
    ),
    "fedaux+logits": Method("fedaux+logits", start="pretrained", teacher="certainty", scores=True),
    "fedaux+logits+m": Method(
        "fedaux+logits+m",
        start="pretrained",
        teacher="certainty",
        scores=True,
        memory=("predictions",),
    ),
    "fedaux2": Method(
        "fedaux2",
        start="private-head",
        objectives=("logit-adjusted", "rehearsal"),
        teacher="belief",
        scores=True,
        memory=("predictions",),
        anchor=0.5,
        server_rate=2.0,
        head_by_class=True,
        smoothing=0.8,
        mechanism="classes",
    ),
    "private-head": Method(
        "private-head", start="private-head", scores=True, mechanism="classes", trains=False
    ),
    "private-student": Method(
        "private-student",
        start="private-head",
        teacher="private-head",
        scores=True,
        mechanism="classes",
        trains=False,
    ),
    "fedauxfdp": Method(
        "fedauxfdp", start="pretrained", teacher="mixture", scores=True, heads=True, trains=False
    ),
    **_and_from_h0(
        Method("local-only", start="scratch", memory=("weights",), exchange="nothing"),
        Method("pooled", start="scratch", exchange="data"),
    ),
}
"""`fedaux` averages probabilities, as the paper's theory does; `fedaux+logits` is its Eq. 3."""


def release_sections(names: Iterable[str], section: Certainty) -> dict[str, Certainty]:
    """Return the settings of the releases that methods ask for, by mechanism; methods with the same
    mechanism share a release."""
    scoring = [METHODS[name] for name in names if METHODS[name].scores]
    asked = [method.certainty(section) for method in scoring]
    asked += [head_section(section) for method in scoring if method.heads]
    return {own.mechanism: own for own in asked}


def head_section(section: Certainty) -> Certainty:
    """Return the settings of the release of heads: mechanism `heads` at its own epsilon."""
    return section.model_copy(update={"mechanism": "heads", "epsilon": section.head_epsilon})


def sends_plain_updates(experiment: ExperimentFields) -> bool:
    """Return whether updates leave the clients without DP-SGD."""
    return experiment.local.privacy is None and any(
        METHODS[name].trains for name in experiment.method
    )


def unprotected_by(experiment: ExperimentFields) -> str:
    """Return what the (epsilon, delta) of a run does not cover."""
    from fedaux.privacy import ledger  # late: it needs torch

    methods = [METHODS[name] for name in experiment.method]
    if not any(method.trains for method in methods):
        return ledger.UNPROTECTED_BESIDES_RELEASES
    if experiment.local.privacy is not None:
        return ledger.UNPROTECTED_BESIDES_UPDATES
    if all(method.exchange == "data" for method in methods):
        return ledger.UNPROTECTED_DATA
    scored = any(method.scores for method in methods)
    return ledger.UNPROTECTED if scored else ledger.UNPROTECTED_UPDATES
