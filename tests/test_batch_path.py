"""The number of source files that handle a batch of images, from Parquet to a weight update.

Public batches update the student, private ones a client's model. Pretraining, scores and digests of
the data are not counted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from helpers.federations import federation
from helpers.image_files import png
from PIL import Image
from torch import Tensor

import fedaux
from fedaux.core.server import Server, prepare
from fedaux.core.simulation import SimulatedClients
from fedaux.data import LabelledData
from fedaux.running.run import ExperimentRunner, NullCallback, client_parts, load_inputs
from fedaux.running.run_directory import RunDirectory

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROOT = Path(fedaux.__file__).parent
MOST_FILES = 15
SHADES = {"private": range(90), "test": range(100, 150), "public": range(160, 256)}
"""Pixel values by which the test recognises private, test and public images."""
SIDE = 6


def write(path: Path, count: int, shade: str, *, labels: bool) -> None:
    draw = np.random.default_rng(0).choice
    images = [png(draw(SHADES[shade], (3, SIDE, SIDE)).astype(np.uint8)) for _ in range(count)]
    columns = {"image": images} | ({"label": [n % 3 for n in range(count)]} if labels else {})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)


def shades(value: Any) -> set[str]:
    """Return which of the three kinds of images a value holds."""
    if isinstance(value, bytes) and value.startswith(b"\x89PNG"):
        value = Image.open(io.BytesIO(value))
    if isinstance(value, Image.Image):
        value = np.asarray(value).transpose(2, 0, 1)
    if isinstance(value, Tensor):
        if torch._C._functorch.is_batchedtensor(value):  # of clients in a stack
            return shades(torch._C._functorch.get_unwrapped(value))
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        if value.shape[-3:] != (3, SIDE, SIDE) or value.size == 0:
            return set()
        pixel = int(value.flat[0] * (255 if value.dtype == np.float32 else 1) + 0.5)
        return {name for name, own in SHADES.items() if pixel in own}
    if isinstance(value, tuple | list):
        return set().union(*map(shades, value[:3]))
    if is_dataclass(value) and not isinstance(value, type):
        names = {field.name for field in fields(value)} & {"images", "inputs"}
        return set().union(*(shades(getattr(value, name)) for name in names))
    return set()


@contextmanager
def watched(files: dict[str, set[str]]) -> Iterator[None]:
    """Record, for each kind of images, the files of fedaux whose functions hold some."""

    def look(frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and (path := frame.f_code.co_filename).startswith(f"{ROOT}/"):
            held = [own for name, own in frame.f_locals.items() if name != "self"]
            for shade in shades(result).union(*map(shades, held)):
                files[shade].add(path.removeprefix(f"{ROOT}/"))

    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("model", ["cnn", "resnet8"])
def test_few_files_handle_a_batch(model: str, tmp_path: Path) -> None:
    write(tmp_path / "private" / "train.parquet", 30, "private", labels=True)
    write(tmp_path / "private" / "test.parquet", 9, "test", labels=True)
    write(tmp_path / "public" / "train.parquet", 20, "public", labels=False)
    options = {"width": 4} if model == "cnn" else {}
    experiment = tiny(
        method=["feddf"],
        prototypes=[{"name": "one", "model": model, "options": options}],
        local={"epochs": 1},
        distillation={"epochs": 1},
        data={"source": "parquet", "path": str(tmp_path / "private")},
        auxiliary={"source": "parquet", "path": str(tmp_path / "public"), "size": None},
    )
    server, state, *_ = federation(tmp_path / "warm-up", method=["feddf"], rounds=1)
    server.play_round(state)  # imports what a round needs, which takes long if watched
    callback, files = NullCallback(), {shade: set[str]() for shade in SHADES}
    with watched(files):
        inputs = load_inputs(experiment)
    data: LabelledData = inputs.data
    directory = RunDirectory.open(tmp_path / "run", experiment, resume=False)
    runner = ExperimentRunner(experiment, directory, data, inputs.auxiliary, callback)
    with watched(files):
        task = runner.task("feddf", 0)
        clients = SimulatedClients(task, data.images, data.labels, client_parts(task, data))
        extractor = runner.extractor(task)
        state, preparation = prepare(task, clients, extractor=extractor, callback=callback)
        Server(task, preparation, clients, callback=callback).play_round(state)
    private, public = files["private"], files["public"]
    # Both ends of the path were seen.
    steps = "fast/stacked.py" if model == "cnn" else "core/steps.py"
    assert {"data/parquet.py", "core/simulation.py", steps} <= private
    assert {"data/parquet.py", "core/distillation.py", "core/steps.py"} <= public
    assert len(private) <= MOST_FILES, sorted(private)
    assert len(public) <= MOST_FILES, sorted(public)
