"""Training steps of one model on rows of a data set.

Local training and distillation are sequences of such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedaux.config import Distillation, Local
from fedaux.core.compute import Compute
from fedaux.core.weights import clones, copy_into, zero

Loss = Callable[..., Tensor]
"""loss(logits [B, C], targets [B, ...], *constants) returns the mean loss of a batch."""
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def adam(
    parameters: Iterable[nn.Parameter], section: Local | Distillation, **how: Any
) -> torch.optim.Optimizer:
    """Adam with a section's settings (Kingma & Ba 2015); fused on a CPU."""
    parameters = list(parameters)
    how = (
        {"fused": True} if all(parameter.device.type == "cpu" for parameter in parameters) else {}
    ) | how
    return torch.optim.Adam(
        parameters, lr=section.learning_rate, weight_decay=section.weight_decay, **how
    )


def sgd(
    parameters: Iterable[nn.Parameter], section: Local | Distillation, **how: Any
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with a section's settings."""
    return torch.optim.SGD(
        parameters,
        lr=section.learning_rate,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        **how,
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": adam, "sgd": sgd}
"""Called as optimizer(parameters, section, **how), for local training and distillation."""


class Stepping(Protocol):
    """Training steps of one model. Steps that are prepared once serve many distillations."""

    @property
    def model(self) -> nn.Module:
        """The model; `settle` brings its weights up to date."""

    def start(self) -> None:
        """Begin at the model's present weights."""

    def begin(self, rows: Tensor) -> None:
        """Set the rows of the next steps, [n]."""

    def step(self, size: int) -> None:
        """Take a step on the next `size` rows."""

    def settle(self) -> None:
        """Bring the model's weights up to date."""

    def set_targets(self, targets: Tensor) -> None:
        """Replace the targets of all rows."""

    def reset(self) -> None:
        """Reset the optimizer."""


class Steps:
    """Eager training steps of one model."""

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
        constants: Sequence[Tensor] = (),
        uncounted: int = 0,
        correction: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        self.parameters = [parameter for _, parameter in named]
        self._names = [name for name, _ in named]
        self._corrections = [correction[name] for name in self._names] if correction else []
        self.optimizer = optimizer(self.parameters)
        self.total = torch.zeros((), device=targets.device)
        """Sum of the loss over the examples seen, without the proximal term and without the last
        `uncounted` rows of each batch, which are public."""
        self.constants = tuple(constants)
        """Further arguments of the loss, which may be changed in place."""
        self._uncounted = uncounted
        self._inputs = inputs
        self._targets = targets
        self._loss = loss
        self._compute = compute
        self._proximal = proximal
        self._anchors: list[Tensor] = []
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._cursor = 0

    def start(self) -> None:
        """Anchor the proximal term at the model's present weights, and reset the loss."""
        self.model.train()
        self.total.zero_()
        if self._proximal > 0:
            self._anchors = [parameter.detach().clone() for parameter in self.parameters]

    def begin(self, rows: Tensor) -> None:
        """Set the rows of the next steps, [n]."""
        self._rows, self._cursor = rows, 0

    def step(self, size: int) -> None:
        """Take a step on the next `size` rows."""
        batch = self._rows[self._cursor : self._cursor + size]
        self._cursor += size
        self._update(self._compute.floats(self._inputs[batch]), self._targets[batch], self._forward)

    def set_targets(self, targets: Tensor) -> None:
        """Replace the targets of all rows."""
        self._targets.copy_(targets)

    def reset(self) -> None:
        """Reset the optimizer."""
        reset(self.optimizer)

    def settle(self) -> None:
        """Do nothing: the model is always up to date."""

    def run(self, rows: Tensor, *, batch_size: int) -> None:
        """Take a step on each batch of rows in turn; the last one can be smaller."""
        self.begin(rows)
        for size in batch_sizes(len(rows), batch_size):
            self.step(size)

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with running_statistics_for_one(self.model, batch_size=len(targets)):
            with self._compute.autocast():
                logits = self.model(inputs)
            return self._loss(logits.float(), targets, *self.constants)

    def _update(
        self, inputs: Tensor, targets: Tensor, forward: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        loss = forward(inputs, targets)
        self.total += loss.detach() * (len(targets) - self._uncounted)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self._anchors:
            add_proximal_gradient(self.parameters, self._anchors, strength=self._proximal)
        if self._corrections:
            add_to_gradients(self.parameters, self._corrections)
        self.optimizer.step()


def epoch_orders(
    rows: Tensor, *, epochs: int, generator: np.random.Generator, mirrored: int = 0
) -> Iterator[Tensor]:
    """Yield a random order of the rows [n] for each epoch.

    If `mirrored` is given, half of them at random become row + `mirrored`, the mirrored image.
    """
    for _ in range(epochs):
        order = rows[torch.from_numpy(generator.permutation(len(rows))).to(rows.device)]
        if mirrored:
            flips = torch.from_numpy(generator.integers(2, size=len(rows)))
            order = order + mirrored * flips.to(rows.device)
        yield order


def batch_sizes(count: int, batch_size: int) -> Iterator[int]:
    """Yield the sizes of the batches of `count` examples: all full but the last."""
    for begin in range(0, count, batch_size):
        yield min(batch_size, count - begin)


def add_proximal_gradient(
    parameters: Sequence[nn.Parameter], anchors: Sequence[Tensor], *, strength: float
) -> None:
    """Add strength * (theta - theta_0), the gradient of FedPROX's proximal term."""
    differences = torch._foreach_sub([own.detach() for own in parameters], list(anchors))
    add_to_gradients(parameters, differences, alpha=strength)


def add_to_gradients(
    parameters: Sequence[nn.Parameter], summands: Sequence[Tensor], *, alpha: float = 1.0
) -> None:
    """Add alpha times a tensor to the gradient of each parameter that has one."""
    pairs = [
        (parameter.grad, summand)
        for parameter, summand in zip(parameters, summands, strict=True)
        if parameter.grad is not None
    ]
    torch._foreach_add_([one for one, _ in pairs], [one for _, one in pairs], alpha=alpha)


@contextmanager
def running_statistics_for_one(model: nn.Module, *, batch_size: int) -> Iterator[None]:
    """Use running statistics of batch normalisation, unchanged, for a batch of one."""
    layers = layers_without_variance(model, batch_size=batch_size)
    for module in layers:
        module.eval()
    try:
        yield
    finally:
        for module in layers:
            module.train()


def layers_without_variance(model: nn.Module, *, batch_size: int) -> list[nn.Module]:
    """Return the layers of batch normalisation that a batch of this size gives no variance."""
    return [
        module
        for module in model.modules()
        if batch_size == 1
        and isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
    ]


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Reset an optimizer in place: its moments and its count of steps are zero."""
    zero(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the optimizer's tensors by "parameter/moment"; none before a step."""
    own = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return clones(own)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Tensor]
) -> None:
    """Load what `optimizer_state` returned; tensors that exist are changed in place."""
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
    copy_into(present, values)
