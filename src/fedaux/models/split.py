"""SplitModel: f = head after features, as the paper assumes of every client model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn


class SplitModel(nn.Module):
    """`features` maps inputs to vectors [N, F], `head` maps these to logits [N, C]."""

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
        """Reads pretrained weights of the features, where pretraining starts; None without."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [N, C]."""
        logits: Tensor = self.head(self.features(inputs))
        return logits


class _Logits(nn.Module):
    """A module of Hugging Face, whose outputs have logits beside other things."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs).logits
        return logits


def split_model(module: nn.Module, *, head: str, example: Tensor) -> SplitModel:
    """Make a SplitModel of any module by the name of its head: `split_model(net, head="fc", ...)`.

    The module is copied, and in the copy an identity replaces the head. `example`, a batch of
    inputs, gives the feature width and checks that the outputs agree. Outputs are logits, or have
    `logits`, as Hugging Face's do. Raises ValueError if there is no such head or it is not the
    last step.
    """
    whole = copy.deepcopy(module).eval()
    names = [name for name, _ in whole.named_modules() if name]
    if head not in names:
        raise ValueError(f"head = {head!r}: the module has no such part; it has {', '.join(names)}")
    with torch.no_grad():
        outputs = whole(example)
    expected = _logits_of(outputs)
    if expected is not outputs:
        whole, head = _Logits(whole), f"module.{head}"
    parent_name, _, child = head.rpartition(".")
    parent = whole.get_submodule(parent_name)
    head_module = whole.get_submodule(head)
    setattr(parent, child, nn.Identity())
    with torch.no_grad():
        features = whole(example)
        if features.ndim != 2:
            raise ValueError(
                f"head = {head!r}: its inputs are {list(features.shape)}, should be [N, F]"
            )
        if not torch.equal(head_module(features), expected):
            raise ValueError(f"head = {head!r}: should be the last step of the module")
    model = SplitModel(whole, head_module, feature_width=features.shape[1])
    return model.train(module.training)


def _logits_of(outputs: object) -> Tensor:
    """Return the logits of a module's outputs. Raises ValueError if there are none."""
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        raise ValueError(f"returns a {type(outputs).__name__}; should return logits [N, classes]")
    return logits


def find_head(module: nn.Module, *, example: Tensor) -> str:
    """Return the name of the nn.Linear whose outputs the module returns.

    Raises ValueError if there is none.
    """
    whole = copy.deepcopy(module).eval()
    outputs: dict[str, Tensor] = {}
    for name, part in whole.named_modules():
        if isinstance(part, nn.Linear) and name:
            part.register_forward_hook(
                lambda _, __, output, name=name: outputs.update({name: output})
            )
    with torch.no_grad():
        logits = _logits_of(whole(example))
    for name in reversed(outputs):
        if outputs[name].shape == logits.shape and torch.equal(outputs[name], logits):
            return name
    used = ", ".join(outputs) or "none"
    raise ValueError(
        f"its last step should be an nn.Linear that returns logits, without a softmax (it uses "
        f"{used}); otherwise name the head with fedaux.split_model(module, head=..., example=...)"
    )


def random_layers(module: nn.Module) -> list[str]:
    """Return the names of layers that draw random numbers in training, such as dropout."""
    return [
        f"{name or 'the module'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if (isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0)
        or isinstance(part, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
        or (isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0)
    ]


def has_overrides(part: nn.Module) -> bool:
    """Return whether a module has hooks or its own `forward` attribute."""
    hooks = (
        part._forward_hooks,
        part._forward_pre_hooks,
        part._backward_hooks,
        part._backward_pre_hooks,
    )
    return "forward" in vars(part) or any(hooks)
