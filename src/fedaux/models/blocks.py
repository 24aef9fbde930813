"""Convolution, group normalisation and ReLU as one operation on a CPU, for small maps, gradients included.

Operations of torch on small maps spend more time around the arithmetic than in it: each writes what the next one reads,
and on some processors gradients of convolutions take ten times as long as the convolution. The operation is C of our
own (`fedaux.native`); where it cannot be compiled, layers go one by one.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from torch.nn.modules.module import _has_any_global_hook

from fedaux import native
from fedaux.models.convolutional import ImageConvolution
from fedaux.models.split import SplitModel, is_meddled_with

CONVOLUTIONS = (nn.Conv2d, ImageConvolution)
WITHOUT_STATE = (nn.Identity, nn.Flatten, nn.ReLU, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d)
"""Layers behind the blocks that no example sees another in, and that have nothing of a model's own."""
MOST_POSITIONS = 1024
"""Of a map that counts as small."""
SHARE = 4_000_000
"""Products that a thread should have to do at least: a quarter of a millisecond."""
MOST_BLOCKS = 64
"""Of a chain, as in blocks.c."""

OfModels = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""forward(weights, inputs): the outputs [K, B, ...] of K models with weights [K, ...] each, on inputs [K, B, ...]."""


class Layers(nn.Sequential):
    """Layers one after another; where a convolution, a group normalisation and a ReLU follow each other, as one."""

    joined = False
    """Whether they may be one operation; `join` says so where it can be compiled."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the last layer makes of the inputs."""
        layers = list(self)
        while layers:
            if blocks := self.blocks(layers, inputs):
                inputs = _chain(inputs, blocks, [tensor for block in blocks for tensor in block.parameters()])
                del layers[: 3 * len(blocks)]
            else:
                inputs = layers.pop(0)(inputs)
        return inputs

    def blocks(self, layers: Sequence[nn.Module], inputs: Tensor) -> list[Block]:
        """Return the blocks that these layers begin with, as far as there is an operation for them on such inputs."""
        found: list[Block] = []
        if not (self.joined and native.available() and _takes(inputs)):
            return found
        batch, channels, height, width = inputs.shape
        while len(found) < MOST_BLOCKS:
            block = _block(layers[3 * len(found) : 3 * len(found) + 3])
            if block is None or not block.fits(batch, channels, height, width):
                break
            found.append(block)
            channels, height, width = block.features, *block.size_after(height, width)
        return found


def join(module: nn.Module, *, joined: bool) -> None:
    """Let the blocks of a network be one operation each, or not; where that cannot be compiled, one line says so."""
    parts = [part for part in module.modules() if isinstance(part, Layers)]
    if joined and parts:
        try:
            native.library()
        except native.Uncompiled as error:
            _tell(f"engine.compile: C cannot be compiled here, small networks are slower ({error})")
            joined = False
    for part in parts:
        part.joined = joined


@lru_cache
def _tell(message: str) -> None:
    """Warn of something once a process."""
    warnings.warn(message, stacklevel=3)


def of_models(model: nn.Module) -> OfModels:
    """Return a model as a function of several models' weights: by blocks where it consists of them, else vmapped."""
    vmapped = vmap(lambda weights, inputs: functional_call(model, weights, (inputs,)))

    def forward(weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        blocks = _all_blocks(model, inputs[0]) or []
        own = [weights[name] for name in _names(model, len(blocks))]
        if not blocks or not _are_fit(own, blocks, models=len(inputs)):
            outputs: Tensor = vmapped(dict(weights), inputs)
            return outputs
        assert isinstance(model, SplitModel)
        assert isinstance(model.features, Layers)
        maps, bias = _chain(inputs, blocks, own), weights.get("head.bias")
        rest = model.features[3 * len(blocks) :](maps.flatten(0, 1)).unflatten(0, inputs.shape[:2])
        products: Tensor = rest @ weights["head.weight"].transpose(1, 2)
        return products if bias is None else products + bias[:, None]

    return forward


def _names(model: nn.Module, count: int) -> list[str]:
    """Return the names of weight, scale and shift of the blocks that a model begins with."""
    layers = list(model.features._modules) if count and isinstance(model.features, Layers) else []
    blocks = [layers[3 * place : 3 * place + 2] for place in range(count)]
    return [f"features.{part}" for one, two in blocks for part in (f"{one}.weight", f"{two}.weight", f"{two}.bias")]


def consists_of_blocks(model: nn.Module, inputs: Tensor) -> bool:
    """Say whether `of_models` is quick: the model is blocks, layers without a state, and a linear head."""
    return _all_blocks(model, inputs) is not None


def _all_blocks(model: nn.Module, inputs: Tensor) -> list[Block] | None:
    if type(model) is not SplitModel or type(model.features) is not Layers or type(model.head) is not nn.Linear:
        return None
    if any(is_meddled_with(part) for part in (model, model.features, model.head)):
        return None
    layers = list(model.features)
    blocks = model.features.blocks(layers, inputs)
    others = layers[3 * len(blocks) :]
    if not blocks or any(type(layer) not in WITHOUT_STATE or is_meddled_with(layer) for layer in others):
        return None
    return None if any(isinstance(layer, nn.Flatten) and layer.start_dim != 1 for layer in others) else blocks


class Block(NamedTuple):
    """A convolution and the normalisation behind it; a ReLU follows."""

    convolution: nn.Conv2d
    normalisation: nn.GroupNorm

    @property
    def features(self) -> int:
        """Channels of the maps that go out."""
        return self.convolution.out_channels

    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weight [C', C, h, w], scale and shift [C']."""
        return self.convolution.weight, self.normalisation.weight, self.normalisation.bias

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of its parameters."""
        convolution = self.convolution
        weight = convolution.out_channels, convolution.in_channels, *convolution.kernel_size
        return weight, (convolution.out_channels,), (convolution.out_channels,)

    def fits(self, batch: int, channels: int, height: int, width: int) -> bool:
        """Say whether maps of this size come in: small ones, and those that torch would not refuse."""
        (kernel_height, kernel_width), (above, beside) = self.convolution.kernel_size, self._padding
        return (
            channels == self.convolution.in_channels
            and 0 < height * width <= MOST_POSITIONS
            and height + 2 * above >= kernel_height
            and width + 2 * beside >= kernel_width
            and batch * self.features // self.normalisation.num_groups * math.prod(self.size_after(height, width)) > 1
        )

    def size_after(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the maps that go out."""
        (kernel_height, kernel_width), (down, across) = self.convolution.kernel_size, self.convolution.stride
        above, beside = self._padding
        return (height + 2 * above - kernel_height) // down + 1, (width + 2 * beside - kernel_width) // across + 1

    def products(self, height: int, width: int) -> int:
        """Return how many products an example takes."""
        return math.prod(self.size_after(height, width)) * self.convolution.weight.numel()

    def form(self, *, models: int, batch: int, height: int, width: int) -> _Form:
        """Return what the operation asks to know."""
        convolution, normalisation = self
        return _Form(
            *(models, batch, convolution.in_channels, height, width, convolution.out_channels),
            *(*convolution.kernel_size, *convolution.stride, *self._padding),
            *(normalisation.num_groups, normalisation.eps),
        )

    @property
    def _padding(self) -> tuple[int, int]:
        padding = self.convolution.padding
        assert not isinstance(padding, str)
        return padding[0], padding[1]


class _Form(ctypes.Structure):
    """`Block` in blocks.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("models", "batch", "channels", "height", "width", "features")),
        *((name, ctypes.c_int64) for name in ("kernel_height", "kernel_width", "stride_height", "stride_width")),
        *((name, ctypes.c_int64) for name in ("padding_height", "padding_width", "groups")),
        ("epsilon", ctypes.c_double),
    ]


def _takes(inputs: Tensor) -> bool:
    """Whether the operation is for such inputs [N, C, H, W]: single precision on a CPU, and nobody looks inside."""
    return (
        inputs.device.type == "cpu"
        and inputs.dtype is torch.float32
        and inputs.ndim == 4
        and len(inputs) > 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not _has_any_global_hook()
    )


def _block(layers: Sequence[nn.Module]) -> Block | None:
    """Return the block that three layers are, where there is an operation for it and nobody looks at what is inside."""
    if len(layers) < 3:
        return None
    convolution, normalisation, relu = layers
    if type(convolution) not in CONVOLUTIONS or type(normalisation) is not nn.GroupNorm or type(relu) is not nn.ReLU:
        return None
    assert isinstance(convolution, nn.Conv2d)
    possible = (
        convolution.bias is None
        and convolution.groups == 1
        and convolution.dilation == (1, 1)
        and convolution.padding_mode == "zeros"
        and not isinstance(convolution.padding, str)
        and normalisation.affine
        and normalisation.num_channels == convolution.out_channels
        and convolution.out_channels % native.library().lanes() == 0
        and not any(is_meddled_with(part) for part in layers)
    )
    block = Block(convolution, normalisation)
    return block if possible and _are_fit(block.parameters(), [block]) else None


def _are_fit(parameters: Sequence[Tensor], blocks: Sequence[Block], *, models: int | None = None) -> bool:
    """Whether these are the parameters of the blocks, of one model or of several; C would not ask."""
    front = () if models is None else (models,)
    shapes = [shape for block in blocks for shape in block.shapes()]
    return len(parameters) == len(shapes) and all(
        parameter.dtype is torch.float32 and parameter.device.type == "cpu" and parameter.shape == front + shape
        for parameter, shape in zip(parameters, shapes, strict=True)
    )


def _chain(inputs: Tensor, blocks: Sequence[Block], parameters: Sequence[Tensor]) -> Tensor:
    """Return outputs [B, C', H', W'] for inputs [B, C, H, W] and each block's weight, scale and shift in turn.

    Or for several models at once, everything with one more axis in front.
    """
    if torch.is_grad_enabled():
        outputs: Tensor = _Chain.apply(inputs, blocks, *parameters)  # type: ignore[no-untyped-call]
        return outputs
    own_inputs = inputs.ndim == 4 or inputs.stride(0) != 0  # not one that stands for all models
    *many, batch, _, height, width = inputs.shape
    first = _inside(inputs if own_inputs else inputs[0])
    forms, products = (_Form * len(blocks))(), 0
    for index, block in enumerate(blocks):
        products += batch * block.products(height, width)
        forms[index] = block.form(models=many[0] if many else 1, batch=batch, height=height, width=width)
        height, width = block.size_after(height, width)
    own = [parameter.contiguous() for parameter in parameters]
    pointers = (ctypes.c_void_p * len(own))(*(parameter.data_ptr() for parameter in own))
    result = first.new_empty(*many, batch, height, width, blocks[-1].features)
    _call("predict", forms, len(blocks), pointers, first, int(own_inputs), result, _threads(products))
    return _outside(result)


class _Chain(torch.autograd.Function):
    """A chain of blocks and its gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, blocks: Sequence[Block], *parameters: Tensor) -> Tensor:
        *many, batch, _, height, width = inputs.shape
        maps = _inside(inputs)
        kept = [maps]
        ctx.forms = []
        for index, block in enumerate(blocks):
            weight, scale, shift = (parameter.contiguous() for parameter in parameters[3 * index : 3 * index + 3])
            form = block.form(models=many[0] if many else 1, batch=batch, height=height, width=width)
            threads = _threads(batch * block.products(height, width))
            height, width = block.size_after(height, width)
            outputs = maps.new_empty(*many, batch, height, width, block.features)
            convolved = torch.empty_like(outputs)
            statistics = maps.new_empty(*many, batch, 2, block.features)
            _call("forward", ctypes.byref(form), maps, weight, scale, shift, outputs, convolved, statistics, threads)
            kept += [weight, scale, convolved, statistics, outputs]
            ctx.forms.append((form, threads))
            maps = outputs
        ctx.save_for_backward(*kept[:-1], _outside(maps))
        return _outside(maps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *kept, last = ctx.saved_tensors
        outputs, following = _inside(last), cast("Tensor | None", _inside(gradient))
        gradients: list[Tensor | None] = []
        for index in reversed(range(len(ctx.forms))):
            inputs, weight, scale, convolved, statistics = kept[5 * index : 5 * index + 5]
            needs_inputs = index > 0 or ctx.needs_input_grad[0]
            for_inputs = torch.empty_like(inputs) if needs_inputs else None
            own = torch.empty_like(weight), torch.empty_like(scale), torch.empty_like(scale)
            given = inputs, weight, scale, outputs, convolved, statistics, following
            form, threads = ctx.forms[index]
            _call("backward", ctypes.byref(form), *given, *own, for_inputs, threads)
            gradients[:0] = own
            outputs, following = inputs, for_inputs
        return None if following is None else _outside(following), None, *gradients


def _inside(maps: Tensor) -> Tensor:
    """Return maps [..., C, H, W] as [..., H, W, C], side by side in memory."""
    return maps.permute(*range(maps.ndim - 3), -2, -1, -3).contiguous()


def _outside(maps: Tensor) -> Tensor:
    """Return maps [..., H, W, C] as [..., C, H, W]."""
    return maps.permute(*range(maps.ndim - 3), -1, -3, -2)


def _threads(products: int) -> int:
    """Return how many threads share the work: torch's, as far as it is enough for them."""
    return max(1, min(torch.get_num_threads(), products // SHARE))


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library; tensors are passed as where they lie."""
    passed = [_passed(argument) for argument in arguments]
    if getattr(native.library(), name)(*passed) != 0:
        raise MemoryError(f"{name}: no memory for a few maps of a network")


def _passed(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument
