"""Rounds of the demo at ten times its data on one process and on several, one thread each.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --processes 4 --method fedaux2

Each process reports the least seconds of a round, and of its own processor time: the latter also
tells on a machine with other work, where processes wait for it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from players import fast_federation
from setting import DEFAULTS, Settings, experiment_of, random_data

from fedaux.core import ranks

TIMES = 10
"""As much data as the demo has."""


def play(method: str, rounds: int) -> None:
    """Play rounds on this rank; rank 0 prints the least seconds of a round."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    demo = {
        key: value
        for key, value in DEFAULTS["cpu"].items()
        if key not in ("rounds", "warmup", "threads")
    }
    demo |= {key: TIMES * demo[key] for key in ("examples", "distill")}
    settings = Settings(**demo, method=method)
    data, auxiliary = random_data(settings, device=device)
    with ranks.connected(device):
        fast = fast_federation(experiment_of(settings, device=device), data, auxiliary)
        state, walls, own = fast.state, [], []
        for _ in range(rounds + 1):
            began, busy = time.perf_counter(), time.process_time()
            state, _ = fast.server.play_round(state)
            walls.append(time.perf_counter() - began)
            own.append(max(ranks.gathered(time.process_time() - busy)))
    if ranks.rank() == 0:
        print(min(walls[1:]), min(own[1:]))


def main() -> None:
    """Play the rounds on one process and on several, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--method", default="fedaux")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        play(given.method, given.rounds)
        return
    program = [__file__, "--play", "--method", given.method, "--rounds", str(given.rounds)]
    found = []
    for number in (1, given.processes):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        done = subprocess.run(
            [sys.executable, *launcher, *program], check=True, stdout=subprocess.PIPE, text=True
        )
        found.append([float(word) for word in done.stdout.split()])
        wall, own = found[-1]
        print(f"{given.method}, processes: {number}; a round {wall:.2f} s, processor {own:.2f} s")
    ratios = [many / one for one, many in zip(*found, strict=True)]
    print(f"ratio {ratios[0]:.2f}, of processor time {ratios[1]:.2f} (aim: 0.6)")


if __name__ == "__main__":
    main()
