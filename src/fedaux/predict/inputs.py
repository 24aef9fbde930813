"""What `fedaux predict` reads: images, text files, folders of them, and tables."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedaux.config import FEATURES, Auxiliary
from fedaux.data import load_auxiliary
from fedaux.data.decoding import Content
from fedaux.data.folders import IMAGE_SUFFIXES, TEXT_SUFFIXES, files_below
from fedaux.data.lines import open_csv, open_jsonl
from fedaux.data.parquet import open_parquet
from fedaux.data.tables import Opener, Table
from fedaux.data.texts import trimmed
from fedaux.predict.trained_model import TrainedModel

TABLES: dict[str, Opener] = {".csv": open_csv, ".jsonl": open_jsonl, ".parquet": open_parquet}
"""Readers of tables by the end of a file's name."""
BATCH = 256
"""Inputs that are predicted at a time."""


@dataclass(frozen=True)
class Item:
    """One input: its file, its row if the file is a table, and its content."""

    path: str
    row: int | None
    content: Content | NDArray[np.float32]
    problem: str | None = None
    """Why a row of a table cannot be read."""

    def __str__(self) -> str:
        return self.path if self.row is None else f"{self.path}, row {self.row}"


class Inputs:
    """The inputs below some paths, in order, read while they are used.

    `columns` of tables are read, by default the columns that the model was trained on, or
    usual names. Raises ValueError if a path does not exist, or a folder has nothing to read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        model: TrainedModel,
        *,
        columns: Sequence[str] = (),
        encoding: str | None = None,
    ) -> None:
        try:
            codecs.lookup(encoding or "utf-8")
        except LookupError as error:
            raise ValueError(
                f"--encoding {encoding}: should be an encoding of Python, such as latin-1 or cp1252"
            ) from error
        self._model, self._encoding, self._columns = model, encoding, tuple(columns)
        usual = tuple(model.card["input"]["columns"])
        self._features = Auxiliary(source=FEATURES, feature_column=self._columns or usual)
        parts = [self._below(path) for path in paths]
        self.size = sum(size for size, _ in parts)
        self._items = chain.from_iterable(items for _, items in parts)

    def predicted(self, *, bad: dict[str, str] | None) -> Iterator[tuple[list[Item], Tensor]]:
        """Yield inputs and their probabilities [n, C], batch by batch.

        Raises ValueError at an input that cannot be read, unless `bad` collects the reasons.
        """
        with ThreadPoolExecutor() as pool, torch.inference_mode():
            # The tokenizer cannot be shared by threads.
            read = pool.map if self._model.kind == "image" else map
            while batch := list(islice(self._items, BATCH)):
                good, examples = [], []
                for item, found in zip(batch, read(self._read, batch), strict=True):
                    if isinstance(found, Tensor):
                        good.append(item)
                        examples.append(found)
                    elif bad is None:
                        raise ValueError(f"{item}: {found} (--skip-bad leaves such inputs out)")
                    else:
                        bad[str(item)] = str(found)
                if good:
                    stacked = torch.stack(examples)
                    if self._model.ignores_padding:
                        stacked = torch.from_numpy(trimmed(stacked.numpy()))
                    yield good, self._model(stacked).double().cpu()

    def _read(self, item: Item) -> Tensor | ValueError:
        try:
            if item.problem is not None:
                raise ValueError(item.problem)
            return self._model.preprocess(item.content, encoding=self._encoding)
        except ValueError as error:
            return ValueError(_with_option(str(error)))

    def _below(self, place: Path) -> tuple[int, Iterable[Item]]:
        """Return the number of inputs in a file or folder, and the inputs."""
        if not place.exists():
            raise ValueError(f"{place}: not found")
        if self._model.kind == "features":
            rows = load_auxiliary(self._features.model_copy(update={"path": str(place)}))
            return len(rows), [Item(str(place), row, one) for row, one in enumerate(rows.numpy())]
        if not place.is_dir():
            opener = TABLES.get(place.suffix.lower())
            if opener is None:
                return 1, [Item(str(place), None, place)]
            table = self._opened(opener, place)
            entries = enumerate(table.entries())
            return table.size, (
                Item(str(place), row, one, table.bad.get(row)) for row, (_, one) in entries
            )
        texts = self._model.kind == "text"
        suffixes = TEXT_SUFFIXES if texts else IMAGE_SUFFIXES
        if files := files_below(place, suffixes=suffixes):
            return len(files), [Item(str(file), None, file) for file in files]
        if tables := files_below(place, suffixes=TABLES):
            parts = [self._below(file) for file in tables]
            return sum(size for size, _ in parts), chain.from_iterable(one for _, one in parts)
        kinds = ", ".join(sorted({*suffixes, *TABLES}))
        raise ValueError(f"{place}: has no {'texts' if texts else 'images'} ({kinds})")

    def _opened(self, opener: Opener, file: Path) -> Table:
        """Open a table: the given columns, else the training data's, else usual names."""
        texts = self._model.kind == "text"
        usual = tuple(self._model.card["input"]["columns"])
        key, first = "text_column" if texts else "image_column", None
        for wish in [self._columns] if self._columns else dict.fromkeys([usual, ()]):
            section = Auxiliary(source=file.suffix[1:].lower(), path=str(file))
            update = {"encoding": self._encoding, key: wish if texts else next(iter(wish), None)}
            try:
                table = opener(str(file), "train", section.model_copy(update=update), texts)
            except ValueError as error:
                first = first or error  # about the columns of the training, if they are known
                continue
            assert table is not None, "a file is its own training part"
            return table
        said = str(first).replace(f"auxiliary.{key}", "--column")
        raise ValueError(_with_option(said)) from first


def _with_option(problem: str) -> str:
    """Return a problem with the option of `fedaux predict` instead of a recipe's setting."""
    return problem.replace("set `encoding`", "give --encoding")
