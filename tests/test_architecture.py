"""Packages depend on each other in one direction, and the algorithm on nothing that is optional."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fedaux

ROOT = Path(fedaux.__file__).parent
ABOVE_CORE = {"fast", "federation", "report", "sweep", "cli", "running", "predict"}
MOST_MODULES = 25
"""That `import fedaux.core.server` may load, of fedaux."""
MOST_ROOT_FILES = 8


def packages() -> set[str]:
    return {folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()}


def imports(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports anywhere in it, late imports and types
    included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_graph() -> dict[str, set[str]]:
    """Return the packages that each package imports; a module of the root counts for none."""
    graph: dict[str, set[str]] = {}
    for name in packages():
        targets = [
            target.split(".") for file in (ROOT / name).rglob("*.py") for target in imports(file)
        ]
        own = {parts[1] for parts in targets if parts[0] == "fedaux" and len(parts) > 1}
        graph[name] = (own & packages()) - {name}
    return graph


def test_core_imports_nothing_that_is_built_on_it() -> None:
    graph = package_graph()
    assert "models" in graph["core"]  # the search does find imports
    assert not graph["core"] & ABOVE_CORE


def test_the_search_sees_late_imports_and_those_for_types(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("if TYPE_CHECKING:\n    import a.b\ndef f():\n    from c import d\n")
    assert sorted(imports(file)) == ["a.b", "c.d"]


def test_no_two_packages_import_each_other() -> None:
    """Packages that import only what is already placed are placed; a cycle never is."""
    graph = package_graph()
    placed: set[str] = set()
    while ready := {
        name for name, needs in graph.items() if name not in placed and needs <= placed
    }:
        placed |= ready
    assert {name: sorted(graph[name] - placed) for name in graph.keys() - placed} == {}


def test_a_round_loads_the_algorithm_alone() -> None:
    script = "import json, sys, fedaux.core.server; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = [name for name in json.loads(done.stdout) if name.partition(".")[0] == "fedaux"]
    assert "fedaux.core.server" in loaded
    assert not {name.split(".")[1] for name in loaded if "." in name} & ABOVE_CORE
    assert len(loaded) <= MOST_MODULES, loaded


def test_the_root_holds_few_files() -> None:
    assert len(list(ROOT.glob("*.py"))) <= MOST_ROOT_FILES
