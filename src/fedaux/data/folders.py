"""Which files belong to a part of the data, and folders of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedaux.config import Auxiliary, Data
from fedaux.data.tables import Table, key_of

IMAGE_COLUMNS = ("image", "img", "path", "file", "filename", "file_name")
LABEL_COLUMNS = ("label", "labels", "class", "target", "fine_label")
IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
PARTS = {"train": ("train", "training"), "test": ("test", "testing", "validation", "valid", "val")}


def part_files(path: str, part: str, *, suffix: str, key: str) -> list[Path]:
    """Return the files of a part in a folder (or its folder `data`), in order; a single file is training data.

    A file belongs to the part its name begins with; in a folder where none does, all are training data.
    """
    place = Path(path)
    if place.is_file():
        return [place] if part == "train" else []
    for folder in (place, place / "data"):
        files = sorted(file for file in folder.glob(f"*{suffix}") if not file.name.startswith("."))
        if any(_begins(file, names) for names in PARTS.values() for file in files):
            for name in PARTS[part]:
                if chosen := [file for file in files if _begins(file, (name,))]:
                    return chosen
            return _none_found(path, part, suffix=suffix, key=key)
        if files:
            return files if part == "train" else []
    return _none_found(path, part, suffix=suffix, key=key)


def _begins(file: Path, names: Sequence[str]) -> bool:
    return any(file.stem == name or file.stem.startswith((f"{name}-", f"{name}_", f"{name}.")) for name in names)


def _none_found(path: str, part: str, *, suffix: str, key: str) -> list[Path]:
    if part == "train":
        raise ValueError(
            f"{key}: no {suffix} files found in {path}; a folder should hold train*{suffix} (and test*{suffix})"
        )
    return []


def open_folder(path: str, part: str, section: Data | Auxiliary) -> Table | None:
    """Open a folder of images: one folder a class, perhaps below `train` and `test`; public data lies as it likes."""
    place = Path(path)
    found = [place / name for names in PARTS.values() for name in names if (place / name).is_dir()]
    if found:
        place = next((place / name for name in PARTS[part] if place / name in found), place / part)
    elif part == "test":
        return None
    if not place.is_dir():
        if part == "test":
            return None
        raise ValueError(f"{key_of(section)}.path = {path}: should be a folder, with a folder {part} if it has others")
    if not isinstance(section, Data):
        images = _images_below(place)
        return Table(files=tuple(images), size=len(images), cells=lambda: ((str(file), file) for file in images))
    classes = sorted(folder.name for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not classes:
        raise ValueError(f"{place}: has no folders; labelled images should lie in one folder a class")
    members = [(file, number) for number, name in enumerate(classes) for file in _images_below(place / name)]
    return Table(
        files=tuple(file for file, _ in members),
        size=len(members),
        cells=lambda: ((str(file), file) for file, _ in members),
        labels=lambda: [number for _, number in members],
        classes=tuple(classes),
    )


def _images_below(folder: Path) -> list[Path]:
    images = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()
    )
    if not images:
        raise ValueError(f"{folder}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return images
