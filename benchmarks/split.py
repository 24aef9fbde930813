"""The Dirichlet split against the same normalisation as plain loops, in one run; `--json` for
machines."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from fedaux import seeding
from fedaux.data.splits import MAX_ITERATIONS, split_dirichlet

CLIENTS, CLASSES, ALPHA, EXAMPLES = 1000, 10, 0.01, 50_000


def plain_normalisation(iterations: int) -> float:
    """Return the seconds that so many alternating normalisations take as loops over numbers."""
    shares = seeding.generator(0, "plain").random((CLIENTS, CLASSES)).tolist()
    began = time.perf_counter()
    for _ in range(iterations):
        for i in range(CLIENTS):
            total = sum(shares[i])
            shares[i] = [value / total for value in shares[i]]
        for j in range(CLASSES):
            total = sum(shares[i][j] for i in range(CLIENTS))
            for i in range(CLIENTS):
                shares[i][j] /= total
    return time.perf_counter() - began


def main() -> None:
    """Time both and print seconds and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args()
    labels = np.repeat(np.arange(CLASSES), EXAMPLES // CLASSES)
    times = []
    for seed in range(5):
        began = time.perf_counter()
        split_dirichlet(
            labels,
            num_clients=CLIENTS,
            alpha=ALPHA,
            num_classes=CLASSES,
            generator=seeding.generator(seed, "split"),
        )
        times.append(time.perf_counter() - began)
    fast = float(np.median(times))
    plain = plain_normalisation(20) * MAX_ITERATIONS / 20
    result = {
        "clients": CLIENTS,
        "alpha": ALPHA,
        "seconds": fast,
        "plain_seconds": plain,
        "ratio": plain / fast,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{CLIENTS} clients at alpha = {ALPHA}: {fast:.3f} s; plain loops {plain:.1f} s; "
            f"{plain / fast:.0f} times"
        )


if __name__ == "__main__":
    main()
