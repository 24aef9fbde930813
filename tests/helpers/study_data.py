"""The data sets of the paper in small, and what a study would run on them."""

from __future__ import annotations

import csv
import io
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from fedaux.config import Experiment
from reproduce.planning import Plan, Request, plan
from reproduce.studies import STUDIES


def write_images(folder: Path) -> Path:
    """Write a few examples of every set of images, each in one of the layouts that are
    understood."""
    import pyarrow.parquet
    import scipy.io

    generator = np.random.default_rng(0)

    def write(path: Path, *shape: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.integers(10, size=shape, dtype=np.uint8).tobytes())

    write(folder / "cifar10/cifar-10-batches-bin/data_batch_1.bin", 160, 3073)
    write(folder / "cifar-100-binary/train.bin", 120, 3074)
    write(folder / "stl10_binary/unlabeled_X.bin", 20, 3 * 96 * 96)
    (folder / "svhn").mkdir()
    pixels = generator.integers(255, size=(32, 32, 3, 9), dtype=np.uint8)
    scipy.io.savemat(
        folder / "svhn/train_32x32.mat", {"X": pixels, "y": np.ones((9, 1), dtype=np.uint8)}
    )
    (folder / "tinyimagenet32/data").mkdir(parents=True)
    table = pyarrow.table({"image": [b""] * 3, "wnid": ["n02099601"] * 3})
    pyarrow.parquet.write_table(table, folder / "tinyimagenet32/data/train-00000-of-00001.parquet")
    return folder


def planned(name: str, root: Path, **options: Any) -> Plan:
    """Return the runs of a study on the data below a folder."""
    if options:
        return plan(STUDIES[name], Request(root / "out", data_root=root, **options))
    return whole(name, root)


@cache
def whole(name: str, root: Path) -> Plan:
    """Return all runs of a study as it is."""
    return plan(STUDIES[name], Request(root / "out", data_root=root))


def settings(prepared: Plan) -> list[Experiment]:
    """Return the experiment of every run."""
    return [cell.experiment for cell in prepared.cells]


def saved(page: str) -> dict[str, list[dict[str, str]]]:
    """Return the numbers that a page offers with each of its figures; every figure has a caption
    and offers some."""
    figures = re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)
    link = (
        r'<figcaption>[^<]{30,} <a download="([^"]+)\.csv" '
        r'href="data:text/csv;charset=utf-8,([^"]+)">'
    )
    found = {}
    for figure in figures:
        matched = re.search(link, figure)
        assert matched, "a figure without caption or numbers"
        found[matched[1]] = list(csv.DictReader(io.StringIO(unquote(matched[2]))))
    assert len(found) == len(figures) > 0
    return found
