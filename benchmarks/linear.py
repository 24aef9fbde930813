"""Linear mode against training heads through the frozen network: the same heads, at what cost a
round?

    python benchmarks/linear.py [--clients 5] [--examples 32] [--distill 160] [--rounds 2] [--json FILE]

ResNet-8 on random 3x32x32 images, method fedaux, on the CPU. The slow way computes the features of
every batch again, as usual with a frozen network; the fast way is `mode =
"linear"`. Preparation (the features, once) is timed apart. Both end with the same heads, which is
checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from limits import machine_of
from players import Fast, fast_federation
from setting import PROTOTYPE, Settings, experiment_of, random_data
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Experiment
from fedaux.core.task import build_models
from fedaux.data import LabelledData
from fedaux.models import SplitModel


class FrozenNetwork:
    """Rounds of fedaux in which heads are trained through a frozen feature extractor, batch by
    batch."""

    def __init__(self, fast: Fast, data: LabelledData) -> None:
        self._task = fast.server.task
        self._fast = fast
        self._data = data
        self._model: SplitModel = build_models(self._task)[PROTOTYPE].eval()
        self._model.features.load_state_dict(fast.server.preparation.extractors[PROTOTYPE])
        self._head = {
            name.removeprefix("head."): t for name, t in fast.state.models[PROTOTYPE].items()
        }

    def play(self, number: int) -> dict[str, Tensor]:
        """Play one round and return the head."""
        experiment, seed = self._task.experiment, self._task.seed
        chosen = self._fast.chosen(number)
        heads = []
        for client in chosen:
            rows = torch.from_numpy(self._fast.parts[client])
            generator = seeding.generator(seed, "local", round=number, client=client)
            order = rows[torch.from_numpy(generator.permutation(len(rows)))]
            batches = order.split(experiment.local.batch_size)
            heads.append(
                self._train(
                    self._data.images,
                    self._data.labels,
                    batches,
                    rate=experiment.local.learning_rate,
                )
            )
        sizes = [len(self._fast.parts[client]) for client in chosen]
        self._head = {
            name: sum(
                (head[name] * (size / sum(sizes)) for head, size in zip(heads, sizes, strict=True))
            )  # type: ignore[misc]
            for name in self._head
        }
        weights = self._fast.certainty_weights(chosen)
        targets = torch.zeros(())
        for head, own in zip(heads, weights, strict=True):
            targets = targets + own[:, None] * torch.softmax(
                self._predict(head, self._task.distill_set), dim=1
            )
        generator = seeding.generator(seed, "distillation", round=number, part=PROTOTYPE)
        batches = torch.from_numpy(generator.permutation(len(targets))).split(
            experiment.distillation.batch_size
        )
        self._head = self._train(
            self._task.distill_set, targets, batches, rate=experiment.distillation.learning_rate
        )
        self._predict(self._head, self._task.test_images)
        return {f"head.{name}": tensor for name, tensor in self._head.items()}

    def _train(
        self, inputs: Tensor, targets: Tensor, batches: Sequence[Tensor], *, rate: float
    ) -> dict[str, Tensor]:
        head: nn.Module = self._model.head
        head.load_state_dict(self._head)
        optimizer = torch.optim.Adam(head.parameters(), lr=rate)
        for batch in batches:
            with torch.no_grad():
                features = self._model.features(inputs[batch].float() / 255)
            logits = head(features)
            if targets.ndim == 1:
                loss = functional.cross_entropy(logits, targets[batch])
            else:
                loss = functional.kl_div(
                    torch.log_softmax(logits, dim=1), targets[batch], reduction="batchmean"
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}

    @torch.no_grad()
    def _predict(self, head: dict[str, Tensor], images: Tensor) -> Tensor:
        self._model.head.load_state_dict(head)
        return torch.cat([self._model(batch.float() / 255) for batch in images.split(256)])


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--examples", type=int, default=32, help="a client")
    parser.add_argument("--distill", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    settings = Settings(
        model="resnet8",
        image=(3, 32, 32),
        clients=arguments.clients,
        participants=arguments.clients,
        examples=arguments.examples,
        distill=arguments.distill,
        test=64,
    )
    device = torch.device("cpu")
    data, auxiliary = random_data(settings, device=device)
    experiment = Experiment(
        **{**experiment_of(settings, device=device).to_dict(), "mode": "linear"}
    )
    fast = fast_federation(experiment, data, auxiliary)
    slow = FrozenNetwork(fast, data)
    state = fast.state
    seconds: dict[str, list[float]] = {"through the frozen network": [], "linear mode": []}
    for number in range(1, arguments.rounds + 2):
        began = time.perf_counter()
        expected = slow.play(number)
        seconds["through the frozen network"].append(time.perf_counter() - began)
        began = time.perf_counter()
        state, _ = fast.server.play_round(state)
        seconds["linear mode"].append(time.perf_counter() - began)
        difference = max(
            float((state.models[PROTOTYPE][name] - t).abs().max()) for name, t in expected.items()
        )
        print(
            f"round {number}: largest difference between the two heads {difference:.1e}", flush=True
        )
    # The first round computes the features of the private data: it is the warm-up.
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    ratio = medians["through the frozen network"] / medians["linear mode"]
    for name, median in medians.items():
        print(f"{name:28s} {median:8.3f} s a round, {seconds[name][0]:.3f} s the first")
    print(f"ratio {ratio:.0f}; preparation {fast.seconds:.2f} s")
    if arguments.json:
        result = {
            "ratio": ratio,
            "seconds": medians,
            "difference": difference,
            "machine": machine_of(device),
        }
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
