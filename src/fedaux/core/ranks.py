"""The ranks of a run: processes that `torchrun` starts to share the work of each round.

All ranks play the same rounds on the same state. Clients train, and models predict, on one rank
each; then every rank has every answer. Rank 0 alone writes and prints. Ranks unpickle what other
ranks send: they are processes of one user, who has started them together.
"""

from __future__ import annotations

import io
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

PROCESS_ENDED = (
    "another process of this run has ended; finished rounds are saved, continue with --resume"
)
LONGEST_WAIT = timedelta(days=1)
"""How long ranks wait for one another: a dead one is noticed at once."""


def rank() -> int:
    """Return the number of this process."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def size() -> int:
    """Return the number of processes of the run."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def connected(device: torch.device) -> Iterator[None]:
    """Connect the ranks; on GPUs, each has its own."""
    if size() == 1:
        yield
        return
    signal.signal(signal.SIGTERM, _ended)  # from torchrun, where another rank has failed
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if rank():
        warnings.simplefilter("ignore")
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=LONGEST_WAIT)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _ended(*_: object) -> None:
    raise ValueError(PROCESS_ENDED)


def gathered(own: Item) -> list[Item]:
    """Return what each rank has, by rank. Raises ValueError if another rank has ended."""
    if size() == 1:
        return [own]
    buffer, found = io.BytesIO(), [b""] * size()
    torch.save(own, buffer)
    try:
        torch.distributed.all_gather_object(found, buffer.getvalue())
    except RuntimeError as error:
        raise ValueError(PROCESS_ENDED) from error
    return [torch.load(io.BytesIO(one), map_location=_here, weights_only=False) for one in found]


def _here(storage: Any, location: str) -> Any:
    return storage if location == "cpu" else storage.cuda()


def of_first(work: Callable[[], Result]) -> Result:
    """Return on all ranks what rank 0 makes."""
    (made, *_) = gathered(work() if rank() == 0 else None)
    return made  # type: ignore[return-value]


def share(items: Sequence[Item]) -> Sequence[Item]:
    """Return the items that this rank works on."""
    return items[rank() :: size()]


def joined(own: Iterable[Item]) -> Iterable[Item]:
    """Return the results of all ranks."""
    return own if size() == 1 else [one for part in gathered(list(own)) for one in part]


def spread(
    work: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
) -> list[Result]:
    """Return the results of work(items), in order; each rank does its share."""
    parts = gathered(work(share(items)))
    return [parts[place % size()][place // size()] for place in range(len(items))]
