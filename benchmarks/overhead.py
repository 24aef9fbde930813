"""What a round of a real federation costs over the simulator, on loopback: ResNet-8, 20 MB a
message.

    python benchmarks/overhead.py [--clients 3] [--rounds 4] [--wire fp32]

Needs the extra flower. Processes, ports and folders are its own; the data is the embedded digits,
few of them, so that hardly anything is computed and the rest can be seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from helpers.harness import Federation

import fedaux
from fedaux.federation import records
from fedaux.models import MODELS


def recipe(clients: int, rounds: int, wire: str) -> dict[str, Any]:
    """Return FedAVG of a large model on little data."""
    return {
        "name": "overhead",
        "method": ["fedavg"],
        "seeds": [0],
        "rounds": rounds,
        "participation_rate": 1.0,
        "data": {"source": "digits", "test_fraction": 0.95},
        "auxiliary": {"source": "letters", "size": 100},
        "split": {"num_clients": clients, "alpha": 100.0},
        "prototypes": [{"name": "resnet8", "model": "resnet8"}],
        "engine": {"device": "cpu", "threads": 1, "clients_at_once": 1},
        "federation": {"wire": wire, "wait_seconds": 600.0, "deadline": 600.0},
    }


def rounds_of(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def median_of(rows: list[dict[str, Any]], phase: str) -> float:
    """Return the median seconds of a phase, without the first round."""
    return float(statistics.median(row["seconds"][phase] for row in rows[1:] or rows))


def conversion() -> dict[str, float]:
    """Return seconds to make records of 20 MB, to hash them as Flower does, and to read them
    back."""
    weights = {
        name: torch.randn_like(t) if t.is_floating_point() else t for name, t in _weights().items()
    }
    began = time.perf_counter()
    record = records.arrays(weights)
    made = time.perf_counter()
    content = record.deflate()
    for array in record.values():
        array.deflate()
    assert content
    hashed = time.perf_counter()
    records.tensors(record, records.expected_of(weights))
    return {"make": made - began, "serialise": hashed - made, "read": time.perf_counter() - hashed}


def _weights() -> dict[str, torch.Tensor]:
    return dict(MODELS["resnet8"]((1, 8, 8), 10).state_dict())


def start() -> float:
    """Return the processor seconds of loading what a node needs for a message."""
    code = (
        "import time, flwr.supernode.runtime.run_clientapp, fedaux.federation.client, "
        "fedaux.federation.records, fedaux.federation.work; print(time.process_time())"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def main() -> None:
    """Measure, and print a line a figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--wire", choices=["fp32", "fp16"], default="fp32")
    given = parser.parse_args()
    settings = recipe(given.clients, given.rounds, given.wire)
    with tempfile.TemporaryDirectory() as folder:
        fedaux.run(fedaux.Experiment(**settings), out=Path(folder) / "simulated")
        simulated = median_of(rounds_of(Path(folder) / "simulated"), "train")
        with Federation(Path(folder) / "overhead", settings) as federation:
            federation.start()
            federation.run()
            federation.wait_for_end(1800)
            rows = federation.rows()
            log = federation.run_log()
    real = median_of(rows, "train")
    print(
        f"clients {given.clients}, wire {given.wire}, "
        f"{rows[0]['bytes_down'] / given.clients / 1e6:.1f} MB a message"
    )
    print(
        f"train, simulator: {simulated:.2f} s a round; federation: {real:.2f} s; over it: "
        f"{real - simulated:.2f} s"
    )
    for line in log.splitlines():
        if "train: " in line and "the slowest client" in line:
            print(f"  {line.partition('train: ')[2]}")
    for name, seconds in conversion().items():
        print(f"  records of 20 MB, {name}: {seconds:.3f} s")
    print(f"  loading torch, Flower and fedaux once: {start():.1f} s of a processor")


if __name__ == "__main__":
    main()
