"""What a machine could do at best, and what a piece of work asks of it: operations, and memory."""

from __future__ import annotations

import copy
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fedaux
from fedaux.core.compute import to_float
from fedaux.fast.convolutions import make_plain

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler announces itself on the screen


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_precision(model: nn.Module, precision: str, *, device: torch.device) -> nn.Module:
    """Return the model with a forward pass in mixed precision (bf16), or as it is (fp32)."""
    if precision == "bf16":
        forward = model.forward

        def mixed(inputs: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                outputs: Tensor = forward(inputs)
                return outputs.float()

        model.forward = mixed
    return model


def machine_of(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions that a measurement depends on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedaux": fedaux.__version__,
    }


def operations_of_image(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return the floating-point operations of one image by phase, counted by torch on a batch."""
    model = copy.deepcopy(model)
    make_plain(model)  # torch does not see into custom operations
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model.eval()(to_float(images))
    with FlopCounterMode(display=False) as both:
        model.train()(to_float(images)).sum().backward()
    look, step = forward.get_total_flops() / len(images), both.get_total_flops() / len(images)
    return {"train": step, "teach": look, "distill": step, "evaluate": look}


def peak_operations(device: torch.device, *, precision: str) -> float:
    """Return operations a second of a large square matrix product, the best of several.

    Single precision means what convolutions do by default: TF32 where the device has it.
    """
    size = 8192 if device.type == "cuda" else 2048
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        torch.set_float32_matmul_precision("high")
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    times = []
    for _ in range(8):
        wait(device)
        began = time.perf_counter()
        torch.mm(left, right)
        wait(device)
        times.append(time.perf_counter() - began)
    torch.set_float32_matmul_precision(before)
    return 2 * size**3 / min(times)


@contextmanager
def full_single_precision() -> Iterator[None]:
    """Switch TF32 off in convolutions, where torch uses it by default, for a while."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def peak_memory(work: Callable[[], object], *, device: torch.device) -> int:
    """Return the most bytes of tensors that a piece of work holds at a time, beyond what was there
    before."""
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        wait(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    kineto = found.profiler.kineto_results
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in kineto.events()
        if event.name() == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
