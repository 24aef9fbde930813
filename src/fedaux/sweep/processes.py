"""The process of a worker, as whoever gives it cells sees it: lines of JSON go in, and lines come out until it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

PATIENCE = 10.0
"""Seconds that a process has to end by itself."""


class Lost(Exception):
    """A process is out of reach, with the machine it was on."""


class NoPlace(Lost):
    """A process could not be started: its machine is gone, or has nothing free."""


class Process(Protocol):
    """A worker that has been started, here or on another machine. Raises Lost where that machine is gone."""

    def send(self, line: str) -> None:
        """Give it a line. Raises OSError where it does not listen."""

    def lines(self) -> Iterator[str]:
        """Yield what it says, line by line, until it ends."""

    def stop(self) -> int | None:
        """End it, and return its status where that is known."""


class Seat(Protocol):
    """A place for a worker."""

    @property
    def device(self) -> str | None:
        """The device of its cells; None leaves it to the recipe."""

    def start(self) -> Process:
        """Start a worker. Raises NoPlace where there can be none any more."""

    def gone(self) -> bool:
        """Whether no worker can be started here any more; asked after one was lost, which may take a while."""


class OwnProcess:
    """A worker on this machine, which stops when its input ends."""

    def __init__(
        self,
        *,
        log: Path,
        environment: Mapping[str, str],
        lock: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """``lock`` is a file that stays locked as long as the worker lives; ``folder`` is where it works."""
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fedaux.sweep.worker",
                    *([] if lock is None else [str(lock)]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=environment,
                cwd=folder,
                pass_fds=[] if lock is None else [lock],
            )

    def send(self, line: str) -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Return what it says, line by line; a generator would close the pipe when it is left."""
        assert self._process.stdout is not None
        return iter(self._process.stdout)

    def stop(self) -> int:
        """End it, and return its status."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def shared_cores(cores: int, *, at_once: int) -> dict[str, str]:
    """Return the environment of one of several workers on a machine: a share of its cores, and idle threads sleep."""
    if at_once <= 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // at_once)), "OMP_WAIT_POLICY": "PASSIVE"}


class Here:
    """A seat on this machine; its worker holds the sweep's lock too, so that it is free when the last one is gone."""

    def __init__(self, root: Path, device: str | None, *, lock: int, at_once: int) -> None:
        self.device = device
        self._root = root
        self._lock = lock
        self._at_once = at_once

    def start(self) -> Process:
        """Start a worker."""
        environment = shared_cores(os.cpu_count() or 1, at_once=self._at_once) | dict(os.environ)
        if (
            os.environ.get("FEDAUX_CACHE") == ""
        ):  # nothing is shared with others, but the cells of one sweep share h0
            environment["FEDAUX_CACHE"] = str((self._root / ".shared").resolve())
        return OwnProcess(
            log=self._root / "logs" / "workers.log", environment=environment, lock=self._lock
        )

    def gone(self) -> bool:
        """Return False."""
        return False
