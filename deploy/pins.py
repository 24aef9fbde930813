"""Write the requirements of the images and of a node, with hashes: `make pins`, where a package
index is at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = (
    "# Written by `make pins`: the versions of constraints.txt with the SHA-256 of every file of a "
    "release.\n"
)
EXTRAS = ("flower", "privacy", "dpsgd", "parquet")
TORCH = ("torch==", "triton==", "nvidia-", "cuda-")
"""PyTorch and what it brings: a build without CUDA takes another index for these alone."""


def compiled(*sources: str, given: str = "") -> list[str]:
    """Return the pinned packages that sources need, each with its hashes."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--quiet", *sources]
    command += ["--generate-hashes", "--universal", "--python-version", "3.11", "--no-annotate"]
    command += ["--no-header", "--constraint", "constraints.txt"]
    done = subprocess.run(
        command, cwd=ROOT, input=given, capture_output=True, text=True, check=True
    )
    return re.split(r"\n(?=\S)", done.stdout.strip())


def write(name: str, packages: list[str]) -> None:
    """Write one file of requirements."""
    text = HEAD + "\n".join(packages) + "\n"
    (ROOT / "deploy" / name).write_text(text, encoding="utf-8")


def main() -> None:
    """Write the three files."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    packages = compiled("pyproject.toml", *extras)
    write("requirements.txt", [one for one in packages if not one.startswith(TORCH)])
    write("requirements-torch.txt", [one for one in packages if one.startswith(TORCH)])
    write("requirements-build.txt", compiled("-", given="hatchling"))


if __name__ == "__main__":
    main()
