"""A federation for trial, and what people type around it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fedaux.federation.folder import write_folder
from helpers.typing_commands import called


def federate_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return what `fedaux federate` says and its exit status, called in this process."""
    return called("federate", *arguments, cwd=cwd)


def write_trial(folder: Path) -> Path:
    """Write the folder of a trial with three nodes, and return the configuration of the second."""
    write_folder(folder, recipe="demo", clients=3, trial=True)
    return folder / "nodes/node-1.toml"
