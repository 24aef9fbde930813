"""Training steps of one model on rows of a data set: eager, or captured once and replayed as CUDA graphs.

Local training and distillation both are sequences of such steps; schedules, validation and averages happen in between.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaux.core import foreach as many
from fedaux.core.compute import Compute

Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of logits [B, C] against targets [B, ...]."""
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
WARM_UP_STEPS = 3
Made = TypeVar("Made")


class Stepping(Protocol):
    """Steps of one model, whoever takes them."""

    @property
    def model(self) -> nn.Module:
        """The model, which has its weights when they are settled."""

    def start(self) -> None:
        """Begin at the model's present weights."""

    def begin(self, rows: Tensor) -> None:
        """Say which rows come next, [n]."""

    def step(self, size: int) -> None:
        """Take a step on the next so many rows."""

    def set_rate(self, rate: float) -> None:
        """Change the learning rate."""

    def settle(self) -> None:
        """Let the model have the weights as they are now."""


class PreparedStepping(Stepping, Protocol):
    """Steps that stay where they are in memory, to be taken again and again."""

    def set_targets(self, targets: Tensor) -> None:
        """Replace the targets of all rows."""

    def reset(self) -> None:
        """Let the optimizer start anew."""


class Steps:
    """One model, its optimizer and the data they look at. Each step is eager."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        compute: Compute,
        proximal: float = 0.0,
        clip: float | None = None,
    ) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer(self.parameters)
        self.total = torch.zeros((), device=targets.device)
        """Sum of the loss over the examples seen, without the proximal term."""
        self._inputs = inputs
        self._targets = targets
        self._loss = loss
        self._compute = compute
        self._proximal = proximal
        self._clip = clip
        self._anchors: list[Tensor] = []
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._cursor = 0

    def start(self) -> None:
        """Take the model's present weights as those of the proximal term, and count the loss anew."""
        self.model.train()
        self.total.zero_()
        if self._proximal > 0:
            self._anchors = [parameter.detach().clone() for parameter in self.parameters]

    def begin(self, rows: Tensor) -> None:
        """Say which rows come next, [n]."""
        self._rows, self._cursor = rows, 0

    def step(self, size: int) -> None:
        """Take a step on the next so many rows."""
        batch = self._rows[self._cursor : self._cursor + size]
        self._cursor += size
        self._update(self._compute.floats(self._inputs[batch]), self._targets[batch], self._forward)

    def set_rate(self, rate: float) -> None:
        """Change the learning rate; where it is a tensor, in place, so that whoever holds the tensor sees it."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def reset(self) -> None:
        """Let the optimizer start anew."""
        reset(self.optimizer)

    def settle(self) -> None:
        """Let the model have the weights as they are now: here it always has."""

    def run(self, rows: Tensor, *, batch_size: int) -> None:
        """Take a step on each batch of rows in turn; the last one can be smaller."""
        self.begin(rows)
        for size in batch_sizes(len(rows), batch_size):
            self.step(size)

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with statistics_of(self.model, batch_size=len(targets)):
            with self._compute.autocast():
                logits = self.model(inputs)
            return self._loss(logits.float(), targets)

    def _update(self, inputs: Tensor, targets: Tensor, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        loss = forward(inputs, targets)
        self.total += loss.detach() * len(targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self._anchors:
            add_proximal_gradient(self.parameters, self._anchors, strength=self._proximal)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self._clip)
        self.optimizer.step()


class CapturedSteps(Steps):
    """The same steps without Python: one CUDA graph for each batch size, which takes its rows from a fixed buffer.

    Model, optimizer state, rows and targets stay where they are in memory; new values are copied into them. The step of
    `batch_size` is compiled where `compute` says so; steps of other sizes (the rest of an epoch) are captured as they
    are, for compiling each would take longer than they do.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        compute: Compute,
        capacity: int,
        batch_size: int,
        key: Hashable,
        proximal: float = 0.0,
        clip: float | None = None,
    ) -> None:
        super().__init__(
            model,
            inputs,
            targets,
            loss=loss,
            optimizer=optimizer,
            compute=compute,
            proximal=proximal,
            clip=clip,
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
        if proximal > 0:
            self._anchors = [parameter.detach().clone() for parameter in self.parameters]

    def start(self) -> None:
        """Take the model's present weights as those of the proximal term, and count the loss anew."""
        self.model.train()
        self.total.zero_()
        if self._anchors:
            torch._foreach_copy_(self._anchors, [parameter.detach() for parameter in self.parameters])

    def begin(self, rows: Tensor) -> None:
        """Say which rows come next, [n]."""
        self._buffer[: len(rows)].copy_(rows)
        self._position.zero_()

    def prepare(self, sizes: Iterable[int]) -> None:
        """Capture the steps of these sizes; the model and its optimizer are then in disorder and must be loaded."""
        for size in sizes:
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)

    def step(self, size: int) -> None:
        """Take a step on the next so many rows, whose size has been prepared."""
        self._graphs[size].replay()

    def set_targets(self, targets: Tensor) -> None:
        """Replace the targets of all rows."""
        self._targets.copy_(targets)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        # Held here: a graph reads it from where it lies for as long as it is replayed.
        offsets = self._offsets[size] = torch.arange(size, device=self._compute.device)
        forward = self._forward_compiled if size == self._batch_size and self._compute.compile else self._forward

        def step() -> None:
            rows = self._buffer.index_select(0, self._position + offsets)
            self._update(self._compute.floats(self._inputs[rows]), self._targets[rows], forward)
            self._position += size

        device = self.stream.device  # which need not be the current one
        self._position.zero_()
        self.stream.wait_stream(torch.cuda.current_stream(device))
        # Trying out convolutions pays for the full batch; the rests of epochs come in many sizes.
        try_out = torch.backends.cudnn.benchmark and size == self._batch_size
        with (
            torch.cuda.stream(self.stream),
            torch.backends.cudnn.flags(enabled=True, benchmark=try_out, allow_tf32=torch.backends.cudnn.allow_tf32),
        ):
            for _ in range(WARM_UP_STEPS):  # choices of algorithms and first allocations must not be captured
                self._position.zero_()
                step()
        torch.cuda.current_stream(device).wait_stream(self.stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        self._position.zero_()
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=try_out, allow_tf32=torch.backends.cudnn.allow_tf32),
            torch.cuda.graph(graph, stream=self.stream, pool=pool),
        ):
            step()
        return graph

    def _forward_compiled(self, inputs: Tensor, targets: Tensor) -> Tensor:
        size = self._batch_size
        forward = self._compute.compiled(
            self._key, lambda: loss_of_weights(self.model, loss=self._loss, compute=self._compute, batch_size=size)
        )
        result: Tensor = forward(*self._named, inputs, targets)
        return result


def loss_of_weights(
    model: nn.Module, *, loss: Loss, compute: Compute, batch_size: int
) -> Callable[[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor], Tensor]:
    """Return the loss of a batch of this size in training as a function of a model's parameters and buffers."""
    own = copy.deepcopy(model).train()
    for layer in _without_variance(own, batch_size=batch_size):
        layer.eval()

    def forward(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        with compute.autocast():
            logits = functional_call(own, (parameters, buffers), (inputs,))
        return loss(logits.float(), targets)

    return forward


def attempt(
    make: Callable[[], Made], *, device: torch.device, otherwise: str, errors: type[Exception] = RuntimeError
) -> Made | None:
    """Return what is captured or compiled, or None, with one line that says what happens otherwise.

    Out of memory is no reason to go on in another way, which would take more.
    """
    try:
        return make()
    except torch.cuda.OutOfMemoryError:
        raise
    except errors as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        warnings.warn(f"{otherwise} ({type(error).__name__}: {reason})", stacklevel=3)
        release_generator(device)
        return None


def release_generator(device: torch.device) -> None:
    """Let the device's global random numbers be drawn again after a capture that failed, which leaves them locked."""
    if not torch.cuda.is_initialized():
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state())


def batch_sizes(count: int, batch_size: int) -> Iterator[int]:
    """Yield the sizes of the batches of so many examples: all full but the last."""
    for begin in range(0, count, batch_size):
        yield min(batch_size, count - begin)


def add_proximal_gradient(parameters: Sequence[nn.Parameter], anchors: Sequence[Tensor], *, strength: float) -> None:
    """Add the gradient of strength / 2 * |theta - theta_0|^2 (FedPROX), which is strength * (theta - theta_0)."""
    pairs = [pair for pair in zip(parameters, anchors, strict=True) if pair[0].grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    differences = torch._foreach_sub([parameter.detach() for parameter, _ in pairs], [anchor for _, anchor in pairs])
    torch._foreach_add_(gradients, differences, alpha=strength)


@contextmanager
def statistics_of(model: nn.Module, *, batch_size: int) -> Iterator[None]:
    """Let batch normalisation use its running statistics, unchanged, for a batch of one: it has no variance."""
    layers = _without_variance(model, batch_size=batch_size)
    for module in layers:
        module.eval()
    try:
        yield
    finally:
        for module in layers:
            module.train()


def _without_variance(model: nn.Module, *, batch_size: int) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if batch_size == 1 and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer start anew, in place: its moments and its count of steps are zero."""
    many.zero(value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the optimizer's tensors by "parameter/moment", empty before its first step."""
    own = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return many.clones(own)


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give an optimizer the tensors that `optimizer_state` returned; in place where it already has some."""
    parameters = dict(model.named_parameters())
    present, values = [], []
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        if name not in parameters:
            continue
        moments = optimizer.state[parameters[name]]
        if isinstance(moments.get(key), Tensor):
            present.append(moments[key])
            values.append(value)
        else:
            moments[key] = value.detach().clone()
    many.copy_into(present, values)
