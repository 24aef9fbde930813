"""Kills runs at random moments and resumes them: kill_runs.py FOLDER KILLS.

Each run is a process that is forked after the imports, which would take longer than the run. It is
killed once, at a random moment of the work that a whole run takes, in seconds of the processor, so
that other work on the machine changes little; another process resumes it.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

import fedaux
import fedaux.report
from fedaux.data.tensor_files import weights_digest
from fedaux.recipes import find_recipe, load_experiment

SMALL = (
    "method=[feddf+p, fedaux+m]",
    "seeds=[0]",
    "rounds=3",
    "participation_rate=0.15",
    "auxiliary.size=200",
    "split.num_clients=20",
    "prototypes=[{name='cnn',model='cnn',options={width=4}}]",
    "pretraining.epochs=2",
    "pretraining.batch_size=50",
    "local.optimizer_state=kept",
    "engine.device=cpu",
    "engine.threads=1",
)
fedaux.report.write_report = lambda directory: (
    directory / "report.html"
)  # takes longer than all the rest
torch.set_num_threads(1)  # a pool of threads would not survive a fork
EXPERIMENT = load_experiment(find_recipe("demo"), overrides=SMALL)


def start(out: Path) -> int:
    """Start or resume a run in a separate process with a separate store of h0; return its id."""
    process = os.fork()
    if process:
        return process
    os.environ["FEDAUX_CACHE"] = str(out.with_suffix(".cache"))
    status = 1
    try:
        fedaux.run(EXPERIMENT, out=out, resume=True)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def finished(process: int) -> bool:
    """Wait for a process; return whether it ended well."""
    return os.waitpid(process, 0)[1] == 0


def worked(process: int) -> float:
    """Return the seconds of the processor that a process has taken; infinity if it has ended."""
    state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[10]) + int(fields[11])  # user and system time
    return math.inf if state == "Z" else ticks / os.sysconf("SC_CLK_TCK")


def killed(process: int, *, after: float) -> bool:
    """Kill a process after some seconds of work; return whether it was still at it."""
    while worked(process) < after:
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def result(out: Path) -> Mapping[str, object]:
    """Return what has to be the same: metrics, ledger, summary, and every tensor."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    del summary["shared_seconds"]
    for row in (*rows, *summary["rows"]):
        del row["seconds"]
    return {
        "metrics": rows,
        "summary": summary,
        "ledger": json.loads((out / "ledger.json").read_text()),
        "tensors": {
            str(file.relative_to(out)): weights_digest(load_file(file))
            for file in sorted(out.rglob("*.safetensors"))
        },
    }


def main() -> None:
    """Print how many kills found a run at work, at how many stages, and which runs ended
    differently."""
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["FEDAUX_CACHE"] = str(folder / "whole.cache")
    fedaux.run(EXPERIMENT, out=folder / "whole")  # in this process: the others share its imports
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    before = os.times()
    assert finished(start(folder / "again"))
    after = os.times()
    seconds = after.children_user - before.children_user
    seconds += after.children_system - before.children_system
    expected, generator = result(folder / "whole"), random.Random(0)
    stopped, found, different = 0, [], {}
    for number in range(kills):
        out = folder / f"run-{number}"
        stopped += killed(start(out), after=generator.uniform(0.0, seconds))
        found.append(len(list(out.rglob("*"))))
        assert finished(start(out)), f"run {number} cannot be resumed"
        ended = result(out)
        if keys := [key for key in expected if ended[key] != expected[key]]:
            different[out.name] = {key: [expected[key], ended[key]] for key in keys}
    print(json.dumps({"stopped": stopped, "states": len(set(found)), "different": different}))


if __name__ == "__main__":
    main()
