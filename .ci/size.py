"""Fail if a package in src has more lines of code than its limit in size.toml.

Comments, docstrings and blank lines do not count. The total may only fall; a package may grow if
others shrink. `--write` makes the present sizes the limits.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT, LIMITS = Path(__file__).parents[1], ".ci/size.toml"
KINDS = (".py", ".ci/size.toml")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def lines_of_code(source: str) -> int:
    """Return the number of lines that hold more than comments and docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string and token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def sizes_of(files: dict[str, str]) -> Counter[str]:
    """Return the lines of code of each package, with their total, from sources by path."""
    sizes: Counter[str] = Counter()
    for path, source in files.items():
        lines = lines_of_code(source)
        sizes.update({"/".join(path.split("/")[1:-1][:2]): lines, "total": lines})
    return sizes


def git(*arguments: str) -> bytes:
    """Return what a git command prints; nothing if it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True).stdout


def main() -> str | None:
    """Print each size, its limit and its change since main; return what is too large."""
    files = {str(file.relative_to(ROOT)): file.read_text() for file in ROOT.glob("src/**/*.py")}
    sizes, limits = sizes_of(files), tomllib.loads((ROOT / LIMITS).read_text())
    if "--write" in sys.argv:
        limits = dict(sorted(sizes.items()))
        (ROOT / LIMITS).write_text("".join(f'"{name}" = {size}\n' for name, size in limits.items()))
    before, allowed = sizes, limits["total"]
    main, head = (git("rev-parse", "--verify", "-q", name) for name in ("main", "HEAD"))
    at_main = main == head and not git("status", "--porcelain", "src")
    base = "main" if main and not at_main else "HEAD~1"
    if packed := git("archive", base, "src", LIMITS) or git("archive", base, "src"):
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            old = {one.name: archive.extractfile(one) for one in archive if one.isfile()}
            texts = {
                name: own.read().decode()
                for name, own in old.items()
                if own and name.endswith(KINDS)
            }
        allowed = tomllib.loads(texts.pop(LIMITS, "")).get("total", allowed)
        before = sizes_of(texts)
    problems = [f"{LIMITS}: the total was {allowed} and may only fall"]
    problems = problems if limits["total"] > allowed else []
    for name, size in sorted(sizes.items()):
        print(f"{name:20}{size:7} of{limits.get(name, 0):7}{size - before[name]:+7}")
        if size > limits.get(name, 0):
            problems.append(f"{name}: {size} lines of code, {LIMITS} allows {limits.get(name, 0)}")
    return "\n".join(problems) or None


if __name__ == "__main__":
    sys.exit(main())
