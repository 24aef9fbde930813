"""Packages depend on each other in one direction, and the algorithm on nothing that is optional."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import fedaux
from fedaux.core.algorithms import METHODS
from fedaux.core.objectives import OBJECTIVES

ROOT = Path(fedaux.__file__).parent
ABOVE_CORE = {"fast", "federation", "report", "sweep", "cli", "running", "predict"}
MOST_MODULES = 26
"""That `import fedaux.core.server` may load, of fedaux."""
MOST_ROOT_FILES = 8
PARTS = re.compile(r"fedaux\.core\.algorithms\.[a-z0-9_]+\.")
MAY_NAME_METHODS = {"running/from_python.py", "report/figures.py"}
"""A small default recipe, and colours."""


def packages() -> set[str]:
    return {folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()}


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


@cache
def imports(file: Path) -> list[str]:
    """Return the dotted names that a file imports anywhere in it, late imports and types
    included."""
    found: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


@cache
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
    """Packages that import only placed packages are placed; a cycle never is."""
    graph = package_graph()
    placed: set[str] = set()
    while ready := {
        name for name, needs in graph.items() if name not in placed and needs <= placed
    }:
        placed |= ready
    assert {name: sorted(graph[name] - placed) for name in graph.keys() - placed} == {}


def module_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports anywhere in it; the root's own imports are late
    names for users."""
    files = {
        ".".join(["fedaux", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): file
        for file in ROOT.rglob("*.py")
    }
    graph: dict[str, set[str]] = {"fedaux": set()}
    for name in files.keys() - graph.keys():
        named = {
            target if target in files else target.rpartition(".")[0]
            for target in imports(files[name])
        }
        graph[name] = (named & files.keys()) - {name, "fedaux"}
    return graph


def test_no_modules_import_each_other_not_even_late_or_for_types() -> None:
    order = tuple(TopologicalSorter(module_graph()).static_order())  # raises CycleError
    assert order.index("fedaux.core.messages") < order.index("fedaux.core.server")


def literals(file: Path) -> Iterator[str]:
    """Yield the strings of a file, without its docstrings."""
    texts = {id(node.value) for node in nodes(file) if isinstance(node, ast.Expr)}
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def test_only_the_algorithms_know_methods() -> None:
    """No other module names a method or reads more of one than `Method` promises."""
    promised = {"name", "asks", "problems", "prepare", "round", "finish", "evaluated"}
    promised |= {"optimizer", "own_settings"}
    names = METHODS.keys() - OBJECTIVES.keys() - {"fedaux"}  # which is the package's name, too
    found = []
    for file in ROOT.rglob("*.py"):
        place = file.relative_to(ROOT).as_posix()
        if place.startswith("core/algorithms/") or place in MAY_NAME_METHODS:
            continue
        found += [f"{place}: {text}" for text in literals(file) if text in names]
        found += [f"{place}: {one}" for one in imports(file) if PARTS.match(one)]
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr not in promised:
                held = node.value
                row = isinstance(held, ast.Subscript) and ast.unparse(held.value) == "METHODS"
                if row or (
                    isinstance(held, ast.Attribute)
                    and ast.unparse(held) in ("task.method", "self._method", "self.task.method")
                ):
                    found.append(f"{place}: {ast.unparse(node)}")
    assert not found


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


def test_every_public_name_exists() -> None:
    for package in ("fedaux", "fedaux.data", "fedaux.models", "fedaux.sweep", "fedaux.encoders"):
        module = importlib.import_module(package)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
