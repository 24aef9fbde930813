"""The operations of torch that run, by name."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Listening(TorchDispatchMode):
    """Collects the names of all operations in `called`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        self.called.update(str(operation).split("."))
        return operation(*arguments, **(options or {}))
