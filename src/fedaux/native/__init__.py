"""Code in C for processors, compiled by the machine's own compiler at the first use: once a machine, in a second.

What is compiled lies in a folder of the user's own among the temporary files, under a digest of all it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from functools import lru_cache
from importlib import resources
from pathlib import Path

FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
"""With all that this processor can do; not every compiler knows it for every processor."""
FUNCTIONS = ("lanes", "forward", "backward", "predict")
SECONDS = 120.0
FEATURES = ("flags", "Features", "CPU part")
"""Lines of /proc/cpuinfo that say what a processor can do."""


class Uncompiled(Exception):
    """There is no library: no compiler, one that fails, or a folder that nothing can be loaded from."""


def library() -> ctypes.CDLL:
    """Return the compiled library. Raises Uncompiled, with what is missing."""
    found = _tried()
    if isinstance(found, str):
        raise Uncompiled(found)
    return found


def available() -> bool:
    """Say whether there is a library."""
    return not isinstance(_tried(), str)


@lru_cache(maxsize=1)
def _tried() -> ctypes.CDLL | str:
    """Return the library or why there is none: a process tries once."""
    try:
        return _made()
    except (Uncompiled, OSError, ValueError, AttributeError) as error:
        return str(error)


def _made() -> ctypes.CDLL:
    source = resources.files(__package__).joinpath("blocks.c").read_bytes()
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    digest = hashlib.sha256(source)
    digest.update("\0".join([*compiler, _run([*compiler, "--version"]), *FLAGS, NATIVE, _processor()]).encode())
    name = f"blocks-{digest.hexdigest()[:32]}.so"
    folder = _own_folder()
    if folder is None:  # somebody else was there first
        with tempfile.TemporaryDirectory(prefix="fedaux-") as own:
            return _loaded(_compiled(source, compiler, Path(own) / name))
    if (folder / name).is_file():
        try:
            return _loaded(folder / name)
        except (OSError, AttributeError):
            (folder / name).unlink(missing_ok=True)  # damaged: as if it were not there
    return _loaded(_compiled(source, compiler, folder / name))


def _own_folder() -> Path | None:
    """Return a folder that only this user can look into, for what lies in it is run; None where there is none."""
    folder = Path(tempfile.gettempdir()) / f"fedaux-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if own else None


def _compiled(source: bytes, compiler: list[str], target: Path) -> Path:
    """Compile into a file, which is there whole or not at all, whoever else compiles."""
    with tempfile.TemporaryDirectory(dir=target.parent) as workplace:
        code, made = Path(workplace) / "blocks.c", Path(workplace) / "made.so"
        code.write_bytes(source)
        try:
            _run([*compiler, *FLAGS, NATIVE, "-o", str(made), str(code), "-lm"])
        except Uncompiled:
            _run([*compiler, *FLAGS, "-o", str(made), str(code), "-lm"])
        with made.open("rb") as stream:
            os.fsync(stream.fileno())
        made.replace(target)
    return target


def _loaded(file: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(file))
    for name in FUNCTIONS:
        getattr(found, name)  # AttributeError where a compiler has made something else
    return found


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Uncompiled(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
        raise Uncompiled(f"{command[0]}: {reason.strip()}")
    return done.stdout


def _processor() -> str:
    """Return what this processor can do, for folders may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    own = sorted({line for line in lines if line.startswith(FEATURES)})
    return "\n".join([platform.machine(), platform.processor(), *own])
