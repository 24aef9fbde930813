"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from fedaux import __version__
from fedaux.cli import inspect, prepare, run
from fedaux.federation.commands import app as federate

PUT_RIGHT = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""What is wrong with a file that a user named; a full disk, say, is no mistake of theirs."""

app = typer.Typer(
    help="Federated learning with unlabeled auxiliary data: FedAUX and the methods it is compared with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run.run,
    prepare.data,
    prepare.pretrain,
    prepare.tokenise,
    inspect.report,
    inspect.methods,
    inspect.privacy,
    inspect.audit,
    run.reproduce,
):
    app.command()(command)
app.add_typer(federate, name="federate")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"fedaux {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; what a user did wrong is told in plain words, without a traceback.

    The exit status is 2 for what the user can put right (settings, arguments, files), 1 for anything else that failed,
    3 for a sweep that is not complete, 130 after Ctrl-C: docs/run-directory.md.
    """
    # Threads that spin while they wait make small models many times slower on a machine that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.formatwarning = _in_one_line
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"error: {error.filename or 'file system'}: {error.strerror or error}", err=True)
        sys.exit(2 if isinstance(error, PUT_RIGHT) else 1)


def _in_one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning as a user reads it: which line of ours it comes from is no matter of theirs."""
    if category is UserWarning:
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
