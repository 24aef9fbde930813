"""Flower's `flwr-clientapp` at a node: the installed client answers, and code that was sent is not
executed.

Flower sends the app's code with the first message of a run and would unpack, import and execute it
here, so that the server could bypass the node's policy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fedaux.federation import logs

REPLACED = (
    "install_from_fab",
    "get_project_dir",
    "get_load_client_app_fn",
    "install_app_dependencies",
)
"""The functions by which Flower's process uses the app that it was sent."""


def guard(runtime: Any) -> None:
    """Keep Flower's client process from using the app that was sent.

    Raises RuntimeError for an unknown version of Flower, rather than execute foreign code.
    """
    if missing := [name for name in REPLACED if not hasattr(runtime, name)]:
        raise RuntimeError(
            f"this version of Flower has no {', '.join(missing)}; fedaux needs flwr 1.41"
        )
    runtime.install_from_fab = _nothing
    runtime.get_project_dir = _nothing
    runtime.install_app_dependencies = _nothing
    runtime.get_load_client_app_fn = _load_own


def _nothing(*_: object, **__: object) -> None:
    """Ignore what was sent."""


def _load_own(*_: object, **__: object) -> Callable[..., Any]:
    def load(*_: object) -> Any:
        from fedaux.federation.client import app

        return app

    return load


def main() -> None:
    """Answer one message."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    guard(run_clientapp)
    logs.configure()
    sys.argv[0] = "flwr-clientapp"
    flwr_clientapp()


if __name__ == "__main__":
    main()
