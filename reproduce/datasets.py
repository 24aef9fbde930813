"""The paper's data sets below one folder, `--data-root`, as on the Hugging Face hub or as
published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaux.config import Auxiliary, Data, Experiment

PARQUET = ("parquet", "train*.parquet")
UNLABELED = ("parquet", "unlabeled*.parquet")


@dataclass(frozen=True)
class DataSet:
    """A data set: its title, the names its folder may have, and the files in it."""

    title: str
    folders: tuple[str, ...]
    forms: tuple[tuple[str, str], ...] = (PARQUET,)
    """Sources of `fedaux.data.SOURCES`, each with the pattern of files that it reads."""
    text: bool = False
    made: int = 0
    """The default number of examples of generated data; 0 for data that are read."""


DATA_SETS: dict[str, DataSet] = {
    "cifar10": DataSet(
        "CIFAR-10",
        ("cifar10", "cifar-10-batches-bin"),
        (PARQUET, ("cifar10-binary", "data_batch_*.bin")),
    ),
    "cifar100": DataSet(
        "CIFAR-100", ("cifar100", "cifar-100-binary"), (PARQUET, ("cifar100-binary", "train.bin"))
    ),
    "stl10": DataSet(
        "STL-10", ("stl10", "stl10_binary"), (UNLABELED, ("stl10-binary", "unlabeled_X.bin"))
    ),
    "svhn": DataSet("SVHN", ("svhn",), (PARQUET, ("svhn", "train_32x32.mat"))),
    "imagenet32": DataSet(
        "ImageNet", ("imagenet32", "imagenet"), (PARQUET, ("folder", "n[0-9]*/*"))
    ),
    "tinyimagenet32": DataSet(
        "Tiny-ImageNet",
        ("tinyimagenet32", "tiny-imagenet", "tiny-imagenet-200"),
        (PARQUET, ("folder", "n[0-9]*/*")),
    ),
    "noise": DataSet("noise", (), (), made=100_000),
    "ag_news": DataSet("AG News", ("ag_news",), text=True),
    "amazon": DataSet("Amazon reviews, English", ("amazon_reviews_multi", "amazon"), text=True),
    "bookcorpus": DataSet("BookCorpus", ("bookcorpus",), text=True),
    "book_sentences": DataSet("sentences from other books", ("book_sentences",), text=True),
}
STAND_INS = {"imagenet32": "tinyimagenet32", "bookcorpus": "book_sentences"}
"""Data sets that replace missing ones; the page states it."""
EMBEDDED = {
    "digits": "handwritten digits (embedded)",
    "letters": "rendered letters (embedded)",
    "noise": "noise",
}
"""Data that come with the package, or are generated."""


@dataclass(frozen=True)
class Found:
    """A data set on disk."""

    name: str
    source: str
    path: Path | None
    """None for generated data."""

    def settings(self, section: str) -> dict[str, Any]:
        """Return the settings of `data` or `auxiliary` that read it; public images are resized
        to CIFAR's."""
        if self.path is None:
            return {f"{section}.source": self.source, f"{section}.size": DATA_SETS[self.name].made}
        chosen: dict[str, Any] = {
            f"{section}.source": self.source,
            f"{section}.path": str(self.path),
        }
        if section == "auxiliary" and not DATA_SETS[self.name].text:
            chosen["auxiliary.image_size"] = 32
        return chosen


def describe(experiment: Experiment) -> str:
    """Return a sentence that names the data of the clients and of the server."""
    private, public = (_title(section) for section in (experiment.data, experiment.auxiliary))
    return f"Data: {private}; public data: {public}."


def _title(section: Data | Auxiliary) -> str:
    """Return the title of a data set, by its source or the folder it lies in."""
    if section.path is None:
        return EMBEDDED.get(section.source, section.source)
    path = Path(section.path)
    for part in reversed(path.parts):
        for known in DATA_SETS.values():
            if part in known.folders:
                return known.title
    return f"`{path.name}`"


def titles(names: Iterable[str]) -> str:
    """Return the titles of data sets, for a list."""
    return ", ".join(DATA_SETS[name].title for name in names)


class Missing(ValueError):
    """Data sets are missing, one line for each."""


def locate(root: Path | None, names: Iterable[str]) -> dict[str, Found]:
    """Find every data set below the root. Raises Missing with the places that were searched."""
    wanted = list(dict.fromkeys(names))
    if root is None:
        texts = any(DATA_SETS[name].text for name in wanted)
        way = (
            "for --quick too: no texts are embedded"
            if texts
            else "or give --quick for embedded data"
        )
        raise ValueError(f"--data-root: missing; {titles(wanted)} must lie below one folder, {way}")
    if not root.is_dir():
        raise ValueError(f"--data-root {root}: there is no such folder")
    found: dict[str, Found] = {}
    missing: list[str] = []
    for name in wanted:
        place = _find(root, name) or _find(root, STAND_INS.get(name, ""))
        if place is not None:
            found[name] = place
        else:
            missing.append(
                f"{DATA_SETS[name].title}: none of {', '.join(map(str, _looked_for(root, name)))}"
            )
            if name == "stl10" and _find(root, "tinyimagenet32"):
                missing[-1] += "; Tiny-ImageNet is available: --aux tinyimagenet32 uses it instead"
    if missing:
        raise Missing(
            "\n".join(
                [f"--data-root {root}: {len(missing)} of {len(wanted)} data sets missing", *missing]
            )
        )
    return found


def replacements(found: Mapping[str, Found]) -> list[str]:
    """Return a line for each data set that replaces another."""
    return [
        f"{DATA_SETS[place.name].title} stands in for {DATA_SETS[name].title}"
        for name, place in found.items()
        if place.name != name
    ]


def _find(root: Path, name: str) -> Found | None:
    if name not in DATA_SETS:
        return None
    if DATA_SETS[name].made:
        return Found(name, name, None)
    for folder in DATA_SETS[name].folders:
        for source, pattern in DATA_SETS[name].forms:
            for place in _places(root / folder):
                if path := _to_read(place, pattern):
                    return Found(name, source, path.resolve())
    return None


def _to_read(place: Path, pattern: str) -> Path | None:
    """Return the folder with the files of a pattern; the one file if a source would read others
    beside it."""
    files = list(place.glob(pattern))
    if pattern != UNLABELED[1] or not any(place.glob(PARQUET[1])):
        return place if files else None
    return files[0] if len(files) == 1 else None


def _places(folder: Path) -> Iterator[Path]:
    """Yield a folder and its subfolders: the hub has one per configuration, and archives unpack
    into one."""
    if folder.is_dir():
        yield folder
        yield from sorted(inner for inner in folder.iterdir() if inner.is_dir())


def _looked_for(root: Path, name: str) -> list[Path]:
    """Return the searched places: each form in the first folder, and the last form in the
    others."""
    first, *others = DATA_SETS[name].folders
    forms = [pattern for _, pattern in DATA_SETS[name].forms]
    return [
        *(root / first / pattern for pattern in forms),
        *(root / other / forms[-1] for other in others),
    ]
