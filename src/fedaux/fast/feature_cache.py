"""A cache of features under h0: linear mode needs the same features in every run."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.data.tensor_files import content_digest, save_tensors, weights_digest
from fedaux.fast.inference import FastPredictor
from fedaux.models.standardised import Standardised, standardise, without_map

WORTH_KEEPING = 10.0
"""Seconds that features must have taken to be stored on disk."""
PROCESSOR_BATCH = 32
"""Images per batch on a CPU: activations then stay in its cache (1.5 times as fast as 256)."""
IMAGES_A_REPORT = 32 * PROCESSOR_BATCH
"""Images per worker between two reports of progress on a CPU; a GPU is too fast to need any."""
RECENT = 5
"""Sets of features in memory: of private, public (also before they are standardised), test and
validation examples."""
COMPARED_EXAMPLES = 8
"""Examples whose features are computed again to check stored ones."""


@dataclass(frozen=True)
class Recent:
    """What tasks of this process asked for last."""

    features: dict[str, Tensor] = field(default_factory=dict)
    digests: list[tuple[Tensor, str]] = field(default_factory=list)


class FeatureCache:
    """Features of whole sets of examples: computed once per run, or once for all runs if that is
    slow.

    Their key is what they depend on: weights, examples, precision. Before stored ones are used, a
    few are computed again, so that a network whose code has changed gets new ones.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        batch_size: int | None,
        folder: Path | None,
        report: Callable[[int, str], None] = lambda done, total: None,
    ) -> None:
        """`report(done, total)` is called while the features of many examples are computed, with
        total as text: "6000 public examples"."""
        self._compute = compute
        self._report = report
        self._batch_size = batch_size
        self._folder = folder
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._recent = compute.once("features", Recent)

    def tell(self, part: Tensor, *, whole: Tensor, rows: Tensor) -> None:
        """Register examples that are rows of a larger set, whose features serve all its parts."""
        self._parts.append((part, whole, rows))

    def __call__(
        self, module: nn.Module, weights: Weights, examples: Tensor, *, rows: Tensor | None = None
    ) -> Tensor:
        """Return the features [n, F] of examples, or of some rows of them."""
        for part, whole, own in self._parts:
            if part is examples:
                return self(module, weights, whole, rows=own if rows is None else own[rows])
        key = self._key(module, weights, examples)
        features = self._recent.features.pop(key, None)
        if features is None and isinstance(module, Standardised):
            features = self._standardised(module, weights, examples)
        elif features is None:
            with self._compute.sharing():
                features = self._found(key, module, weights, examples)
        self._recent.features[key] = features
        while len(self._recent.features) > RECENT:
            self._recent.features.pop(next(iter(self._recent.features)))
        return features if rows is None else features[rows]

    def _standardised(self, module: Standardised, weights: Weights, examples: Tensor) -> Tensor:
        """Return mapped features; the network's own stay only of public examples, which give the
        maps of later tasks."""
        inner = without_map(weights)
        features = standardise(self(module.network, inner, examples), weights)
        if not self._is_public(examples):
            del self._recent.features[self._key(module.network, inner, examples)]
        return features

    def _is_public(self, examples: Tensor) -> bool:
        return any(examples is whole for _, whole, _ in self._parts)

    def _digest(self, examples: Tensor) -> str:
        recent = self._recent.digests
        for known, digest in recent:
            if known is examples:
                return digest
        recent.append((examples, content_digest(examples)))
        del recent[:-RECENT]
        return recent[-1][1]

    def _key(self, module: nn.Module, weights: Weights, examples: Tensor) -> str:
        compute = self._compute
        settings: dict[str, Any] = {
            "weights": weights_digest(weights),
            "examples": self._digest(examples),
            "precision": str(compute.precision),
            "device": compute.device.type,
            "mean": None if compute.mean is None else compute.mean.flatten().tolist(),
            "deviation": None
            if compute.deviation is None
            else compute.deviation.flatten().tolist(),
            "torch": torch.__version__,
        }
        if module.extra_repr():  # the same weights can be pooled in several ways
            settings["read"] = module.extra_repr()
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:40]

    def _found(self, key: str, module: nn.Module, weights: Weights, examples: Tensor) -> Tensor:
        """Return stored features if there are any that match, else compute them."""
        file = None if self._folder is None else self._folder / f"{key}.safetensors"
        if file is not None and file.is_file():
            try:
                stored = load_file(file, device=str(examples.device))["features"]
            except (OSError, SafetensorError, KeyError):  # damaged: treated as missing
                stored = torch.empty(0)
            expected = self._computed(module, weights, examples[:COMPARED_EXAMPLES])
            if stored.shape == (len(examples), *expected.shape[1:]) and torch.allclose(
                stored[:COMPARED_EXAMPLES], expected, rtol=1e-3, atol=1e-4
            ):
                return stored
        began = time.monotonic()
        features = self._computed(module, weights, examples)
        if file is not None and time.monotonic() - began >= WORTH_KEEPING:
            with suppress(OSError):  # a full disk is no reason to stop
                save_tensors(file, {"features": features})
        return features

    def _computed(self, module: nn.Module, weights: Weights, examples: Tensor) -> Tensor:
        """Compute features, with a piece of the examples on each worker."""
        workers = self._compute.workers
        batch_size = self._batch_size
        if examples.ndim == 4 and examples.device.type == "cpu":
            batch_size = PROCESSOR_BATCH
            if (
                self._compute.precision is not torch.float32
            ):  # 1.1 times as fast; in single precision slower
                module = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                examples = examples.contiguous(memory_format=torch.channels_last)
        predictors = [FastPredictor(module, self._compute) for _ in range(workers)]

        def work(number: int) -> Tensor:
            return predictors[number](weights, pieces[number], batch_size=batch_size)

        at_once = (
            workers * IMAGES_A_REPORT if examples.device.type == "cpu" else max(1, len(examples))
        )
        found: list[Tensor] = []
        for start in range(0, max(1, len(examples)), at_once):
            if start > 0:
                kind = "public" if self._is_public(examples) else "labelled"
                self._report(start, f"{len(examples)} {kind} examples")
            some = examples[start : start + at_once]
            pieces = some.tensor_split(workers) if len(some) >= workers else (some,)
            found += self._compute.spread(work, range(len(pieces)))
        return torch.cat(found)
