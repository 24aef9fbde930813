"""Worker processes and the slots they run in: JSON lines in, JSON lines out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

STOP_TIMEOUT = 10.0
"""Seconds a process has to stop by itself."""


class LocalProcess:
    """A worker on this machine, which stops when its input ends."""

    def __init__(
        self,
        *,
        log: Path,
        environment: Mapping[str, str],
        lock: int,
    ) -> None:
        """``lock``: descriptor of a file that stays locked until the worker exits."""
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


def shared_cores(cores: int, *, at_once: int) -> dict[str, str]:
    """Return the environment of one of several workers: a share of the cores, no busy waiting."""
    if at_once <= 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // at_once)), "OMP_WAIT_POLICY": "PASSIVE"}


class LocalSlot:
    """A slot on this machine; its worker inherits the sweep's lock and releases it on exit."""

    def __init__(self, root: Path, device: str | None, *, lock: int, at_once: int) -> None:
        self.device = device
        self._root = root
        self._lock = lock
        self._at_once = at_once

    def start(self) -> LocalProcess:
        """Start a worker."""
        environment = shared_cores(os.cpu_count() or 1, at_once=self._at_once) | dict(os.environ)
        if os.environ.get("FEDAUX_CACHE") == "":  # no global store, but cells of a sweep share h0
            environment["FEDAUX_CACHE"] = str((self._root / ".shared").resolve())
        log = self._root / "logs" / "workers.log"
        return LocalProcess(log=log, environment=environment, lock=self._lock)
