"""Predictions of many models of one architecture on many examples: teachers, features, evaluation.

On a GPU in half precision, batch normalisation is folded into the convolution before it, and convolution, bias,
shortcut and ReLU are one kernel. No image ever sees its batch.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional

from fedaux import many
from fedaux.clients import Weights
from fedaux.compute import Compute
from fedaux.data.batches import inference_batch
from fedaux.data.texts import WIDTH_STEP, token_lengths
from fedaux.models import depthwise
from fedaux.models.convolutional import DepthwiseConvolution, ImageConvolution, PointwiseConvolution
from fedaux.server import load
from fedaux.steps import statistics_of

CONVOLUTIONS = (nn.Conv2d, ImageConvolution, DepthwiseConvolution, PointwiseConvolution)


class Predictor:
    """An architecture that predicts with whatever weights it is given."""

    def __init__(self, module: nn.Module, compute: Compute) -> None:
        self._module = copy.deepcopy(module).eval()  # the original may be in training meanwhile
        for layer in self._module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.momentum = 0.0  # `by_batch` looks at batches and learns nothing from them
        self._compute = compute
        self._by_length = ByLength()
        self._trims = any(getattr(part, "ignores_padding", False) for part in self._module.modules())
        self._fused: FusedInference | None = None
        if compute.device.type == "cuda" and compute.precision is not torch.float32:
            try:
                self._fused = FusedInference(module)
            except Untraceable:
                self._fused = None  # somebody's own architecture: operation by operation, then

    @torch.no_grad()
    def __call__(
        self,
        weights: Weights,
        inputs: Tensor,
        *,
        batch_size: int | None = None,
        rows: Tensor | None = None,
        by_batch: bool = False,
    ) -> Tensor:
        """Return outputs [N, ...] in single precision on uint8 images or features, or on some rows of them.

        `by_batch` normalises by the statistics of each batch, as in training: only to compare with code that does.
        """
        batch_size = batch_size or inference_batch(inputs.device)
        if rows is not None and len(rows) == 0:
            return self(weights, inputs[:1], batch_size=1)[:0]
        forward = self._forward_by_batch(weights) if by_batch else self._forward(weights)
        if self._trims and not by_batch:
            return self._by_length(forward, inputs, batch_size=batch_size, rows=rows)
        picked = inputs.split(batch_size) if rows is None else (inputs[part] for part in rows.split(batch_size))
        return torch.cat([forward(batch).float() for batch in picked])

    @property
    def takes_many(self) -> bool:
        """Whether `many` is quicker than one model after another."""
        return self._fused is not None

    @torch.no_grad()
    def many(self, models: Sequence[Weights], inputs: Tensor, *, batch_size: int | None = None) -> list[Tensor]:
        """Return the outputs [N, ...] of several models on the same inputs, each batch of which is made only once."""
        assert self._fused is not None
        batch_size = batch_size or inference_batch(inputs.device)
        folded = [self._fused.fold(weights, dtype=self._compute.precision) for weights in models]
        outputs: list[list[Tensor]] = [[] for _ in models]
        for batch in inputs.split(batch_size):
            prepared = self._fused.prepared(self._compute.floats(batch), dtype=self._compute.precision)
            for own, weights in zip(outputs, folded, strict=True):
                own.append(self._fused(weights, prepared).float())
        return [torch.cat(own) for own in outputs]

    def _forward(self, weights: Weights) -> Callable[[Tensor], Tensor]:
        if self._fused is not None:
            fused, floats, dtype = self._fused, self._compute.floats, self._compute.precision
            folded = fused.fold(weights, dtype=dtype)
            return lambda batch: fused(folded, fused.prepared(floats(batch), dtype=dtype))
        module, compute = self._module, self._compute
        self._load(weights)

        def forward(batch: Tensor) -> Tensor:
            with compute.autocast():
                outputs: Tensor = module(compute.floats(batch))
            return outputs

        return forward

    def _load(self, weights: Weights) -> None:
        """Give the module weights; on a CPU where they lie, for copying them takes as long as a few images do."""
        if self._compute.device.type != "cpu":
            load(self._module, weights)
            return
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            tensor.data = weights[name]

    def _forward_by_batch(self, weights: Weights) -> Callable[[Tensor], Tensor]:
        module, compute = self._module, self._compute
        self._load({name: tensor.clone() for name, tensor in weights.items()})  # batches are counted in them

        def forward(batch: Tensor) -> Tensor:
            module.train()
            with statistics_of(module, batch_size=len(batch)), compute.autocast():
                outputs: Tensor = module(compute.floats(batch))
            module.eval()
            return outputs

        return forward


class ByLength:
    """Batches of token ids [N, L], long texts first, so that none is wider than its texts.

    To know the widths takes a wait for the device; it is had once for inputs that come again, as a round's do.
    """

    REMEMBERED = 2
    """The distill set and the test set."""

    def __init__(self) -> None:
        self._plans: list[tuple[Tensor, int, list[tuple[Tensor, int]]]] = []

    def __call__(
        self, forward: Callable[[Tensor], Tensor], texts: Tensor, *, batch_size: int, rows: Tensor | None
    ) -> Tensor:
        """Return outputs [N, ...], or on some rows of the texts, in the order that was asked for."""
        chosen = texts if rows is None else texts[rows]
        parts = self._parts(chosen, batch_size, again=rows is None and len(texts) > batch_size)
        outputs = torch.cat([forward(chosen[part, :width]).float() for part, width in parts])
        return torch.empty_like(outputs).index_copy_(0, torch.cat([part for part, _ in parts]), outputs)

    def _parts(self, texts: Tensor, batch_size: int, *, again: bool) -> list[tuple[Tensor, int]]:
        """Return the rows of each batch and its width; `again`: the same texts will be asked about once more."""
        for known, size, parts in self._plans:
            if known is texts and size == batch_size:
                return parts
        lengths = token_lengths(texts)
        order = lengths.argsort(descending=True, stable=True)
        longest = lengths[order[::batch_size]].tolist()
        widths = [max(1, -(-length // WIDTH_STEP)) * WIDTH_STEP for length in longest]
        parts = list(zip(order.split(batch_size), widths, strict=True))
        if again:
            self._plans = [(texts, batch_size, parts), *self._plans][: self.REMEMBERED]
        return parts


class Untraceable(Exception):
    """A module whose operations cannot be listed."""


class _Tracer(fx.Tracer):
    """Lists the network's own kinds of layers as one operation each, as it does with torch's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d) or super().is_leaf_module(m, module_qualified_name)


class FusedInference:
    """A module's operations, with convolution + normalisation + shortcut + ReLU joined wherever they follow each other.

    The list is made once; `fold` prepares a set of weights for it, and a call runs it.
    """

    def __init__(self, module: nn.Module) -> None:
        module = copy.deepcopy(module).eval()
        if any(isinstance(part, nn.Embedding) for part in module.modules()):
            raise Untraceable("looks tokens up, whose numbers must not become floats, and has nothing to join")
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
            # One that is used twice has two normalisations behind it; the weights of both cannot be in one place.
            convolves = self._is_module(node, *CONVOLUTIONS)
            if convolves and uses[str(node.target)] == 1 and self._is_plain_convolution(node):
                self._join(node)
        self._first = self._first_layer()
        by_result = {joined.result: joined for joined in self._joined.values()}
        for joined in self._joined.values():
            giver = by_result.get(joined.shortcut)
            # A bias that is added anyway costs nothing in the sum's own kernel, and a pass over all positions before.
            if giver is not None and not giver.relu and self._only_user(giver.result) is not None:
                joined.bias_from, giver.gives_bias = giver, True

    def fold(self, weights: Weights, *, dtype: torch.dtype) -> Weights:
        """Return the weights as the list of operations uses them: convolutions with their normalisation inside."""
        folded = dict(weights)
        scaled, offsets = self._with_normalisation(weights)
        sums = {joined: offsets[joined] for joined in offsets if not joined.gives_bias}
        for joined in sums:
            if joined.bias_from is not None:
                sums[joined] = sums[joined] + offsets[joined.bias_from]
        for joined in self._joined.values():
            folded.pop(f"{joined.convolution}.bias", None)
        matrices = {
            f"{joined.convolution}.weight": self._as_used(joined, weight, dtype) for joined, weight in scaled.items()
        }
        biases = {f"{joined.convolution}.bias": bias for joined, bias in sums.items()}
        return folded | _in_type(matrices, dtype) | _in_type(biases, dtype)

    def _with_normalisation(self, weights: Weights) -> tuple[dict[_Joined, Tensor], dict[_Joined, Tensor]]:
        """Return weight and bias of each convolution that also does the normalisation after it.

        All layers at a time, as far as that goes: a client's weights are many small tensors.
        """
        scaled = {joined: weights[f"{joined.convolution}.weight"] for joined in self._joined.values()}
        offsets = {joined: weights.get(f"{joined.convolution}.bias") for joined in scaled}
        layers = {
            joined: layer
            for joined in scaled
            if joined.normalisation is not None
            and isinstance(layer := self._modules[joined.normalisation], nn.BatchNorm2d)
        }
        if layers:
            parts = {
                kind: [weights[f"{joined.normalisation}.{kind}"] for joined in layers]
                for kind in ("running_mean", "running_var")
            }
            gains = list(torch._foreach_add(parts["running_var"], [layer.eps for layer in layers.values()]))
            torch._foreach_sqrt_(gains)
            torch._foreach_reciprocal_(gains)
            affine = [place for place, layer in enumerate(layers.values()) if layer.affine]
            own = {
                kind: [weights[f"{joined.normalisation}.{kind}"] for joined, layer in layers.items() if layer.affine]
                for kind in ("weight", "bias")
            }
            if affine:
                torch._foreach_mul_([gains[place] for place in affine], own["weight"])
            means = list(torch._foreach_neg(parts["running_mean"]))
            for mean, joined in zip(means, layers, strict=True):
                if (bias := offsets[joined]) is not None:
                    mean += bias
            torch._foreach_mul_(means, gains)
            if affine:
                torch._foreach_add_([means[place] for place in affine], own["bias"])
            for joined, gain, offset in zip(layers, gains, means, strict=True):
                scaled[joined] = scaled[joined] * gain[:, None, None, None]
                offsets[joined] = offset
        return scaled, {
            joined: torch.zeros(len(scaled[joined]), device=scaled[joined].device) if offset is None else offset
            for joined, offset in offsets.items()
        }

    def _as_used(self, joined: _Joined, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight as the matrix that rows are multiplied with, where they are."""
        layer = self._modules[joined.convolution]
        if not _by_patches(weight, dtype):
            return weight
        if joined is self._first:
            return ImageConvolution.matrix(weight)
        return layer.matrix(weight, groups=layer.groups) if isinstance(layer, PointwiseConvolution) else weight

    def prepared(self, inputs: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return inputs [N, ...] as calls take them, whatever the weights: on a GPU in half precision as patches."""
        if self._first is None or not _by_patches(inputs, dtype):
            return inputs
        layer = self._modules[self._first.convolution]
        assert isinstance(layer, ImageConvolution)
        return layer.patches(inputs.to(dtype))

    def __call__(self, folded: Weights, inputs: Tensor) -> Tensor:
        """Return the module's outputs on inputs [N, ...], which `prepared` has made of the examples."""
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
        if following is not None and self._is_module(following, nn.BatchNorm2d) and self._has_statistics(following):
            joined.normalisation = str(following.target)
            chain.append(following)
            following = self._only_user(following)
        if following is not None and self._is_module(following, nn.ReLU, nn.ReLU6):
            joined.relu, joined.most = True, 6.0 if self._is_module(following, nn.ReLU6) else math.inf
            chain.append(following)
        elif following is not None and _is_addition(following):
            others = [argument for argument in following.args if argument is not chain[-1]]
            after = self._only_user(following)
            ready = len(others) == 1 and isinstance(others[0], fx.Node) and self._place[others[0]] < self._place[node]
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
        if first is None or first not in self._joined or not self._is_module(first, ImageConvolution):
            return None
        layer = self._modules[str(first.target)]
        return self._joined[first] if isinstance(layer, ImageConvolution) and layer.has_patches else None

    def _only_user(self, node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _is_module(self, node: fx.Node, *kinds: type[nn.Module]) -> bool:
        return node.op == "call_module" and type(self._modules[str(node.target)]) in kinds

    def _is_plain_convolution(self, node: fx.Node) -> bool:
        return len(node.args) == 1 and not node.kwargs and self._modules[str(node.target)].padding_mode == "zeros"

    def _has_statistics(self, node: fx.Node) -> bool:
        return self._modules[str(node.target)].running_var is not None

    def _convolve(self, joined: _Joined, folded: Weights, values: Mapping[fx.Node, Any]) -> Tensor:
        layer = self._modules[joined.convolution]
        assert isinstance(layer, nn.Conv2d)
        weight, bias = folded[f"{joined.convolution}.weight"], folded.get(f"{joined.convolution}.bias")
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
        own = {name.removeprefix(prefix): tensor for name, tensor in folded.items() if name.startswith(prefix)}
        # Weights are in single precision here, and what is left is small: heads, or normalisation of groups.
        precise = tuple(value.float() if own and isinstance(value, Tensor) else value for value in arguments)
        return functional_call(module, own, precise, keywords)

    def _attribute(self, name: str, folded: Weights) -> Any:
        """Return a weight, or what belongs to the module and not to its weights, such as a constant."""
        parent, _, last = name.rpartition(".")
        return folded[name] if name in folded else getattr(self._modules[parent], last)


class _Joined:
    """A convolution and what is joined with it."""

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


def _out_shape(layer: nn.Conv2d, inputs: Tensor) -> torch.Size:
    """Return the shape of a convolution's output; its padding is in numbers."""
    assert not isinstance(layer.padding, str)
    sizes = zip(inputs.shape[2:], layer.kernel_size, layer.stride, layer.padding, layer.dilation, strict=True)
    maps = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in sizes
    ]
    return torch.Size((len(inputs), layer.out_channels, *maps))


def _in_type(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    """Return tensors in another type, those of convolutions with the channels last on a GPU."""
    cast = {
        name: torch.empty(tensor.shape, dtype=dtype, device=tensor.device, memory_format=_layout(tensor))
        for name, tensor in tensors.items()
    }
    many.copy_into(list(cast.values()), list(tensors.values()))
    return cast


def _layout(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.is_cuda and tensor.ndim == 4 else torch.contiguous_format


def _by_patches(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the first convolution is a matrix product: on a GPU in half precision (see `ImageConvolution`)."""
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
    return node.op == "call_function" and node.target in (operator.add, torch.add, operator.iadd) and not node.kwargs
