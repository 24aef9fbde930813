"""Training steps of several models of one architecture, each step one CUDA graph for all of
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.objectives import CROSS_ENTROPY, LocalLoss
from fedaux.core.weights import clones, copy_into, load, zero
from fedaux.fast.capture import capture
from fedaux.fast.triton.network import Network
from fedaux.models import SplitModel

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class BatchedSteps:
    """Like CapturedSteps, for several clients: Adam on cross entropy (labels [n]) or D_KL (soft
    labels [n, C]).

    Weights, moments and statistics of the clients stay where they are in memory; new values are
    copied into them.
    """

    def __init__(
        self,
        model: SplitModel,
        inputs: Tensor,
        targets: Tensor,
        *,
        clients: int,
        learning_rate: float,
        compute: Compute,
        capacity: int,
        batch_size: int,
        weight_decay: float = 0.0,
        proximal: float = 0.0,
        loss: LocalLoss = CROSS_ENTROPY,
    ) -> None:
        on_gpu = compute.device.type == "cuda"
        self.network = Network(
            model,
            inputs,
            targets,
            clients=clients,
            batch_size=batch_size,
            capacity=capacity,
            precision=compute.precision,
            weight_decay=weight_decay,
            proximal=proximal,
            mean=compute.mean,
            deviation=compute.deviation,
            side=torch.cuda.Stream(compute.device) if on_gpu else None,
            loss=loss,
        )
        self.stream = torch.cuda.Stream(compute.device) if on_gpu else None
        self.clients = clients
        self.network.rate.fill_(learning_rate)
        self._names = list(model.state_dict())
        self._batch_size = batch_size
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def total(self) -> Tensor:
        """Sum of each client's loss over the examples seen, without the proximal term,
        [clients]."""
        return self.network.total

    def set_targets(self, targets: Tensor) -> None:
        """Replace the targets of all rows."""
        self.network.targets.copy_(targets)

    def set_objective(self, adjustments: Sequence[Tensor | None], beliefs: Tensor | None) -> None:
        """Set what each client's class counts do to its logits [3, C], and the public soft
        labels."""
        if self.network.loss.adjusted:  # else the kernels have no place for it
            for place, adjustment in zip(self.network.adjustment, adjustments, strict=False):
                if adjustment is not None:
                    place[:, : adjustment.shape[1]].copy_(adjustment[:2])
        if beliefs is not None:
            self.network.beliefs.copy_(beliefs)

    def load(self, weights: Weights) -> None:
        """Give all clients these weights and statistics; `start` lets steps see them."""
        own = self._values()
        lines = [line for name in own for line in own[name]]
        copy_into(lines, [weights[name] for name in own for _ in range(self.clients)])

    def weights(self, count: int | None = None) -> list[dict[str, Tensor]]:
        """Return copies of the weights and statistics of the first clients, or all, each as a
        model's state_dict."""
        own, count = self._values(), self.clients if count is None else count
        return [
            clones({name: values[client] for name, values in own.items()})
            for client in range(count)
        ]

    def reset(self) -> None:
        """Let the optimizers start anew."""
        zero((self.network.first, self.network.second, self.network.steps))

    def _values(self) -> dict[str, Tensor]:
        """Return everything in a model's state_dict, in its order, [clients, ...] each."""
        network = self.network
        return {
            name: network.statistics[name]
            if name in network.statistics
            else network.stack.of(network.params_fp32, name)
            for name in self._names
        }

    def optimizer_state(self, client: int) -> dict[str, Tensor]:
        """Return copies of a client's moments by "parameter/moment", as
        `fedaux.core.steps.optimizer_state` does."""
        network, found = self.network, dict[str, Tensor]()
        step = network.steps[client].float()
        for name in network.stack.shapes:
            values = (
                network.stack.of(network.first, name)[client],
                network.stack.of(network.second, name)[client],
                step,
            )
            found |= {
                f"{name}/{moment}": value for moment, value in zip(MOMENTS, values, strict=True)
            }
        return clones(found)

    def restore_optimizer(self, client: int, state: Mapping[str, Tensor]) -> None:
        """Give a client the moments that `optimizer_state` returned."""
        network = self.network
        names = list(network.stack.shapes)
        places = [
            network.stack.of(moments, name)[client]
            for moments in (network.first, network.second)
            for name in names
        ]
        copy_into(places, [state[f"{name}/{moment}"] for moment in MOMENTS[:2] for name in names])
        network.steps[client] = state[f"{names[0]}/step"].to(network.steps)

    def start(self) -> None:
        """Take the present weights, also as anchor of the proximal term, and count losses anew."""
        self.network.total.zero_()
        self.network.refresh()
        if self.network.proximal > 0:
            self.network.anchor.copy_(self.network.params_fp32)

    def begin(self, rows: Sequence[Tensor], *, epochs: int = 1) -> None:
        """Say which rows come next for each client, [epochs * n] each; clients that are not named
        have none.

        A batch ends with an epoch, which a client begins when it is through with the last one.
        """
        for line, each in zip(self.network.rows, rows, strict=False):
            line[: len(each)].copy_(each, non_blocking=True)
        counts = [*map(len, rows), *[0] * (self.clients - len(rows))]
        # From pinned memory: nothing waits for the device.
        ahead = torch.tensor(
            [counts, [count // epochs for count in counts]],
            dtype=torch.int32,
            pin_memory=self.stream is not None,
        )
        self.network.ahead.copy_(ahead, non_blocking=True)
        self.network.following.zero_()

    def prepare(self) -> None:
        """Compile the kernels and capture the step; nothing is trained by it."""
        if self.stream is None or self._graph is not None:
            return
        self.begin([])  # without rows, kernels change nothing
        self._graph = capture(self.network.step, stream=self.stream, warm_up_steps=1)

    def step(self) -> None:
        """Take a step on the next rows of every client that has some left."""
        if self._graph is None:
            self.network.step()
        else:
            self._graph.replay()

    def run(self, rows: Sequence[Tensor], *, epochs: int = 1) -> None:
        """Take a step on each batch of every client's rows in turn; the last one of an epoch can
        be smaller."""
        self.begin(rows, epochs=epochs)
        longest = max(map(len, rows), default=0) // epochs
        for _ in range(epochs * math.ceil(longest / self._batch_size)):
            self.step()


class ServerModelSteps:
    """The same for one model, which gets the weights whenever they are settled; the interface is
    that of Steps."""

    def __init__(self, model: SplitModel, batched: BatchedSteps) -> None:
        self.model = model
        self._batched = batched

    def set_targets(self, targets: Tensor) -> None:
        """Replace the targets of all rows."""
        self._batched.set_targets(targets)

    def reset(self) -> None:
        """Let the optimizer start anew."""
        self._batched.reset()

    def start(self) -> None:
        """Begin at the model's present weights."""
        self._batched.load(self.model.state_dict())
        self._batched.start()

    def begin(self, rows: Tensor) -> None:
        """Say which rows come next, [n]."""
        self._batched.begin([rows])

    def step(self, size: int) -> None:
        """Take a step on the next rows: as many as a batch has, or the rest of them."""
        self._batched.step()

    def settle(self) -> None:
        """Give the model the weights as they are now."""
        load(self.model, self._batched.weights()[0])
