"""Training steps as CUDA graphs: captured once, replayed without Python."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaux.core.compute import Compute
from fedaux.core.steps import Loss, Steps, layers_without_variance
from fedaux.fast.fallback import compiled

WARM_UP_STEPS = 3


def capture(
    step: Callable[[], object],
    *,
    stream: torch.cuda.Stream,
    rewind: Callable[[], object] = lambda: None,
    warm_up_steps: int = WARM_UP_STEPS,
    generator: torch.Generator | None = None,
    pool: Any = None,
) -> torch.cuda.CUDAGraph:
    """Return a step as a CUDA graph, captured on a stream.

    The step first runs a few times, each time after `rewind`: choices of algorithms and first
    allocations must not be captured. The caller restores, in place, what these steps change. A
    replay draws new random numbers from `generator`. Graphs that never run at the same time may
    share a pool.
    """
    device = stream.device  # not necessarily the current one, where Triton launches
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for _ in range(warm_up_steps):
            rewind()
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    rewind()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, pool=pool):
        step()
    return graph


class CapturedSteps(Steps):
    """Steps as CUDA graphs, one for each batch size, which take their rows from a fixed buffer.

    Model, optimizer state, rows and targets keep their places in memory; new values are copied into
    them. The step of `batch_size` is compiled if `compute` asks for it. Steps of other sizes (the
    last of an epoch) are captured without, because compiling them would take longer than they do.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        *,
        loss: Loss,
        compute: Compute,
        capacity: int,
        batch_size: int,
        key: Hashable,
        correction: Mapping[str, Tensor] | None = None,
        **steps: Any,
    ) -> None:
        """`steps` are further arguments of `Steps`."""
        own = {name: tensor.clone() for name, tensor in (correction or {}).items()}
        super().__init__(
            model, inputs, targets, loss=loss, compute=compute, correction=own, **steps
        )
        device = compute.device
        self.stream = torch.cuda.Stream(device)
        self._buffer = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._offsets: dict[int, Tensor] = {}
        self._batch_size = batch_size
        self._key = (key, batch_size, loss)
        self._named = dict(model.named_parameters()), dict(model.named_buffers())
        if self._proximal > 0:
            self._anchors = [parameter.detach().clone() for parameter in self.parameters]

    def start(self) -> None:
        """Anchor the proximal term at the model's present weights, and reset the loss."""
        self.model.train()
        self.total.zero_()
        if self._anchors:
            torch._foreach_copy_(
                self._anchors, [parameter.detach() for parameter in self.parameters]
            )

    def begin(self, rows: Tensor) -> None:
        """Set the rows of the next steps, [n]."""
        self._buffer[: len(rows)].copy_(rows)
        self._position.zero_()

    def prepare(self, sizes: Iterable[int]) -> None:
        """Capture the steps of these sizes; model and optimizer must be loaded again afterwards."""
        for size in sizes:
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)

    def step(self, size: int) -> None:
        """Take a step on the next `size` rows; the size must be prepared."""
        self._graphs[size].replay()

    def set_correction(self, correction: Mapping[str, Tensor]) -> None:
        """Replace the summands of the gradients."""
        torch._foreach_copy_(self._corrections, [correction[name] for name in self._names])

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        # Held here: graphs read it from its place in memory.
        offsets = self._offsets[size] = torch.arange(size, device=self._compute.device)
        forward = (
            self._forward_compiled
            if size == self._batch_size and self._compute.compile
            else self._forward
        )

        def step() -> None:
            rows = self._buffer.index_select(0, self._position + offsets)
            self._update(self._compute.floats(self._inputs[rows]), self._targets[rows], forward)
            self._position += size

        # Benchmarking convolutions pays for the full batch; the last ones come in many sizes.
        try_out = torch.backends.cudnn.benchmark and size == self._batch_size
        tf32 = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=try_out, allow_tf32=tf32):
            return capture(
                step,
                stream=self.stream,
                rewind=self._position.zero_,
                pool=next(iter(self._graphs.values())).pool() if self._graphs else None,
            )

    def _forward_compiled(self, inputs: Tensor, targets: Tensor) -> Tensor:
        model, loss, compute, size = self.model, self._loss, self._compute, self._batch_size

        def make() -> Callable[..., Tensor]:
            return loss_of_weights(model, loss=loss, compute=compute, batch_size=size)

        step = compiled(compute, self._key, make)
        result: Tensor = step(*self._named, inputs, targets, *self.constants)
        return result


def loss_of_weights(
    model: nn.Module, *, loss: Loss, compute: Compute, batch_size: int
) -> Callable[..., Tensor]:
    """Return the training loss of a batch as a function of a model's parameters and buffers."""
    own = copy.deepcopy(model).train()
    for layer in layers_without_variance(own, batch_size=batch_size):
        layer.eval()

    def forward(
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        *constants: Tensor,
    ) -> Tensor:
        with compute.autocast():
            logits = functional_call(own, (parameters, buffers), (inputs,))
        return loss(logits.float(), targets, *constants)

    return forward
