"""How to compute: device, precision, compilation. One value, passed to all code that runs
models."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedaux.config import Data, Engine

CLIENTS_AT_ONCE = 8

Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Compute:
    """Where and how precisely models run. The default: CPU, single precision, nothing compiled."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: torch.dtype = torch.float32
    compile: bool = False
    clients_at_once: int = 1
    workers: int = 1
    """Threads that work on different clients at the same time on a CPU, each with one core."""
    mean: Tensor | None = field(default=None, compare=False)
    """Subtracted from images in [0, 1], [C, 1, 1]."""
    deviation: Tensor | None = field(default=None, compare=False)
    """Divides images afterwards, [C, 1, 1]."""
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def captures(self) -> bool:
        """Whether steps are captured as CUDA graphs: on a GPU, unless clients train one by one."""
        return self.device.type == "cuda" and self.clients_at_once > 1

    def autocast(self) -> AbstractContextManager[None]:
        """Run the block in the chosen precision; weights stay in single precision."""
        if self.precision is torch.float32:
            return nullcontext()
        # Without a cache: a cached copy of a weight would outlive the graph that made it.
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

    def floats(self, inputs: Tensor) -> Tensor:
        """Return images in [0, 1] and normalised; features and token ids as they are."""
        floats = to_float(inputs)
        return self.normalised(floats) if inputs.dtype is torch.uint8 else floats

    def normalised(self, images: Tensor) -> Tensor:
        """Return images in [0, 1] without the mean of each channel, in units of its deviation."""
        images = images if self.mean is None else images - self.mean
        return images if self.deviation is None else images / self.deviation

    def spread(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return work(item) for all items, in order; several at a time if there are several
        workers.

        One thread per client is faster than sharing each small operation among all cores.
        """
        if self.workers == 1 or len(items) < 2:
            return [work(item) for item in items]
        threads = self.once("workers", lambda: ThreadPoolExecutor(self.workers))
        # Threads inherit the number that is set when they first compute.
        with self.one_thread():
            return list(threads.map(work, items))

    def spread_alone(
        self, work: Callable[[Sequence[int]], Result], rows: Sequence[int]
    ) -> list[Result]:
        """Return work(part) for parts of the rows, one for each worker, in order.

        Every part is computed on one thread, however many there are.
        """
        with self.one_thread():
            size = max(1, math.ceil(len(rows) / self.workers))
            return self.spread(work, [rows[at : at + size] for at in range(0, len(rows), size)])

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Run operations on one core: sharing small ones takes longer than the work."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return what `make` made for this key the first time; all tasks of a process share it."""
        if key not in self._cache:
            self._cache[key] = make()
        made: Result = self._cache[key]
        return made

    @property
    def shared_seconds(self) -> float:
        """Seconds of work that all later tasks of this process find done, not yet recorded."""
        return float(self._cache.get("shared seconds", 0.0))

    def take_shared_seconds(self) -> float:
        """Return these seconds, to record them."""
        return float(self._cache.pop("shared seconds", 0.0))

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Count the seconds of the block as shared."""
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._cache["shared seconds"] = self.shared_seconds + time.perf_counter() - began


def to_float(images: Tensor) -> Tensor:
    """Map uint8 images to [0, 1] in single precision; features and token ids stay as they are."""
    return images.float().div_(255.0) if images.dtype is torch.uint8 else images


def inference_batch(device: torch.device) -> int:
    """Return the default batch size of predictions."""
    return 4096 if device.type == "cuda" else 256


def choose_device(name: str, *, key: str = "engine.device") -> torch.device:
    """Return a device by name; `auto` is a GPU if one is available. `key` is its setting."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{key} = {name}: no CUDA device is available; use auto or cpu")
    return torch.device(name)


def has_bf16(device: torch.device) -> bool:
    """Return whether a device supports bf16 natively; emulation is hundreds of times slower."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    tell = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and tell is not None and bool(tell())


def compute_for(engine: Engine, device: torch.device, data: Data | None = None) -> Compute:
    """Return how to compute an experiment on a device: `auto` is bf16 and compiled on a GPU, else
    fp32.

    If the device does not support bf16, fedaux prints a warning and uses fp32.
    """
    on_gpu = device.type == "cuda"
    precision = engine.precision
    if precision == "auto":
        precision = "bf16" if on_gpu and has_bf16(device) else "fp32"
    elif precision == "bf16" and not has_bf16(device):
        what = "GPU" if on_gpu else "processor"
        warnings.warn(f"engine.precision: this {what} has no bf16, going on in fp32", stacklevel=2)
        precision = "fp32"
    if on_gpu:
        # Benchmarking convolutions saves a fifth of the time, but two runs may choose differently.
        # And "fp32" should not mean TF32, which convolutions use by default.
        torch.backends.cudnn.benchmark = precision != "fp32"
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
    return Compute(
        device,
        torch.bfloat16 if precision == "bf16" else torch.float32,
        compile=on_gpu if engine.compile is None else engine.compile,
        clients_at_once=CLIENTS_AT_ONCE
        if engine.clients_at_once is None
        else engine.clients_at_once,
        workers=1 if on_gpu or engine.clients_at_once == 1 else torch.get_num_threads(),
        mean=None if data is None else _a_channel(data.channel_mean, device),
        deviation=None if data is None else _a_channel(data.channel_deviation, device),
    )


def _a_channel(numbers: Sequence[float], device: torch.device) -> Tensor | None:
    return torch.tensor(numbers, device=device)[:, None, None] if numbers else None
