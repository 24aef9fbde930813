"""Help and mistakes of the command line: paragraphs that wrap, one "did you mean"."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from fedaux.config import known_keys
from fedaux.config_errors import nearest


def _one_suggestion(error: click.NoSuchOption, command: click.Command) -> click.UsageError:
    names = [name for parameter in command.params for name in (*parameter.opts, "--help")]
    word = error.option_name.lstrip("-").replace("-", "_")
    keys = [key for key in known_keys() if word in (key, key.rpartition(".")[2])]
    guess = nearest(error.option_name, names)
    if keys and "--set" in names:
        guess = f"; settings are given as --set {keys[0]}=VALUE"
    return click.UsageError(f"{error.option_name}: no such option{guess}", error.ctx)


class Command(TyperCommand):
    """A command that suggests the nearest option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; an unknown option is named with the nearest one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _one_suggestion(error, self) from error


class CommandGroup(TyperGroup):
    """Commands; typer and click would each append another suggestion."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; an unknown one is named with the nearest one."""
        if self.get_command(ctx, args[0]) is None:
            line = f"{args[0]}: no such command{nearest(args[0], self.commands)}"
            raise click.UsageError(line, ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; an unknown option is named with the nearest one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _one_suggestion(error, self) from error


class _Argument(TyperArgument):
    """An argument that keeps its help: click 8.5 defines a `help` that erases typer's."""

    def __init__(self, *, help: str | None = None, **others: Any) -> None:
        super().__init__(help=help, **others)
        self.help = help


def tidy(*apps: typer.Typer) -> None:
    """Let the help of all commands wrap at the terminal's width, and use the classes above."""
    vars(typer.main)["TyperArgument"] = _Argument
    for app in apps:
        app.info.cls = CommandGroup
        for command in app.registered_commands:
            command.cls = Command
            paragraphs = cleandoc((command.callback and command.callback.__doc__) or "").split(
                "\n\n"
            )
            command.help = "\n\n".join(" ".join(part.split()) for part in paragraphs)
