"""Commands that a page tells its readers to type."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

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


def called(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return what `fedaux ...` says and its exit status, called in this process: a new one takes seconds to load."""
    status, output, errors = 0, io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", DeprecationWarning)  # of packages, as in a new process
        from fedaux import cli

        patch.chdir(cwd)
        patch.setenv("COLUMNS", "120")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which would stay
        patch.setattr(sys, "argv", ["fedaux", *words])
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which would stay, too
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return subprocess.CompletedProcess(["fedaux", *words], status, output.getvalue(), errors.getvalue())


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


def invoked(folder: Path, *words: str) -> str:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", DeprecationWarning)  # of the packages that the command line is made of
        from typer.testing import CliRunner

        from fedaux.cli import app

        patch.setenv("FEDAUX_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "120")
        done = CliRunner().invoke(app, words)
    return done.stdout if done.exception is None else str(done.exception)
