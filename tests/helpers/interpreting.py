"""Kernels for GPUs in Triton's interpreter, which needs none."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from helpers.programs import run_program

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, which comes with torch for GPUs"
)


def interpreted(program: str, *arguments: str) -> None:
    """Run a program of tests/programs with the interpreter on; it prints "compared" at its end."""
    run = run_program(program, *arguments, changes={"TRITON_INTERPRET": "1"}, timeout=None)
    if "only 0-dimensional arrays can be converted" in run.stderr:
        pytest.skip("Triton's interpreter does not go with this NumPy")
    assert run.stdout == "compared\n", run.stderr
