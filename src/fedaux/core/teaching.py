"""A round's soft labels: from the clients that answered and, for methods with a memory, from those that did before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedaux.config import ExperimentFields
from fedaux.core.messages import Stamped
from fedaux.core.methods import Method
from fedaux.core.server_model import Student
from fedaux.core.teachers import TEACHERS, Ensemble, Member

NO_NUMBERS = "its model predicts NaN or infinity on public examples"
HALF = torch.finfo(torch.float16).max
"""Remembered predictions are kept in half precision."""


@dataclass(frozen=True)
class Lesson:
    """What a round's clients teach."""

    targets: Tensor | None
    """Soft labels [N, C]; None where nobody's predictions are numbers."""
    predictions: Mapping[int, Tensor]
    """The clients' logits [N, C] in half precision, where the method remembers them."""
    unusable: Mapping[int, str]
    """Clients that were left out, and why."""


def teach(
    present: Sequence[Member],
    absent: Sequence[Member],
    *,
    method: Method,
    experiment: ExperimentFields,
    students: Mapping[str, Student],
    memory: Mapping[int, Stamped],
    log_scores: Callable[[Sequence[int]], Tensor],
    generator: Callable[[], np.random.Generator],
    num_classes: int,
) -> Lesson:
    """Return the soft labels of the members present and those remembered, without members that predict no numbers.

    Raises ValueError where a teacher returns something else than a distribution for every public example.
    """
    assert method.teacher is not None, "a method without a teacher does not teach"
    predictions: dict[int, Tensor] = {}
    finite: dict[int, Tensor] = {}
    remembers = "predictions" in method.memory
    gone = {member.client for member in absent}

    ready = predicted_together(present, students)

    def predict(member: Member) -> Tensor:
        if member.client in gone:
            return memory[member.client].tensors["logits"].float()
        logits = ready[member.client] if member.client in ready else students[member.prototype].logits(member.weights)
        if member.client >= 0:
            finite[member.client] = torch.isfinite(logits).all()
            if remembers:
                predictions[member.client] = logits.clamp(-HALF, HALF).half()
        return logits

    members = sorted([*present, *absent], key=lambda member: member.client)
    rows = next(iter(students.values())).num_public
    unusable: dict[int, str] = {}
    while len(unusable) < len(present):
        ensemble = Ensemble(
            members,
            predict,
            log_scores,
            generator=generator(),
            bayesian=experiment.bayesian,
        )
        targets = TEACHERS[method.teacher](ensemble)
        if (problem := problem_of_targets(targets, shape=(rows, num_classes))) is None:
            kept = {client: logits for client, logits in predictions.items() if client not in unusable}
            return Lesson(targets, kept, unusable)
        culprits = [client for client, flag in finite.items() if not flag and client not in unusable]
        if not culprits:
            raise ValueError(f"teacher {method.teacher}: {problem}")
        unusable |= dict.fromkeys(culprits, NO_NUMBERS)
        members = [member for member in members if member.client not in unusable]
    return Lesson(None, {}, unusable)


def predicted_together(members: Sequence[Member], students: Mapping[str, Student]) -> dict[int, Tensor]:
    """Return the logits [N, C] of all members where workers can share the work; nothing where there is one at most.

    Elsewhere they are made one at a time, as a teacher asks for them, and need not be held all at once.
    """
    ready: dict[int, Tensor] = {}
    for name, student in students.items():
        own = [member for member in members if member.prototype == name]
        if student.shares_work and len(own) > 1:
            outputs = student.all_logits([member.weights for member in own])
            ready |= {member.client: output for member, output in zip(own, outputs, strict=True)}
    return ready


def problem_of_targets(targets: object, *, shape: tuple[int, int]) -> str | None:
    """Say why soft labels cannot be learned: they should be a tensor of this shape, every row a distribution."""
    if not isinstance(targets, Tensor):
        return f"returned {type(targets).__name__}, should be a torch.Tensor"
    if tuple(targets.shape) != shape:
        return f"returned {list(targets.shape)}, should be {list(shape)}: public examples, classes"
    off = (targets.sum(dim=1) - 1).abs().amax() + (-targets).clamp_min(0).amax()
    error = float(off)  # the one wait for the device
    return None if error < 1e-2 else f"returned rows that are no distributions (off by {error:g})"
