"""Which vocabulary the texts of an experiment have: given, of a checkpoint, or learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from fedaux.config import Auxiliary, ExperimentFields
from fedaux.data import cache, vocabulary
from fedaux.data.checkpoints import checkpoint_of, locate
from fedaux.data.tables import Table
from fedaux.data.texts import text_of
from fedaux.data.vocabulary import Vocabulary
from fedaux.files import save_text

KEY = "text.vocabulary"
LEARNED = "auxiliary"
"""The value of text.vocabulary that learns one from the public texts."""


OpenPublic = Callable[[Auxiliary], Table]


def vocabulary_of(experiment: ExperimentFields, *, open_public: OpenPublic | None) -> Vocabulary:
    """Return the given vocabulary, the vocabulary of a checkpoint, or a learned one.

    `open_public` opens the public texts; None for a source without texts.
    """
    assert experiment.text is not None, "images have no vocabulary"
    name = experiment.text.vocabulary
    if name is None:
        return _brought(experiment) or _learned(experiment, open_public)
    if name == LEARNED:
        return _learned(experiment, open_public)
    if Path(name).is_file():
        return vocabulary.of_file(Path(name), key=KEY)
    return vocabulary.of_folder(locate(name, key=KEY), key=KEY)


def _brought(experiment: ExperimentFields) -> Vocabulary | None:
    if experiment.pretraining.checkpoint is not None:
        file = Path(experiment.pretraining.checkpoint)
        if (inside := vocabulary.inside_of(file, key="pretraining.checkpoint")) is not None:
            return inside
    for prototype in experiment.prototypes:
        if (checkpoint := checkpoint_of(prototype)) is not None:
            key = "prototypes.options.checkpoint"
            return vocabulary.of_folder(locate(checkpoint, key=key), key=key)
    return None


def _learned(experiment: ExperimentFields, open_public: OpenPublic | None) -> Vocabulary:
    """Learn the vocabulary from the public texts, or read it from the cache."""
    section = experiment.auxiliary
    if open_public is None or experiment.text is None:
        raise ValueError(
            f"{KEY} = {LEARNED!r}: auxiliary.source = {section.source!r} has no texts to learn from"
        )
    table = open_public(section)
    size = experiment.text.vocabulary_size
    settings = {
        "text_column": section.text_column,
        "encoding": section.encoding,
        "size": section.size,
        "vocabulary_size": size,
    }
    parent = cache.folder()
    key = cache.Key(table.files, settings=settings)
    path = parent and parent.with_name("vocabularies") / f"{key()}.json"
    if path is not None:
        with suppress(OSError, ValueError):
            return Vocabulary(vocabulary.of_file(path).tokenizer, vocabulary.LEARNED)
    made = vocabulary.learned(_texts(table, section), size=size)
    if path is not None:
        with suppress(OSError):  # without a cache, it is learned again
            save_text(path, made.tokenizer)
    return made


def _texts(table: Table, section: Auxiliary) -> Iterator[str]:
    for _, content in islice(table.entries(), section.size):
        with suppress(ValueError):  # reported when the texts are read
            yield text_of(content, encoding=section.encoding)
