"""Differentially private local training: DP-SGD (Abadi et al., 2016), for `[local.privacy]`.

A step samples each of the n_i examples with probability q = batch_size / n_i, clips each gradient
to norm C, adds N(0, (noise_multiplier C)^2 I) to their sum and divides by the expected batch size.
Replacing an example moves the sum by at most 2C. n_i is public, and so are q and the number of
steps. The proximal term depends on no example and needs no noise. Per-example gradients come from
Opacus; with secure draws each example has a separate pass, so that its gradient does not depend
on which others were sampled. Clipping, sums and noise are exact on a lattice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Local
from fedaux.core.compute import Compute
from fedaux.core.steps import OPTIMIZERS
from fedaux.formatting import optional
from fedaux.privacy.accounting import Query, composed_epsilon
from fedaux.privacy.bounds import MOST_PARAMETERS
from fedaux.privacy.exact_gaussian import Draws
from fedaux.privacy.ledger import UPDATE, LedgerEntry

LATTICE = 2.0**24
"""Points of the lattice within the clip bound, along each coordinate of a gradient."""
CLIP_SHARE = 1.0 - 2.0**-20
"""Gradients are clipped to this share of the bound, which covers rounding errors of their norm."""


def train_privately(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    section: Local,
    proximal: float,
    draws: Draws,
    client: int,
    compute: Compute | None = None,
) -> tuple[float, LedgerEntry]:
    """Train `model` in place on inputs [n, ...] and labels [n]; return mean loss and cost.

    Examples with a label of -1 count and contribute nothing. The loss has no noise and must not
    leave the client. Raises ValueError if a layer mixes the examples of a batch, or if an extra is
    missing.
    """
    check_ready([model])
    if len(labels) == 0:
        raise ValueError("a client without examples cannot train")
    assert section.privacy is not None, "local.privacy sets the noise"
    privacy = section.privacy
    query, steps = schedule(section, num_examples=len(labels))
    assert query.sampling_probability is not None
    entry = update_entry(section, num_examples=len(labels), client=client, noise=draws.kind)
    parameters = _trained(model)
    anchors = [parameter.detach().clone() for parameter in parameters]
    gradients_of = _alone if draws.kind == "secure" else _together
    compute = Compute(labels.device) if compute is None else compute
    optimizer = OPTIMIZERS[section.optimizer](parameters, section)
    expected = query.sampling_probability * len(labels)
    total, seen = torch.zeros((), device=labels.device), 0
    model.train()
    with gradients_of(model, images, labels, clip=privacy.clip, compute=compute) as gradients:
        for _ in range(steps):
            taken = draws.sample(len(labels), probability=query.sampling_probability)
            points, loss = gradients(torch.from_numpy(taken).to(labels.device))
            total += loss
            seen += len(taken)
            noisy = with_noise(
                points, clip=privacy.clip, noise_multiplier=privacy.noise_multiplier, draws=draws
            )
            for parameter, gradient, anchor in zip(parameters, noisy, anchors, strict=True):
                parameter.grad = (gradient / expected).to(parameter.dtype)
                if proximal > 0:
                    parameter.grad.add_(parameter.detach() - anchor, alpha=proximal)
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total) / max(1, seen), entry


def lattice_sum(samples: Sequence[Tensor], *, clip: float) -> list[Tensor]:
    """Return the sums of clipped gradients [b, ...] of each parameter, in points of the lattice.

    Each example's gradient is clipped to norm C and rounded to a lattice of spacing C / LATTICE;
    integers are summed exactly, in doubles. A gradient with a number that is NaN or infinite counts
    as zero: hostile weights could otherwise let one example turn the whole update into NaN, which
    reveals it without noise.
    """
    flat = [sample.detach().flatten(1).double() for sample in samples]
    finite = torch.stack([one.isfinite().all(dim=1) for one in flat]).all(dim=0)
    flat = [one.masked_fill(~finite[:, None], 0.0) for one in flat]
    squares = torch.stack([one.square().sum(dim=1) for one in flat]).sum(dim=0)
    factors = (clip * CLIP_SHARE / squares.sqrt().clamp_min(1e-300)).clamp_max(1.0) * LATTICE / clip
    return [
        (one * factors[:, None]).round().sum(dim=0).reshape(sample.shape[1:])
        for one, sample in zip(flat, samples, strict=True)
    ]


def with_noise(
    points: Sequence[Tensor], *, clip: float, noise_multiplier: float, draws: Draws
) -> list[Tensor]:
    """Return sums of `lattice_sum` with noise, in doubles.

    With the spacing g = C / LATTICE, rounding moves a gradient of d numbers by at most g sqrt(d) /
    2, so its norm is at most C' = C + g sqrt(d) / 2, and the noise is that of round(N(0,
    (noise_multiplier C' / g)^2)), on the same lattice.
    """
    size = sum(own.numel() for own in points)
    if size > MOST_PARAMETERS:
        raise ValueError(
            f"local.privacy: a model of {size} parameters; should be at most {MOST_PARAMETERS}"
        )
    scale = noise_multiplier * (LATTICE + math.sqrt(size) / 2)
    return [(own + draws.integers(own, scale=scale)) * (clip / LATTICE) for own in points]


def update_entry(section: Local, *, num_examples: int, client: int, noise: str) -> LedgerEntry:
    """Return what one round of a client costs, known before it trains."""
    assert section.privacy is not None, "local.privacy sets the noise"
    privacy = section.privacy
    query, steps = schedule(section, num_examples=num_examples)
    return LedgerEntry(
        client=client,
        num_examples=num_examples,
        mechanism="dp-sgd",
        purpose=UPDATE,
        sensitivity=2.0 * privacy.clip,
        sigma=privacy.noise_multiplier * privacy.clip,
        epsilon=composed_epsilon({query: steps}, delta=privacy.delta),
        delta=privacy.delta,
        noise=noise,
        steps=steps,
        sampling_probability=query.sampling_probability,
    )


def schedule(section: Local, *, num_examples: int) -> tuple[Query, int]:
    """Return one step of a client and the number of steps per round, as in plain epochs."""
    assert section.privacy is not None, "local.privacy sets the noise"
    probability = min(1.0, section.batch_size / num_examples)
    return Query(section.privacy.noise_multiplier, probability), section.epochs * math.ceil(
        1.0 / probability - 1e-9
    )


def check_ready(models: Iterable[nn.Module]) -> None:
    """Raise ValueError if private training cannot start: a missing extra, or mixed examples."""
    _grad_sample_module()
    composed_epsilon({Query(1.0, 1.0): 1}, delta=0.5)  # asks for dp-accounting
    for model in models:
        if (refusal := refusal_of(model)) is not None:
            raise ValueError(refusal)


def refusal_of(model: nn.Module) -> str | None:
    """Return why a model cannot be trained privately, or None: batch normalisation mixes
    examples."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return (
                f"local.privacy: batch normalisation ({name}) mixes the examples of a batch, so "
                "gradients cannot be "
                "clipped one by one; use a model with group normalisation, such as resnet8-gn or "
                "cnn"
            )
    return None


Gradients = Callable[[Tensor], tuple[list[Tensor], Tensor]]
"""Returns the `lattice_sum` of some rows, of each parameter, and their summed loss."""


@contextmanager
def _together(
    model: nn.Module, inputs: Tensor, labels: Tensor, *, clip: float, compute: Compute
) -> Iterator[Gradients]:
    """Give the gradients of a batch at once, by Opacus."""
    parameters = _trained(model)
    wrapped = _grad_sample_module()(model, loss_reduction="sum")

    def gradients(rows: Tensor) -> tuple[list[Tensor], Tensor]:
        if len(rows) == 0:  # a step without examples is a step of noise
            return _zeros(parameters), torch.zeros((), device=labels.device)
        batch = compute.floats(inputs[rows])
        # Opacus uses backward hooks, and torch warns of hooks whose inputs need no gradient.
        batch = batch.requires_grad_() if batch.is_floating_point() else batch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            loss = _summed_loss(wrapped(batch), labels[rows])
            loss.backward()
        points = lattice_sum([own.grad_sample for own in parameters], clip=clip)  # type: ignore[attr-defined]
        for parameter in parameters:
            parameter.grad_sample = None  # type: ignore[attr-defined]
        return points, loss.detach()

    try:
        yield gradients
    finally:
        wrapped.to_standard_module()


@contextmanager
def _alone(
    model: nn.Module, inputs: Tensor, labels: Tensor, *, clip: float, compute: Compute
) -> Iterator[Gradients]:
    """Give the gradients of a batch, each example's from a separate pass on one thread.

    So each is a function of its example and the weights alone, to the last bit, whichever others
    were sampled. The server chooses weights, and some amplify that bit to any size.
    """
    parameters = _trained(model)

    def part(rows: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        total, whole = _zeros(parameters), torch.zeros((), device=labels.device)
        for row in rows:
            one = compute.floats(inputs[row : row + 1].clone())
            loss = _summed_loss(model(one), labels[row : row + 1])
            samples = [own[None] for own in torch.autograd.grad(loss, parameters)]
            whole += loss.detach()
            for so_far, own in zip(total, lattice_sum(samples, clip=clip), strict=True):
                so_far += own
        return total, whole

    def gradients(rows: Tensor) -> tuple[list[Tensor], Tensor]:
        parts = compute.spread_alone(part, rows.tolist()) or [part(())]
        total = [
            torch.stack(own).sum(dim=0) for own in zip(*(own for own, _ in parts), strict=True)
        ]
        return total, torch.stack([loss for _, loss in parts]).sum()

    yield gradients


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _zeros(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(own, dtype=torch.float64, requires_grad=False) for own in parameters]


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")


def _grad_sample_module() -> Any:
    """Return Opacus' class for per-example gradients; imported late because that takes seconds."""
    package = optional("opacus.grad_sample", "local.privacy needs Opacus", extras="dpsgd")
    return package.GradSampleModule
