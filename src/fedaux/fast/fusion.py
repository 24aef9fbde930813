"""A network's predictions as few operations: convolution, normalisation, shortcut and ReLU are
joined.

Batch normalisation is folded into the convolution before it, since no image sees its batch.
Operations are found by tracing, for any network that can be traced.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional

from fedaux.core.messages import Weights
from fedaux.core.weights import copy_into
from fedaux.fast import depthwise
from fedaux.fast.convolutions import (
    has_patches,
    image_matrix,
    make_plain,
    patches,
    pointwise_matrix,
)
from fedaux.models.convolutional import DepthwiseConvolution, ImageConvolution, PointwiseConvolution
from fedaux.models.standardised import Standardised

CONVOLUTIONS = (nn.Conv2d, ImageConvolution, DepthwiseConvolution, PointwiseConvolution)


class Untraceable(Exception):
    """A module whose operations cannot be listed."""


class _Tracer(fx.Tracer):
    """Lists the network's own kinds of layers as one operation each, as it does with torch's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d) or super().is_leaf_module(m, module_qualified_name)


class FusedInference:
    """A module's operations, with convolution + normalisation + shortcut + ReLU joined.

    The list is made once; `fold` prepares a set of weights for it, and a call runs it.
    """

    def __init__(self, module: nn.Module) -> None:
        module = copy.deepcopy(module).eval()
        make_plain(module)
        if any(isinstance(part, nn.Embedding | Standardised) for part in module.modules()):
            raise Untraceable("has token ids, which are no floats, or a map in double precision")
        try:
            self._graph = _Tracer().trace(module)
        except Exception as error:
            raise Untraceable(str(error)) from error
        self._modules: dict[str, nn.Module] = dict(module.named_modules())
        self._nodes = list(self._graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        if sum(node.op == "placeholder" for node in self._nodes) != 1:
            raise Untraceable("takes more than one input")
        self._joined: dict[fx.Node, _Joined] = {}
        self._done_elsewhere: set[fx.Node] = set()
        uses = Counter(str(node.target) for node in self._nodes if node.op == "call_module")
        for node in self._nodes:
            # A convolution that is used twice has two normalisations; they cannot both be folded
            # in.
            convolves = self._is_module(node, *CONVOLUTIONS)
            if convolves and uses[str(node.target)] == 1 and self._is_plain_convolution(node):
                self._join(node)
        self._first = self._first_layer()
        by_result = {joined.result: joined for joined in self._joined.values()}
        for joined in self._joined.values():
            giver = by_result.get(joined.shortcut)
            # A bias costs nothing in the kernel of the sum, and a pass over all positions
            # elsewhere.
            if giver is not None and not giver.relu and self._only_user(giver.result) is not None:
                joined.bias_from, giver.gives_bias = giver, True

    def fold(self, weights: Weights, *, dtype: torch.dtype) -> Weights:
        """Return the weights as operations use them: convolutions with their normalisation
        folded in."""
        folded = dict(weights)
        by_name = with_normalisation(
            weights,
            {joined.convolution: self._normalisation(joined) for joined in self._joined.values()},
        )
        offsets = {joined: by_name[joined.convolution][1] for joined in self._joined.values()}
        sums = {joined: offset for joined, offset in offsets.items() if not joined.gives_bias}
        for joined in sums:
            if joined.bias_from is not None:
                sums[joined] = sums[joined] + offsets[joined.bias_from]
        for joined in self._joined.values():
            folded.pop(f"{joined.convolution}.bias", None)
        matrices = {
            f"{joined.convolution}.weight": self._as_used(
                joined, by_name[joined.convolution][0], dtype
            )
            for joined in self._joined.values()
        }
        biases = {f"{joined.convolution}.bias": bias for joined, bias in sums.items()}
        return folded | _in_type(matrices, dtype) | _in_type(biases, dtype)

    def _normalisation(self, joined: _Joined) -> tuple[str, nn.BatchNorm2d] | None:
        if joined.normalisation is None:
            return None
        layer = self._modules[joined.normalisation]
        assert isinstance(layer, nn.BatchNorm2d)
        return joined.normalisation, layer

    def _as_used(self, joined: _Joined, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight as the matrix that rows are multiplied with, where they are."""
        layer = self._modules[joined.convolution]
        if not _by_patches(weight, dtype):
            return weight
        if joined is self._first:
            return image_matrix(weight)
        return (
            pointwise_matrix(weight, groups=layer.groups)
            if isinstance(layer, PointwiseConvolution)
            else weight
        )

    def prepared(self, inputs: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return inputs [N, ...] as calls take them: on a GPU in half precision as patches."""
        if self._first is None or not _by_patches(inputs, dtype):
            return inputs
        layer = self._modules[self._first.convolution]
        assert isinstance(layer, ImageConvolution)
        return patches(layer, inputs.to(dtype))

    def __call__(self, folded: Weights, inputs: Tensor) -> Tensor:
        """Return the module's outputs on inputs [N, ...] that `prepared` returned."""
        values: dict[fx.Node, Any] = {}
        for node in self._nodes:
            if node in self._done_elsewhere:
                continue
            if node.op == "output":
                outputs: Tensor = fx.node.map_arg(node.args[0], values.__getitem__)
                return outputs
            if node.op == "placeholder":
                values[node] = inputs
            elif node in self._joined:
                joined = self._joined[node]
                values[joined.result] = self._convolve(joined, folded, values)
            else:
                values[node] = self._plain(node, folded, values)
        raise AssertionError("a graph has an output")

    def _join(self, node: fx.Node) -> None:
        """Find what follows a convolution and can be joined with it."""
        joined = _Joined(str(node.target), node.args[0])
        chain = [node]
        following = self._only_user(node)
        if (
            following is not None
            and self._is_module(following, nn.BatchNorm2d)
            and self._has_statistics(following)
        ):
            joined.normalisation = str(following.target)
            chain.append(following)
            following = self._only_user(following)
        if following is not None and self._is_module(following, nn.ReLU, nn.ReLU6):
            joined.relu, joined.most = (
                True,
                6.0 if self._is_module(following, nn.ReLU6) else math.inf,
            )
            chain.append(following)
        elif following is not None and _is_addition(following):
            others = [argument for argument in following.args if argument is not chain[-1]]
            after = self._only_user(following)
            ready = (
                len(others) == 1
                and isinstance(others[0], fx.Node)
                and self._place[others[0]] < self._place[node]
            )
            if ready and after is not None and self._is_module(after, nn.ReLU):
                joined.shortcut, joined.relu = others[0], True
                chain += [following, after]
        joined.result = chain[-1]
        self._done_elsewhere |= set(chain[1:])
        self._joined[node] = joined

    def _first_layer(self) -> _Joined | None:
        """Return the convolution of images, if it is the only one to look at the input."""
        (start,) = (node for node in self._nodes if node.op == "placeholder")
        first = self._only_user(start)
        if (
            first is None
            or first not in self._joined
            or not self._is_module(first, ImageConvolution)
        ):
            return None
        layer = self._modules[str(first.target)]
        return (
            self._joined[first]
            if isinstance(layer, ImageConvolution) and has_patches(layer)
            else None
        )

    def _only_user(self, node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _is_module(self, node: fx.Node, *kinds: type[nn.Module]) -> bool:
        return node.op == "call_module" and type(self._modules[str(node.target)]) in kinds

    def _is_plain_convolution(self, node: fx.Node) -> bool:
        return (
            len(node.args) == 1
            and not node.kwargs
            and self._modules[str(node.target)].padding_mode == "zeros"
        )

    def _has_statistics(self, node: fx.Node) -> bool:
        return self._modules[str(node.target)].running_var is not None

    def _convolve(self, joined: _Joined, folded: Weights, values: Mapping[fx.Node, Any]) -> Tensor:
        layer = self._modules[joined.convolution]
        assert isinstance(layer, nn.Conv2d)
        weight, bias = (
            folded[f"{joined.convolution}.weight"],
            folded.get(f"{joined.convolution}.bias"),
        )
        inputs = values[joined.inputs].to(weight.dtype)
        shortcut = None if joined.shortcut is None else values[joined.shortcut].to(weight.dtype)
        if weight.ndim == 2:
            rows = inputs.permute(0, 2, 3, 1) if isinstance(layer, PointwiseConvolution) else inputs
            in_product = joined.relu and shortcut is None and joined.most == math.inf
            outputs = _multiplied(rows, weight, bias, relu=in_product)
            return outputs if in_product else _finished(outputs, shortcut, joined)
        if isinstance(layer, DepthwiseConvolution) and depthwise.takes(inputs):
            cut = joined.most if joined.relu and shortcut is None else None
            outputs = depthwise.joined(inputs, weight, bias, stride=layer.stride[0], most=cut)
            return outputs if shortcut is None else _finished(outputs, shortcut, joined)
        how: Any = (layer.stride, layer.padding, layer.dilation, layer.groups)
        one_kernel = inputs.is_cuda and layer.groups == 1 and not isinstance(layer.padding, str)
        if one_kernel and shortcut is not None and shortcut.shape == _out_shape(layer, inputs):
            return torch.cudnn_convolution_add_relu(inputs, weight, shortcut, 1.0, bias, *how)
        if one_kernel and shortcut is None and joined.relu and joined.most == math.inf:
            return torch.cudnn_convolution_relu(inputs, weight, bias, *how)
        return _finished(functional.conv2d(inputs, weight, bias, *how), shortcut, joined)

    def _plain(self, node: fx.Node, folded: Weights, values: Mapping[fx.Node, Any]) -> Any:
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "get_attr":
            return self._attribute(str(node.target), folded)
        if node.op == "call_function":
            return node.target(*arguments, **keywords)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(arguments[0], str(node.target))(*arguments[1:], **keywords)
        module, prefix = self._modules[str(node.target)], f"{node.target}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in folded.items()
            if name.startswith(prefix)
        }
        # Weights are in single precision here; the rest is small: heads, group normalisation.
        precise = tuple(
            value.float() if own and isinstance(value, Tensor) else value for value in arguments
        )
        return functional_call(module, own, precise, keywords)

    def _attribute(self, name: str, folded: Weights) -> Any:
        """Return a weight, or another attribute of the module, such as a constant."""
        parent, _, last = name.rpartition(".")
        return folded[name] if name in folded else getattr(self._modules[parent], last)


class _Joined:
    """A convolution and the operations joined with it."""

    def __init__(self, convolution: str, inputs: Any) -> None:
        self.convolution = convolution
        self.inputs = inputs
        self.result: Any = None
        self.normalisation: str | None = None
        self.shortcut: Any = None
        self.relu = False
        self.most = math.inf
        """Where the ReLU ends: at 6 for ReLU6."""
        self.bias_from: _Joined | None = None
        """The convolution on the shortcut, whose bias is added here."""
        self.gives_bias = False


def with_normalisation(
    weights: Weights, layers: Mapping[str, tuple[str, nn.BatchNorm2d] | None]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return weight and bias of convolutions, by name, with the normalisation after them folded in.

    All layers of one shape at a time: a client's weights are many small tensors.
    """
    scaled = {name: weights[f"{name}.weight"] for name in layers}
    offsets = {name: weights.get(f"{name}.bias") for name in layers}
    pairs = {name: pair for name, pair in layers.items() if pair is not None}
    if pairs:
        means = list(
            torch._foreach_neg([weights[f"{path}.running_mean"] for path, _ in pairs.values()])
        )
        variances = [weights[f"{path}.running_var"] for path, _ in pairs.values()]
        gains = list(torch._foreach_add(variances, [layer.eps for _, layer in pairs.values()]))
        torch._foreach_sqrt_(gains)
        torch._foreach_reciprocal_(gains)
        affine = {place: path for place, (path, layer) in enumerate(pairs.values()) if layer.affine}
        if affine:
            torch._foreach_mul_(
                [gains[place] for place in affine],
                [weights[f"{path}.weight"] for path in affine.values()],
            )
        for mean, name in zip(means, pairs, strict=True):
            if (bias := offsets[name]) is not None:
                mean += bias
        torch._foreach_mul_(means, gains)
        if affine:
            torch._foreach_add_(
                [means[place] for place in affine],
                [weights[f"{path}.bias"] for path in affine.values()],
            )
        products = torch._foreach_mul(
            [scaled[name] for name in pairs], [gain[:, None, None, None] for gain in gains]
        )
        scaled |= dict(zip(pairs, products, strict=True))
        offsets |= dict(zip(pairs, means, strict=True))
    return {
        name: (
            weight,
            torch.zeros(len(weight), device=weight.device)
            if (bias := offsets[name]) is None
            else bias,
        )
        for name, weight in scaled.items()
    }


def _out_shape(layer: nn.Conv2d, inputs: Tensor) -> torch.Size:
    """Return the shape of a convolution's output; its padding is in numbers."""
    assert not isinstance(layer.padding, str)
    sizes = zip(
        inputs.shape[2:],
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        strict=True,
    )
    maps = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in sizes
    ]
    return torch.Size((len(inputs), layer.out_channels, *maps))


def _in_type(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    """Return tensors in another type; weights of convolutions have the channels last on a GPU."""
    cast = {
        name: torch.empty(
            tensor.shape, dtype=dtype, device=tensor.device, memory_format=_layout(tensor)
        )
        for name, tensor in tensors.items()
    }
    copy_into(list(cast.values()), list(tensors.values()))
    return cast


def _layout(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.is_cuda and tensor.ndim == 4 else torch.contiguous_format


def _by_patches(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the first convolution is a matrix product (see `FastImageConvolution`)."""
    return tensor.is_cuda and dtype is not torch.float32


def _multiplied(patches: Tensor, matrix: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    """Return patches [N, H, W, K] times a matrix [C, K], plus bias, as [N, C, H, W]."""
    rows = patches.flatten(0, 2)
    if bias is not None and relu:
        outputs = torch._addmm_activation(bias, rows, matrix.t())  # ReLU in the same kernel
    else:
        outputs = functional.linear(rows, matrix, bias)
        outputs = functional.relu(outputs) if relu else outputs
    return outputs.view(*patches.shape[:3], -1).permute(0, 3, 1, 2)


def _finished(outputs: Tensor, shortcut: Tensor | None, joined: _Joined) -> Tensor:
    """Add the shortcut and cut, in place, where no kernel has done so."""
    if shortcut is not None:
        outputs = outputs.add_(shortcut) if outputs.shape == shortcut.shape else outputs + shortcut
    return outputs.clamp_(0.0, joined.most) if joined.relu else outputs


def _is_addition(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target in (operator.add, torch.add, operator.iadd)
        and not node.kwargs
    )
