"""Commands that a page tells its readers to type."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.programs import run_program


def called(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return what `fedaux ...` says and its exit status, called in this process: a new one takes
    seconds to load."""
    status, output, errors = 0, io.StringIO(), io.StringIO()

    def show(message: Any, category: Any, file: str, number: int, *_: Any) -> None:
        errors.write(warnings.formatwarning(message, category, file, number))

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
        patch.setattr(warnings, "showwarning", show)  # pytest keeps warnings to itself
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return subprocess.CompletedProcess(
        ["fedaux", *words], status, output.getvalue(), errors.getvalue()
    )


def typed(
    lines: Sequence[Sequence[str]], folder: Path, *, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return what each `fedaux ...` or `python FILE` prints in a folder.

    All run in one new process: separate processes would each take seconds to load.
    """
    assert {line[0] for line in lines} <= {"fedaux", "python"}
    words = json.dumps([list(line) for line in lines])
    done = run_program("type_commands.py", words, cwd=folder, changes=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def invoked(folder: Path, *words: str) -> str:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of the packages that the command line is made of
        from typer.testing import CliRunner

        from fedaux.cli import app

        patch.setenv("FEDAUX_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "120")
        done = CliRunner().invoke(app, words)
    return done.stdout if done.exception is None else str(done.exception)
