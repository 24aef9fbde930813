"""Rounds of the demo at ten times its data on one process and on several, one thread each.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --processes 4 --method fedaux2

Seconds are the least of a round, and processor seconds of the process that works most: they
also tell on a machine with other work, where processes wait for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence

import numpy as np
import torch
from players import fast_federation
from setting import DEFAULTS, DEMO, Settings, experiment_of, random_data

from fedaux.core import ranks

TIMES = 10
"""As much data as the demo has."""
FIELDS = Settings.__dataclass_fields__


def play(methods: Sequence[str], rounds: int) -> None:
    """Play rounds on this rank; rank 0 prints the least seconds of a round of each method."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    demo = {key: own for key, own in DEFAULTS["cpu"].items() if key in FIELDS}
    demo |= {key: TIMES * demo[key] for key in ("examples", "distill")}
    with ranks.connected(device):
        for method in methods:
            settings = Settings(**demo, method=method)
            data, auxiliary = random_data(settings, device=device)
            fast = fast_federation(experiment_of(settings, device=device), data, auxiliary)
            state, walls, own = fast.state, [], []
            for _ in range(rounds + 1):
                began, busy = time.perf_counter(), time.process_time()
                state, _ = fast.server.play_round(state)
                busy = time.process_time() - busy
                own.append(max(ranks.gathered(busy)))
                walls.append(time.perf_counter() - began)
            if ranks.rank() == 0:
                print(json.dumps([min(walls[1:]), min(own[1:])]))


def main() -> None:
    """Play the rounds on one process and on several, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    demo = tomllib.loads(DEMO.read_text(encoding="utf-8"))["method"]
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--method", nargs="+", default=demo)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        play(given.method, given.rounds)
        return
    program = [__file__, "--play", "--rounds", str(given.rounds), "--method", *given.method]
    found = []
    for number in (1, given.processes):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        done = subprocess.run(
            [sys.executable, *launcher, *program], check=True, stdout=subprocess.PIPE, text=True
        )
        found.append(np.array([json.loads(line) for line in done.stdout.splitlines()]))
    one, many = found
    print(f"{'a round':16}{'seconds':>16}{'of a processor':>20}{'ratios':>14}")
    rows = zip([*given.method, "all"], [*one, one.sum(0)], [*many, many.sum(0)], strict=True)
    for name, row, other in rows:
        numbers = f"{row[0]:>8.2f}{other[0]:>8.2f}{row[1]:>12.2f}{other[1]:>8.2f}"
        print(f"{name:16}{numbers}{other[0] / row[0]:>8.2f}{other[1] / row[1]:>6.2f}")


if __name__ == "__main__":
    main()
