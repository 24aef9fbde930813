"""A federation for trial, and what people type around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fedaux.federation.folder import write_folder


def federate_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `fedaux federate` as a process."""
    command = [sys.executable, "-m", "fedaux", "federate", *arguments]
    environment = os.environ | {"COLUMNS": "140"}
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment
    )


def write_trial(folder: Path) -> Path:
    """Write the folder of a trial with three nodes, and return the configuration of the second."""
    write_folder(folder, recipe="demo", clients=3, trial=True)
    return folder / "nodes/node-1.toml"
