"""Kernels for GPUs in Triton's interpreter, which needs none."""

from __future__ import annotations

from helpers.programs import run_program


def interpreted(program: str, *arguments: str) -> None:
    """Run a program of tests/programs with the interpreter on; it prints "compared" at its end."""
    run = run_program(program, *arguments, changes={"TRITON_INTERPRET": "1"}, timeout=None)
    assert run.stdout == "compared\n", run.stderr
