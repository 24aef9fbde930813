"""SplitModel: f = head after features, the decomposition that the paper assumes of every client model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn


class SplitModel(nn.Module):
    """f = g after h: `features` maps inputs to vectors [N, F], `head` maps those to logits [N, C]."""

    def __init__(
        self,
        features: nn.Module,
        head: nn.Module,
        *,
        feature_width: int,
        given: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.feature_width = feature_width
        self.given = given
        """Reads weights of the features that others have trained, where there are such: pretraining begins there."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [N, C]."""
        logits: Tensor = self.head(self.features(inputs))
        return logits


def split_model(module: nn.Module, *, head: str, example: Tensor) -> SplitModel:
    """Make a SplitModel of any module by naming its head, for example `split_model(net, head="fc", ...)`.

    The module is copied; in the copy the head gives way to an identity, and what remains is the feature extractor.
    `example` is a batch of inputs, used once to learn the feature width and to check that the two halves still
    compute what the module does. Raises ValueError where there is no such head, or where it is not the last step.
    """
    whole = copy.deepcopy(module).eval()
    names = [name for name, _ in whole.named_modules() if name]
    if head not in names:
        raise ValueError(f"head = {head!r}: the module has no such part; it has {', '.join(names)}")
    with torch.no_grad():
        expected = whole(example)
    parent_name, _, child = head.rpartition(".")
    parent = whole.get_submodule(parent_name)
    head_module = whole.get_submodule(head)
    setattr(parent, child, nn.Identity())
    with torch.no_grad():
        features = whole(example)
        if features.ndim != 2:
            raise ValueError(
                f"head = {head!r}: gets inputs of shape {list(features.shape)}, should be [N, F]"
            )
        if not torch.equal(head_module(features), expected):
            raise ValueError(
                f"head = {head!r}: is not the last step, its output differs from the module's"
            )
    model = SplitModel(whole, head_module, feature_width=features.shape[1])
    return model.train(module.training)


def is_meddled_with(part: nn.Module) -> bool:
    """Say whether a part has hooks, or a way of computing that somebody gave to it alone; these could do anything."""
    hooks = (
        part._forward_hooks,
        part._forward_pre_hooks,
        part._backward_hooks,
        part._backward_pre_hooks,
    )
    return "forward" in vars(part) or any(hooks)
