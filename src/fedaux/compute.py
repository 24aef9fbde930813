"""How work is computed: device, precision, compilation. One value, passed to whoever runs a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedaux.config import Engine

CLIENTS_AT_ONCE = 8

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Compute:
    """Where and how precisely models run. The default is the plain one: CPU, single precision, nothing compiled."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: torch.dtype = torch.float32
    compile: bool = False
    clients_at_once: int = 1
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def captures(self) -> bool:
        """Whether training steps are captured as CUDA graphs: on a GPU, unless clients are trained one by one."""
        return self.device.type == "cuda" and self.clients_at_once > 1

    def autocast(self) -> AbstractContextManager[None]:
        """Run what is inside in the chosen precision; weights stay in single precision."""
        if self.precision is torch.float32:
            return nullcontext()
        # Without a cache: a weight is used once a step, and a cached copy would outlive the graph that made it.
        return torch.autocast(self.device.type, self.precision, cache_enabled=False)

    def place(self, module: Model) -> Model:
        """Move a module to the device, convolutions in the layout that is fastest there."""
        layout = torch.channels_last if self.device.type == "cuda" else torch.preserve_format
        placed: Model = module.to(self.device, memory_format=layout)  # type: ignore[call-overload]
        return placed

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """Move examples to the device, images in the layout of convolutions there."""
        if self.device.type == "cuda" and inputs.ndim == 4:
            return inputs.to(self.device, memory_format=torch.channels_last)
        return inputs.to(self.device)

    def compiled(self, key: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function compiled, once for each key; where compilation is off or fails, the function itself."""
        if not self.compile:
            return function
        if key not in self._cache:
            self._cache[key] = _Compiled(function)
        compiled: Callable[..., Any] = self._cache[key]
        return compiled


class _Compiled:
    """A compiled function that falls back to the plain one, with one line, where this machine cannot compile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is not None:
            try:
                return self._compiled(*arguments)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                self._compiled = None
                reason = str(error).strip().splitlines() or [type(error).__name__]
                warnings.warn(f"engine.compile: not possible here, going on without ({reason[0]})", stacklevel=2)
        return self._plain(*arguments)


def compute_for(engine: Engine, device: torch.device) -> Compute:
    """Return how an experiment is computed on a device: `auto` is bf16 and compiled on a GPU, fp32 elsewhere."""
    on_gpu = device.type == "cuda"
    precision = engine.precision
    if precision == "auto":
        precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "fp32"
    if on_gpu:
        # Trying out convolutions is worth a fifth of the time, but two runs may choose differently; and "fp32" should
        # not mean the shortened format that convolutions take by default.
        torch.backends.cudnn.benchmark = precision != "fp32"
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
    return Compute(
        device,
        torch.bfloat16 if precision == "bf16" else torch.float32,
        compile=on_gpu if engine.compile is None else engine.compile,
        clients_at_once=CLIENTS_AT_ONCE if engine.clients_at_once is None else engine.clients_at_once,
    )
