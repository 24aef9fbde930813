"""Programs of tests/programs, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.paths import PROGRAMS, TESTS


def command(name: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of a program."""
    return [sys.executable, *options, str(PROGRAMS / name), *arguments]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program, in which it can import the tests' helpers."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | dict(changes or {})


def run_program(
    name: str,
    *arguments: str,
    cwd: Path | None = None,
    changes: Mapping[str, str] | None = None,
    timeout: float | None = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a program with changes to the environment, and wait for its end."""
    return subprocess.run(
        command(name, *arguments),
        cwd=cwd,
        env=environment(changes),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
