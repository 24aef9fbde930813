"""Sources of data: how to count and load the examples of each format and of an experiment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Auxiliary, Data, ExperimentFields
from fedaux.data import cache, embedded, notes, wordnet
from fedaux.data.binary import open_cifar10, open_cifar100, open_idx, open_stl10, open_svhn
from fedaux.data.decoding import convert
from fedaux.data.features import (
    count_feature_rows,
    count_features,
    load_feature_rows,
    load_features,
    load_public_features,
)
from fedaux.data.folders import open_folder
from fedaux.data.hub import open_hub
from fedaux.data.labelled import LabelledData, count_training, renumbered, union_of_classes
from fedaux.data.lines import open_csv, open_jsonl, open_lines
from fedaux.data.parquet import open_parquet
from fedaux.data.rows import open_csv_rows, open_folder_rows, open_jsonl_rows
from fedaux.data.silos import client_sections, joined
from fedaux.data.tables import BadRows, Converter, Examples, Opener, Table, found_by, read, reworded
from fedaux.data.tensor_files import content_digest
from fedaux.data.tensors import (
    count_tensor_rows,
    count_tensors,
    load_public_tensors,
    load_tensor_rows,
    load_tensors,
)
from fedaux.data.texts import Texts
from fedaux.data.vocabulary import Vocabulary
from fedaux.data.vocabulary_choice import vocabulary_of

NOISE_SHAPE = (3, 32, 32)
"""Shape of noise images for an encoder."""


@dataclass(frozen=True)
class Source:
    """How a dataset is counted and loaded. `count_labelled` should be fast: it runs before a run.

    With `path_on_disk`, the path must exist; `takes_test` and `takes_split` are sources that use
    `data.test` and `split`. With `holds_texts`, the functions take a second argument for texts:
    `count_labelled` True, the others the `Texts` that make token ids; `open_public` opens the texts
    to learn a vocabulary from. With `holds_features`, examples are
    float32 [N, F]. With `converts`, `load_labelled`, `load_rows` and `load_auxiliary` take a
    `Converter` as second argument. With `is_made`, `load_auxiliary` generates `auxiliary.size`
    images and takes the shape of the clients' images, or None, as second argument.
    """

    needs_path: bool = False
    path_on_disk: bool = True
    takes_test: bool = False
    takes_split: bool = False
    holds_texts: bool = False
    holds_features: bool = False
    converts: bool = False
    is_made: bool = False
    count_labelled: Callable[..., int] | None = None
    load_labelled: Callable[..., LabelledData] | None = None
    load_rows: Callable[..., tuple[LabelledData, int]] | None = None
    """Loads the good rows of a node's images, and the number of all; whether a row is good depends
    on that row alone."""
    count_rows: Callable[[Data], int] | None = None
    """That number alone."""
    load_auxiliary: Callable[..., Tensor] | None = None
    open_public: Callable[[Auxiliary], Table] | None = None


def load_private(
    experiment: ExperimentFields, *, converter: Converter | None = None
) -> LabelledData:
    """Load the clients' data and the test data."""
    if converter is None and experiment.text is not None:
        converter = Texts(_vocabulary(experiment), experiment.text.length)
    return load_labelled(experiment.data, converter=converter)


def load_both(
    experiment: ExperimentFields, *, converter: Converter | None = None
) -> tuple[LabelledData, Tensor]:
    """Load private and public data: features by a `converter`, texts with one vocabulary."""
    if converter is not None or experiment.text is None:
        private = load_labelled(experiment.data, converter=converter)
        shape = private.input_shape
        return private, load_auxiliary(experiment.auxiliary, converter=converter, shape=shape)
    public, found = load_public(experiment)
    assert found is not None, "texts have a vocabulary"
    texts = Texts(found, experiment.text.length)
    return load_labelled(experiment.data, converter=texts), public


def load_public(experiment: ExperimentFields) -> tuple[Tensor, Vocabulary | None]:
    """Load public data only; texts with their vocabulary."""
    if experiment.text is None:
        return load_auxiliary(experiment.auxiliary), None
    found, section = _vocabulary(experiment), experiment.text
    length = section.auxiliary_length or section.length
    return load_auxiliary(experiment.auxiliary, converter=Texts(found, length)), found


def _vocabulary(experiment: ExperimentFields) -> Vocabulary:
    open_public = SOURCES[experiment.auxiliary.source].open_public
    return vocabulary_of(experiment, open_public=open_public)


def count_labelled(section: Data, *, texts: bool = False) -> int:
    """Return the number of training examples of all clients."""
    count = SOURCES[section.source].count_labelled
    assert count is not None, "a source of labelled data can count it"
    wanted = (True,) if texts else ()
    with _renaming_path("data.clients" if section.clients else "data.path"):
        counts = [count(own, *wanted) for own in client_sections(section)]
    return sum(min(counted, section.size or counted) for counted in counts)


def load_labelled(section: Data, *, converter: Converter | None = None) -> LabelledData:
    """Load the clients' data and the test data; `data.clients` are concatenated.

    A `converter` makes token ids or features of texts and images.
    """
    load = SOURCES[section.source].load_labelled
    assert load is not None, "checked before a run"
    loaded: list[LabelledData] = []
    bad: list[BadRows] = []
    with _renaming_path("data.clients" if section.clients else "data.path"):
        for own in client_sections(section):
            try:
                if isinstance(converter, Texts):
                    words = converter.vocabulary
                    loaded.append(replace(load(own, converter), vocabulary=words))
                elif converter is not None and SOURCES[section.source].converts:
                    loaded.append(load(own, converter))
                else:
                    found = check_labelled(load(own), source=section.source)
                    loaded.append(_converted(found, section, converter))
            except BadRows as error:
                bad.append(error)
        if bad:
            raise BadRows.joined(bad)
    loaded = [_shortened(data, section) for data in loaded]
    if not section.clients:
        _warn_of_classes(loaded[0])
        return loaded[0].with_validation(section.server_validation)
    # On the hub, `data.test` is a split, which each client's dataset has.
    shared_test = section.test is not None and SOURCES[section.source].path_on_disk
    data = joined(loaded, names=section.clients, shared_test=shared_test)
    _warn_of_classes(data)
    return data.with_validation(section.server_validation)


def _warn_of_classes(data: LabelledData) -> None:
    """Warn of class names that differ only in case, and of test classes without training data."""
    spellings: dict[str, list[str]] = {}
    for name in data.classes:
        spellings.setdefault(name.strip().casefold(), []).append(name)
    if twice := [names for names in spellings.values() if len(names) > 1]:
        shown = "; ".join(" and ".join(names) for names in twice[:5])
        notes.warn(f"data: class names that differ only in case are different classes: {shown}")
    trained, tested = set(data.labels.tolist()), set(data.test_labels.tolist())
    if trained and (untrained := sorted(tested - trained)):
        share = np.isin(data.test_labels.numpy(), untrained).mean()
        names = ", ".join(data.classes[label] for label in untrained[:5])
        more = ", ..." if len(untrained) > 5 else ""
        notes.warn(
            f"data: no client trains on these classes of the test data: {names}{more} "
            f"({share:.1%} of the test examples)"
        )


def load_own(section: Data, *, converter: Converter | None = None) -> LabelledData:
    """Load the data of one client, all for training."""
    source = SOURCES[section.source]
    load = source.load_labelled
    assert load is not None, "checked before"
    section = section.model_copy(update={"test_fraction": 0.0, "size": None, "test_size": None})
    if converter is not None and source.converts:
        return load(section, converter)
    return _converted(load(section), section, converter)


def load_rows(section: Data, *, converter: Converter | None = None) -> tuple[LabelledData, int]:
    """Load a node's own examples for training, and the number of all its rows; whether a row is
    good, and its class, depend on that row alone."""
    source = SOURCES[section.source]
    if source.load_rows is None:  # embedded data, which is not private
        data = load_own(section, converter=converter)
        return data, len(data.labels)
    if converter is not None and source.converts:
        return source.load_rows(section, converter)
    data, total = source.load_rows(section)
    return _converted(data, section, converter), total


def count_rows(section: Data) -> int:
    """Return the number of a node's rows, readable or not."""
    count = SOURCES[section.source].count_rows
    return load_rows(section)[1] if count is None else count(section)


def load_test(section: Data, *, converter: Converter | None = None) -> LabelledData:
    """Load test images, labels and class names, for a server without training data."""
    source = SOURCES[section.source]
    if section.path is None and section.test is not None and source.needs_path:
        with _renaming_path("data.test"):
            own = load_own(
                section.model_copy(update={"path": section.test, "test": None, "split": None}),
                converter=converter,
            )
        data = replace(own, test_images=own.images, test_labels=own.labels)
    else:
        data = load_labelled(section, converter=converter)
    return replace(data, images=data.test_images[:0], labels=data.test_labels[:0], clients=None)


@contextmanager
def _renaming_path(setting: str) -> Iterator[None]:
    """Replace `data.path` in messages by the setting that the user gave."""
    token = _path_setting.set(setting)
    try:
        yield
    except ValueError as error:
        old = "data.path = "
        if not isinstance(error, BadRows) and not str(error).startswith(old):
            raise
        raise reworded(error, old=old, new=f"{setting} = ") from error
    finally:
        _path_setting.reset(token)


_path_setting: ContextVar[str] = ContextVar("path_setting", default="data.path")


def load_auxiliary(
    section: Auxiliary,
    *,
    converter: Converter | None = None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Load the public unlabeled images, uint8 [N, C, H, W], texts, int32 [N, L], or features.

    `shape` [C, H, W] is the shape of the clients' images, for sources that generate public images.
    """
    source = SOURCES[section.source]
    load = source.load_auxiliary
    assert load is not None, "checked before a run"
    if isinstance(converter, Texts) or (converter is not None and source.converts):
        return load(section, converter)
    if source.is_made:
        images = load(section, shape if converter is None else NOISE_SHAPE)
    else:
        found = load(section)
        check_examples(found, what=f"auxiliary.source = {section.source!r}: load_auxiliary returns")
        images = convert(found, channels=section.channels, side=section.image_size)
    return images if converter is None else features_of(images, converter)


def check_labelled(data: object, *, source: str) -> LabelledData:
    """Return the data that a source has loaded. Raises ValueError if they break the rules of
    `LabelledData`."""
    what = f"data.source = {source!r}: load_labelled returns"
    if not isinstance(data, LabelledData):
        raise ValueError(f"{what} a {type(data).__name__}; should be a fedaux.data.LabelledData")
    for prefix in ("", "test_"):
        images, labels = getattr(data, f"{prefix}images"), getattr(data, f"{prefix}labels")
        check_examples(images, what=f"{what} {prefix}images,")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            found = f"{labels.dtype} {list(labels.shape)}"
            raise ValueError(f"{what} {prefix}labels, {found}; should be int64 [{len(images)}]")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(data.classes):
            found = f"{int(labels.min())} to {int(labels.max())}"
            right = f"0 to {len(data.classes) - 1}, positions in classes"
            raise ValueError(f"{what} {prefix}labels, {found}; should be {right}")
    return data


def check_examples(examples: object, *, what: str) -> None:
    """Raise ValueError if examples of a source are neither images nor token ids nor features."""
    found = type(examples).__name__
    if isinstance(examples, Tensor):
        kinds = {4: (torch.uint8,), 2: (torch.int32, torch.float32, torch.float16)}
        if examples.dtype in kinds.get(examples.ndim, ()):
            return
        found = f"{examples.dtype} {list(examples.shape)}"
    raise ValueError(f"{what} {found}; images should be uint8 [N, channels, height, width]")


def features_of(images: Tensor, converter: Converter) -> Tensor:
    """Return the features of images in memory, uint8 [N, C, H, W], from the cache if stored."""
    about = {"images": content_digest(images), **converter.settings(Data())}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:40]
    found = cache.load(key)
    if found is None:
        entries = ((f"image {row}", pixels) for row, pixels in enumerate(images.numpy()))
        blocks = converter.encode_all(entries, bad_labels={}, place=key, expected=len(images))
        found = cache.store(key, blocks)
    if found.reasons:
        raise ValueError(found.reasons[0])
    made = converter.finished(found.images) if len(found.rows) else converter.nothing()
    return torch.from_numpy(made)


def _shortened(data: LabelledData, section: Data) -> LabelledData:
    """Return the first `size` and `test_size` examples. Raises ValueError if there are fewer."""
    for key, wanted, held in (
        ("size", section.size, len(data.labels)),
        ("test_size", section.test_size, len(data.test_labels)),
    ):
        if wanted is not None and wanted > held:
            kind = "training" if key == "size" else "test"
            raise ValueError(
                f"data.{key} = {wanted}: should be at most {held}, the number of {kind} examples"
            )
    clients = data.clients
    if section.size is not None and clients is not None:
        clients = tuple(own for part in clients if len(own := part[part < section.size]))
    return replace(
        data,
        clients=clients,
        images=data.images[: section.size],
        labels=data.labels[: section.size],
        test_images=data.test_images[: section.test_size],
        test_labels=data.test_labels[: section.test_size],
    )


def _converted(
    data: LabelledData, section: Data, converter: Converter | None = None
) -> LabelledData:
    """Convert images to the size and channels of the section, if the source has not done so, or
    to features."""
    if converter is not None:
        parts = [features_of(part, converter) for part in (data.images, data.test_images)]
        return replace(data, images=parts[0], test_images=parts[1])
    images, test_images = (
        convert(part, channels=section.channels, side=section.image_size)
        for part in (data.images, data.test_images)
    )
    return replace(data, images=images, test_images=test_images)


def _load_digits(section: Data) -> LabelledData:
    images, labels = embedded.digits()
    examples = Examples(images, labels, tuple(map(str, range(10))))
    return _of(examples).held_out(section.test_fraction)


def _load_letters(section: Auxiliary) -> Tensor:
    # Public data does not depend on the seed of a run.
    return torch.from_numpy(
        embedded.letters(section.size or 5000, generator=seeding.generator(0, "letters"))
    )


def _make_noise(section: Auxiliary, shape: tuple[int, ...] | None) -> Tensor:
    if section.size is None:
        raise ValueError(size_missing(section.source))
    channels = section.channels or (shape[0] if shape else None)
    sides = (section.image_size,) * 2 if section.image_size else shape and shape[1:]
    if channels is None or sides is None:
        raise ValueError(
            f"auxiliary.source = {section.source!r}: there are no clients' images to take the "
            "shape from; set auxiliary.image_size and auxiliary.channels"
        )
    generator = seeding.generator(section.seed, "noise")
    return torch.from_numpy(
        embedded.noise(section.size, shape=(channels, *sides), generator=generator)
    )


def size_missing(source: str) -> str:
    """Return the problem of a source that generates images without a size."""
    return f"auxiliary.size: missing; required by the source {source}"


WITH_WORDNET_IDS = ("parquet", "folder", "csv", "jsonl", "huggingface")
"""Sources whose rows can have WordNet ids."""


def _from_files(
    open_part: Opener,
    *,
    path_on_disk: bool = True,
    general: bool = True,
    open_rows: Callable[[Data], Table] | None = None,
) -> Source:
    """Return the source of a file format; a general one supports texts and named splits, one with
    `open_rows` nodes."""

    def pair(section: Data, texts: bool) -> tuple[Table, Table | None]:
        """Open training and test data; the latter is None if there is none."""
        assert section.path is not None, "checked before a run"
        with found_by("data.path", section.path):
            train = open_part(section.path, "train", section, texts)
            assert train is not None, "openers raise without training data"
            if section.test is None or not path_on_disk:
                return train, open_part(section.path, "test", section, texts)
        elsewhere = section.model_copy(update={"split": None})
        with found_by("data.test", section.test):
            tested = open_part(section.test, "test", elsewhere, texts)
            return train, tested or open_part(section.test, "train", elsewhere, texts)

    def count(section: Data, texts: bool = False) -> int:
        train, test = pair(section, texts)
        return train.size if test else count_training(train.size, section)

    def load(section: Data, converter: Converter | None = None) -> LabelledData:
        train, test = pair(section, converter is not None and converter.reads_texts)
        assert section.path is not None, "checked before a run"
        own = f"{_path_setting.get()} = {section.path}"
        size = section.size if test is not None else None  # all rows, to hold some out
        with found_by("data.path", section.path):
            examples = read(train, section, name=own, converter=converter, size=size)
        if test is not None:
            setting, path = (
                ("data.test", section.test) if section.test else ("data.path", section.path)
            )
            name = f"data.test = {section.test}" if section.test else f"{own}, test part"
            with found_by(setting, path):
                tested = read(test, section, name=name, converter=converter, size=section.test_size)
                return _assembled(examples, tested)
        return _of(examples).held_out(section.test_fraction)

    def load_rows(section: Data, converter: Converter | None = None) -> tuple[LabelledData, int]:
        assert open_rows is not None, "a node reads no other sources"
        with found_by("data.path", str(section.path)):
            table, name = open_rows(section), f"data.path = {section.path}"
            examples = read(table, section, name=name, converter=converter, row_by_row=True)
        return _of(examples), table.size

    def open_public(section: Auxiliary, texts: bool = True) -> Table:
        assert section.path is not None, "checked before a run"
        with found_by("auxiliary.path", section.path):
            table = open_part(section.path, "train", section, texts)
        assert table is not None, "openers raise without data"
        return table

    def load_unlabelled(section: Auxiliary, converter: Converter | None = None) -> Tensor:
        table = open_public(section, converter is not None and converter.reads_texts)
        size = section.size if section.wordnet is None else None  # rows of a noun can be anywhere
        assert section.path is not None, "checked before a run"
        with found_by("auxiliary.path", section.path):
            name = f"auxiliary.path = {section.path}"
            examples = read(table, section, name=name, converter=converter, size=size)
        images = examples.images
        if section.wordnet is not None:
            assert examples.rows is not None, "read returns rows"
            rows = wordnet.rows_in_table(table, section.wordnet, key="auxiliary.wordnet")
            images = images[np.isin(examples.rows, rows)]
        return _first(torch.from_numpy(images), section.size)

    return Source(
        needs_path=True,
        path_on_disk=path_on_disk,
        takes_test=True,
        takes_split=general,
        holds_texts=general,
        converts=True,
        count_labelled=count,
        load_labelled=load,
        load_rows=load_rows if open_rows else None,
        count_rows=(lambda section: open_rows(section).size) if open_rows else None,
        load_auxiliary=load_unlabelled,
        open_public=open_public if general else None,
    )


def _of(examples: Examples) -> LabelledData:
    images, labels = torch.from_numpy(examples.images), torch.from_numpy(examples.labels)
    return LabelledData.for_training(images, labels, examples.classes)


def _assembled(train: Examples, test: Examples) -> LabelledData:
    """Combine training and test data, with the same class numbers in both."""
    classes = union_of_classes([train.classes, test.classes])
    return LabelledData(
        images=torch.from_numpy(train.images),
        labels=torch.from_numpy(renumbered(train.labels, train.classes, classes)),
        test_images=torch.from_numpy(test.images),
        test_labels=torch.from_numpy(renumbered(test.labels, test.classes, classes)),
        classes=classes,
    )


def _load_public_tensors(section: Auxiliary) -> Tensor:
    return _first(load_public_tensors(section), section.size)


def _first(images: Tensor, size: int | None) -> Tensor:
    if size is not None and size > len(images):
        raise ValueError(
            f"auxiliary.size = {size}: should be at most {len(images)}, the number of examples"
        )
    return images[:size]


SOURCES: dict[str, Source] = {
    "digits": Source(
        count_labelled=lambda section: count_training(1797, section),
        load_labelled=_load_digits,
    ),
    "letters": Source(load_auxiliary=_load_letters),
    "noise": Source(load_auxiliary=_make_noise, is_made=True),
    "tensors": Source(
        needs_path=True,
        count_labelled=count_tensors,
        load_labelled=load_tensors,
        load_rows=load_tensor_rows,
        count_rows=count_tensor_rows,
        load_auxiliary=_load_public_tensors,
    ),
    "features": Source(
        needs_path=True,
        takes_test=True,
        takes_split=True,
        holds_features=True,
        count_labelled=count_features,
        load_labelled=load_features,
        load_rows=load_feature_rows,
        count_rows=count_feature_rows,
        load_auxiliary=load_public_features,
    ),
    "folder": _from_files(open_folder, open_rows=open_folder_rows),
    "parquet": _from_files(open_parquet),
    "csv": _from_files(open_csv, open_rows=open_csv_rows),
    "jsonl": _from_files(open_jsonl, open_rows=open_jsonl_rows),
    "lines": replace(_from_files(open_lines), count_labelled=None, load_labelled=None),
    "huggingface": _from_files(open_hub, path_on_disk=False),
    "cifar10-binary": _from_files(open_cifar10, general=False),
    "cifar100-binary": _from_files(open_cifar100, general=False),
    "stl10-binary": _from_files(open_stl10, general=False),
    "idx": _from_files(open_idx, general=False),
    "svhn": _from_files(open_svhn, general=False),
}
