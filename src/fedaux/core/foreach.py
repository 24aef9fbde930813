"""Operations on all tensors of a model at once: on a GPU a few launches, where one a tensor would leave it waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies by the same names, in the same layout."""
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    copy_into(list(copies.values()), list(tensors.values()))
    return copies


@torch.no_grad()
def copy_into(goals: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its goal, which has the same shape."""
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for place, (goal, source) in enumerate(zip(goals, sources, strict=True)):
        groups.setdefault((goal.dtype, source.dtype), []).append(place)  # one call takes one type
    for places in groups.values():
        torch._foreach_copy_([goals[place] for place in places], [sources[place] for place in places])


def zero(tensors: Iterable[Tensor]) -> None:
    """Set all numbers to zero."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for same in groups.values():
        torch._foreach_zero_(same)


def surely_finite(tensors: Sequence[Tensor]) -> bool:
    """Say whether floating-point tensors hold neither NaN nor infinity; False also where numbers are merely huge.

    A norm is finite only if every number is.
    """
    if not tensors:
        return True
    device = next(
        (tensor.device for tensor in tensors if tensor.is_cuda), tensors[0].device
    )  # a counter may lie elsewhere
    norms = torch._foreach_norm(list(tensors))
    return bool(torch.isfinite(torch.stack([norm.to(device, torch.float32) for norm in norms])).all())
