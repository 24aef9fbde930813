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
NATIVE = "-march=native"
"""With all that this processor can do; not every compiler knows it for every processor."""
SECONDS = 120.0
FEATURES = ("flags", "Features", "CPU part")
"""Lines of /proc/cpuinfo that say what a processor can do."""


class Uncompiled(Exception):
    """There is no library: no compiler, or one that fails."""


def library() -> ctypes.CDLL:
    """Return the compiled library. Raises Uncompiled, with what is missing."""
    found = _tried()
    if isinstance(found, Uncompiled):
        raise found
    return found


@lru_cache(maxsize=1)
def _tried() -> ctypes.CDLL | Uncompiled:
    """Return the library or why there is none: a process tries once."""
    try:
        return _made()
    except Uncompiled as error:
        return error
    except OSError as error:
        return Uncompiled(str(error))


def _made() -> ctypes.CDLL:
    source = resources.files(__package__).joinpath("blocks.c").read_bytes()
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    folder = _folder()
    digest = hashlib.sha256(source)
    digest.update("\0".join([*compiler, _version(compiler), *FLAGS, _processor()]).encode())
    target = folder / f"blocks-{digest.hexdigest()[:32]}.so"
    if target.is_file():
        try:
            return ctypes.CDLL(str(target))
        except OSError:
            target.unlink(missing_ok=True)  # damaged: as if it were not there
    with tempfile.TemporaryDirectory(dir=folder) as workplace:
        made = Path(workplace) / "made.so"
        code = Path(workplace) / "blocks.c"
        code.write_bytes(source)
        try:
            _run([*compiler, *FLAGS, NATIVE, "-o", str(made), str(code), "-lm"])
        except Uncompiled:
            _run([*compiler, *FLAGS, "-o", str(made), str(code), "-lm"])
        made.replace(target)  # whole or not at all, whoever else compiles
    return ctypes.CDLL(str(target))


def _folder() -> Path:
    """Return a folder that only this user can write to: what lies in it is run."""
    folder = Path(tempfile.gettempdir()) / f"fedaux-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="fedaux-"))  # somebody else was there first


def _version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
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
