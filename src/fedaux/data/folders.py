"""The files of each part of the data, and folders of images or texts."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from fedaux.config import Auxiliary, Data
from fedaux.config_errors import nearest
from fedaux.data.tables import Table, key_of
from fedaux.data.wordnet import id_of_folder

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TEXT_SUFFIXES = {".txt", ""}
"""Collections of news and mail have files without an extension."""
ARCHIVER = "__MACOSX"
"""The folder that macOS adds to zip archives."""
PARTS = {"train": ("train", "training"), "test": ("test", "testing", "validation", "valid", "val")}


def part_names(part: str, section: Data | Auxiliary) -> tuple[str, ...]:
    """Return possible names of a part: the given split, or the usual names."""
    if part == "train":
        return PARTS["train"] if section.split is None else (section.split,)
    return tuple(name for name in PARTS[part] if name != section.split)


def no_such_split(path: str, section: Data | Auxiliary, *, there: Collection[str]) -> ValueError:
    """Return the error for a missing split, with the existing ones."""
    key, held = key_of(section), ", ".join(there) or "none"
    if section.split is None:
        return ValueError(
            f"{key}.path = {path}: has no split train; it has {held}; set {key}.split"
        )
    guess = nearest(section.split, there)
    return ValueError(
        f"{key}.split = {section.split!r}: {path} has no such split; it has {held}{guess}"
    )


def part_files(path: str, part: str, section: Data | Auxiliary, *, suffix: str) -> list[Path]:
    """Return the files of a part in a folder or its subfolder `data`, sorted.

    A file belongs to the part that its name starts with. A single file, or all files if no name
    matches a part and no split is given, are training data.
    """
    place = Path(path)
    wanted = part_names(part, section)
    if place.is_file():
        if part == "train" and section.split is not None and not _begins(place, wanted):
            raise no_such_split(path, section, there=[_beginning(place)])
        return [place] if part == "train" else []
    for folder in (place, place / "data"):
        files = sorted(file for file in folder.glob(f"*{suffix}") if not file.name.startswith("."))
        for name in wanted:
            if chosen := [file for file in files if _begins(file, (name,))]:
                return chosen
        if files and part == "train" and section.split is not None:
            raise no_such_split(path, section, there=list(dict.fromkeys(map(_beginning, files))))
        if any(_begins(file, names) for names in PARTS.values() for file in files):
            return _none_found(path, part, suffix=suffix, key=key_of(section))
        if files:
            return files if part == "train" else []
    return _none_found(path, part, suffix=suffix, key=key_of(section))


def _begins(file: Path, names: Sequence[str]) -> bool:
    return any(
        file.stem == name or file.stem.startswith((f"{name}-", f"{name}_", f"{name}."))
        for name in names
    )


def _beginning(file: Path) -> str:
    """Return the split of a file by its name, as on the hub."""
    return re.split(r"[-_.]", file.stem, maxsplit=1)[0]


def _none_found(path: str, part: str, *, suffix: str, key: str) -> list[Path]:
    if part == "train":
        raise ValueError(
            f"{Path(path)}: no {suffix} files found; should be train*{suffix} (and test*{suffix}), "
            "or "
            f"set {key}.split to the beginning of their names"
        )
    return []


def open_folder(path: str, part: str, section: Data | Auxiliary, texts: bool) -> Table | None:
    """Open a folder of images or text files: one folder per class, optionally in `train` and
    `test`.

    Public data can have any layout.
    """
    place = Path(path)
    wanted = part_names(part, section)
    named = section.split if part == "train" else None
    if named is not None and place.is_dir() and not (place / named).is_dir():
        folders = [folder.name for folder in sorted(place.iterdir()) if folder.is_dir()]
        raise no_such_split(path, section, there=folders)
    usual = [name for names in (wanted, *PARTS.values()) for name in names]
    found = [place / name for name in usual if (place / name).is_dir()]
    if found:
        place = next((place / name for name in wanted if place / name in found), place / part)
    elif part == "test":
        return None
    if not place.is_dir():
        if part == "test":
            return None
        raise ValueError(
            f"{Path(path)}: should be a folder, with a folder {part} if it has other parts"
        )
    suffixes = TEXT_SUFFIXES if texts else IMAGE_SUFFIXES
    if not isinstance(section, Data):
        images = files_below(place, suffixes=suffixes)
        if not images:
            raise _nothing_in(place, texts=texts)
        return Table(
            files=tuple(images),
            size=len(images),
            entries=lambda: ((str(file), file) for file in images),
            wnids=lambda: [id_of_folder(file) for file in images],
        )
    classes = sorted(
        folder.name for folder in place.iterdir() if folder.is_dir() and not _is_hidden(folder.name)
    )
    if not classes:
        raise ValueError(f"{place}: has no folders; should have one folder per class")
    members = [
        (file, number)
        for number, name in enumerate(classes)
        for file in files_below(place / name, suffixes=suffixes)
    ]
    if not members and not section.skip_bad:
        raise _nothing_in(place, texts=texts)
    filled = {number for _, number in members}
    empty = [name for number, name in enumerate(classes) if number not in filled]
    shown = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
    what = "texts" if texts else "images"
    return Table(
        files=tuple(file for file, _ in members),
        size=len(members),
        entries=lambda: ((str(file), file) for file, _ in members),
        labels=lambda: [number for _, number in members],
        classes=tuple(classes),
        warnings=(f"class folders without {what}: {shown}",) if empty else (),
    )


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == ARCHIVER


def files_below(folder: Path, *, suffixes: Collection[str]) -> list[Path]:
    """Return the files in a folder and its subfolders with these suffixes, without hidden ones."""
    found: list[Path] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if _is_hidden(entry.name):
            continue
        file = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            found += files_below(file, suffixes=suffixes)
        elif file.suffix.lower() in suffixes and entry.is_file():
            found.append(file)
    return found


def _nothing_in(folder: Path, *, texts: bool) -> ValueError:
    suffixes = ", ".join(sorted(TEXT_SUFFIXES if texts else IMAGE_SUFFIXES)).removeprefix(", ")
    return ValueError(f"{folder}: has no {'texts' if texts else 'images'} ({suffixes})")
