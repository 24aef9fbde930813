"""Which files belong to a part of the data, and folders of images or of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedaux.config import Auxiliary, Data
from fedaux.data.tables import Table, key_of

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TEXT_SUFFIXES = {".txt"}
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


def open_folder(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open a folder of images or text files: one folder a class, perhaps below `train` and `test`.

    Public data lies as it likes.
    """
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
        images = _files_below(place, texts=texts)
        return Table(files=tuple(images), size=len(images), cells=lambda: ((str(file), file) for file in images))
    classes = sorted(folder.name for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not classes:
        raise ValueError(f"{place}: has no folders; labelled examples should lie in one folder a class")
    members = [
        (file, number) for number, name in enumerate(classes) for file in _files_below(place / name, texts=texts)
    ]
    return Table(
        files=tuple(file for file, _ in members),
        size=len(members),
        cells=lambda: ((str(file), file) for file, _ in members),
        labels=lambda: [number for _, number in members],
        classes=tuple(classes),
    )


def _files_below(folder: Path, *, texts: bool) -> list[Path]:
    suffixes = TEXT_SUFFIXES if texts else IMAGE_SUFFIXES
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in suffixes and not file.name.startswith(".") and file.is_file()
    )
    if not files:
        raise ValueError(f"{folder}: holds no {'texts' if texts else 'images'} ({', '.join(sorted(suffixes))})")
    return files
