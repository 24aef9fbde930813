"""Help does not load the large packages."""

from __future__ import annotations

import sys

from typer.testing import CliRunner

import fedaux.cli

assert CliRunner().invoke(fedaux.cli.app, ["--help"]).exit_code == 0
heavy = {"torch", "numpy", "scipy", "sklearn", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
