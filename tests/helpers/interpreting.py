"""Kernels for GPUs in Triton's interpreter, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which comes with torch for GPUs")


def interpreted(program: str) -> None:
    """Run a program with the interpreter on; it prints "compared" at its end."""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in run.stderr:
        pytest.skip("Triton's interpreter does not go with this NumPy")
    assert run.stdout == "compared\n", run.stderr
