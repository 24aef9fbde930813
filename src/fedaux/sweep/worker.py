"""A worker of a sweep, a process of its own: runs the cells it is given one after another, and says how far it is.

    python -m fedaux.sweep.worker [LOCK]

Cells come as lines of JSON on its input, what happens goes out likewise; LOCK is the number of a file that stays locked
as long as the worker lives, where the sweep is on the same machine. When its input ends, so does the worker, at once:
finished rounds are safe on disk, and a sweep that is killed leaves nobody behind.
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

OF_ROUNDS = {
    *(
        "name",
        "method",
        "seeds",
        "rounds",
        "participation_rate",
        "split",
        "pretraining",
        "certainty",
        "local",
    ),
    *("distillation", "bayesian", "memory", "evaluation", "output"),
}
"""Sections that neither the data on the device nor compiled steps depend on."""
OF_MODELS = {"prototypes", "mode", "batch_normalisation"}
"""Sections that compiled steps depend on, and the data does not."""
OF_TEXTS = {"pretraining", "prototypes"}
"""Where the vocabulary of texts may come from."""
QUIET_SECONDS = 0.5


def input_keys(experiment: Experiment) -> tuple[str, str]:
    """Return what the data and what the compiled steps of an experiment depend on, as text."""
    table = experiment.to_dict()
    others = (OF_ROUNDS | OF_MODELS) - (OF_TEXTS if experiment.text is not None else set())
    data = {key: table[key] for key in sorted(table.keys() - others)}
    return json.dumps(data), json.dumps(
        {key: table[key] for key in sorted(table.keys() & OF_MODELS)}
    )


class Remembered:
    """Loads the inputs of a cell, or takes those of the cell before where nothing they depend on has changed.

    On a GPU, start, data and compilation take longer than many a cell.
    """

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
            torch.compiler.reset()  # what was compiled for other models would count against those to come
        if data == self._keys[0] and self._inputs is not None:
            compute = compute_for(experiment.engine, self._inputs.auxiliary.device, experiment.data)
            self._inputs = replace(self._inputs, compute=compute)
        else:
            self._inputs = None  # the old data makes room first
            self._inputs = load_inputs(experiment)
        self._keys = data, models
        return self._inputs


class Telling:
    """A callback that passes on what it sees."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._spoke = 0.0
        self._preparing = ""

    def tell(self, **event: Any) -> None:
        """Write one event."""
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()

    def phase(self, task: Task, round: int, name: str) -> None:
        """Tell what is being done, now and then; of the preparation all of it, for each part can take long."""
        kind = name.partition(" ")[0]
        prepares = round == 0 and kind != self._preparing
        if prepares or time.monotonic() - self._spoke >= QUIET_SECONDS:
            self._spoke = time.monotonic()
            self._preparing = kind
            self.tell(
                event="phase", method=task.method.name, seed=task.seed, round=round, phase=name
            )

    def round(self, row: Mapping[str, Any]) -> None:
        """Tell of a finished round."""
        self.tell(
            event="round", **{key: row[key] for key in ("method", "seed", "round", "accuracy")}
        )


def run_cell(order: Mapping[str, Any], *, load: Remembered, telling: Telling) -> None:
    """Run one cell, with what it prints in its log, and tell how it ended."""
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
            callback=telling,
            load=load,
        )
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        telling.tell(event="failed", reason=reason.strip())
    else:
        telling.tell(event="finished")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()  # a federation holds its graphs in circles


def main() -> None:
    """Run cells until there are no more."""
    for lock in sys.argv[1:]:
        os.set_inheritable(int(lock), False)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to everybody; the sweep ends its workers itself
    telling = Telling(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # nothing else may write between the events
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    load = Remembered()
    while True:
        order = orders.get()
        if "plugins" in order:
            from fedaux.running.plugins import load_plugin

            for path in order["plugins"]:
                load_plugin(path)
            continue
        run_cell(order, load=load, telling=telling)


if __name__ == "__main__":
    main()
