"""What a method asks of clients. Checks, prices, plans and reports read nothing else of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from fedaux.config import Certainty, ExperimentFields
from fedaux.privacy import ledger

SHARED_PHASES = ("pretrain", "features")
"""Phases whose results later methods use too: h0, and features under it in linear mode."""


@dataclass(frozen=True)
class Asks:
    """What a method asks of clients, and how the server uses it."""

    pretrained: bool = False
    """Whether it starts from h0, the features of self-supervised pretraining."""
    trains: bool = True
    """Whether clients train in every round."""
    releases: tuple[Certainty, ...] = ()
    """What each client releases once, before the first round."""
    last_releases: tuple[Certainty, ...] = ()
    """What each client releases once, after the last round."""
    objectives: tuple[str, ...] = ()
    """What clients minimise besides cross-entropy: keys of
    `fedaux.core.objectives.OBJECTIVES`."""
    distills: bool = False
    """Whether the server distills on public data."""
    remembers: bool = False
    """Whether the server keeps something of each client between rounds."""
    personal: bool = False
    """Whether each client ends with a personal model, part of which stays there."""
    shares: Literal["models", "nothing", "data"] = "models"
    """What clients share: models; nothing (each trains alone); data (one model of all of it)."""

    @property
    def all_releases(self) -> tuple[Certainty, ...]:
        """The releases before the first round and after the last one."""
        return self.releases + self.last_releases

    @property
    def is_bound(self) -> bool:
        """Whether it is a reference point, not a federated method."""
        return self.shares != "models"

    def ignores(self, key: str) -> bool:
        """Return whether a setting has no effect on this method."""
        return (
            (key.startswith("local.") and not self.trains)
            or (key.startswith("distillation.") and not self.distills)
            or (key == "local.proximal" and "proximal" not in self.objectives)
        )


class Asking(Protocol):
    """A method, as everything but its server sees it."""

    @property
    def name(self) -> str:
        """The name of its row in METHODS."""
        ...

    def asks(self, settings: ExperimentFields) -> Asks:
        """Return what it asks of clients in an experiment."""
        ...


def release_sections(asked: Iterable[Asks]) -> dict[str, Certainty]:
    """Return the releases that methods ask for, by mechanism: methods with the same mechanism share
    a release."""
    return {section.mechanism: section for asks in asked for section in asks.all_releases}


def sends_plain_updates(asked: Iterable[Asks], experiment: ExperimentFields) -> bool:
    """Return whether updates leave the clients without DP-SGD."""
    return experiment.local.privacy is None and any(asks.trains for asks in asked)


def unprotected_by(asked: Iterable[Asks], experiment: ExperimentFields) -> str:
    """Return what the (epsilon, delta) of a run does not cover."""
    asked = list(asked)
    if not any(asks.trains for asks in asked):
        return ledger.UNPROTECTED_BESIDES_RELEASES
    if experiment.local.privacy is not None:
        return ledger.UNPROTECTED_BESIDES_UPDATES
    if all(asks.shares == "data" for asks in asked):
        return ledger.UNPROTECTED_DATA
    scored = any(asks.all_releases for asks in asked)
    return ledger.UNPROTECTED if scored else ledger.UNPROTECTED_UPDATES
