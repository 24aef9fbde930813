"""Commands that a page tells its readers to type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = """
import contextlib, io, json, runpy, sys
from typer.testing import CliRunner
from fedaux.cli import app
for program, *words in json.loads(sys.argv[1]):
    if program == "python":
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(words[0], run_name="__main__")
        print(json.dumps(output.getvalue()))
    else:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        print(json.dumps(done.stdout))
"""


def typed(
    lines: Sequence[Sequence[str]], folder: Path, *, then: str = "", environment: Mapping[str, str] | None = None
) -> tuple[list[str], str]:
    """Return what each `fedaux ...` or `python FILE` said in a folder, and what a program said that ran afterwards.

    All in one process of their own, for each would load everything anew.
    """
    assert {line[0] for line in lines} <= {"fedaux", "python"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + then, json.dumps([list(line) for line in lines])],
        cwd=folder,
        env=os.environ | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines(keepends=True)
    return [json.loads(line) for line in said[: len(lines)]], "".join(said[len(lines) :])
