"""Teaching while distilling, on the few cores of a CPU: soft labels in the order in which they will be asked for.

The steps of distillation come one after another, and further cores hardly help with a small one; they can work on the
soft labels of later batches meanwhile. Who teaches which piece changes nothing in it, so neither does anybody's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition

from torch import Tensor

TeachRows = Callable[[Tensor, int], Tensor]
"""teach(rows, worker): the soft labels [n, C] of some rows [n] of the distill set, as computed by that worker."""


class Dictation:
    """Soft labels in a given order, piece by piece: helpers go ahead, and who waits for a piece teaches the next."""

    def __init__(self, teach: TeachRows, order: Tensor, *, piece: int) -> None:
        self.seconds = 0.0
        """What the learner has spent on teaching and waiting."""
        self._teach = teach
        self._order = order
        self._pieces = order.split(piece)
        self._taught: list[Tensor | None] = [None] * len(self._pieces)
        self._begun = 0
        self._error: BaseException | None = None
        self._changed = Condition()
        self._copied = 0
        self._present = 0
        self._targets: Tensor | None = None

    def help(self, worker: int) -> None:
        """Teach one piece after another until none is left, or until the learner has heard enough."""
        while self._teach_next(worker):
            pass

    def end(self) -> None:
        """Let helpers stop after the pieces they are at."""
        with self._changed:
            self._begun = len(self._pieces)

    @property
    def targets(self) -> Tensor:
        """The soft labels [N, C]: right in those rows that `until` was called for."""
        if self._targets is None:
            self.until(1)
        assert self._targets is not None
        return self._targets

    def until(self, count: int) -> None:
        """Return when the first so many rows of the order are in `targets`. Raises what a helper has raised."""
        if self._present >= count:
            return
        began = time.perf_counter()
        while self._present < count:
            if not self._copy_next() and not self._teach_next(0):
                with self._changed:
                    self._changed.wait_for(lambda: self._error or self._taught[self._copied] is not None)
            if self._error is not None:
                raise self._error
        self.seconds += time.perf_counter() - began

    def _copy_next(self) -> bool:
        """Copy the first piece that is not yet in `targets`, if it has been taught."""
        taught, rows = self._taught[self._copied], self._pieces[self._copied]
        if taught is None:
            return False
        if self._targets is None:
            self._targets = taught.new_zeros(len(self._order), *taught.shape[1:])
        self._targets[rows] = taught
        self._taught[self._copied] = None
        self._copied += 1
        self._present += len(rows)
        return True

    def _teach_next(self, worker: int) -> bool:
        """Teach the first piece that nobody has begun, if there is one."""
        with self._changed:
            number = self._begun
            if number == len(self._pieces) or self._error is not None:
                return False
            self._begun += 1
        try:
            taught = self._teach(self._pieces[number], worker)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return False
        with self._changed:
            self._taught[number] = taught
            self._changed.notify_all()
        return True
