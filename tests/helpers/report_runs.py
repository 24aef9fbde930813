"""Run directories with made-up numbers, and pages read as a stranger would read them."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import statistics
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import tomli_w
from safetensors.numpy import save_file

CLASSES = [str(number) for number in range(10)]
LEVELS = {"fedavg": 0.30, "fedavg+p": 0.48, "feddf": 0.36, "feddf+p": 0.56, "fedaux": 0.80}
EPSILON = {"fedaux": 1.0}


def make_run(
    directory: Path,
    *,
    levels: Mapping[str, float] = LEVELS,
    seeds: int = 3,
    rounds: int = 10,
    recorded: int | None = None,
    clients: int = 20,
    name: str = "demo",
    epsilon: float | str = 1.0,
    alpha: float = 0.01,
    participation_rate: float = 0.4,
    megabytes: Mapping[str, float] | None = None,
) -> Path:
    """Write a run directory as the library does, with made-up numbers; ``recorded`` rounds of the
    last seed."""
    directory.mkdir(parents=True)
    generator = np.random.default_rng(
        [round(1000 * number) for number in (alpha - 0.01, participation_rate - 0.4)]
    )
    methods, last = list(levels), rounds if recorded is None else recorded
    config = {
        "name": name,
        "method": methods,
        "seeds": list(range(seeds)),
        "rounds": rounds,
        "participation_rate": participation_rate,
        "data": {"source": "digits", "test_fraction": 0.2},
        "auxiliary": {"source": "letters"},
        "split": {"num_clients": clients, "alpha": alpha},
        "certainty": {
            "mechanism": "mean",
            "epsilon": 1.0 if epsilon == "inf" else epsilon,
            "delta": 1e-5,
        },
    }
    (directory / "config.toml").write_text(tomli_w.dumps(config))
    environment = {
        "fedaux": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0",
        "numpy": "2.4.0",
        "platform": "Linux-6.1-x86_64",
        "device": "cpu",
        "threads": 2,
        "started": "2026-01-01T10:00:00Z",
    }
    (directory / "environment.json").write_text(json.dumps(environment))

    metrics: list[dict[str, Any]] = []
    for method, level in levels.items():
        for seed in range(seeds):
            for number in range(1, (last if seed == seeds - 1 else rounds) + 1):
                accuracy = level * (1 - 0.6 * 0.65**number) + generator.normal(0, 0.012)
                evaluated = number != 2
                metrics.append(
                    {
                        "method": method,
                        "seed": seed,
                        "round": number,
                        "accuracy": accuracy if evaluated else None,
                        "loss": 1.1 if evaluated else None,
                        "accuracy_by_prototype": {"cnn": accuracy} if evaluated else {},
                        "clients_asked": [0, 1, 2, 3, 4, 5, 6, 7],
                        "clients_answered": [0, 1, 2, 4, 5, 6, 7],
                        "clients_dropped": {"3": "no data"},
                        "seconds": {
                            "train": 0.5,
                            "average": 0.01,
                            "teach": 0.2,
                            "distill": 0.3,
                            "evaluate": 0.04,
                        },
                        "bytes_up": 7 * 316_000,
                        "bytes_down": 8 * 316_000,
                        **by_class(accuracy, last=number == rounds),
                        **(public_weight(method) if method[:5] != "fedav" else {}),
                    }
                )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))

    tables = {str(seed): make_table(generator, clients=clients) for seed in range(seeds)}
    (directory / "split.json").write_text(
        json.dumps({"classes": CLASSES, "alpha": alpha, "tables": tables})
    )
    entries = [
        {
            "method": "fedaux",
            "seed": seed,
            "client": client,
            "num_examples": sum(counts),
            "mechanism": "mean",
            "purpose": "certainty scores",
            "sensitivity": 2 / sum(counts),
            "sigma": 7.46 / sum(counts),
            "epsilon": epsilon,
            "delta": 1e-5,
            "noise": "simulated",
        }
        for seed, table in tables.items()
        for client, counts in enumerate(table)
        if "fedaux" in levels and any(counts)
    ]
    ledger = {
        "neighbours": "data sets that differ by replacing one example; the number of examples n_i "
        "is public",
        "entries": entries,
        "unprotected": "The model updates of local training are sent without differential privacy.",
    }
    (directory / "ledger.json").write_text(json.dumps(ledger))
    rows = [summary_row(method, metrics, epsilon=epsilon) for method in methods if metrics]
    for row in rows:
        row["bytes_up"] = round(1e6 * (megabytes or {}).get(row["method"], row["bytes_up"] / 1e6))
    summary = {
        "name": name,
        "rows": rows,
        "seeds": list(range(seeds)),
        "config_sha256": "ab" * 32,
        "rounds": rounds,
        "complete": last == rounds,
    }
    (directory / "summary.json").write_text(json.dumps(summary))

    if "fedaux" in levels:
        shares = np.asarray(tables["0"]) / np.maximum(np.asarray(tables["0"]).sum(axis=0), 1)
        noise = generator.dirichlet([1.0] * clients, size=10).T
        weights = np.ascontiguousarray(0.6 * shares + 0.4 * noise, dtype=np.float32)
        save_file(
            {"weights_by_class": weights},
            directory / "scores.safetensors",
            metadata={"method": "fedaux", "seed": "0", "clients": json.dumps(list(range(clients)))},
        )
    return directory


def make_folder(
    root: Path,
    *,
    alphas: tuple[float, ...] = (0.01, 0.1, 1.0),
    rates: tuple[float, ...] = (0.4, 0.8),
    epsilons: tuple[float, ...] = (1.0,),
    levels: Mapping[str, float] = LEVELS,
    **options: Any,
) -> Path:
    """Write a folder of runs, a run for every combination; less heterogeneity and more noise have
    their effects."""
    megabytes = {method: 20.0 + 8 * ("+" in method) + 3 * (method == "fedaux") for method in levels}
    for alpha, rate, epsilon in product(alphas, rates, epsilons):
        easy = 0.12 * (2 + np.log10(alpha)) + 0.1 * (rate - 0.4)
        own = {
            m: min(0.97, level + easy * (1 - level) + 0.02 * np.log10(epsilon) * (m == "fedaux"))
            for m, level in levels.items()
        }
        make_run(
            root / f"alpha={alpha:g},rate={rate:g},epsilon={epsilon:g}",
            levels=own,
            name=f"run-{alpha:g}-{rate:g}-{epsilon:g}",
            alpha=alpha,
            participation_rate=rate,
            epsilon=epsilon,
            megabytes={method: value * rate for method, value in megabytes.items()},
            **options,
        )
    return root


def by_class(accuracy: float, *, last: bool) -> dict[str, Any]:
    """Figures of a model that confuses a class only with the next, the first class most."""
    hits = [round(100 * accuracy * (0.9 + label / 45)) for label in range(10)]
    confusion = [[0] * 10 for _ in range(10)]
    for label, own in enumerate(hits):
        confusion[label][label], confusion[label][(label + 1) % 10] = own, 100 - own
    figures = {"balanced_accuracy": sum(hits) / 1000, "macro_f1": accuracy - 0.01, "auc": 0.9}
    return {**figures, **({"confusion": confusion} if last else {})}


def public_weight(method: str) -> dict[str, Any]:
    """Equal weights or, by scores, weights that grow with the client's number."""
    clients = (0, 1, 2, 4, 5, 6, 7)
    weights = [1 + client if method == "fedaux" else 1 for client in clients]
    return {
        "public_weight_by_client": {
            str(client): own / sum(weights) for client, own in zip(clients, weights, strict=True)
        },
        "public_weight_by_class": [0.05 + 0.01 * label for label in range(10)],
    }


def make_table(generator: np.random.Generator, *, clients: int) -> list[list[int]]:
    """A split [clients, 10] in which nearly every client holds one or two classes."""
    shares = generator.dirichlet([0.08] * clients, size=10).T
    return [
        [int(count) for count in row] for row in np.ceil(140 * np.where(shares > 0.02, shares, 0))
    ]


def summary_row(
    method: str, metrics: list[dict[str, Any]], *, epsilon: float | str
) -> dict[str, Any]:
    """A method's row of the summary."""
    seeds = sorted({row["seed"] for row in metrics if row["method"] == method})
    runs = [
        [
            row["accuracy"]
            for row in metrics
            if (row["method"], row["seed"]) == (method, seed) and row["accuracy"]
        ]
        for seed in seeds
    ]
    last, best = [run[-1] for run in runs if run], [max(run) for run in runs if run]
    return {
        "method": method,
        "accuracy_mean": statistics.mean(last),
        "accuracy_std": statistics.pstdev(last),
        "accuracy_max_mean": statistics.mean(best),
        "accuracy_max_std": statistics.pstdev(best),
        "epsilon": epsilon if method in EPSILON else None,
        "delta": 1e-5 if method in EPSILON else None,
        "seconds": 1234.56,
        "bytes_up": 22_500_000,
        "bytes_down": 41_250_000,
    }


def read_table(text: str, heading: str, *, number: int = 0) -> dict[str, list[str]]:
    """The cells of a section's table by the name of the row, read as a stranger would: from the
    markup."""
    section = re.search(rf'<h2 id="{heading}">.*?</section>', text, re.S)
    assert section, f"no section {heading}"
    body = re.findall(r"<tbody>(.*?)</tbody>", section[0], re.S)[number]
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
        for row in re.findall(r"<tr.*?</tr>", body, re.S)
    ]
    return {html.unescape(row[0]): [html.unescape(cell) for cell in row[1:]] for row in rows}


def read_downloads(text: str) -> dict[str, list[dict[str, str]]]:
    """The CSV behind each link, by file name."""
    links = re.findall(r'<a download="([^"]+)" href="data:text/csv;charset=utf-8,([^"]*)"', text)
    return {name: list(csv.DictReader(io.StringIO(unquote(data)))) for name, data in links}


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
