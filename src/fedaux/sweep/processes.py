"""The process of a worker: JSON lines in, JSON lines out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

STOP_TIMEOUT = 10.0
"""Seconds a process has to stop by itself."""


class WorkerProcess:
    """A process that stops when its input ends."""

    def __init__(self, *, log: Path, environment: Mapping[str, str], lock: int) -> None:
        """``lock``: descriptor of a file that stays locked until the process exits."""
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedaux.sweep.worker", str(lock)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=environment,
                pass_fds=[lock],
            )

    def send(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Return an iterator over the output; a generator would close the pipe when abandoned."""
        assert self._process.stdout is not None
        return iter(self._process.stdout)

    def stop(self) -> int:
        """Stop the process and return its exit status."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout=STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def environment_of(sweep: Path, *, at_once: int) -> dict[str, str]:
    """Return the environment of one of several workers: a share of the cores, no busy waiting, and
    a place for the h0 that cells share."""
    cores = str(max(1, (os.cpu_count() or 1) // at_once))
    shared = {"OMP_NUM_THREADS": cores, "OMP_WAIT_POLICY": "PASSIVE"} if at_once > 1 else {}
    environment = shared | dict(os.environ)
    if environment.get("FEDAUX_CACHE") == "":  # no global store, but cells of a sweep share h0
        environment["FEDAUX_CACHE"] = str((sweep / ".shared").resolve())
    return environment
