"""Functions of weights: average, copy, load.

Operations take all tensors of a model at once: a few launches on a GPU instead of one per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedaux.core.messages import ClientState, Member, Weights

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of batch normalisation's statistics."""
TRIMMED_SHARE = 0.2
"""`trimmed-mean`: share of the values left out at each end, at least one of three or more."""


def average(weights: Sequence[Weights], *, sizes: Sequence[float]) -> Weights:
    """Return sum_i |D_i| theta_i / sum_l |D_l| (FedAVG; Algorithm 2, parameter averaging).

    Floating-point buffers (statistics of batch normalisation) are averaged like parameters; of
    integer buffers (counters) the largest is kept.
    """
    total = float(sum(sizes))
    first = weights[0]
    floats = [name for name, tensor in first.items() if tensor.is_floating_point()]
    shares = [size / total for size in sizes]
    sums = list(torch._foreach_mul([first[name] for name in floats], shares[0])) if floats else []
    for own, share in zip(weights[1:], shares[1:], strict=True) if floats else ():
        torch._foreach_add_(sums, [own[name] for name in floats], alpha=share)
    averaged = dict(zip(floats, sums, strict=True))
    return {
        name: averaged[name]
        if name in averaged
        else torch.stack([own[name] for own in weights]).amax(dim=0)
        for name in first
    }


def server_step(before: Weights, after: Weights, *, rate: float) -> Weights:
    """Return before + rate * (after - before) for all tensors but statistics and counters.

    Statistics of batch normalisation are taken from `after`: extrapolated, a variance could be
    negative.
    """
    names = parameter_names(after)
    if rate == 1.0 or not names:
        return after
    moved = torch._foreach_lerp(
        [before[name] for name in names], [after[name] for name in names], rate
    )
    return {**after, **dict(zip(names, moved, strict=True))}


def parameter_names(weights: Weights) -> list[str]:
    """Return the names of all tensors but statistics and counters."""
    return [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point() and name.rpartition(".")[2] not in STATISTICS
    ]


def trimmed_mean(weights: Sequence[Weights], *, sizes: Sequence[float]) -> Weights:
    """Return the mean of each coordinate without its b smallest and b largest values (Yin et al.,
    2018), b = max(1, floor(0.2 K)) of K >= 3 models.

    `sizes` are ignored: a client states its own. Of integer buffers the largest remaining is kept.
    """
    return _middle_mean(weights, trim=max(1, int(TRIMMED_SHARE * len(weights))))


def median(weights: Sequence[Weights], *, sizes: Sequence[float]) -> Weights:
    """Return the median of each coordinate, the mean of the middle two of an even number.

    `sizes` are ignored: a client states its own.
    """
    return _middle_mean(weights, trim=len(weights))


def _middle_mean(weights: Sequence[Weights], *, trim: int) -> Weights:
    """Return coordinate-wise means without the `trim` lowest and highest values; one or two values
    always remain."""
    count = len(weights)
    trim = min(trim, (count - 1) // 2)
    result: Weights = {}
    for name, first in weights[0].items():
        ordered = torch.stack([own[name] for own in weights]).sort(dim=0).values
        kept = ordered[trim : count - trim]
        result[name] = kept.mean(dim=0) if first.is_floating_point() else kept[-1]
    return result


class Average(Protocol):
    """One way to combine the weights of several clients."""

    def __call__(self, weights: Sequence[Weights], *, sizes: Sequence[float]) -> Weights:
        """Return one model; `sizes` are the clients' weights r_i |D_i|."""
        ...


AVERAGES: dict[str, Average] = {
    "mean": average,
    "clipped": average,  # of updates that went through `clip_updates`
    "trimmed-mean": trimmed_mean,
    "median": median,
}
"""Averages by their names in `aggregation`."""


def clip_updates(weights: Sequence[Weights], *, before: Weights) -> list[Weights]:
    """Return theta + min(1, c / |theta_i - theta|) (theta_i - theta) for the server's theta
    (`before`), where c is the (lower) median of the norms |theta_i - theta|.

    Norms include statistics of batch normalisation; integer buffers stay as they are.
    """
    floats = [name for name, tensor in before.items() if tensor.is_floating_point()]
    if not floats or not weights:
        return list(weights)
    start = [before[name] for name in floats]
    updates = [torch._foreach_sub([own[name] for name in floats], start) for own in weights]
    norms = torch.stack([torch.stack(torch._foreach_norm(own)).norm() for own in updates])
    factors = (norms.median() / norms.clamp_min(1e-30)).tolist()  # one wait for the device
    clipped = []
    for own, update, factor in zip(weights, updates, factors, strict=True):
        if factor < 1:
            moved = torch._foreach_add(start, torch._foreach_mul(update, factor))
            own = {**own, **dict(zip(floats, moved, strict=True))}
        clipped.append(own)
    return clipped


def clipped(members: Sequence[Member], before: Mapping[str, Weights]) -> list[Member]:
    """Return the members with their updates clipped to the median norm of their prototype."""
    models: dict[int, Weights] = {}
    for name in {member.prototype for member in members}:
        group = [member for member in members if member.prototype == name]
        weights = clip_updates([member.weights for member in group], before=before[name])
        models |= {member.client: own for member, own in zip(group, weights, strict=True)}
    return [replace(member, weights=models[member.client]) for member in members]


def average_by_prototype(
    members: Sequence[Member], *, average: Average = average
) -> dict[str, Weights]:
    """Average the members of each prototype, weighted by r_i |D_i|: share and number of
    examples."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        if (
            member.weights and member.num_examples * member.share > 0
        ):  # an old share can underflow to 0
            groups.setdefault(member.prototype, []).append(member)
    return {
        name: average(
            [member.weights for member in group],
            sizes=[member.num_examples * member.share for member in group],
        )
        for name, group in sorted(groups.items())
    }


def own_weights(state: ClientState) -> Weights:
    """Return the model's weights that are remembered of a client."""
    return below("weights/", state.tensors)


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }


def flat(groups: Mapping[str, Mapping[str, Tensor]], *, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of several groups, named GROUP/NAME after a prefix."""
    return {
        f"{prefix}{group}/{name}": one for group, own in groups.items() for name, one in own.items()
    }


def snapshot(model: nn.Module) -> Weights:
    """Return a copy of the model's weights that later training does not change."""
    return clones(model.state_dict())


def load(model: nn.Module, weights: Weights) -> None:
    """Load weights in place. Raises RuntimeError if they belong to another architecture."""
    own = model.state_dict()
    if own.keys() != weights.keys() or any(
        tensor.shape != weights[name].shape for name, tensor in own.items()
    ):
        model.load_state_dict(weights)  # raises an error that names the tensors
    copy_into(list(own.values()), [weights[name] for name in own])


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies by the same names, in the same layout."""
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    copy_into(list(copies.values()), list(tensors.values()))
    return copies


@torch.no_grad()
def copy_into(goals: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its goal of the same shape."""
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for place, (goal, source) in enumerate(zip(goals, sources, strict=True)):
        groups.setdefault((goal.dtype, source.dtype), []).append(place)  # one call takes one type
    for places in groups.values():
        torch._foreach_copy_(
            [goals[place] for place in places], [sources[place] for place in places]
        )


def zero(tensors: Iterable[Tensor]) -> None:
    """Set all tensors to zero."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for same in groups.values():
        torch._foreach_zero_(same)
