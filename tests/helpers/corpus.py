"""Small texts for tests: news of three kinds, sentences that belong to nobody, and a checkpoint in
the true layout."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from fedaux.config import Experiment
from fedaux.data import vocabulary
from fedaux.data.vocabulary import Vocabulary
from fedaux.recipes import merged

TOPICS = {
    "markets": [
        "stocks",
        "shares",
        "prices",
        "profit",
        "bank",
        "market",
        "trade",
        "oil",
        "investors",
        "growth",
    ],
    "science": [
        "space",
        "planet",
        "rocket",
        "cells",
        "species",
        "signal",
        "orbit",
        "telescope",
        "virus",
        "theory",
    ],
    "sport": [
        "team",
        "match",
        "goal",
        "season",
        "coach",
        "players",
        "league",
        "final",
        "victory",
        "injury",
    ],
}
COMMON = [
    "the",
    "a",
    "of",
    "in",
    "on",
    "said",
    "after",
    "with",
    "new",
    "more",
    "than",
    "two",
    "year",
    "they",
    "has",
    "will",
    "for",
]


def sentence(draw: random.Random, words: list[str], *, length: int = 9) -> str:
    """Return a sentence of which about half are these words."""
    picked = [draw.choice(words if draw.random() < 0.5 else COMMON) for _ in range(length)]
    return " ".join(picked).capitalize() + "."


def news(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Return texts with their topics, in turn."""
    draw = random.Random(seed)
    names = list(TOPICS)
    return [
        (sentence(draw, TOPICS[names[n % 3]], length=5 + n % 7), names[n % 3]) for n in range(count)
    ]


def sentences(count: int, *, seed: int = 1) -> list[str]:
    """Return public sentences about everything."""
    draw = random.Random(seed)
    everything = [word for words in TOPICS.values() for word in words]
    return [sentence(draw, everything, length=4 + n % 9) for n in range(count)]


def write_csv(path: Path, rows: list[tuple[str, str]]) -> Path:
    """Write texts and labels."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def write_corpus(folder: Path) -> Path:
    """Write private and public texts as CSV files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "news.csv", news(120))
    write_csv(folder / "public.csv", [(text, "") for text in sentences(160)])
    return folder


def learned_words() -> Vocabulary:
    """Return a vocabulary that was learned on public sentences and news."""
    return vocabulary.learned([*sentences(160), *(text for text, _ in news(120))], size=300)


def write_checkpoint(folder: Path) -> Path:
    """Let transformers itself write a checkpoint, with the tokenizer of the learned words beside
    it."""
    transformers = pytest.importorskip(
        "transformers", reason="the independent truth: pip install transformers"
    )
    words = learned_words()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=words.size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        initializer_range=0.2,
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(words.tokenizer, encoding="utf-8")
    return folder


BERT: dict[str, bool | int | float | str] = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "intermediate": 32,
    "positions": 32,
}


def texts_of(folder: Path, **changes: Any) -> Experiment:
    """Return a tiny experiment on the texts of a folder."""
    settings: dict[str, Any] = {
        "name": "texts",
        "method": ["fedaux"],
        "rounds": 2,
        "participation_rate": 1.0,
        "data": {"source": "csv", "path": str(folder / "news.csv")},
        "auxiliary": {"source": "csv", "path": str(folder / "public.csv")},
        "text": {"length": 16, "vocabulary_size": 300},
        "split": {"num_clients": 4, "alpha": 0.3},
        "prototypes": [{"name": "bert", "model": "bert", "options": BERT}],
        "pretraining": {"epochs": 2, "batch_size": 40},
        "certainty": {"epsilon": 1.0, "components": 4},
        "local": {"batch_size": 16},
        "distillation": {"learning_rate": 1e-3},
        "engine": {"device": "cpu", "threads": 1},
    }
    return Experiment(**merged(settings, changes))


def text_of_ids(words: Vocabulary, ids: Iterable[int]) -> str:
    """Return the text of token ids, without special tokens."""
    text: str = Tokenizer.from_str(words.tokenizer).decode([int(number) for number in ids])
    return text.replace(" ##", "")
