"""Try the fast way; if it fails, print one warning and use the slower one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch

from fedaux.core.compute import Compute

Made = TypeVar("Made")


def attempt(
    make: Callable[[], Made],
    *,
    otherwise: str,
    device: torch.device | None = None,
    errors: type[Exception] = RuntimeError,
) -> Made | None:
    """Return what `make` returns; if it fails, warn with `otherwise` and the reason, and return
    None.

    Running out of memory is raised: the slower way would need more. `device` is where a CUDA graph
    may have been captured; a failed capture locks its random numbers, which are released here.
    """
    try:
        return make()
    except torch.cuda.OutOfMemoryError:
        raise
    except errors as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        warnings.warn(f"{otherwise} ({type(error).__name__}: {reason})", stacklevel=3)
        if device is not None:
            _release_generator(device)
        return None


def _release_generator(device: torch.device) -> None:
    """Unlock the device's global random numbers after a capture that failed."""
    if not torch.cuda.is_initialized():
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def compiled(
    compute: Compute, key: Hashable, make: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the function that `make` returns, compiled, once for each key.

    A function of a model's weights should hold a copy of the model: torch notes when a tensor it is
    given is one that the function holds, and compiles again for the first tensors of another
    caller.
    """
    return compute.once(("compiled", key), lambda: _Compiled(make()))


class _Compiled:
    """A compiled function; if compilation fails, it warns once and runs the plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._compiled: Callable[..., Any] | None = None
        self._possible = True

    def __call__(self, *arguments: Any) -> Any:
        if self._possible:
            # In a tuple, because None means that it failed.
            result = attempt(
                lambda: (self._run_compiled(*arguments),),
                otherwise="engine.compile: not possible here, running without",
                errors=Exception,
            )
            if result is not None:
                return result[0]
            self._possible = False
        return self._plain(*arguments)

    def _run_compiled(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(_with_own_code(self._plain), dynamic=False)
        return self._compiled(*arguments)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with a copy of its code.

    torch counts compilations per code object and stops after eight; functions of many models share
    one.
    """
    if isinstance(function, MethodType):
        return MethodType(_with_own_code(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    own = FunctionType(code, *parts)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
