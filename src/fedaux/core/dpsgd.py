"""Differentially private local training: DP-SGD (Abadi et al., 2016) with Opacus, for `[local.privacy]`.

A step takes each of the n_i examples with probability q = batch_size / n_i, clips each gradient to norm C, adds
N(0, (noise_multiplier C)^2 I) to their sum and divides by the expected batch size. Replacing an example moves the sum
by at most 2C. n_i is public, and with it q and the number of steps. The proximal term looks at no example and needs no
noise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Local
from fedaux.core.compute import Compute
from fedaux.core.local_training import OPTIMIZERS
from fedaux.data.batches import to_float
from fedaux.privacy.accounting import Query, composed_epsilon
from fedaux.privacy.ledger import UPDATE, LedgerEntry


def train_privately(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    section: Local,
    proximal: float,
    generator: np.random.Generator,
    client: int,
    compute: Compute | None = None,
    noise: str = "simulated",
) -> tuple[float, LedgerEntry]:
    """Train `model` in place on one client's inputs [n, ...] and labels [n]; return mean loss and cost.

    The loss is the client's own: it has no noise and must not be sent. Sampling and noise come from `generator`; the
    entry says with the word `noise` whether that can be foretold. Raises ValueError where a layer mixes the examples of
    a batch, or where an extra is missing.
    """
    check_ready([model])
    if len(labels) == 0:
        raise ValueError("a client without examples cannot train")
    opacus = _opacus()
    assert section.privacy is not None, "local.privacy says how much noise"
    privacy = section.privacy
    query, steps = schedule(section, num_examples=len(labels))
    assert query.sampling_probability is not None
    entry = update_entry(section, num_examples=len(labels), client=client, noise=noise)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    anchors = [parameter.detach().clone() for parameter in parameters]
    draws = torch.Generator(device=labels.device).manual_seed(int(generator.integers(2**63)))
    wrapped = opacus.GradSampleModule(model)
    optimizer = opacus.DPOptimizer(
        OPTIMIZERS[section.optimizer](parameters, section),
        noise_multiplier=privacy.noise_multiplier,
        max_grad_norm=privacy.clip,
        expected_batch_size=query.sampling_probability * len(labels),
        generator=draws,
    )
    floats = to_float if compute is None else compute.floats
    total, seen = torch.zeros((), device=labels.device), 0
    model.train()
    try:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            taken = np.flatnonzero(generator.random(len(labels)) < query.sampling_probability)
            batch = torch.from_numpy(taken).to(labels.device)
            total += _per_example_gradients(wrapped, parameters, floats(images[batch]), labels[batch])
            seen += len(batch)
            optimizer.pre_step()  # clips, sums, adds noise, divides
            if proximal > 0:
                for parameter, anchor in zip(parameters, anchors, strict=True):
                    assert parameter.grad is not None, "every step leaves a gradient"
                    parameter.grad.add_(parameter.detach() - anchor, alpha=proximal)
            optimizer.original_optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    finally:
        wrapped.to_standard_module()
    return float(total) / max(1, seen), entry


def update_entry(section: Local, *, num_examples: int, client: int, noise: str) -> LedgerEntry:
    """Return what one round of a client costs, known before it trains."""
    assert section.privacy is not None, "local.privacy says how much noise"
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
    """Return what one step of a client is, and how many a round has: as many as plain epochs would take."""
    assert section.privacy is not None, "local.privacy says how much noise"
    probability = min(1.0, section.batch_size / num_examples)
    return Query(section.privacy.noise_multiplier, probability), section.epochs * math.ceil(1.0 / probability - 1e-9)


def check_ready(models: Iterable[nn.Module]) -> None:
    """Raise ValueError where private training could not start: an extra is missing, or a model mixes examples."""
    _opacus()
    composed_epsilon({Query(1.0, 1.0): 1}, delta=0.5)  # asks for dp-accounting
    for model in models:
        if (refusal := refusal_of(model)) is not None:
            raise ValueError(refusal)


def refusal_of(model: nn.Module) -> str | None:
    """Say why a model cannot be trained privately: batch normalisation lets one example move all others' gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return (
                f"local.privacy: batch normalisation ({name}) mixes the examples of a batch, so gradients cannot be "
                "clipped one by one; use a model with group normalisation, such as resnet8-gn or cnn"
            )
    return None


def _per_example_gradients(wrapped: Any, parameters: list[nn.Parameter], inputs: Tensor, labels: Tensor) -> Tensor:
    """Leave the gradient of each example in `grad_sample` of each parameter; return the sum of the losses."""
    if len(labels) == 0:  # a step without examples is a step of noise
        for parameter in parameters:
            parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
        return torch.zeros((), device=labels.device)
    # Opacus hangs on backward hooks, and torch warns of those whose inputs need no gradient, as token ids cannot.
    inputs = inputs.requires_grad_() if inputs.is_floating_point() else inputs
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        loss = functional.cross_entropy(wrapped(inputs), labels)
        loss.backward()
    leave_out_what_is_no_number(parameters)
    return loss.detach() * len(labels)


def leave_out_what_is_no_number(parameters: Sequence[nn.Parameter]) -> None:
    """Set the gradients of an example to zero where one of its numbers is none: clipping could not bound them.

    Weights come from the server, and with hostile ones an example could otherwise turn the whole update into NaN, which
    would tell of it without noise.
    """
    samples: list[Tensor] = [parameter.grad_sample for parameter in parameters]  # type: ignore[attr-defined]
    finite = torch.stack([sample.flatten(1).isfinite().all(dim=1) for sample in samples]).all(dim=0)
    for sample in samples:
        sample.masked_fill_(~finite.view(-1, *[1] * (sample.ndim - 1)), 0.0)


def _opacus() -> Any:
    """Return the two classes of Opacus that are used, imported late because they take seconds."""
    try:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise ValueError("local.privacy needs Opacus: pip install 'fedaux[dpsgd]'") from error
    return SimpleNamespace(GradSampleModule=GradSampleModule, DPOptimizer=DPOptimizer)
