"""What to check again for a new version of Flower: each of its internals that a federation uses."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import fedaux.federation

pytest.importorskip("flwr", reason="needs the extra flower")

CHECKED = "1.41."
"""The version of Flower for which everything below was checked."""
INTERNALS = {
    "flwr.superlink.extensions:get_middleware": "it wraps the SuperLink's whole interface, so that "
    "other machines reach only /v1/fleet/ and /health: tests of RemoteNodesOnly in test_guards.py",
    "flwr.superlink.main:_get_middleware": "the same: the outermost layer is ours",
    "flwr.superlink.servicer.fleet.fleet_handlers:activate_node": "it is called when a node joins, "
    "and its errors reach the node with their public details: test_supernode.py",
    "flwr.supercore.error:FlowerError": "the same: its code and public_details",
    "flwr.supercore.error:ApiErrorCode": "the same: FLEET_NODE_ACTIVATION_FAILED",
    "flwr.supercore.sql_mixin:SQLITE_PRAGMAS": "every connection to the database sets them, so "
    "that fetched messages are overwritten: test_guards.py",
    "flwr.supernode.fleet_http_connection:NodeAuthHttpInterceptor": "all requests of a node pass "
    "its `intercept`; status 401 and 412 keep their meaning: test_supernode.py",
    "flwr.supercore.date:now": "requests are signed by this clock: test_supernode.py",
    "flwr.supernode.runtime:run_clientapp": "the app that a server sends is used through the names "
    "in clientapp.REPLACED alone: test_guards.py",
    "flwr.superlink.cli:flower_superlink": "the command of a server, with the same options",
    "flwr.supernode.cli:flower_supernode": "the command of a node, with the same options",
    "flwr.supernode.cli:flwr_clientapp": "the command that answers one message; a node finds ours "
    "first on PATH: test_guards.py",
    "flwr.supercore.cli:flower_superexec": "the command that starts it; no other command starts an "
    "app (processes.REFUSED_TASKS)",
}


def test_what_to_check_again_for_a_new_version_of_flower() -> None:
    what = "\n".join(f"  {name}: {why}" for name, why in INTERNALS.items())
    assert version("flwr").startswith(CHECKED), (
        f"Flower {version('flwr')} is new: check that these parts do what fedaux takes them to do, "
        f"run `make test-federation`, then raise CHECKED here and flwr in pyproject.toml\n{what}"
    )
    for name in INTERNALS:
        module, _, attribute = name.partition(":")
        if not hasattr(import_module(module), attribute):
            import_module(f"{module}.{attribute}")


def test_only_one_folder_uses_internals_of_flower() -> None:
    public = ("flwr.app", "flwr.serverapp", "flwr.clientapp")
    others = {"logs.py: flwr.supercore.logger"}  # whose handler is replaced
    root = Path(fedaux.federation.__file__).parent
    named = set()
    for file in root.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            text = node.value if isinstance(node, ast.Constant) else module
            if isinstance(text, str) and text.startswith("flwr.") and not text.startswith(public):
                named.add(f"{file.name}: {text}")
    assert named == others
