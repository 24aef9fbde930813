"""How the benchmarks show what they measured: tables on the screen, figures as files."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = ("release", "train", "average", "teach", "distill", "settle", "evaluate", "all")
ENDINGS = (".png", ".svg", ".pdf")


def print_round(result: Mapping[str, Any]) -> None:
    """Print the tables of one round's result."""
    settings = result["settings"]
    print(
        f"{settings['method']}, {settings['model']} on {'x'.join(map(str, settings['image']))}, "
        f"{settings['participants']} of {settings['clients']} clients a round with "
        f"{settings['examples']} examples, "
        f"{settings['distill']} distill images; {result['machine']['device']}, "
        f"threads: {result['machine']['threads']}; fast in {settings['fast_precision']}, "
        f"median of {settings['rounds']} rounds, {settings['order']}"
    )
    if result["max_difference"] is not None:
        print(
            f"weights after the first round in fp32: at most {result['max_difference']:.1e} apart, "
            f"{result['relative_difference']:.1e} of what the round changed"
        )
    for name, seconds in result["warmup_seconds"].items() if result["settings"]["warmup"] else ():
        print(f"warm-up, not counted, {name}: {', '.join(f'{value:.2f}' for value in seconds)} s")
    print_table("seconds", result["seconds"], ".4f")
    print_table("times as long as fast", result["ratio_by_phase"], ".2f")
    print_table("images a second", result["images_per_second"], ",.0f")
    print_table("share of the limit", result["fraction_of_limit"], ".1%")
    limits = ", ".join(
        f"{precision} {peak:.3g}" for precision, peak in result["peak_tflops"].items()
    )
    print(
        f"\nlimit: a matrix product's TFLOP/s in this run, {limits}; every teacher on every image "
        "counted"
    )
    if result["scoring_seconds"] is not None:
        print(
            f"scoring of {settings['clients']} clients: {result['scoring_seconds']:.4f} s, their "
            "releases and scores "
            "on the distill set; all of preparation the first time: "
            f"{result['preparation_seconds']:.2f} s"
        )
    for name, peer in result["peers"].items():
        print(
            f"{name} {peer['version']}: {peer['seconds']:.4f} s a round of local training and "
            "averaging, "
            f"{peer['ratio']:.1f} times as long as fast"
        )
    half = "" if result["ratio_bf16"] is None else f", plain bf16 {result['ratio_bf16']:.2f} times"
    print(f"\nall in, plain fp32 takes {result['ratio']:.2f} times as long{half}")


def print_table(title: str, rows: Mapping[str, Mapping[str, float]], form: str) -> None:
    """Print a row for each variant and a column for each phase."""
    phases = [phase for phase in PHASES if any(phase in row for row in rows.values())]
    print(f"\n{title:24}" + "".join(f"{phase:>11}" for phase in phases))
    for name, row in rows.items():
        print(
            f"{name:24}"
            + "".join(f"{format(row[phase], form) if phase in row else '':>11}" for phase in phases)
        )


def draw_round(result: Mapping[str, Any], path: Path) -> None:
    """Draw the seconds of each variant as bars, phase upon phase."""
    figure = new_figure(width=7, height=0.6 * len(result["seconds"]) + 1.6)
    axes = figure.subplots()
    names = list(result["seconds"])[::-1]
    left = np.zeros(len(names))
    for phase in PHASES[:-1]:
        values = np.array([result["seconds"][name].get(phase, 0.0) for name in names])
        if not values.any():
            continue
        axes.barh(names, values, left=left, label=phase)
        left += values
    axes.set_xlabel("seconds a round")
    axes.set_title(
        f"{result['settings']['method']}, {result['settings']['model']}, "
        f"{result['machine']['device']}"
    )
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    save(figure, path)


def draw_scale(result: Mapping[str, Any], path: Path) -> None:
    """Draw the seconds of a round against each of the quantities."""
    sweeps: Sequence[tuple[str, Mapping[str, Any]]] = list(result["sweeps"].items())
    figure = new_figure(width=3.4 * len(sweeps), height=3.2)
    for axes, (name, sweep) in zip(
        figure.subplots(1, len(sweeps), squeeze=False)[0], sweeps, strict=True
    ):
        sizes = [point["size"] for point in sweep["points"]]
        axes.plot(sizes, [point["seconds"] for point in sweep["points"]], marker="o")
        if sizes[-1] > 100 * sizes[0]:
            axes.set_xscale("log")
        axes.set_ylim(0, 1.15 * max(point["seconds"] for point in sweep["points"]))
        axes.set_xlabel(name)
        axes.set_ylabel("seconds a round")
    save(figure, path)


def check_plot(path: Path | None) -> None:
    """End, before anything is measured, where a figure is asked for that cannot be drawn."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(
            f"--plot {path}: matplotlib, which draws it, is not installed here: pip install "
            "matplotlib"
        )
    if path is not None and path.suffix not in ENDINGS:
        raise SystemExit(f"--plot {path}: should end in {', '.join(ENDINGS)}")


def new_figure(*, width: float, height: float) -> Figure:
    """Return an empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF by the ending of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
