"""A worker process of a sweep: runs cells one after another and reports their progress.

    python -m fedaux.sweep.worker LOCK

Cells arrive as JSON lines on standard input, events are written to standard output. LOCK is the
descriptor of a file that stays locked until the worker exits. The worker exits
as soon as its input ends, so that a killed sweep leaves no processes; finished rounds are on disk.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedaux.config import Experiment
from fedaux.config_errors import plain

if TYPE_CHECKING:
    from fedaux.core.task import Task
    from fedaux.running.run import Inputs

ROUND_SECTIONS = {
    *("name", "method", "seeds", "rounds", "participation_rate", "split", "pretraining"),
    *("certainty", "local", "distillation", "bayesian", "memory", "evaluation", "output"),
}
"""Sections that affect neither the data on the device nor compiled steps."""
MODEL_SECTIONS = {"prototypes", "mode"}
"""Sections that affect compiled steps but not the data."""
VOCABULARY_SECTIONS = {"pretraining", "prototypes"}
"""Sections that affect the vocabulary of texts."""
REPORT_SECONDS = 0.5
"""Minimum time between two reported phases."""


def input_keys(experiment: Experiment) -> tuple[str, str]:
    """Return the settings that data and compiled steps depend on, as JSON."""
    table = experiment.to_dict()
    others = (ROUND_SECTIONS | MODEL_SECTIONS) - (
        VOCABULARY_SECTIONS if experiment.text is not None else set()
    )
    data = {key: table[key] for key in sorted(table.keys() - others)}
    return json.dumps(data), json.dumps(
        {key: table[key] for key in sorted(table.keys() & MODEL_SECTIONS)}
    )


class InputCache:
    """Loads the inputs of a cell, or reuses the previous cell's if they are the same."""

    def __init__(self) -> None:
        self._inputs: Inputs | None = None
        self._keys = ("", "")

    def __call__(self, experiment: Experiment) -> Inputs:
        """Return data and compute for an experiment."""
        import torch

        from fedaux.core.compute import compute_for
        from fedaux.running.run import load_inputs

        data, models = input_keys(experiment)
        if (data, models) == self._keys and self._inputs is not None:
            return self._inputs
        if self._inputs is not None and self._inputs.compute.compile:
            torch.compiler.reset()  # graphs of other models count towards the recompile limit
        if data == self._keys[0] and self._inputs is not None:
            compute = compute_for(experiment.engine, self._inputs.auxiliary.device, experiment.data)
            self._inputs = replace(self._inputs, compute=compute)
        else:
            self._inputs = None  # free the memory of the old data first
            self._inputs = load_inputs(experiment)
        self._keys = data, models
        return self._inputs


class EventWriter:
    """A callback that writes events as JSON lines."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._reported = 0.0
        self._preparing = ""

    def write(self, **event: Any) -> None:
        """Write one event."""
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()

    def phase(self, task: Task, round: int, name: str) -> None:
        """Report every phase of the preparation, and phases of rounds at intervals."""
        kind = name.partition(" ")[0]
        prepares = round == 0 and kind != self._preparing
        if prepares or time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            self._preparing = kind
            self.write(
                event="phase", method=task.method.name, seed=task.seed, round=round, phase=name
            )

    def round(self, row: Mapping[str, Any]) -> None:
        """Report a finished round."""
        self.write(
            event="round", **{key: row[key] for key in ("method", "seed", "round", "accuracy")}
        )


def run_cell(order: Mapping[str, Any], *, load: InputCache, events: EventWriter) -> None:
    """Run one cell with its output in its log, and report its outcome."""
    from fedaux.running import run as execute

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    try:
        table = order["experiment"]
        if order["device"] is not None:
            table["engine"]["device"] = order["device"]
        execute.run(
            Experiment(**plain(table)),
            out=Path(order["out"]),
            resume=True,
            callback=events,
            progress=False,
            load=load,
        )
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        events.write(event="failed", reason=reason.strip())
    else:
        events.write(event="finished")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()  # CUDA graphs are in reference cycles


def main() -> None:
    """Run cells until the input ends."""
    os.set_inheritable(int(sys.argv[1]), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the sweep stops its workers itself
    events = EventWriter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # other output must not mix with the events
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    load = InputCache()
    while True:
        order = orders.get()
        if "plugins" in order:
            from fedaux.running.plugins import load_plugin

            for path in order["plugins"]:
                load_plugin(path)
            continue
        run_cell(order, load=load, events=events)


if __name__ == "__main__":
    main()
