"""The methods as choices on a few axes: what `prepare` and `play_round` branch on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fedaux.config import Certainty


@dataclass(frozen=True)
class Method:
    """What distinguishes one federated method from another."""

    name: str
    start: Literal["scratch", "pretrained", "private-head"]
    """Initial weights: random; the features of h0 from self-supervised pretraining; or these and
    the linear head that the clients' private class sums give."""
    objectives: tuple[str, ...] = ()
    """What local training minimises besides cross-entropy: keys of
    `fedaux.core.objectives.OBJECTIVES`."""
    teacher: str | None = None
    """What the soft labels are; None means no distillation."""
    scores: bool = False
    """Whether clients release certainty scores in the preparation phase."""
    memory: tuple[Literal["predictions", "weights"], ...] = ()
    """What counts of absent clients (`+m`): predictions for the teacher, weights in the average."""
    anchor: float = 0.0
    """Share of the private head's soft labels in the server's beliefs, times the reliability of the
    releases, divided by the round's number."""
    server_rate: float = 1.0
    """The server's parameters become old + rate * (average - old)."""
    head_by_class: bool = False
    """Whether row c of the head is averaged over clients in proportion to their examples of class
    c, which their private class sums tell. Robust averages (`aggregation`) ignore it: a client
    could claim a whole class."""
    smoothing: float = 0.0
    """Decay of the server model's average over rounds, which is evaluated; 0 evaluates the last."""
    corrects_heads: bool = False
    """Whether heads are corrected as in SCAFFOLD, and not distilled."""
    correction: Literal["scaffold", "feddyn"] | None = None
    """What clients add to their gradients; such a method averages clients
    equally, as its paper does."""
    mechanism: str | None = None
    """The mechanism of the clients' release; None means `certainty.mechanism`."""
    calibrated: bool = False
    """Whether clients release class sums of the trained features after the last round instead of
    scores before the first, from which the server trains the head again."""
    heads: bool = False
    """Whether clients also release linear heads on h0's features, which teach in
    every round."""
    trains: bool = True
    """Whether clients train. If not, no client is asked in a round; the server goes on by itself if
    there is a teacher, and else only measures the start."""
    exchange: Literal["models", "nothing", "data"] = "models"
    """What clients share: models; nothing (each trains alone); data (one model of all of it)."""

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
    def remembers(self) -> bool:
        """Whether the server keeps something of each client between rounds."""
        return bool(self.memory) or self.correction is not None

    @property
    def scores_first(self) -> bool:
        """Whether clients release scores before they train."""
        return self.scores and not self.calibrated


def in_mode(method: Method, mode: str) -> Method:
    """Return a method as it is in a mode."""
    if not method.corrects_heads or mode == "full":
        return method
    return replace(method, teacher=None, memory=(), correction="scaffold")


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
        objectives=("jointly-adjusted", "rehearsal"),
        teacher="belief",
        scores=True,
        memory=("predictions",),
        anchor=0.5,
        server_rate=2.0,
        head_by_class=True,
        smoothing=0.8,
        corrects_heads=True,
        mechanism="classes",
    ),
    "fedcounts": Method(
        "fedcounts",
        start="pretrained",
        objectives=("jointly-adjusted", "rehearsal"),
        scores=True,
        server_rate=2.0,
        head_by_class=True,
        smoothing=0.8,
        corrects_heads=True,
        mechanism="counts",
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


def head_section(section: Certainty) -> Certainty:
    """Return the settings of the release of heads: mechanism `heads` at its own epsilon."""
    return section.model_copy(update={"mechanism": "heads", "epsilon": section.head_epsilon})
