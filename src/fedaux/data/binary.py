"""CIFAR-10, CIFAR-100, STL-10, SVHN and IDX (MNIST) in their original formats without pickle."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedaux.config import Auxiliary, Data
from fedaux.data.decoding import Entry
from fedaux.data.tables import Table

CIFAR_PIXELS = 3 * 32 * 32
STL_PIXELS = 3 * 96 * 96


def open_cifar10(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open data_batch_*.bin or test_batch.bin: one label byte, then red, green and blue by rows."""
    patterns = {"train": "data_batch_*.bin", "test": "test_batch.bin"}
    folder = _below(path, "cifar-10-batches-bin")
    files = _files(folder, path, patterns[part], part=part)
    return _open_cifar(files, label_bytes=1, label_at=0, names="batches.meta.txt", num_classes=10)


def open_cifar100(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open train.bin or test.bin: coarse label byte, fine label byte, then as CIFAR-10."""
    wanted = section.label_column if isinstance(section, Data) else None
    if wanted not in (None, "fine", "coarse"):
        raise ValueError(f"data.label_column = {wanted!r}: cifar100-binary has fine and coarse")
    folder = _below(path, "cifar-100-binary")
    files = _files(folder, path, f"{part}.bin", part=part)
    if wanted == "coarse":
        return _open_cifar(
            files, label_bytes=2, label_at=0, names="coarse_label_names.txt", num_classes=20
        )
    return _open_cifar(
        files, label_bytes=2, label_at=1, names="fine_label_names.txt", num_classes=100
    )


def _open_cifar(
    files: Sequence[Path], *, label_bytes: int, label_at: int, names: str, num_classes: int
) -> Table | None:
    if not files:
        return None
    record = label_bytes + CIFAR_PIXELS
    sizes = [_records(file, record) for file in files]

    def records(file: Path) -> NDArray[np.uint8]:
        return np.memmap(file, dtype=np.uint8, mode="r").reshape(-1, record)

    def entries() -> Iterator[Entry]:
        for file in files:
            for row, image in enumerate(records(file)[:, label_bytes:].reshape(-1, 3, 32, 32)):
                yield f"{file}, row {row}", image

    return Table(
        files=tuple(files),
        size=sum(sizes),
        entries=entries,
        labels=lambda: [int(label) for file in files for label in records(file)[:, label_at]],
        classes=_class_names(files[0].with_name(names), num_classes),
    )


def open_stl10(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open train_*.bin or test_*.bin; public data is unlabeled_X.bin. Pixels are by columns."""
    unlabeled = not isinstance(section, Data)
    folder = _below(path, "stl10_binary")
    files = _files(folder, path, f"{'unlabeled' if unlabeled else part}_X.bin", part=part)
    if not files:
        return None
    (file,) = files
    size = _records(file, STL_PIXELS)

    def entries() -> Iterator[Entry]:
        images = np.memmap(file, dtype=np.uint8, mode="r").reshape(-1, 3, 96, 96)
        return (
            (f"{file}, row {row}", image.transpose(0, 2, 1)) for row, image in enumerate(images)
        )

    if unlabeled:
        return Table(files=(file,), size=size, entries=entries)
    label_file = file.with_name(file.name.replace("_X", "_y"))
    if not label_file.is_file() or label_file == file:
        raise ValueError(f"{file}: the file of labels, {file.name.replace('_X', '_y')}, is missing")
    if label_file.stat().st_size != size:
        raise ValueError(f"{label_file}: {label_file.stat().st_size} labels for {size} images")
    return Table(
        files=(file, label_file),
        size=size,
        entries=entries,
        labels=lambda: _counted_from_one(np.fromfile(label_file, dtype=np.uint8)),
        classes=_class_names(file.with_name("class_names.txt"), 10),
    )


def _counted_from_one(labels: NDArray[np.uint8]) -> list[object]:
    """Return labels 1 .. 10 as 0 .. 9, and 0, which STL-10 uses for no label, as None."""
    return [int(label) - 1 if label else None for label in labels]


def open_svhn(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open train_32x32.mat or test_32x32.mat, or a file such as extra_32x32.mat; label 10 is 0."""
    files = _files(Path(path), path, f"{part}_32x32.mat", part=part)
    if not files:
        return None
    (file,) = files
    held = _matlab(file, "whosmat")
    shapes = {name: shape for name, shape, _ in held}
    pixels, labels = shapes.get("X", ()), shapes.get("y", ())
    if len(pixels) != 4 or pixels[:3] != (32, 32, 3) or labels != (pixels[3], 1):
        raise ValueError(
            f"{file}: has {shapes}; should have X [32, 32, 3, N] and y [N, 1], as SVHN's cropped "
            "digits"
        )
    kind = {name: kind for name, _, kind in held}["X"]
    if kind != "uint8":
        raise ValueError(
            f"{file}: X is {kind}; should be uint8, from 0 to 255, as SVHN's cropped digits"
        )

    def entries() -> Iterator[Entry]:
        images = _matlab(file, "loadmat", variable_names=["X"])["X"].transpose(3, 2, 0, 1)
        return ((f"{file}, row {row}", image) for row, image in enumerate(images))

    def digits() -> list[object]:
        written = _matlab(file, "loadmat", variable_names=["y"])["y"].ravel().tolist()
        # Zeros are written as 10; a 0 is no digit.
        return [0 if label == 10 else label if label != 0 else None for label in written]

    return Table(
        files=(file,),
        size=pixels[3],
        entries=entries,
        labels=digits,
        classes=tuple(str(digit) for digit in range(10)),
    )


def open_idx(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open IDX files as of MNIST: train-images-idx3-ubyte, t10k-images-idx3-ubyte, perhaps .gz, or
    one file of images; the labels are in the file with `labels` and `idx1` in its name."""
    beginning = {"train": "train", "test": "t10k"}[part]
    images = _files(Path(path), path, f"{beginning}-images*idx3-ubyte*", part=part)
    if not images and part == "test":
        images = sorted(Path(path).glob("test-images*idx3-ubyte*"))
    if not images:
        return None
    file = images[0]  # a packed file beside its unpacked copy comes second
    size, *sides = _idx_shape(file, dimensions=3)

    def entries() -> Iterator[Entry]:
        pixels = _idx_content(file, shape=(size, 1, *sides))
        return ((f"{file}, row {row}", image) for row, image in enumerate(pixels))

    if not isinstance(section, Data):
        return Table(files=(file,), size=size, entries=entries)
    name = file.name.replace("images", "labels").replace("idx3", "idx1")
    places = [file.with_name(name), file.with_name(name.removesuffix(".gz"))]
    places.append(file.with_name(f"{name}.gz"))
    label_file = next((place for place in places if place.is_file() and place != file), None)
    if label_file is None:
        raise ValueError(f"{file}: the file of labels, {name}, is missing")
    (count,) = _idx_shape(label_file, dimensions=1)
    if count != size:
        raise ValueError(f"{label_file}: {count} labels for {size} images")
    return Table(
        files=(file, label_file),
        size=size,
        entries=entries,
        labels=lambda: _idx_content(label_file, shape=(count,)).tolist(),
    )


def _idx_shape(file: Path, *, dimensions: int) -> tuple[int, ...]:
    """Return the shape in the header of an IDX file of bytes."""
    header = _idx_bytes(file, 4 + 4 * dimensions)
    if header[:4] != bytes([0, 0, 8, dimensions]) or len(header) < 4 + 4 * dimensions:
        raise ValueError(
            f"{file}: begins with {header[:4].hex(' ') or 'nothing'}; an IDX file of "
            f"{'images' if dimensions == 3 else 'labels'} begins with 00 00 08 0{dimensions}"
        )
    return struct.unpack(f">{dimensions}I", header[4:])


def _idx_content(file: Path, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    header = 4 + 4 * (3 if len(shape) == 4 else 1)
    content = _idx_bytes(file)[header:]
    if len(content) != np.prod(shape):
        raise ValueError(
            f"{file}: {len(content)} bytes after the header, should be {np.prod(shape)}; "
            "incomplete?"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _idx_bytes(file: Path, size: int = -1) -> bytes:
    """Return the first `size` bytes of a file, unpacked if it is packed with gzip."""
    with file.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(file) if packed else file.open("rb") as content:
            return content.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: not a readable gzip file ({error})") from error


def _matlab(file: Path, function: str, **options: Any) -> Any:
    """Call a reader of scipy.io, which does not unpickle."""
    import scipy.io  # a slow import

    read: Callable[..., Any] = getattr(scipy.io, function)
    try:
        return read(str(file), **options)
    except Exception as error:  # broken files cause errors of any type
        raise ValueError(f"{file}: not a readable MATLAB file of version 5 ({error})") from error


def _below(path: str, usual: str) -> Path:
    """Return the folder, or the subfolder of the unpacked archive."""
    return Path(path) / usual if (Path(path) / usual).is_dir() else Path(path)


def _files(folder: Path, path: str, pattern: str, *, part: str) -> list[Path]:
    if folder.is_file():
        return [folder] if part == "train" else []
    files = sorted(folder.glob(pattern))
    if not files and part == "train":
        raise ValueError(f"{Path(path)}: has no {pattern}")
    return files


def _records(file: Path, record: int) -> int:
    size = file.stat().st_size
    if size == 0 or size % record:
        raise ValueError(
            f"{file}: {size} bytes are not a whole number of records of {record} bytes; incomplete?"
        )
    return size // record


def _class_names(file: Path, num_classes: int) -> tuple[str, ...]:
    """Return the names in a file, one per line; numbers if it is missing."""
    if not file.is_file():
        return tuple(str(number) for number in range(num_classes))
    names = tuple(
        line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
    )
    if len(names) != num_classes:
        raise ValueError(f"{file}: has {len(names)} classes, should be {num_classes}")
    return names
