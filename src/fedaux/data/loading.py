"""Load the data of an experiment, private and public; for texts with their vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from torch import Tensor

from fedaux.config import Auxiliary, ExperimentFields
from fedaux.data import cache, vocabulary
from fedaux.data.checkpoints import checkpoint_of, locate
from fedaux.data.labelled import LabelledData
from fedaux.data.sources import SOURCES, load_auxiliary, load_labelled
from fedaux.data.tables import Table
from fedaux.data.tensors import carried_vocabulary
from fedaux.data.texts import Texts, text_of
from fedaux.data.vocabulary import Vocabulary
from fedaux.files import save_text

KEY = "text.vocabulary"
LEARNED = "auxiliary"
"""The value of text.vocabulary that learns one from the public texts."""


def load_private(experiment: ExperimentFields) -> LabelledData:
    """Load the clients' data and the test data."""
    texts = (
        None
        if experiment.text is None
        else Texts(vocabulary_of(experiment), experiment.text.length)
    )
    return load_labelled(experiment.data, texts=texts)


def load_both(experiment: ExperimentFields) -> tuple[LabelledData, Tensor]:
    """Load private and public data; texts of both with one vocabulary."""
    if experiment.text is None:
        private = load_labelled(experiment.data)
        return private, load_auxiliary(experiment.auxiliary, shape=private.input_shape)
    public, found = load_public(experiment)
    assert found is not None, "texts have a vocabulary"
    return load_labelled(experiment.data, texts=Texts(found, experiment.text.length)), public


def load_public(experiment: ExperimentFields) -> tuple[Tensor, Vocabulary | None]:
    """Load public data only; texts with their vocabulary."""
    if experiment.text is None:
        return load_auxiliary(experiment.auxiliary), None
    found, section = vocabulary_of(experiment), experiment.text
    length = section.auxiliary_length or section.length
    return load_auxiliary(experiment.auxiliary, texts=Texts(found, length)), found


def vocabulary_of(experiment: ExperimentFields) -> Vocabulary:
    """Return the given vocabulary, that of the data or a checkpoint, or a learned one."""
    assert experiment.text is not None, "images have no vocabulary"
    name = experiment.text.vocabulary
    if name is None:
        return _brought(experiment) or _learned(experiment)
    if name == LEARNED:
        return _learned(experiment)
    if Path(name).is_file():
        return vocabulary.of_file(Path(name), key=KEY)
    return vocabulary.of_folder(locate(name, key=KEY), key=KEY)


def _brought(experiment: ExperimentFields) -> Vocabulary | None:
    if experiment.data.source == "tensors":
        path = experiment.data.path or next(iter(experiment.data.clients), None)
        return carried_vocabulary(path, key="data.path")
    if experiment.auxiliary.source == "tensors":
        return carried_vocabulary(experiment.auxiliary.path, key="auxiliary.path")
    if experiment.pretraining.checkpoint is not None:
        file = Path(experiment.pretraining.checkpoint)
        if (inside := vocabulary.inside_of(file, key="pretraining.checkpoint")) is not None:
            return inside
    for prototype in experiment.prototypes:
        if (checkpoint := checkpoint_of(prototype)) is not None:
            key = "prototypes.options.checkpoint"
            return vocabulary.of_folder(locate(checkpoint, key=key), key=key)
    return None


def _learned(experiment: ExperimentFields) -> Vocabulary:
    """Learn the vocabulary from the public texts, or read it from the cache."""
    section = experiment.auxiliary
    open_public = SOURCES[section.source].open_public
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
    place = None if parent is None else parent.with_name("vocabularies")
    path = (
        None
        if place is None
        else place / f"{cache.content_key(table.files, settings=settings)}.json"
    )
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
