"""Local training on a CPU: the weights of several clients stacked, each operation done once for all of them.

Small models spend their time between operations, not in them. A step here is one pass over the stacked weights with
`torch.func.vmap`. Where a client's batch is short, rows are filled up and count for nothing; that is exact as long as
no example sees another, so models with batch normalisation are trained one by one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fedaux.clients import Weights
from fedaux.config import Local
from fedaux.engines.training import Job, Workplace
from fedaux.local import Trained, epoch_orders

BETAS = (0.9, 0.999)
EPSILON = 1e-8
"""Of Adam, as torch's own."""


def can_stack(model: nn.Module) -> bool:
    """Whether no example sees another in a model, nothing is drawn in it, and all of it is trained parameters.

    Text models are not stacked: their operations are large enough, and attention would fall apart into single ones.
    """
    layers = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.Embedding)
    return (
        [name for name, _ in model.named_parameters()] == list(model.state_dict())  # no buffers, nothing shared
        and all(parameter.requires_grad for parameter in model.parameters())
        and not any(isinstance(module, layers) for module in model.modules())
    )


class StackedTraining:
    """Trains up to `compute.clients_at_once` clients in one stack, and a stack in each of `compute.workers` threads."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._names = [name for name, _ in place.model.named_parameters()]
        self._forwards: list[Callable[..., Tensor]] = []

    def __call__(self, jobs: Sequence[Job], weights: Weights) -> Iterator[tuple[Job, Weights, Trained]]:
        """Train each job from the given weights, those of many steps first."""
        ordered = sorted(jobs, key=lambda job: (-len(job.rows), job.client))
        compute = self._place.compute
        # Dealt out in turn, so that stacks are of the same work.
        count = min(len(ordered), max(compute.workers, math.ceil(len(ordered) / compute.clients_at_once)))
        stacks = [ordered[begin::count] for begin in range(count)]
        while len(self._forwards) < count:
            self._forwards.append(self._stacked_forward())
        done = compute.spread(lambda n: self._train(stacks[n], weights, self._forwards[n]), range(count))
        for results in done:
            yield from results

    def _stacked_forward(self) -> Callable[..., Tensor]:
        """Return the model on stacked weights [K, ...] and inputs [K, B, ...]; each with a copy, for it is borrowed."""
        model, names = copy.deepcopy(self._place.model).train(), self._names

        def forward(weights: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
            logits: Tensor = functional_call(model, dict(zip(names, weights, strict=True)), (inputs,))
            return logits

        stacked: Callable[..., Tensor] = vmap(forward)
        return stacked

    def _train(
        self, jobs: Sequence[Job], weights: Weights, forward: Callable[..., Tensor]
    ) -> list[tuple[Job, Weights, Trained]]:
        place, section = self._place, self._place.section
        batches = [list(_batches(job, section)) for job in jobs]
        anchors = [weights[name].detach() for name in self._names]
        stack = [anchor.expand(len(jobs), *anchor.shape).clone() for anchor in anchors]
        optimizer = OPTIMIZERS[section.optimizer](stack, self._names, [job.state for job in jobs], section)
        totals = torch.zeros(len(jobs))
        for number in range(len(batches[0])):
            # Sorted by size, so those that still have a batch are the first ones.
            active = sum(number < len(own) for own in batches)
            rows, present = _filled([own[number] for own in batches[:active]], section.batch_size)
            leaves = [tensor[:active].detach().requires_grad_() for tensor in stack]
            inputs = place.compute.floats(place.inputs[rows.flatten()]).unflatten(0, rows.shape)
            with place.compute.autocast():
                logits = forward(tuple(leaves), inputs).float()
            losses = functional.cross_entropy(
                logits.flatten(0, 1), place.labels[rows.flatten()], reduction="none"
            ).view_as(present)
            sums = (losses * present).sum(dim=1)
            sizes = present.sum(dim=1)
            gradients = list(torch.autograd.grad((sums / sizes).sum(), leaves))
            totals[:active] += sums.detach()
            if place.proximal > 0:
                for gradient, leaf, anchor in zip(gradients, leaves, anchors, strict=True):
                    gradient.add_(leaf.detach() - anchor, alpha=place.proximal)
            optimizer.step(gradients, active)
        results = []
        for index, (job, total) in enumerate(zip(jobs, totals.tolist(), strict=True)):
            own = {name: tensor[index].clone() for name, tensor in zip(self._names, stack, strict=True)}
            kept = optimizer.state(index) if section.optimizer_state == "kept" else {}
            results.append((job, own, Trained(total / (section.epochs * len(job.rows)), kept)))
        return results


class StackedAdam:
    """Adam (Kingma & Ba 2015) on stacked tensors [K, ...], of which the first few take a step.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, theta -= rate * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon),
    with t the number of steps of each client, for kept states may differ in it.
    """

    def __init__(
        self, stack: list[Tensor], names: Sequence[str], states: Sequence[Mapping[str, Tensor]], section: Local
    ) -> None:
        self._stack = stack
        self._names = names
        self._section = section
        self._first = _stacked(stack, names, states, "exp_avg")
        self._second = _stacked(stack, names, states, "exp_avg_sq")
        counts = [float(state[f"{names[0]}/step"]) if state else 0.0 for state in states]
        self._counts = torch.tensor(counts, dtype=torch.float64)

    def step(self, gradients: list[Tensor], active: int) -> None:
        """Take a step with the gradients [active, ...] of the first clients."""
        section = self._section
        self._counts[:active] += 1
        counts = self._counts[:active]
        rates = (section.learning_rate / (1 - BETAS[0] ** counts)).float()
        scales = torch.sqrt(1 - BETAS[1] ** counts).float()
        for tensor, first, second, gradient in zip(self._stack, self._first, self._second, gradients, strict=True):
            theta, mean, square = tensor[:active], first[:active], second[:active]
            if section.weight_decay > 0:
                gradient = gradient.add(theta, alpha=section.weight_decay)
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            shape = (active,) + (1,) * (theta.ndim - 1)
            scale = square.sqrt().div_(scales.view(shape)).add_(EPSILON)
            theta.sub_(mean.div(scale).mul_(rates.view(shape)))

    def state(self, client: int) -> dict[str, Tensor]:
        """Return one client's tensors, named as torch's Adam names them."""
        tensors: dict[str, Tensor] = {}
        for name, first, second in zip(self._names, self._first, self._second, strict=True):
            tensors[f"{name}/exp_avg"] = first[client].clone()
            tensors[f"{name}/exp_avg_sq"] = second[client].clone()
            tensors[f"{name}/step"] = self._counts[client].float()
        return tensors


class StackedSgd:
    """Gradient descent with momentum on stacked tensors: b = momentum b + g, theta -= rate * b."""

    def __init__(
        self, stack: list[Tensor], names: Sequence[str], states: Sequence[Mapping[str, Tensor]], section: Local
    ) -> None:
        self._stack = stack
        self._names = names
        self._section = section
        self._momenta = _stacked(stack, names, states, "momentum_buffer") if section.momentum > 0 else []

    def step(self, gradients: list[Tensor], active: int) -> None:
        """Take a step with the gradients [active, ...] of the first clients."""
        section = self._section
        for index, (tensor, gradient) in enumerate(zip(self._stack, gradients, strict=True)):
            theta = tensor[:active]
            if section.weight_decay > 0:
                gradient = gradient.add(theta, alpha=section.weight_decay)
            if self._momenta:
                gradient = self._momenta[index][:active].mul_(section.momentum).add_(gradient)
            theta.sub_(gradient, alpha=section.learning_rate)

    def state(self, client: int) -> dict[str, Tensor]:
        """Return one client's tensors, named as torch's SGD names them."""
        named = zip(self._names, self._momenta, strict=bool(self._momenta))
        return {f"{name}/momentum_buffer": momentum[client].clone() for name, momentum in named}


OPTIMIZERS: dict[str, Callable[..., StackedAdam | StackedSgd]] = {"adam": StackedAdam, "sgd": StackedSgd}


def _stacked(
    stack: list[Tensor], names: Sequence[str], states: Sequence[Mapping[str, Tensor]], key: str
) -> list[Tensor]:
    """Return the clients' kept moments as stacks like their weights; zero for those who start anew."""
    moments = [torch.zeros_like(tensor) for tensor in stack]
    for index, state in enumerate(states):
        for name, moment in zip(names, moments, strict=True):
            if f"{name}/{key}" in state:
                moment[index].copy_(state[f"{name}/{key}"])
    return moments


def _batches(job: Job, section: Local) -> Iterator[Tensor]:
    for order in epoch_orders(len(job.rows), epochs=section.epochs, generator=job.generator):
        yield from job.rows[order].split(section.batch_size)


def _filled(batches: Sequence[Tensor], batch_size: int) -> tuple[Tensor, Tensor]:
    """Return batches as one tensor [K, B], filled up with a row that counts for nothing, and what counts [K, B]."""
    width = min(batch_size, max(len(batch) for batch in batches))
    rows = torch.stack([functional.pad(batch, (0, width - len(batch)), value=int(batch[0])) for batch in batches])
    sizes = torch.tensor([len(batch) for batch in batches])
    return rows, (torch.arange(width) < sizes[:, None]).float()
