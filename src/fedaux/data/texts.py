"""Encode texts as padded token ids, int32 [N, L]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedaux.data.decoding import Content, DecodedBlock, Entry, Numbers
from fedaux.data.vocabulary import PAD_ID, Vocabulary

BLOCK = 10_000
WIDTH_STEP = 8
"""Widths are multiples of this, for fast matrix products."""


@dataclass(frozen=True)
class Texts:
    """How texts are encoded: the vocabulary and the maximum number of tokens."""

    vocabulary: Vocabulary
    length: int

    def encode_all(
        self, entries: Iterator[Entry], *, bad_labels: Mapping[int, str]
    ) -> Iterator[DecodedBlock]:
        """Yield the rows in order, in blocks, as token ids [n, length]."""
        numbered = enumerate(entries)
        while rows := list(islice(numbered, BLOCK)):
            texts, good = [], []
            reasons: dict[int, str] = {}
            for row, (where, content) in rows:
                try:
                    if row in bad_labels:
                        raise ValueError(bad_labels[row])
                    texts.append(text_of(content))
                    good.append(row)
                except ValueError as error:
                    reasons[row] = f"{where}: {error}"
            yield DecodedBlock(self.vocabulary.encode(texts, length=self.length), good, reasons)


def text_of(content: Content) -> str:
    """Return the text of an entry or of its file. Raises ValueError if there is none."""
    if isinstance(content, Path):
        try:
            content = content.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot be read as text ({error})") from error
    if content is None:
        raise ValueError("the text is missing")
    if not isinstance(content, str):
        raise ValueError(f"should be a text, is {type(content).__name__}")
    if not content.strip():
        raise ValueError("the text is empty")
    return content


def trimmed(ids: Numbers) -> Numbers:
    """Return token ids [N, L] without trailing columns of padding; the width is a multiple of 8."""
    used = np.flatnonzero((ids != PAD_ID).any(axis=0))
    longest = 1 + int(used[-1]) if len(used) else 1
    return ids[:, : -(-longest // WIDTH_STEP) * WIDTH_STEP]


def padded(ids: Tensor, *, width: int) -> Tensor:
    """Return token ids [N, L] padded to [N, width]."""
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=PAD_ID)


def token_lengths(ids: Tensor) -> Tensor:
    """Return the number of tokens of texts [N, L] without padding: [N]."""
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return ((ids != PAD_ID) * places).amax(dim=1)
