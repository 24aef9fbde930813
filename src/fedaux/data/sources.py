"""Where data comes from. A source is a row: how to count its training examples cheaply, and how to load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedaux import seeding
from fedaux.config import Auxiliary, Data
from fedaux.data import embedded, wordnet
from fedaux.data.binary import open_cifar10, open_cifar100, open_stl10, open_svhn
from fedaux.data.decoding import convert
from fedaux.data.folders import open_folder
from fedaux.data.hub import open_hub
from fedaux.data.labelled import LabelledData, renumbered, union_of_classes
from fedaux.data.lines import open_csv, open_jsonl
from fedaux.data.parquet import open_parquet
from fedaux.data.silos import client_sections, joined
from fedaux.data.tables import Examples, Opener, Table, found_by, name_labels, read, refuse_gaps
from fedaux.data.texts import Texts
from fedaux.data.tokens import load_public_tokens, load_tokens


@dataclass(frozen=True)
class Source:
    """What a data set can be used for, and how. `count` must be quick: it is asked before anything runs.

    A path is a file or folder that must be there, unless it is not `path_on_disk`; `takes_test` looks at `data.test`,
    `takes_split` at `split`.
    One that `holds_texts` is called with a second argument where texts are wanted: `count` with True, the others with
    the `Texts` that make token ids of them; `open_public` then opens texts that a vocabulary can be learned from.
    One that `is_made` reads no public images but makes `auxiliary.size` of them: `load_auxiliary` is called with a
    second argument, the shape of the clients' images, or None where nobody knows it.
    """

    needs_path: bool = False
    path_on_disk: bool = True
    takes_test: bool = False
    takes_split: bool = False
    holds_texts: bool = False
    is_made: bool = False
    count_labelled: Callable[..., int] | None = None
    load_labelled: Callable[..., LabelledData] | None = None
    load_rows: Callable[[Data], LabelledData] | None = None
    """Loads the good rows of a node's images; no row has a say in what becomes of another."""
    load_auxiliary: Callable[..., Tensor] | None = None
    open_public: Callable[[Auxiliary], Table] | None = None


def count_labelled(section: Data, *, texts: bool = False) -> int:
    """Count the training examples of all clients, as quickly as the source can."""
    count = SOURCES[section.source].count_labelled
    assert count is not None, "a source of labelled data can count it"
    wanted = (True,) if texts else ()
    with _called("data.clients" if section.clients else "data.path"):
        counts = [count(own, *wanted) for own in client_sections(section)]
    return sum(min(counted, section.size or counted) for counted in counts)


def load_labelled(section: Data, *, texts: Texts | None = None) -> LabelledData:
    """Load the clients' data and the test data; where each client has its own, all in one with who holds what."""
    load = SOURCES[section.source].load_labelled
    assert load is not None, "checked before a run"
    with _called("data.clients" if section.clients else "data.path"):
        if texts is None:
            loaded = [_converted(load(own), section) for own in client_sections(section)]
        else:
            loaded = [
                replace(load(own, texts), vocabulary=texts.vocabulary)
                for own in client_sections(section)
            ]
    loaded = [_shortened(data, section) for data in loaded]
    if not section.clients:
        return loaded[0].with_validation(section.server_validation)
    # On the hub `data.test` names a split, and each client's data set has its own.
    shared_test = section.test is not None and SOURCES[section.source].path_on_disk
    return joined(loaded, names=section.clients, shared_test=shared_test).with_validation(
        section.server_validation
    )


def load_own(section: Data) -> LabelledData:
    """Load the data of one client for training alone: nothing is held out for testing."""
    load = SOURCES[section.source].load_labelled
    assert load is not None, "checked before"
    whole = {"test_fraction": 0.0, "size": None, "test_size": None}
    return _converted(load(section.model_copy(update=whole)), section)


def load_rows(section: Data) -> LabelledData:
    """Load a node's own images for training: a row is read, left out and named by what it holds itself."""
    load = SOURCES[section.source].load_rows
    return load_own(section) if load is None else _converted(load(section), section)


def load_test(section: Data) -> LabelledData:
    """Load what a server without training data holds: test images, their labels, and the names of the classes."""
    source = SOURCES[section.source]
    if section.path is None and section.test is not None and source.needs_path:
        with _called("data.test"):
            own = load_own(
                section.model_copy(update={"path": section.test, "test": None, "split": None})
            )
        data = replace(own, test_images=own.images, test_labels=own.labels)
    else:
        data = load_labelled(section)
    return replace(data, images=data.test_images[:0], labels=data.test_labels[:0], clients=None)


@contextmanager
def _called(setting: str) -> Iterator[None]:
    """Let errors name the setting that the user has given, where the source was given it as `data.path`."""
    try:
        yield
    except ValueError as error:
        rest = str(error).removeprefix("data.path = ")
        if rest == str(error):
            raise
        raise ValueError(f"{setting} = {rest}") from error


def load_auxiliary(
    section: Auxiliary, *, texts: Texts | None = None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Load the public unlabeled images, uint8 [N, C, H, W], or texts, int32 [N, L].

    `shape` is that of the clients' images [C, H, W], for sources that make public images like them.
    """
    source = SOURCES[section.source]
    load = source.load_auxiliary
    assert load is not None, "checked before a run"
    if texts is not None:
        return load(section, texts)
    if source.is_made:
        return load(section, shape)
    return convert(load(section), channels=section.channels, side=section.image_size)


def _shortened(data: LabelledData, section: Data) -> LabelledData:
    """Return the first examples, as many as asked for; raise ValueError where there are fewer."""
    for key, wanted, held in (
        ("size", section.size, len(data.labels)),
        ("test_size", section.test_size, len(data.test_labels)),
    ):
        if wanted is not None and wanted > held:
            kind = "training" if key == "size" else "test"
            raise ValueError(
                f"data.{key} = {wanted}: there are {held} {kind} examples; should be at most {held}"
            )
    return replace(
        data,
        images=data.images[: section.size],
        labels=data.labels[: section.size],
        test_images=data.test_images[: section.test_size],
        test_labels=data.test_labels[: section.test_size],
    )


def _converted(data: LabelledData, section: Data) -> LabelledData:
    """Give images the size and channels asked for, where the source has not done so itself."""
    images, test_images = (
        convert(part, channels=section.channels, side=section.image_size)
        for part in (data.images, data.test_images)
    )
    return replace(data, images=images, test_images=test_images)


def _load_digits(section: Data) -> LabelledData:
    images, labels = embedded.digits()
    test, train = _hold_out(len(labels), fraction=section.test_fraction)
    return LabelledData(
        images=torch.from_numpy(images[train]),
        labels=torch.from_numpy(labels[train]),
        test_images=torch.from_numpy(images[test]),
        test_labels=torch.from_numpy(labels[test]),
        classes=tuple(str(digit) for digit in range(10)),
    )


def _load_letters(section: Auxiliary) -> Tensor:
    # A public data set is a fixed thing: its content does not depend on the seed of a run.
    return torch.from_numpy(
        embedded.letters(section.size or 5000, generator=seeding.generator(0, "letters"))
    )


def _make_noise(section: Auxiliary, shape: tuple[int, ...] | None) -> Tensor:
    if section.size is None:
        raise ValueError(size_missing(section.source))
    channels = section.channels or (shape[0] if shape else None)
    sides = (
        (section.image_size, section.image_size)
        if section.image_size
        else shape[1:]
        if shape
        else None
    )
    if channels is None or sides is None:
        raise ValueError(
            f"auxiliary.source = {section.source!r}: takes the shape of the clients' images, and none are at hand; set "
            "auxiliary.image_size and auxiliary.channels"
        )
    generator = seeding.generator(section.seed, "noise")
    return torch.from_numpy(
        embedded.noise(section.size, shape=(channels, *sides), generator=generator)
    )


def size_missing(source: str) -> str:
    """Say that a source which makes its public images was not told how many."""
    return f"auxiliary.size: missing; the source {source} makes as many images as it is told to"


def _hold_out(size: int, *, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of test and training examples where a source has no test set: the same for every seed."""
    order = seeding.generator(0, "test set").permutation(size)
    num_test = min(max(1, round(fraction * size)), size - 1) if fraction > 0 else 0
    return np.sort(order[:num_test]), np.sort(order[num_test:])


def _open_tensors(path: str | None, *, key: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Read named tensors of a safetensors file; errors name the setting, the file and what it holds."""
    assert path is not None, "checked before a run"
    try:
        with safe_open(Path(path), framework="pt") as file:
            held = sorted(file.keys())
            missing = [name for name in names if name not in held]
            if missing:
                raise ValueError(
                    f"{key} = {path}: holds no tensor {', '.join(missing)}; it holds {', '.join(held) or 'nothing'}"
                )
            return {name: file.get_tensor(name) for name in held}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error


def _check_images(images: Tensor, *, key: str, name: str) -> Tensor:
    if (
        images.dtype != torch.uint8
        or images.ndim != 4
        or images.shape[1] not in (1, 3)
        or len(images) == 0
    ):
        raise ValueError(
            f"{key}: tensor {name} is {str(images.dtype).removeprefix('torch.')} {list(images.shape)}; "
            f"should be uint8 [examples, 1 or 3 channels, height, width]"
        )
    return images


def _count_tensors(section: Data, texts: bool = False) -> int:
    content = "texts" if texts else "images"
    tensors = _open_tensors(section.path, key="data.path", names=(content, "labels"))
    total = len(tensors["labels"])
    return (
        total
        if f"test_{content}" in tensors
        else total - len(_hold_out(total, fraction=section.test_fraction)[0])
    )


def _load_tensors(section: Data, texts: Texts | None = None) -> LabelledData:
    """Read images and labels (and test_images, test_labels where the file has them) of a safetensors file."""
    if texts is not None:
        return load_tokens(section, texts, hold_out=_hold_out)
    tensors = _open_tensors(section.path, key="data.path", names=("images", "labels"))
    key = f"data.path = {section.path}"
    for part in ("", "test_") if "test_images" in tensors else ("",):
        images, labels = tensors[f"{part}images"], tensors.get(f"{part}labels", torch.zeros(0))
        _check_images(images, key=key, name=f"{part}images")
        if (
            labels.ndim != 1
            or labels.dtype.is_floating_point
            or len(labels) != len(images)
            or labels.min() < 0
        ):
            raise ValueError(
                f"{key}: tensor {part}labels should be {len(images)} class numbers from 0 upwards, one an image"
            )
        try:
            refuse_gaps(labels.long().numpy(), rows=np.arange(len(labels)))
        except ValueError as error:
            raise ValueError(f"{key}: tensor {part}labels: {error}") from error
    if "test_images" not in tensors:
        test, train = _hold_out(len(tensors["labels"]), fraction=section.test_fraction)
        tensors["test_images"], tensors["test_labels"] = (
            tensors["images"][test],
            tensors["labels"][test],
        )
        tensors["images"], tensors["labels"] = tensors["images"][train], tensors["labels"][train]
    num_classes = int(torch.cat([tensors["labels"], tensors["test_labels"]]).max()) + 1
    return LabelledData(
        images=tensors["images"],
        labels=tensors["labels"].long(),
        test_images=tensors["test_images"],
        test_labels=tensors["test_labels"].long(),
        classes=tuple(str(number) for number in range(num_classes)),
    )


def _load_tensor_rows(section: Data) -> LabelledData:
    tensors = _open_tensors(section.path, key="data.path", names=("images", "labels"))
    images = _check_images(tensors["images"], key=f"data.path = {section.path}", name="images")
    if tensors["labels"].shape != images.shape[:1]:
        raise ValueError(
            f"data.path = {section.path}: tensor labels should be {len(images)} numbers, one an image"
        )
    labels, classes, bad = name_labels(tensors["labels"].tolist(), classes=None)
    good = [row for row in range(len(labels)) if row not in bad]
    return LabelledData(
        images[good], torch.from_numpy(labels)[good], images[:0], torch.zeros(0).long(), classes
    )


def _load_auxiliary_tensors(section: Auxiliary, texts: Texts | None = None) -> Tensor:
    if texts is not None:
        return _first(load_public_tokens(section, texts), section.size)
    images = _open_tensors(section.path, key="auxiliary.path", names=("images",))["images"]
    return _first(
        _check_images(images, key=f"auxiliary.path = {section.path}", name="images"), section.size
    )


WORDNET_ROWS: dict[str, Callable[..., NDArray[np.int64]]] = {
    "parquet": lambda table, name, *, key: wordnet.rows_in_parquet(table.files, name, key=key),
    "folder": lambda table, name, *, key: wordnet.rows_in_folders(table.files, name, key=key),
    "csv": wordnet.rows_in_table,
    "jsonl": wordnet.rows_in_table,
    "huggingface": wordnet.rows_in_table,
}
"""Which rows of a table are of a noun, for sources whose rows or folders carry WordNet ids."""


def _from_files(open_part: Opener, *, path_on_disk: bool = True, general: bool = True) -> Source:
    """Return the source that reads a format; a general one can hold texts, and its splits have any names."""

    def pair(section: Data, texts: bool) -> tuple[Table, Table | None]:
        """Open training and test data; the latter lies at `data.test`, beside the former, or nowhere."""
        assert section.path is not None, "checked before a run"
        with found_by("data.path", section.path):
            train = open_part(section.path, "train", section, texts)
            assert train is not None, "openers raise where there is no training data"
            if section.test is None or not path_on_disk:
                return train, open_part(section.path, "test", section, texts)
        elsewhere = section.model_copy(update={"split": None})  # which is the training data's
        with found_by("data.test", section.test):
            tested = open_part(section.test, "test", elsewhere, texts)
            return train, tested or open_part(section.test, "train", elsewhere, texts)

    def count(section: Data, texts: bool = False) -> int:
        train, test = pair(section, texts)
        return (
            train.size
            if test
            else train.size - len(_hold_out(train.size, fraction=section.test_fraction)[0])
        )

    def load(section: Data, texts: Texts | None = None) -> LabelledData:
        train, test = pair(section, texts is not None)
        assert section.path is not None, "checked before a run"
        own = f"data.path = {section.path}"
        size = section.size if test is not None else None  # all of it: anything may be held out
        with found_by("data.path", section.path):
            examples = read(train, section, name=own, texts=texts, size=size)
        if test is not None:
            setting, path = (
                ("data.test", section.test) if section.test else ("data.path", section.path)
            )
            name = f"data.test = {section.test}" if section.test else "data, its test part"
            with found_by(setting, path):
                return _assembled(
                    examples, read(test, section, name=name, texts=texts, size=section.test_size)
                )
        chosen, rest = _hold_out(len(examples.labels), fraction=section.test_fraction)
        images, labels, classes = examples.images, examples.labels, examples.classes
        return _assembled(
            Examples(images[rest], labels[rest], classes),
            Examples(images[chosen], labels[chosen], classes),
        )

    def load_rows(section: Data) -> LabelledData:
        assert section.path is not None, "checked before a run"
        with found_by("data.path", section.path):
            train = open_part(section.path, "train", section, False)
            assert train is not None, "openers raise where there is no training data"
            examples = read(train, section, name=f"data.path = {section.path}", row_by_row=True)
        images, labels = torch.from_numpy(examples.images), torch.from_numpy(examples.labels)
        return LabelledData(images, labels, images[:0], labels[:0], examples.classes)

    def open_public(section: Auxiliary, texts: bool = True) -> Table:
        assert section.path is not None, "checked before a run"
        with found_by("auxiliary.path", section.path):
            table = open_part(section.path, "train", section, texts)
        assert table is not None, "openers raise where there is nothing"
        return table

    def load_public(section: Auxiliary, texts: Texts | None = None) -> Tensor:
        table = open_public(section, texts is not None)
        size = (
            section.size if section.wordnet is None else None
        )  # how far its rows reach, nobody knows
        assert section.path is not None, "checked before a run"
        with found_by("auxiliary.path", section.path):
            examples = read(
                table, section, name=f"auxiliary.path = {section.path}", texts=texts, size=size
            )
        images = examples.images
        if section.wordnet is not None:
            assert examples.rows is not None, "what was read has its rows"
            rows = WORDNET_ROWS[section.source](table, section.wordnet, key="auxiliary.wordnet")
            images = images[np.isin(examples.rows, rows)]
        return _first(torch.from_numpy(images), section.size)

    return Source(
        needs_path=True,
        path_on_disk=path_on_disk,
        takes_test=True,
        takes_split=general,
        holds_texts=general,
        count_labelled=count,
        load_labelled=load,
        load_rows=load_rows,
        load_auxiliary=load_public,
        open_public=open_public if general else None,
    )


def _assembled(train: Examples, test: Examples) -> LabelledData:
    """Put training and test data together; a class has the same number in both, whatever it had in its file."""
    classes = union_of_classes([train.classes, test.classes])
    return LabelledData(
        images=torch.from_numpy(train.images),
        labels=torch.from_numpy(renumbered(train.labels, train.classes, classes)),
        test_images=torch.from_numpy(test.images),
        test_labels=torch.from_numpy(renumbered(test.labels, test.classes, classes)),
        classes=classes,
    )


def _first(images: Tensor, size: int | None) -> Tensor:
    if size is not None and size > len(images):
        raise ValueError(
            f"auxiliary.size = {size}: there are {len(images)} examples; should be at most {len(images)}"
        )
    return images[:size]


SOURCES: dict[str, Source] = {
    "digits": Source(
        count_labelled=lambda section: (
            1797 - len(_hold_out(1797, fraction=section.test_fraction)[0])
        ),
        load_labelled=_load_digits,
    ),
    "letters": Source(load_auxiliary=_load_letters),
    "noise": Source(load_auxiliary=_make_noise, is_made=True),
    "tensors": Source(
        needs_path=True,
        holds_texts=True,
        count_labelled=_count_tensors,
        load_labelled=_load_tensors,
        load_rows=_load_tensor_rows,
        load_auxiliary=_load_auxiliary_tensors,
    ),
    "folder": _from_files(open_folder),
    "parquet": _from_files(open_parquet),
    "csv": _from_files(open_csv),
    "jsonl": _from_files(open_jsonl),
    "huggingface": _from_files(open_hub, path_on_disk=False),
    "cifar10-binary": _from_files(open_cifar10, general=False),
    "cifar100-binary": _from_files(open_cifar100, general=False),
    "stl10-binary": _from_files(open_stl10, general=False),
    "svhn": _from_files(open_svhn, general=False),
}
