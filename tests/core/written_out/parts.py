"""The parts of `written_out`: functions of models, weights and tensors, in eager PyTorch.

Shapes: K models, N public examples, C classes, F features, n examples of one client.
Functions that take a `model` load the given weights into it first, so it carries no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import scipy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from fedaux.config import Bayesian, Distillation, Local
from fedaux.core.objectives import CROSS_ENTROPY, LocalLoss, joined_targets
from fedaux.models import SplitModel

Weights = dict[str, Tensor]  # a model's parameters and buffers by name
BATCH_SIZE = 1024  # of predictions
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch normalisation


def train_client(
    model: nn.Module,
    weights: Weights,
    inputs: Tensor,
    labels: Tensor,
    *,
    section: Local,
    proximal: float,
    generator: np.random.Generator,
    loss: LocalLoss = CROSS_ENTROPY,
    adjustment: Tensor | None = None,
    beliefs: Tensor | None = None,
    correction: Mapping[str, Tensor] | None = None,
) -> Weights:
    """Return the weights after local training on inputs [n, ...] and labels [n].

    Minimises loss + mu/2 |theta - theta_0|^2 + <correction, theta>, where theta_0 are the given
    weights and mu is `proximal`. The loss is cross-entropy, unless the method has other objectives
    (see `fedaux.core.objectives`). Rehearsed examples follow the n own ones in `inputs`, and
    `beliefs` [M, C] are their soft labels.
    """
    targets = labels
    if not loss.plain:
        classes = () if adjustment is None else (adjustment.shape[1],)
        public = torch.zeros(0, *classes).to(inputs.device) if beliefs is None else beliefs
        targets = joined_targets(labels, public)
    if loss.terms:
        own = predict(model, weights, inputs[: len(labels)])
        targets[: len(labels), 1:] = own.softmax(dim=1)

    def total(logits: Tensor, targets: Tensor) -> Tensor:
        value = loss(logits, targets, None if loss.plain else adjustment)
        for name, parameter in model.named_parameters():
            if correction:
                value = value + (correction[name] * parameter).sum()
        return value if proximal == 0 else value + proximal / 2 * squared_distance(model, weights)

    how = {"private": len(labels), "rehearsed": loss.rehearsed}
    return minimise(total, model, weights, inputs, targets, section, generator, **how)


def distill(
    model: nn.Module,
    weights: Weights,
    inputs: Tensor,
    targets: Tensor,
    *,
    section: Distillation,
    generator: np.random.Generator,
) -> Weights:
    """Return the weights after learning the soft labels [N, C] of inputs [N, ...] (Eq. 1)."""
    return minimise(distillation_loss, model, weights, inputs, targets, section, generator)


def minimise(
    loss: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    weights: Weights,
    inputs: Tensor,
    targets: Tensor,
    section: Local | Distillation,
    generator: np.random.Generator,
    *,
    private: int | None = None,
    rehearsed: int = 0,
) -> Weights:
    """Minimise loss(f(x), y) from the given weights, every epoch in a new random order.

    Each batch gets `rehearsed` random rows of those after the first `private` ones.
    """
    private = len(targets) if private is None else private
    model.load_state_dict(weights)
    rate, decay = section.learning_rate, section.weight_decay
    optimizer: Optimizer = Adam(model.parameters(), rate, weight_decay=decay)
    if section.optimizer == "sgd":
        optimizer = SGD(model.parameters(), rate, section.momentum, weight_decay=decay)
    for _ in range(section.epochs):
        batches = torch.from_numpy(generator.permutation(private)).split(section.batch_size)
        if rehearsed:
            drawn = generator.integers(private, len(targets), size=(len(batches), rehearsed))
            batches = tuple(map(torch.cat, zip(batches, torch.from_numpy(drawn), strict=True)))
        for batch in batches:
            batch = batch.to(targets.device)
            model.train(len(batch) > 1)  # a single example has no variance to normalise by
            value = loss(model(as_input(inputs[batch])), targets[batch])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return snapshot(model)


def joined(private: Tensor, public: Tensor) -> Tensor:
    """Return examples in one tensor; texts [N, L] are padded to equal lengths."""
    width = max(private.shape[-1], public.shape[-1])
    parts = (functional.pad(part, (0, width - part.shape[-1])) for part in (private, public))
    return torch.cat(list(parts))


@torch.no_grad()
def predict(model: nn.Module, weights: Weights, inputs: Tensor) -> Tensor:
    """Return the model's outputs on inputs [N, ...] in evaluation mode."""
    model.load_state_dict(weights)
    model.eval()
    return torch.cat([model(as_input(batch)) for batch in inputs.split(BATCH_SIZE)])


def extract_features(model: SplitModel, weights: Weights, images: Tensor) -> Tensor:
    """Return h(x) [N, F] under the given weights of the feature extractor."""
    return predict(model.features, weights, images)


def standardisation(public: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the map h -> s (S + c I)^(-1/4) (h - mu) of public features [N, F]; c is a tenth of
    the mean variance, and s makes the mean square of public features after it 256."""
    values = public.double().numpy()
    covariance = np.cov(values.T, bias=True)
    ridge = 0.1 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    quarter = np.linalg.inv(scipy.linalg.sqrtm(scipy.linalg.sqrtm(covariance + ridge)))
    centre = values.mean(axis=0)
    mapped = np.stack([quarter @ (row - centre) for row in values])
    scale = 16.0 / np.sqrt((mapped**2).sum(axis=1).mean())

    def standardised(features: Tensor) -> Tensor:
        rows = [scale * quarter @ (row - centre) for row in features.double().numpy()]
        return torch.from_numpy(np.stack(rows)).to(features)

    return standardised


def average(weights: Sequence[Weights], *, sizes: Sequence[float]) -> Weights:
    """Return sum_i |D_i| theta_i / sum_l |D_l| (FedAVG); of counters the largest."""
    shares = [size / sum(sizes) for size in sizes]
    averaged = {}
    for name, first in weights[0].items():
        if first.is_floating_point():
            terms = [own[name] * share for own, share in zip(weights, shares, strict=True)]
            averaged[name] = torch.stack(terms).sum(dim=0)
        else:
            averaged[name] = torch.stack([own[name] for own in weights]).amax(dim=0)
    return averaged


def teacher_weights(shares: Tensor, *, log_scores: Tensor | None) -> Tensor:
    """Return w_i(x) = r_i s_i(x) / sum_j r_j s_j(x) [K, N] for shares r [K] and scores s (Eq. 3).

    Without scores, r_i / sum_j r_j [K, 1].
    """
    logarithms = shares.double().log()[:, None]
    if log_scores is not None:
        logarithms = logarithms + log_scores
    return torch.softmax(logarithms, dim=0).float()


def soft_labels(logits_KNC: Tensor, weights_KN: Tensor, *, of_probabilities: bool) -> Tensor:
    """Return softmax(sum_i w_i(x) f_i(x)) [N, C] (Eq. 2 and 3), or sum_i w_i(x) softmax(f_i(x))."""
    if of_probabilities:
        return (weights_KN[:, :, None] * torch.softmax(logits_KNC, dim=2)).sum(dim=0)
    return torch.softmax((weights_KN[:, :, None] * logits_KNC).sum(dim=0), dim=1)


def sample_models(
    weights: Sequence[Weights],
    *,
    sizes: Sequence[float],
    section: Bayesian,
    generator: np.random.Generator,
) -> Iterator[Weights]:
    """Yield mean + sqrt(scale * variance) * noise of the clients' weights (FedBE's Gaussian).

    Mean and variance are weighted by |D_i|; statistics of batch normalisation are not sampled.
    """
    mean = average(weights, sizes=sizes)
    sampled = sorted(name for name in mean if name.rpartition(".")[2] not in STATISTICS)
    apart = [{name: (own[name] - mean[name]).double() for name in sampled} for own in weights]
    squares = [{name: tensor.square() for name, tensor in own.items()} for own in apart]
    variance = average(squares, sizes=sizes)
    device = mean[sampled[0]].device
    source = torch.Generator(device).manual_seed(int(generator.integers(2**63)))
    for _ in range(section.samples):
        sample = dict(mean)
        for name in sampled:
            noise = torch.randn(mean[name].shape, generator=source, device=device)
            sample[name] = mean[name] + (section.scale * variance[name]).sqrt().float() * noise
        yield sample


def distillation_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of D_KL(targets || softmax(logits)) over rows [N, C] (Eq. 1)."""
    return functional.kl_div(torch.log_softmax(logits, dim=1), targets, reduction="batchmean")


def squared_distance(model: nn.Module, weights: Weights) -> Tensor:
    """Return |theta - theta_0|^2 over the model's parameters, theta_0 being the given weights."""
    parameters = model.named_parameters()
    return torch.stack([(own - weights[name]).square().sum() for name, own in parameters]).sum()


def as_input(examples: Tensor) -> Tensor:
    """Map uint8 images to [0, 1]; features and token ids stay as they are."""
    return examples.float() / 255 if examples.dtype is torch.uint8 else examples


def snapshot(model: nn.Module) -> Weights:
    """Return a copy of a model's weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
