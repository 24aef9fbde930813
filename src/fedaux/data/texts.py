"""Encode texts as padded token ids, int32 [N, L]."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedaux.config import Auxiliary, Data
from fedaux.data.decoding import Content, DecodedBlock, Entry, Numbers
from fedaux.data.vocabulary import PAD_ID, Vocabulary

BLOCK = 10_000
CHUNK = 1 << 20
WIDTH_STEP = 8
"""Widths are multiples of this, for fast matrix products."""


NOT_UNICODE = "not UTF-8; should be saved as UTF-8, or set `encoding`, such as latin-1"


def encoding_of(file: Path, *, declared: str | None) -> str:
    """Return the encoding of a text file: by its byte order mark, UTF-8 if it is valid, or else the
    declared one, if any.

    A file that is declared to be UTF-8 is read as such, whatever it begins with.
    """
    if declared is not None and codecs.lookup(declared).name == "utf-8":
        return "utf-8-sig"
    with file.open("rb") as stream:
        start = stream.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if declared is None:
        return "utf-8-sig"
    try:
        with file.open(encoding="utf-8-sig") as text:
            while text.read(CHUNK):
                pass
    except UnicodeDecodeError:
        return declared
    return "utf-8-sig"


@dataclass(frozen=True)
class Texts:
    """How texts are encoded: the vocabulary and the maximum number of tokens."""

    vocabulary: Vocabulary
    length: int
    reads_texts = True

    def settings(self, section: Data | Auxiliary) -> dict[str, object]:
        """Return everything besides the files that token ids depend on."""
        return {
            "text_column": section.text_column,
            "vocabulary": self.vocabulary.digest,
            "length": self.length,
            "encoding": section.encoding,
        }

    def finished(self, numbers: Numbers) -> Numbers:
        """Return token ids without columns of padding."""
        return trimmed(numbers)

    def nothing(self) -> Numbers:
        """Return the token ids of no texts."""
        return np.zeros((0, self.length), dtype=np.int32)

    def encode_all(
        self,
        entries: Iterator[Entry],
        *,
        bad_labels: Mapping[int, str],
        encoding: str | None = None,
        place: str | None = None,
        expected: int = 0,
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
                    texts.append(text_of(content, encoding=encoding))
                    good.append(row)
                except ValueError as error:
                    reasons[row] = f"{where}: {error}"
            yield DecodedBlock(self.vocabulary.encode(texts, length=self.length), good, reasons)


def text_of(content: Content, *, encoding: str | None = None) -> str:
    """Return the text of an entry or of its file. Raises ValueError if there is none."""
    if isinstance(content, Path):
        try:
            with content.open(encoding=encoding_of(content, declared=encoding)) as stream:
                content = stream.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{NOT_UNICODE} ({error})") from error
        except OSError as error:
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
