"""What a run would take, measured on its first round: `fedaux run --dry-run`."""

from __future__ import annotations

import io
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fedaux.config import Experiment
from fedaux.core.compute import Compute
from fedaux.data.decoding import DecodedBlock, Entry
from fedaux.encoders import Extractor, extractor_of
from fedaux.encoders.extraction import MOST
from fedaux.formatting import decimal, megabytes
from fedaux.recipes import merged
from fedaux.running.remaining import duration
from fedaux.running.run import Inputs, load_inputs, run


class Sampler(Extractor):
    """Makes features of the first two batches of a table, and draws the others alike."""

    inputs, seconds = 0, 0.0
    """Number of all inputs, and the expected seconds for their features."""

    def encode_all(
        self, entries: Iterator[Entry], *, expected: int = 0, **others: Any
    ) -> Iterator[DecodedBlock]:
        """Yield features in blocks."""
        first = list(islice(entries, 2 * self.batch_size))
        others["place"] = None
        for _ in range(2):  # the second time nothing is prepared
            began = time.perf_counter()
            with redirect_stderr(io.StringIO()):
                (block,) = super().encode_all(iter(first), expected=expected, **others)
        self.inputs += expected
        self.seconds += (time.perf_counter() - began) * expected / len(first)
        yield block
        rows = [row for row in range(len(first), expected) if row not in others["bad_labels"]]
        mean, deviation = block.images.mean(axis=0), block.images.std(axis=0)
        draw = np.random.default_rng(0)
        for start in range(0, len(rows), MOST):
            part = rows[start : start + MOST]
            numbers = draw.standard_normal((len(part), len(mean)), dtype=np.float32)
            yield DecodedBlock((mean + deviation * numbers).astype(np.float16), part, {})


@contextmanager
def sampled(experiment: Experiment) -> Iterator[tuple[Inputs, list[Sampler]]]:
    """Load the data of an experiment; features of an encoder are made of some inputs alone, and
    nothing stays in the cache."""
    made: list[Sampler] = []

    def sampler(experiment: Experiment, compute: Compute) -> Sampler | None:
        if found := extractor_of(experiment, compute):
            made.append(Sampler(found.encoder, compute, batch_size=found.batch_size))
        return made[0] if made else None

    with patch.dict(os.environ, {"FEDAUX_CACHE": ""} if experiment.encoder is not None else {}):
        yield load_inputs(experiment, extractor_for=sampler), made


def measured(experiment: Experiment) -> list[str]:
    """Play one round with the first seed and one epoch of pretraining, and return lines of what
    the whole run would take. The features of an encoder are measured on some inputs."""
    first = {"rounds": 1, "seeds": experiment.seeds[:1], "output": {"models": False}}
    once = Experiment(**merged(experiment.to_dict(), first | {"pretraining": {"epochs": 1}}))
    with sampled(once) as (inputs, made), tempfile.TemporaryDirectory() as place:
        with redirect_stderr(io.StringIO()):  # what a single round is warned of
            result = run(once, out=Path(place) / "run", load=lambda _: inputs, progress=False)
        rows = {row["method"]: row for row in result.metrics()}
    lines, shared = [], result.summary["shared_seconds"] * experiment.pretraining.epochs
    if made:
        stored = megabytes(2 * made[0].encoder.width * made[0].inputs)
        took = f"{duration(made[0].seconds)}, {stored} MB in the cache"
        lines.append(f"Features of {made[0].inputs:,} inputs: {took}, unless they are there")
        shared = result.summary["shared_seconds"] + made[0].seconds
    total = shared
    for own in result.summary["rows"]:
        row, clients = rows[own["method"]], experiment.split.num_clients
        seconds = sum(row["seconds"].values())
        total += len(experiment.seeds) * (own["seconds"] + (experiment.rounds - 1) * seconds)
        sent = []
        for key in ("bytes_down", "bytes_up"):
            each = row[key] / max(1, len(row["clients_asked"]))
            sent.append(f"{megabytes((own[key] - row[key]) / clients)} + {megabytes(each)}")
        lines.append(
            f"{own['method']}: {decimal(seconds)} s per round; MB per client, once + each "
            f"time: down {sent[0]}, up {sent[1]}"
        )
    unit = 1 if sys.platform == "darwin" else 1024
    memory = f"Memory: {megabytes(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)} MB"
    if torch.cuda.is_available():
        memory += f", of the GPU {megabytes(torch.cuda.max_memory_allocated())} MB"
    return [*lines, memory, f"Time: about {duration(total)} in all"]
