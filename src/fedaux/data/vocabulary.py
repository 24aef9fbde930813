"""Vocabularies: tokenizers of the BERT family, given or learned from the public texts.

A tokenizer is stored as the JSON of the library `tokenizers`, which is needed only to encode and to
learn.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fedaux.data.checkpoints import lowercases, read_tokenizer
from fedaux.formatting import optional

PAD, UNKNOWN, BEGIN, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
PAD_ID = 0
"""Id of padding; features ignore it."""
TokenIds = NDArray[np.int32]
LEARNED = "the public texts"
MAX_CHARACTERS = 1000
"""Maximum number of characters of a learned vocabulary; rarer ones are unknown."""
METADATA = "tokenizer"
"""Metadata key of the tokenizer in safetensors files written by fedaux."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and its origin, for messages."""

    tokenizer: str
    origin: str

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Ids by token, added tokens included."""
        table = json.loads(self.tokenizer)
        return dict(table["model"]["vocab"]) | {
            added["content"]: added["id"] for added in table["added_tokens"]
        }

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokens.values()) + 1

    @cached_property
    def digest(self) -> str:
        """Digest of the tokenizer."""
        return hashlib.sha256(self.tokenizer.encode()).hexdigest()[:32]

    def mark(self, token: str) -> int:
        """Return the id of a special token. Raises ValueError if it is missing."""
        if token not in self.tokens:
            raise ValueError(f"the vocabulary of {self.origin} has no token {token}")
        return self.tokens[token]

    def check(self) -> None:
        """Raise ValueError unless the tokenizer is one of BERT's kind that can be used."""
        try:
            _checked(self.tokenizer, origin=self.origin)
            _ = self._tokenizer
        except ValueError:
            raise
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{self.origin}: not a usable tokenizer ({error})") from error

    def encode(self, texts: Sequence[str], *, length: int) -> TokenIds:
        """Return token ids [N, length]: [CLS], tokens, truncated if needed, [SEP], padding."""
        self._tokenizer.enable_truncation(max_length=length)
        encoded = self._tokenizer.encode_batch_fast(list(texts))
        ids = np.full((len(encoded), length), PAD_ID, dtype=np.int32)
        for row, text in zip(ids, encoded, strict=True):
            row[: len(text)] = text.ids
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        return library().Tokenizer.from_str(self.tokenizer)


def _checked(text: str, *, origin: str) -> Vocabulary:
    """Return the vocabulary of a tokenizer's JSON. Raises ValueError if it is not BERT's kind."""
    try:
        table = json.loads(text)
        # Truncation and padding are settings, not part of the vocabulary.
        table |= {"truncation": None, "padding": None}
        made = Vocabulary(json.dumps(table, sort_keys=True, ensure_ascii=False), origin)
        tokens = made.tokens
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{origin}: not a tokenizer in the format of tokenizer.json ({error})"
        ) from error
    if tokens.get(PAD) != PAD_ID:
        raise ValueError(
            f"{origin}: {PAD} has the id {tokens.get(PAD)}, should be {PAD_ID}, as in the BERT "
            "family"
        )
    return made


def of_folder(folder: Path, *, key: str) -> Vocabulary:
    """Return the vocabulary of a checkpoint's folder. Raises ValueError if it has none."""
    found = read_tokenizer(folder)
    if found is None:
        raise ValueError(f"{key} = {folder}: has neither tokenizer.json nor vocab.txt")
    return of_file(found[1])


def of_file(path: Path, *, key: str = "text.vocabulary") -> Vocabulary:
    """Return the vocabulary of tokenizer.json, vocab.txt, or a safetensors file of fedaux."""
    if path.suffix == ".safetensors":
        inside = inside_of(path, key=key)
        if inside is None:
            raise ValueError(f"{key} = {path}: has no tokenizer; should be written by fedaux")
        return inside
    if path.suffix == ".txt":
        lines = path.read_text(encoding="utf-8").splitlines()
        tokens = {line.rstrip("\n"): number for number, line in enumerate(lines)}
        return _checked(_word_pieces(tokens, lowercase=lowercases(path.parent)), origin=str(path))
    return _checked(path.read_text(encoding="utf-8"), origin=str(path))


def inside_of(path: Path, *, key: str) -> Vocabulary | None:
    """Return the vocabulary in the metadata of a safetensors file, or None."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error
    return None if text is None else _checked(text, origin=str(path))


def learned(texts: Iterable[str], *, size: int) -> Vocabulary:
    """Learn at most `size` lower-case word pieces from texts (Schuster & Nakajima 2012).

    Characters are numbered here, the most frequent first, because the library's order changes from
    run to run.
    """
    package = library()
    tokenizer = package.Tokenizer.from_str(
        _word_pieces({token: number for number, token in enumerate(_SPECIAL_TOKENS)})
    )
    kept = [tokenizer.normalizer.normalize_str(text) for text in texts]
    counts = Counter(character for text in kept for character in text if not character.isspace())
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[
        :MAX_CHARACTERS
    ]
    first = [*_SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)][:size]
    trainer = package.trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=first,
        limit_alphabet=len(alphabet),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(kept, trainer)
    # A new tokenizer: the library treats the tokens it was given first as special.
    return _checked(_word_pieces(dict(tokenizer.get_vocab())), origin=LEARNED)


_SPECIAL_TOKENS = (PAD, UNKNOWN, BEGIN, END, MASK)


def _word_pieces(tokens: dict[str, int], *, lowercase: bool = True) -> str:
    """Return BERT's tokenizer (cleaning, splitting at punctuation, WordPiece) with these tokens."""
    package = library()
    missing = [mark for mark in (UNKNOWN, BEGIN, END) if mark not in tokens]
    if missing:
        raise ValueError(
            f"the vocabulary has no token {', '.join(missing)}; should be one of the BERT family"
        )
    tokenizer = package.Tokenizer(
        package.models.WordPiece(tokens, unk_token=UNKNOWN, max_input_chars_per_word=100)
    )
    tokenizer.normalizer = package.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = package.processors.BertProcessing(
        (END, tokens[END]), (BEGIN, tokens[BEGIN])
    )
    tokenizer.decoder = package.decoders.WordPiece()
    tokenizer.add_special_tokens([mark for mark in _SPECIAL_TOKENS if mark in tokens])
    return str(tokenizer.to_str())


def library() -> Any:
    """Return the package tokenizers."""
    return optional("tokenizers", "texts need the package tokenizers", extras="text")
