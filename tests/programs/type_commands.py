"""What `fedaux ...` and `python FILE` print, one after the other in one process: a JSON string for
each."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys

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
