"""Differentially private local training: DP-SGD (Abadi et al., 2016), for `[local.privacy]`.

A step samples each of the n_i examples with probability q = batch_size / n_i, clips each gradient
to norm C, adds N(0, (noise_multiplier C)^2 I) to their sum and divides by the expected batch size.
Replacing an example moves the sum by at most 2C. n_i is public, and so are q and the number of
steps. The proximal term depends on no example and needs no noise. Per-example gradients come from
Opacus; clipping, sums and noise are exact on a lattice (`noisy_sum`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Local
from fedaux.core.compute import Compute, to_float
from fedaux.core.steps import OPTIMIZERS
from fedaux.formatting import install_hint
from fedaux.privacy.accounting import Query, composed_epsilon
from fedaux.privacy.bounds import MOST_PARAMETERS
from fedaux.privacy.exact_gaussian import Draws
from fedaux.privacy.ledger import UPDATE, LedgerEntry

LATTICE = 2.0**24
"""Points of the lattice within the clip bound, along each coordinate of a gradient."""
SHRINK = 1.0 - 2.0**-20
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
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    anchors = [parameter.detach().clone() for parameter in parameters]
    wrapped = _grad_sample_module()(model, loss_reduction="sum")
    optimizer = OPTIMIZERS[section.optimizer](parameters, section)
    expected = query.sampling_probability * len(labels)
    floats = to_float if compute is None else compute.floats
    total, seen = torch.zeros((), device=labels.device), 0
    model.train()
    try:
        for _ in range(steps):
            taken = draws.sample(len(labels), probability=query.sampling_probability)
            batch = torch.from_numpy(taken).to(labels.device)
            total += _per_example_gradients(
                wrapped, parameters, floats(images[batch]), labels[batch]
            )
            seen += len(batch)
            noisy = noisy_sum(
                [parameter.grad_sample for parameter in parameters],  # type: ignore[attr-defined]
                clip=privacy.clip,
                noise_multiplier=privacy.noise_multiplier,
                draws=draws,
            )
            for parameter, gradient, anchor in zip(parameters, noisy, anchors, strict=True):
                parameter.grad_sample = None  # type: ignore[attr-defined]
                parameter.grad = (gradient / expected).to(parameter.dtype)
                if proximal > 0:
                    parameter.grad.add_(parameter.detach() - anchor, alpha=proximal)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    finally:
        wrapped.to_standard_module()
    return float(total) / max(1, seen), entry


def noisy_sum(
    samples: Sequence[Tensor], *, clip: float, noise_multiplier: float, draws: Draws
) -> list[Tensor]:
    """Return the noisy sum of clipped gradients, in doubles, from [b, ...] of each parameter.

    Each example's gradient is clipped to norm C and rounded to a lattice of spacing g = C /
    LATTICE; integers are summed exactly. Rounding moves a gradient of d numbers by at most g
    sqrt(d) / 2, so its norm is at most C' = C + g sqrt(d) / 2, and the noise is that of round(N(0,
    (noise_multiplier C' / g)^2)), on the same lattice.
    """
    spacing = clip / LATTICE
    size = sum(
        sample[0].numel() if len(sample) else math.prod(sample.shape[1:]) for sample in samples
    )
    if size > MOST_PARAMETERS:
        raise ValueError(
            f"local.privacy: a model of {size} parameters; should be at most {MOST_PARAMETERS}"
        )
    squares = torch.stack([sample.flatten(1).double().square().sum(dim=1) for sample in samples])
    factors = (clip * SHRINK / squares.sum(dim=0).sqrt().clamp_min(1e-300)).clamp_max(1.0) / spacing
    scale = noise_multiplier * (LATTICE + math.sqrt(size) / 2)
    noisy = []
    for sample in samples:
        points = (sample.double() * factors.view(-1, *[1] * (sample.ndim - 1))).round().sum(dim=0)
        noisy.append((points + draws.integers(points, scale=scale)) * spacing)
    return noisy


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
    """Return one step of a client and the number of steps per round: those of plain epochs."""
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


def _per_example_gradients(
    wrapped: Any, parameters: list[nn.Parameter], inputs: Tensor, labels: Tensor
) -> Tensor:
    """Leave per-example gradients in `grad_sample` of each parameter; return the summed loss."""
    if len(labels) == 0:  # a step without examples is a step of noise
        for parameter in parameters:
            parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
        return torch.zeros((), device=labels.device)
    # Opacus uses backward hooks, and torch warns of hooks whose inputs need no gradient.
    inputs = inputs.requires_grad_() if inputs.is_floating_point() else inputs
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        loss = functional.cross_entropy(wrapped(inputs), labels, ignore_index=-1, reduction="sum")
        loss.backward()
    drop_nonfinite_gradients(parameters)
    return loss.detach()


def drop_nonfinite_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set the gradients of an example to zero if one of its numbers is NaN or infinite.

    Clipping could not bound them. With hostile weights from the server, one example could otherwise
    turn the whole update into NaN, which reveals it without noise.
    """
    samples: list[Tensor] = [parameter.grad_sample for parameter in parameters]  # type: ignore[attr-defined]
    finite = torch.stack([sample.flatten(1).isfinite().all(dim=1) for sample in samples]).all(dim=0)
    for sample in samples:
        sample.masked_fill_(~finite.view(-1, *[1] * (sample.ndim - 1)), 0.0)


def _grad_sample_module() -> Any:
    """Return Opacus' class for per-example gradients; imported late because that takes seconds."""
    try:
        from opacus.grad_sample import GradSampleModule
    except ImportError as error:
        raise ValueError(f"local.privacy needs Opacus: {install_hint('dpsgd')}") from error
    return GradSampleModule
