"""Language modelling: masked tokens (BERT, Devlin et al. 2019).

The number of predicted positions per batch is fixed, so that steps can be captured: the average
number, sampled from the eligible positions of the batch. Surplus positions have weight 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedaux.config import Pretraining
from fedaux.core.compute import Compute
from fedaux.data.vocabulary import BEGIN, END, MASK, PAD_ID, Vocabulary

DEVIATION = 0.02
"""Standard deviation of a head's initial weights, as BERT."""
MASKED_UNTIL, RANDOM_UNTIL = 0.8, 0.9
"""80 % of the positions to predict show the mask, 10 % a random token, the rest their own."""


class LanguageHead(nn.Module):
    """LayerNorm(gelu(W h + b)) E^T + c, with E the token embeddings."""

    def __init__(self, width: int, vocabulary: int, *, generator: torch.Generator) -> None:
        super().__init__()
        device = generator.device
        # On "meta", nn.Linear does not use the global generator.
        self.dense = nn.Linear(width, width, device="meta").to_empty(device=device)
        nn.init.normal_(self.dense.weight, std=DEVIATION, generator=generator)
        nn.init.zeros_(self.dense.bias)
        self.norm = nn.LayerNorm(width, eps=1e-12, device=device)
        self.bias = nn.Parameter(torch.zeros(vocabulary, device=device))

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Map [K, H] and embeddings [V, H] to logits [K, V]."""
        return functional.linear(
            self.norm(functional.gelu(self.dense(hidden))), embeddings, self.bias
        )


class LanguageModel(nn.Module):
    """Token features and the prediction head."""

    def __init__(self, features: Any, *, generator: torch.Generator) -> None:
        super().__init__()
        self.features = features
        self.head = LanguageHead(
            features.words.embedding_dim, features.words.num_embeddings, generator=generator
        )

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Return logits [K, V] at flat positions [K] of token ids [N, L]."""
        hidden = self.features.tokens(ids).flatten(0, 1).index_select(0, places)
        logits: Tensor = self.head(hidden, self.features.words.weight)
        return logits


class MaskedTokens:
    """Cross-entropy of a language model at masked positions of a batch."""

    least = 1

    def __init__(
        self,
        features: nn.Module,
        inputs: Tensor,
        *,
        section: Pretraining,
        generator: torch.Generator,
        compute: Compute,
        vocabulary: Vocabulary,
    ) -> None:
        if inputs.dtype != torch.int32 or inputs.ndim != 2:
            raise ValueError(
                f"texts must be token ids, int32 [N, L], got {inputs.dtype} {list(inputs.shape)}"
            )
        self.model: nn.Module = LanguageModel(features, generator=generator)
        self._compute = compute
        self._vocabulary = vocabulary
        self._marks = vocabulary.mark(BEGIN), vocabulary.mark(END)
        self._mask = vocabulary.mark(MASK)
        self._length = inputs.shape[1]
        size = min(section.batch_size, len(inputs))
        eligible = float(self._eligible(inputs).sum()) / max(1, len(inputs))
        self._count = max(1, round(section.masked_share * eligible * size))
        self.key: Hashable = self._count

    def draw(self, size: int, *, generator: torch.Generator) -> Tensor:
        """Draw three numbers for every token of `size` texts: [3, size, L]."""
        return torch.rand(3, size, self._length, generator=generator, device=generator.device)

    def loss(
        self,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        inputs: Tensor,
        numbers: Tensor,
    ) -> Tensor:
        """Return the mean cross-entropy at the positions to predict of token ids [B, L]."""
        seen, places, targets, counts = self.question(inputs, numbers)
        with self._compute.autocast():
            logits = functional_call(self.model, (parameters, buffers), (seen, places))
        losses = functional.cross_entropy(logits.float(), targets, reduction="none")
        return (losses * counts).sum() / counts.sum().clamp_min(1)

    def question(self, ids: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mask tokens of ids [B, L] by random numbers [3, B, L]: where, how, which random token."""
        places, counts = self._drawn(ids, numbers[0])
        tokens = ids.flatten()
        targets = tokens.index_select(0, places)
        how, which = (row.flatten().index_select(0, places) for row in numbers[1:])
        others = (which * self._vocabulary.size).to(ids.dtype)
        shown = torch.where(how < RANDOM_UNTIL, others, targets).masked_fill(
            how < MASKED_UNTIL, self._mask
        )
        shown = torch.where(counts > 0, shown, targets)
        return tokens.scatter(0, places, shown).view_as(ids), places, targets.long(), counts

    def _eligible(self, ids: Tensor) -> Tensor:
        """Return which positions of ids [B, L] may be masked."""
        return (ids != PAD_ID) & (ids != self._marks[0]) & (ids != self._marks[1])

    def _drawn(self, ids: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return random eligible positions [K], and weights that are 0 for surplus ones [K]."""
        scores = numbers.masked_fill(~self._eligible(ids), -1.0).flatten()
        highest = scores.topk(min(self._count, len(scores)))
        return highest.indices, (highest.values >= 0).float()
