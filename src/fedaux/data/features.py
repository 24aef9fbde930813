"""Feature vectors with labels: embeddings or tables of measurements, read without pickles."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedaux.config import Auxiliary, Data
from fedaux.data import notes
from fedaux.data.folders import part_files
from fedaux.data.labelled import (
    LabelledData,
    count_training,
    hold_out,
    renumbered,
    union_of_classes,
)
from fedaux.data.parquet import parquet_file
from fedaux.data.tables import (
    LABEL_COLUMNS,
    BadRows,
    find_column,
    find_label,
    found_by,
    key_of,
    name_labels,
    number_labels,
)
from fedaux.formatting import optional

FEATURE_COLUMNS = ("features", "embeddings", "embedding", "feature", "x")
NUMBERS_IN_LABELS = (*LABEL_COLUMNS, "targets", "y", "num")
Part = Literal["train", "test"]


@dataclass(frozen=True)
class Columns:
    """A file's features, float32 [N, F], and its labels with the names of the classes, if any."""

    features: NDArray[np.float32]
    labels: Sequence[object] | None
    classes: tuple[str, ...] | None
    fixed_width: bool = True
    """Whether the file states F, so that no single row decides it."""
    clients: NDArray[Any] | None = None
    """The client of each row [N], by `data.client_column`."""


def count_features(section: Data) -> int:
    """Return the number of training examples."""
    train, test = _pair(section)
    total = sum(len(columns.features) for _, columns in train)
    return total if test else count_training(total, section)


def load_features(section: Data) -> LabelledData:
    """Read labelled features; without test data, some are held out."""
    train, test = _pair(section)
    with found_by("data.path", str(section.path)):
        examples = _joined(train, section)
    if section.client_column is not None and examples[3] is None:
        raise ValueError(f"{train[0][0]}: data.client_column should be a column of a Parquet file")
    if test:
        with found_by("data.test" if section.test else "data.path", str(section.path)):
            tested = _joined(test, section)
        classes = union_of_classes([examples[2], tested[2]])
        features, labels, own, owners = examples
        held, held_labels, names, _ = tested
        labels = renumbered(labels, own, classes)
        held_labels = renumbered(held_labels, names, classes)
    else:
        features, labels, classes, owners = examples
        chosen, rest = hold_out(len(labels), fraction=section.test_fraction)
        held, held_labels = features[chosen], labels[chosen]
        features, labels = features[rest], labels[rest]
        owners = None if owners is None else owners[rest]
    return LabelledData(
        images=torch.from_numpy(features),
        labels=torch.from_numpy(labels),
        test_images=torch.from_numpy(held),
        test_labels=torch.from_numpy(held_labels),
        classes=classes,
        clients=None if owners is None else _by_client(owners),
    )


def _by_client(owners: NDArray[Any]) -> tuple[NDArray[np.int64], ...]:
    """Return the rows of each client, clients in order, from the client of each row [N]."""
    order = np.argsort(owners, kind="stable")
    ends = np.flatnonzero(owners[order][1:] != owners[order][:-1]) + 1
    return tuple(np.split(order, ends))


def count_feature_rows(section: Data) -> int:
    """Return the number of a node's rows."""
    with found_by("data.path", str(section.path)):
        return sum(len(columns.features) for _, columns in _of_node(section))


def load_feature_rows(section: Data) -> tuple[LabelledData, int]:
    """Read features for a node's training, and the number of all rows; whether a row is good
    depends on that row alone."""
    with found_by("data.path", str(section.path)):
        files = _of_node(section)
        features, labels, classes, _ = _joined(files, section, row_by_row=True)
    images, numbers = torch.from_numpy(features), torch.from_numpy(labels)
    data = LabelledData.for_training(images, numbers, classes)
    return data, sum(len(columns.features) for _, columns in files)


def load_public_features(section: Auxiliary) -> Tensor:
    """Read public features."""
    with found_by("auxiliary.path", str(section.path)):
        features, *_ = _joined(_files(str(section.path), "train", section), section)
    if section.size is not None and section.size > len(features):
        raise ValueError(
            f"auxiliary.size = {section.size}: should be at most {len(features)}, the number of "
            "examples"
        )
    halved = torch.from_numpy(features[: section.size]).half()  # as clients get them to rehearse
    if not bool(halved.isfinite().all()):
        raise ValueError(
            f"auxiliary.path = {section.path}: a feature is above 65,504, which half precision "
            "cannot hold; bring features to a similar scale"
        )
    return halved.float()


def feature_width(section: Data) -> int:
    """Return the number of features of a file, which no single row decides."""
    with found_by("data.path", str(section.path)):
        return int(_of_node(section)[0][1].features.shape[1])


def _of_node(section: Data) -> Files:
    """Return training data whose width is stated. Raises ValueError for lists of any length."""
    files = _files(str(section.path), "train", section)
    for file, columns in files:
        if not columns.fixed_width:
            raise ValueError(
                f"{file}: the lists of a node's features should be of the type fixed-size list, so "
                "that no row decides their length"
            )
    return files


Files = list[tuple[Path, Columns]]


def _pair(section: Data) -> tuple[Files, Files]:
    """Return training and test data; the latter is empty if there is none."""
    with found_by("data.path", str(section.path)):
        train = _files(str(section.path), "train", section)
        if section.test is None:
            return train, _files(str(section.path), "test", section)
    elsewhere = section.model_copy(update={"split": None, "client_column": None})
    with found_by("data.test", section.test):
        tested = _files(section.test, "test", elsewhere)
        return train, tested or _files(section.test, "train", elsewhere)


def _files(path: str, part: Part, section: Data | Auxiliary) -> Files:
    """Return the files of a part with their columns. A file of arrays can have both parts."""
    place = Path(path)
    if place.is_file():
        files = [place] if part == "train" or place.suffix in ARRAYS else []
    else:
        for suffix in READERS:
            if list(place.glob(f"*{suffix}")) or list((place / "data").glob(f"*{suffix}")):
                files = part_files(path, part, section, suffix=suffix)
                break
        else:
            raise ValueError(f"{place}: has no files that end in {', '.join(READERS)}")
    found: Files = []
    for file in files:
        if file.suffix not in READERS:
            raise ValueError(f"{file}: should end in {', '.join(READERS)}")
        columns = READERS[file.suffix](file, part if place.is_file() else "train", section)
        if columns is not None:
            found.append((file, columns))
    widths = {columns.features.shape[1] for _, columns in found}
    if len(widths) > 1:
        raise ValueError(f"{place}: its files have {' and '.join(map(str, widths))} features")
    return found


def _joined(
    files: Files, section: Data | Auxiliary, *, row_by_row: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...], NDArray[Any] | None]:
    """Return the usable rows of several files: features, labels, classes, and clients.

    Raises BadRows, unless `skip_bad` leaves them out.
    """
    parts = [columns.features for _, columns in files]
    features = parts[0] if len(parts) == 1 else np.concatenate(parts)
    known = [columns.clients for _, columns in files if columns.clients is not None]
    owners = np.concatenate(known) if known else None
    labels, names = np.zeros(len(features), dtype=np.int64), tuple[str, ...]()
    bad: dict[int, str] = {}
    if isinstance(section, Data):
        values: list[object] = []
        for file, columns in files:
            if columns.labels is None:
                raise ValueError(f"{file}: has no labels; {LABELS_GO[file.suffix]}")
            if len(columns.labels) != len(columns.features):
                raise ValueError(
                    f"{file}: has {len(columns.features)} rows of features, but "
                    f"{len(columns.labels)} labels"
                )
            values += columns.labels
        number = name_labels if row_by_row else number_labels
        try:
            labels, names, bad = number(values, classes=files[0][1].classes)
        except ValueError as error:
            raise ValueError(f"{files[0][0]}: {error}") from error
    with np.errstate(invalid="ignore"):  # infinite features of both signs
        finite = np.isfinite(features.sum(axis=1, dtype=np.float64))
    for row in np.flatnonzero(~finite).tolist():
        bad.setdefault(row, "a feature is missing, NaN or infinite")
    if bad:
        starts = np.cumsum([0, *(len(columns.features) for _, columns in files)])
        reasons = []
        for row, why in sorted(bad.items()):
            which = int(np.searchsorted(starts, row, side="right")) - 1
            reasons.append(f"{files[which][0]}, row {row - starts[which]}: {why}")
        if not section.skip_bad:
            raise BadRows(reasons, bad=len(bad), key=key_of(section))
        key = key_of(section)
        place = f"{key}.path = {section.path}"
        notes.skip(
            place,
            skipped=len(bad),
            rows=len(features),
            reasons=reasons,
            setting=f"{key}.skip_bad",
        )
        good = np.setdiff1d(np.arange(len(features)), list(bad))
        features, labels = features[good], labels[good]
        owners = None if owners is None else owners[good]
    if len(features) == 0 and not row_by_row:
        raise ValueError(f"{files[0][0]}: no usable rows")
    return np.ascontiguousarray(features), labels, names, owners


def _of_arrays(
    file: Path,
    arrays: Mapping[str, Callable[[], NDArray[Any]]],
    part: Part,
    section: Data | Auxiliary,
    classes: Sequence[object] = (),
) -> Columns | None:
    """Return the columns of a file of arrays by name; None without this part."""
    prefix = "test_" if part == "test" else ""
    key = key_of(section)
    plain = [name for name in arrays if not name.startswith("test_")]
    column = find_column(
        plain,
        given=section.feature_column[0] if section.feature_column else None,
        names=FEATURE_COLUMNS,
        setting=f"{key}.feature_column",
        where=file,
    )
    if prefix + column not in arrays:
        return None
    labels: list[object] | None = None
    if isinstance(section, Data) and len(plain) > 1:
        name = find_label(plain, section, where=file, names=NUMBERS_IN_LABELS)
        if prefix + name not in arrays:
            raise ValueError(f"{file}: has {prefix}{column}, but no {prefix}{name}")
        found = arrays[prefix + name]()
        if found.ndim != 1:
            raise ValueError(f"{file}: {prefix}{name} is {list(found.shape)}; should be [examples]")
        labels = [_text(value) for value in found.tolist()]
    names = tuple(str(_text(name)) for name in classes)
    features = arrays[prefix + column]()
    return Columns(_numbers(features, f"{file}: {prefix}{column}"), labels, names or None)


def _text(value: object) -> object:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def _numbers(values: NDArray[Any], what: str) -> NDArray[np.float32]:
    """Return features as float32 [N, F]. Raises ValueError for another type or shape."""
    if values.ndim != 2 or 0 in values.shape[1:] or values.dtype.kind not in "fiu":
        raise ValueError(
            f"{what} is {values.dtype} {list(values.shape)}; should be numbers [examples, features]"
        )
    with np.errstate(over="ignore"):  # what overflows is infinite, and a bad row
        # A missing number makes doubles of a column of integers: all have to be rounded alike.
        return values.astype(np.float64 if values.dtype.kind in "iu" else values.dtype).astype(
            np.float32
        )


def _safetensors(file: Path, part: Part, section: Data | Auxiliary) -> Columns | None:
    try:
        with safe_open(file, framework="pt") as opened:

            def array(name: str) -> NDArray[Any]:
                tensor = opened.get_tensor(name)
                return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)

            arrays = {name: partial(array, name) for name in sorted(opened.keys())}
            classes = json.loads((opened.metadata() or {}).get("classes", "[]"))
            return _of_arrays(file, arrays, part, section, classes)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: not a readable safetensors file ({error})") from error


def _npz(file: Path, part: Part, section: Data | Auxiliary) -> Columns | None:
    try:
        with np.load(file, allow_pickle=False) as opened:
            held = {name: np.asarray(opened[name]) for name in opened.files}
    except Exception as error:  # zip, numpy and pickled arrays fail in their own ways
        raise _unreadable(file, error) from error
    classes = held.pop("classes", np.zeros(0)).tolist()
    arrays = {name: partial(held.__getitem__, name) for name in held}
    return _of_arrays(file, arrays, part, section, classes)


def _npy(file: Path, part: Part, section: Data | Auxiliary) -> Columns | None:
    if part == "test":
        return None
    try:
        held = np.load(file, allow_pickle=False)
    except Exception as error:
        raise _unreadable(file, error) from error
    return Columns(_numbers(held, str(file)), None, None)


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{file}: not a readable file of arrays ({error}); pickled objects are never loaded"
    )


def _hdf5(file: Path, part: Part, section: Data | Auxiliary) -> Columns | None:
    h5py = optional("h5py", f"{file}: needs the package h5py", extras="hdf5")
    try:
        with h5py.File(file, "r") as opened:
            plain = [name for name in opened if isinstance(opened[name], h5py.Dataset)]
            arrays = {name: partial(np.asarray, opened[name]) for name in plain}
            classes = arrays.pop("classes")().tolist() if "classes" in arrays else []
            return _of_arrays(file, arrays, part, section, classes)
    except OSError as error:
        raise ValueError(f"{file}: not a readable HDF5 file ({error})") from error


def _parquet(file: Path, part: Part, section: Data | Auxiliary) -> Columns | None:
    """Read a column of lists, or several columns of numbers: by default all but the label."""
    if part == "test":
        return None
    opened = parquet_file(file)
    from pyarrow import types

    schema, key = opened.schema_arrow, key_of(section)
    labelled = section.label_column if isinstance(section, Data) else None
    label = labelled or next((name for name in NUMBERS_IN_LABELS if name in schema.names), None)
    if isinstance(section, Data) and label not in schema.names:
        find_label(schema.names, section, where=file, names=NUMBERS_IN_LABELS)
    owner = section.client_column if isinstance(section, Data) else None
    numeric = [
        name
        for name in schema.names
        if name not in (label, owner)
        and (types.is_integer(kind := schema.field(name).type) or types.is_floating(kind))
    ]
    usual = next((name for name in FEATURE_COLUMNS if name in schema.names), None)
    chosen = list(section.feature_column) or ([usual] if usual else numeric)
    for name in chosen or [""]:
        find_column(schema.names, given=name, names=(), setting=f"{key}.feature_column", where=file)
    if owner is not None:
        find_column(schema.names, given=owner, names=(), setting="data.client_column", where=file)
    kind, several = schema.field(chosen[0]).type, len(chosen) > 1
    lists = not several and (types.is_list(kind) or types.is_fixed_size_list(kind))
    table = opened.read(columns=[name for name in (label, owner) if name is not None])
    labels = _labels(table.column(label), file) if isinstance(section, Data) else None
    owners = None if owner is None else np.asarray(_labels(table.column(owner), file))
    if owners is not None and table.column(owner).null_count:
        raise ValueError(f"{file}: a row has no {owner}, which data.client_column names")
    if not lists:
        table = opened.read(columns=chosen)
        columns = [
            np.asarray(table.column(name).to_numpy(), dtype=np.float64)[:, None] for name in chosen
        ]
        return Columns(_numbers(np.hstack(columns), str(file)), labels, None, clients=owners)
    fixed = types.is_fixed_size_list(kind)
    return Columns(_mapped(opened, chosen[0], file, fixed), labels, None, fixed, owners)


def _mapped(opened: Any, column: str, file: Path, fixed: bool) -> NDArray[np.float32]:
    """Return a column of lists [N, F] as a memory-mapped file, of which rows are read when they are
    needed; NaN where a list has another length than the longest."""
    from pyarrow import compute

    def batches() -> Iterator[tuple[Any, NDArray[Any]]]:
        for batch in opened.iter_batches(columns=[column]):
            lengths = compute.fill_null(compute.list_value_length(batch.column(0)), -1)
            yield batch.column(0), lengths.to_numpy(zero_copy_only=False)

    kind = opened.schema_arrow.field(column).type
    longest = (int(lengths.max(initial=0)) for _, lengths in batches())
    width = kind.list_size if fixed else max(longest, default=0)
    shape = opened.metadata.num_rows, width
    with tempfile.TemporaryFile() as stream:
        for cells, lengths in batches():
            rows = np.full((len(cells), width), np.nan, dtype=np.float32)
            flat = cells.filter(compute.equal(compute.list_value_length(cells), width)).flatten()
            numbers = flat.to_numpy(zero_copy_only=False).reshape(-1, max(1, width))
            rows[lengths == width] = _numbers(numbers, str(file))
            stream.write(rows.data)
        stream.flush()
        if 0 in shape:
            return np.zeros(shape, dtype=np.float32)
        return np.memmap(stream, dtype=np.float32, mode="c", shape=shape)  # outlives the name


def _labels(column: Any, file: Path) -> list[object]:
    """Return a column of labels, whose texts need not be UTF-8. Raises ValueError for its type."""
    from pyarrow import binary, types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind):
        column = column.cast(binary())
    elif not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ValueError(f"{file}: its labels are {kind}; should be numbers or texts")
    return [_text(value) for value in column.to_pylist()]


READERS: dict[str, Callable[[Path, Part, Data | Auxiliary], Columns | None]] = {
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".npy": _npy,
    ".parquet": _parquet,
    ".h5": _hdf5,
    ".hdf5": _hdf5,
}
ARRAYS = (".safetensors", ".npz", ".h5", ".hdf5")
"""Formats whose files can hold training and test data."""
LABELS_GO = {
    ".npy": "labelled features should be an .npz file with the arrays features and labels",
    ".parquet": "should have a column label",
} | dict.fromkeys(ARRAYS, "should have an array labels")
