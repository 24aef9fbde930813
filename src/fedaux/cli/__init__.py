"""The command line. Commands import heavy modules on demand."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from fedaux import __version__
from fedaux.cli import inspect, model, prepare, run
from fedaux.cli.help import tidy
from fedaux.federation.commands import app as federate

USER_FILE_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Problems with a file that the user named, unlike a full disk."""

app = typer.Typer(
    help="Federated learning with unlabeled auxiliary data: FedAUX and related methods.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run.run,
    run.tune,
    prepare.data,
    prepare.encoder,
    prepare.pretrain,
    inspect.report,
    model.predict,
    model.export,
    inspect.methods,
    inspect.recipes,
    inspect.privacy,
    inspect.audit,
):
    app.command()(command)
passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=passed_on)(run.reproduce)
tidy(app, federate)
app.add_typer(federate, name="federate")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"fedaux {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; errors of the user are printed without a traceback.

    Exit status: 2 for invalid settings, arguments or files, 1 for other failures, 3 for an
    incomplete sweep, 130 after Ctrl-C (docs/after-a-run.md).
    """
    # Busy waiting makes small models many times slower on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.formatwarning = _in_one_line
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"error: {error.filename or 'file system'}: {error.strerror or error}", err=True)
        sys.exit(2 if isinstance(error, USER_FILE_ERRORS) else 1)


def _in_one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning as one line; for UserWarning without its place in the code."""
    if category is UserWarning:
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
