"""Local training on a CPU: the weights of several clients are stacked, and each operation serves
all.

Small models spend their time between operations, not in them. A step is one pass over the stacked
weights, which are one tensor. Short batches are padded with rows that count for nothing. That is
exact if no example sees another, so models with batch normalisation are trained one by one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fedaux.config import Local
from fedaux.core.backend import ClientJob, TrainContext, TrainResult
from fedaux.core.local_training import client_batches
from fedaux.core.messages import Weights
from fedaux.core.objectives import weighted_divergence

BETAS = (0.9, 0.999)
EPSILON = 1e-8
"""Of Adam, as torch's own."""

OfModels = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""forward(weights, inputs) returns outputs [K, B, ...] for weights [K, ...] and inputs [K, B,
...]."""


def can_stack(model: nn.Module) -> bool:
    """Return whether a model's examples are independent, without dropout, and all of it is trained.

    Text models are not stacked: their operations are large enough, and attention does not stack
    well.
    """
    layers = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.Embedding)
    return (
        [name for name, _ in model.named_parameters()]
        == list(model.state_dict())  # no buffers, nothing shared
        and len({parameter.dtype for parameter in model.parameters()}) <= 1
        and all(parameter.requires_grad for parameter in model.parameters())
        and not any(isinstance(module, layers) for module in model.modules())
    )


def of_models(model: nn.Module) -> OfModels:
    """Return a model as a function of the weights of several models."""
    vmapped = vmap(lambda weights, inputs: functional_call(model, weights, (inputs,)))

    def forward(weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = vmapped(dict(weights), inputs)
        return outputs

    return forward


class StackedTraining:
    """Trains `compute.clients_at_once` clients per stack, one stack in each of `compute.workers`
    threads."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._shapes = {
            name: parameter.shape for name, parameter in context.model.named_parameters()
        }
        self._forwards: list[OfModels] = []

    def __call__(
        self, jobs: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        """Train each job from the given weights, jobs of many steps first."""
        ordered = sorted(jobs, key=lambda job: (-len(job.rows), job.client))
        compute = self._context.compute
        # Dealt out in turn, so that stacks are of the same work.
        count = min(
            len(ordered), max(compute.workers, math.ceil(len(ordered) / compute.clients_at_once))
        )
        stacks = [ordered[begin::count] for begin in range(count)]
        while len(self._forwards) < count:  # each thread needs its own copy
            self._forwards.append(of_models(copy.deepcopy(self._context.model).train()))
        done = compute.spread(
            lambda n: self._train(stacks[n], weights, self._forwards[n]), range(count)
        )
        for results in done:
            yield from results

    def _train(
        self, jobs: Sequence[ClientJob], weights: Weights, forward: OfModels
    ) -> list[tuple[ClientJob, Weights, TrainResult]]:
        context, section = self._context, self._context.section
        rehearsed, first = context.loss.rehearsed, len(context.labels)
        queues = [list(client_batches(context, job)) for job in jobs]
        anchor = torch.cat([weights[name].detach().flatten() for name in self._shapes])
        stack = anchor.expand(len(jobs), -1).clone()
        optimizer = OPTIMIZERS[section.optimizer](
            stack, self._shapes, [job.state for job in jobs], section
        )
        totals = torch.zeros(len(jobs))
        found = [job.adjustment for job in jobs if job.adjustment is not None]
        adjustments = torch.stack(found) if found else None
        soft_labels = None if jobs[0].soft_labels is None else jobs[0].soft_labels.float()
        corrections = [
            torch.cat([job.correction[name].flatten() for name in self._shapes])
            for job in jobs
            if context.corrected
        ]
        correction = torch.stack(corrections) if corrections else None
        for number in range(len(queues[0])):
            # Sorted by size, so the clients that still have a batch are the first ones.
            active = sum(number < len(own) for own in queues)
            taken = [own[number] for own in queues[:active]]
            private = [batch[: len(batch) - rehearsed] for batch in taken]
            rows, present = _filled(private, section.batch_size)
            width = rows.shape[1]
            if rehearsed:
                others = torch.stack([batch[len(batch) - rehearsed :] for batch in taken])
                rows = torch.cat([rows, others], dim=1)
            before = stack[:active].detach()
            leaves = {
                name: part.requires_grad_() for name, part in _named(before, self._shapes).items()
            }
            inputs = context.compute.floats(context.inputs[rows.flatten()]).unflatten(0, rows.shape)
            with context.compute.autocast():
                logits = forward(leaves, inputs).float()
            private_logits = logits[:, :width]
            if adjustments is not None:
                scales, offsets = adjustments[:active, None, 0], adjustments[:active, None, 1]
                private_logits = private_logits * scales + offsets
            labels = context.labels[rows[:, :width].flatten()]
            losses = functional.cross_entropy(
                private_logits.flatten(0, 1), labels, reduction="none"
            ).view_as(present)
            sums = (losses * present).sum(dim=1)
            sizes = present.sum(dim=1)
            if soft_labels is not None:
                targets = soft_labels[rows[:, width:] - first]
                sums = sums + sizes * weighted_divergence(logits[:, width:], targets).mean(dim=1)
            gradients = torch.autograd.grad(
                (sums / sizes).sum(), list(leaves.values()), allow_unused=True
            )
            totals[:active] += sums.detach()
            unused = [name for name, own in zip(leaves, gradients, strict=True) if own is None]
            left = {name: leaves[name].detach().clone() for name in unused}
            gradient = torch.cat(
                [_flat(own, of) for own, of in zip(gradients, leaves.values(), strict=True)], dim=1
            )
            if context.proximal > 0:
                gradient.add_(before - anchor, alpha=context.proximal)
            if correction is not None:
                gradient.add_(correction[:active])
            optimizer.step(gradient, active)
            for name, tensor in left.items():  # as torch's optimizers do
                _named(before, self._shapes)[name].copy_(tensor)
        results = []
        named = _named(stack, self._shapes)
        for index, (job, total) in enumerate(zip(jobs, totals.tolist(), strict=True)):
            own = {name: tensor[index].clone() for name, tensor in named.items()}
            kept = optimizer.state(index) if section.optimizer_state == "kept" else {}
            results.append((job, own, TrainResult(total / (section.epochs * len(job.rows)), kept)))
        return results


class Stacked:
    """An optimizer of a stack of weights [K, P], of which the first few take a step."""

    def __init__(
        self,
        stack: Tensor,
        shapes: Mapping[str, torch.Size],
        states: Sequence[Mapping[str, Tensor]],
        section: Local,
    ) -> None:
        self._stack = stack
        self._shapes = shapes
        self._section = section
        self._start(states)

    def _start(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        raise NotImplementedError

    def _stacked(self, states: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
        """Return the clients' kept moments as a stack like their weights; zero without any."""
        moments = torch.zeros_like(self._stack)
        for name, moment in _named(moments, self._shapes).items():
            for index, state in enumerate(states):
                if f"{name}/{key}" in state:
                    moment[index].copy_(state[f"{name}/{key}"])
        return moments


class StackedAdam(Stacked):
    """Adam (Kingma & Ba 2015) on a stack of weights [K, P], of which the first few take a step.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
    theta -= rate * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon),
    with t the number of steps of each client, in which kept states may differ.
    """

    def _start(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self._first = self._stacked(states, "exp_avg")
        self._second = self._stacked(states, "exp_avg_sq")
        step = f"{next(iter(self._shapes))}/step"
        counts = [float(state[step]) if state else 0.0 for state in states]
        self._counts = torch.tensor(counts, dtype=torch.float64)

    def step(self, gradient: Tensor, active: int) -> None:
        """Take a step with the gradients [active, P] of the first clients."""
        section = self._section
        self._counts[:active] += 1
        counts = self._counts[:active, None]
        rates = (section.learning_rate / (1 - BETAS[0] ** counts)).float()
        scales = torch.sqrt(1 - BETAS[1] ** counts).float()
        theta, mean, square = self._stack[:active], self._first[:active], self._second[:active]
        if section.weight_decay > 0:
            gradient = gradient.add(theta, alpha=section.weight_decay)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        scale = square.sqrt().div_(scales).add_(EPSILON)
        theta.sub_(mean.div(scale).mul_(rates))

    def state(self, client: int) -> dict[str, Tensor]:
        """Return one client's tensors, named as torch's Adam names them."""
        first, second = _named(self._first, self._shapes), _named(self._second, self._shapes)
        tensors: dict[str, Tensor] = {}
        for name in self._shapes:
            tensors[f"{name}/exp_avg"] = first[name][client].clone()
            tensors[f"{name}/exp_avg_sq"] = second[name][client].clone()
            tensors[f"{name}/step"] = self._counts[client].float()
        return tensors


class StackedSgd(Stacked):
    """SGD with momentum on a stack of weights [K, P]: b = momentum b + g, theta -= rate * b."""

    def _start(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        moved = self._section.momentum > 0
        self._momenta = self._stacked(states, "momentum_buffer") if moved else None

    def step(self, gradient: Tensor, active: int) -> None:
        """Take a step with the gradients [active, P] of the first clients."""
        section = self._section
        theta = self._stack[:active]
        if section.weight_decay > 0:
            gradient = gradient.add(theta, alpha=section.weight_decay)
        if self._momenta is not None:
            gradient = self._momenta[:active].mul_(section.momentum).add_(gradient)
        theta.sub_(gradient, alpha=section.learning_rate)

    def state(self, client: int) -> dict[str, Tensor]:
        """Return one client's tensors, named as torch's SGD names them."""
        named = {} if self._momenta is None else _named(self._momenta, self._shapes)
        return {
            f"{name}/momentum_buffer": momentum[client].clone() for name, momentum in named.items()
        }


OPTIMIZERS: dict[str, Callable[..., StackedAdam | StackedSgd]] = {
    "adam": StackedAdam,
    "sgd": StackedSgd,
}


def _named(stack: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return a stack [K, P] tensor by tensor, [K, ...] each, where it lies."""
    parts = stack.split([shape.numel() for shape in shapes.values()], dim=1)
    return {
        name: part.view(len(part), *shape)
        for part, (name, shape) in zip(parts, shapes.items(), strict=True)
    }


def _flat(gradient: Tensor | None, of: Tensor) -> Tensor:
    """Return a gradient [K, ...] as [K, P], zero where there is none."""
    return (torch.zeros_like(of) if gradient is None else gradient).reshape(len(of), -1)


def _filled(batches: Sequence[Tensor], batch_size: int) -> tuple[Tensor, Tensor]:
    """Return batches as one padded tensor [K, B], and which rows count [K, B]."""
    width = min(batch_size, max(len(batch) for batch in batches))
    rows = torch.stack(
        [functional.pad(batch, (0, width - len(batch)), value=int(batch[0])) for batch in batches]
    )
    sizes = torch.tensor([len(batch) for batch in batches])
    return rows, (torch.arange(width) < sizes[:, None]).float()
