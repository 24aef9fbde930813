"""Learning curves in TensorBoard: the rounds of a run, one folder per method and seed.

    pip install tensorboard
    python examples/to_tensorboard.py runs/demo
    tensorboard --logdir runs/demo/tensorboard

`--follow` goes on with rounds to come, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from shutil import rmtree

from torch.utils.tensorboard import SummaryWriter

from fedaux.recipes import flatten

WAIT_SECONDS = 5.0


def write(run: Path, written: dict[tuple[str, int], SummaryWriter]) -> None:
    """Write the rounds of metrics.jsonl that are not among the written ones."""
    whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    for row in map(json.loads, whole.splitlines()):
        name, step = f"{row.pop('method')}-seed{row.pop('seed')}", row.pop("round")
        if (name, step) in written:
            continue
        writer = written.get((name, step - 1)) or SummaryWriter(str(run / "tensorboard" / name))
        for tag, value in flatten(row).items():
            if isinstance(value, int | float):
                writer.add_scalar(tag.replace(".", "/"), value, step)
        writer.flush()
        written[name, step] = writer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--follow", action="store_true", help="wait for more rounds")
    chosen = parser.parse_args()
    if not (chosen.run / "metrics.jsonl").is_file():
        parser.error(f"{chosen.run}: has no metrics.jsonl; should be a run directory")
    rmtree(chosen.run / "tensorboard", ignore_errors=True)
    written: dict[tuple[str, int], SummaryWriter] = {}
    write(chosen.run, written)
    while chosen.follow:
        time.sleep(WAIT_SECONDS)
        write(chosen.run, written)
