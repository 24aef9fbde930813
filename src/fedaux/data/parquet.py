"""Images in Parquet files as the Hugging Face hub lays them out: a column of encoded images and one of labels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CHUNK = 1000


def parquet_files(path: str, *, part: str) -> list[Path]:
    """Return the files of a part (`train`, `test`) in a folder, in order; a single file is itself."""
    place = Path(path)
    return [place] if place.is_file() else sorted(place.glob(f"{part}-*.parquet"))


def count_rows(files: Sequence[Path]) -> int:
    """Return the number of rows from the files' footers alone."""
    parquet = _pyarrow_parquet()
    return sum(int(parquet.ParquetFile(file).metadata.num_rows) for file in files)


def read_images(files: Sequence[Path], *, key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64] | None]:
    """Return images uint8 [N, C, H, W] and labels [N], or None where there is no column `label`.

    All images take the size and the channels of the first. Raises ValueError naming the file and the row of an image
    that cannot be decoded or has another size.
    """
    parquet = _pyarrow_parquet()
    images: list[NDArray[np.uint8]] = []
    labels: list[NDArray[np.int64]] = []
    for file in files:
        table = parquet.read_table(file)
        if "image" not in table.column_names:
            raise ValueError(f"{key} = {file}: has no column image; it has {', '.join(table.column_names)}")
        column = table.column("image").to_pylist()
        mode = _decode(column[0], "", where=f"{key} = {file}, row 0").shape[2]
        chunks = range(0, len(column), CHUNK)

        def decode(start: int, column: list[Any] = column, mode: int = mode, file: Path = file) -> NDArray[np.uint8]:
            rows = column[start : start + CHUNK]
            target = "L" if mode == 1 else "RGB"
            decoded = [_decode(row, target, where=f"{key} = {file}, row {start + i}") for i, row in enumerate(rows)]
            for i, picture in enumerate(decoded):
                if picture.shape != decoded[0].shape:
                    raise ValueError(
                        f"{key} = {file}, row {start + i}: {picture.shape[1]}x{picture.shape[0]} pixels, "
                        f"others have {decoded[0].shape[1]}x{decoded[0].shape[0]}"
                    )
            return np.stack(decoded).transpose(0, 3, 1, 2)

        with ThreadPoolExecutor() as pool:  # decoders release the interpreter
            images += list(pool.map(decode, chunks))
        if "label" in table.column_names:
            labels.append(table.column("label").to_numpy().astype(np.int64))
    if not images:
        raise ValueError(f"{key}: no Parquet files found; a folder should hold train-*.parquet (and test-*.parquet)")
    together = np.concatenate(images) if len({block.shape[1:] for block in images}) == 1 else None
    if together is None:
        raise ValueError(f"{key}: images differ in size: {sorted({block.shape[1:] for block in images})}")
    return np.ascontiguousarray(together), np.concatenate(labels) if labels else None


def _decode(cell: Any, mode: str, *, where: str) -> NDArray[np.uint8]:
    """Return one image [H, W, C]; an empty mode keeps grey images grey and makes all others RGB."""
    content = cell["bytes"] if isinstance(cell, dict) else cell
    try:
        with Image.open(io.BytesIO(content)) as picture:
            target = mode or ("L" if picture.mode in {"1", "L"} else "RGB")
            pixels = np.asarray(picture if picture.mode == target else picture.convert(target))
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(f"{where}: cannot be decoded as an image ({error})") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("source parquet needs the package pyarrow: pip install 'fedaux[parquet]'") from error
    return pyarrow.parquet
