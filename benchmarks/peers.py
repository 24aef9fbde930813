"""FedAVG on the same clients in other simulators, where they are installed: Flower (on Ray) and
Apple's pfl-research.

The same model, initial weights, examples, optimizer and clients a round; what differs is who runs
them.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from limits import in_precision, wait
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Local
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.compute import Compute, to_float
from fedaux.core.local_training import train_locally
from fedaux.core.weights import load, snapshot
from fedaux.models import MODELS


@dataclass(frozen=True)
class PeerTask:
    """Local training and averaging of so many rounds, with everything it needs."""

    model: str
    options: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    images: Tensor
    labels: Tensor
    parts: Sequence[Tensor]
    """The examples of each client; none is empty."""
    num_classes: int
    local: Local
    seed: int
    participants: int
    rounds: int
    precision: str

    def build(self) -> nn.Module:
        """Return the model with its initial weights."""
        model = MODELS[self.model](tuple(self.images.shape[1:]), self.num_classes, **self.options)
        model.load_state_dict(self.weights)
        return model.to(self.images.device)


def save_task(task: PeerTask, path: Path) -> None:
    """Write a task as a safetensors file, for other processes."""
    tensors = {"images": task.images, "labels": task.labels, "order": torch.cat(list(task.parts))}
    tensors |= {f"weights.{name}": tensor for name, tensor in task.weights.items()}
    fields = ("model", "options", "num_classes", "seed", "participants", "rounds", "precision")
    metadata = {name: json.dumps(getattr(task, name)) for name in fields}
    metadata |= {
        "sizes": json.dumps([len(part) for part in task.parts]),
        "local": task.local.model_dump_json(),
    }
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
        path,
        metadata=metadata,
    )


@lru_cache(maxsize=1)
def load_task(path: str, device: str) -> tuple[PeerTask, nn.Module]:
    """Read a task and build its model, once a process."""
    with safe_open(path, framework="pt", device=device) as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    sizes, local = metadata.pop("sizes"), metadata.pop("local")
    prefix = "weights."
    task = PeerTask(
        weights={
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        },
        images=tensors["images"],
        labels=tensors["labels"],
        parts=tensors["order"].split(sizes),
        local=Local.model_validate(local),
        **metadata,
    )
    return task, in_precision(task.build(), task.precision, device=task.images.device)


def answer_flower(path: str, device: str, message: Any, context: Any) -> Any:
    """Train the client that a Flower message is for, and return its reply."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)  # Ray runs as many of us as there are cores
    task, model = load_task(path, device)
    client, number = (
        int(context.node_config["partition-id"]),
        int(message.content["config"]["server-round"]),
    )
    examples = task.parts[client]
    load(model, message.content["arrays"].to_torch_state_dict())
    context = TrainContext(
        model, task.images, task.labels, task.local, 0.0, Compute(task.images.device), key="peer"
    )
    generator = seeding.generator(task.seed, "local", round=number, client=client)
    train_locally(context, ClientJob(client, examples, generator, {}))
    weights = snapshot(model)
    metrics = MetricRecord({"num-examples": len(examples)})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(weights), "metrics": metrics}), reply_to=message
    )


def time_flower(task: PeerTask) -> list[float]:
    """Return the seconds of each round of Flower's FedAvg in its simulation engine, a core for each
    Ray worker."""
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)  # which importing it has set
    device = task.images.device
    workers = min(task.participants, os.cpu_count() or 1)
    resources: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 1 / workers if device.type == "cuda" else 0.0,
    }
    stamps: list[float] = []
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "task.safetensors")
        save_task(task, Path(path))
        client_app, server_app = ClientApp(), ServerApp()

        @client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
        def train(message: Any, context: Any) -> Any:
            from peers import answer_flower

            return answer_flower(path, device.type, message, context)

        @server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
        def serve(grid: Any, context: Any) -> None:
            strategy = FedAvg(
                fraction_train=task.participants / len(task.parts),
                fraction_evaluate=0.0,
                min_train_nodes=task.participants,
                min_available_nodes=len(task.parts),
            )
            arrays = ArrayRecord({name: tensor.cpu() for name, tensor in task.weights.items()})
            strategy.start(
                grid=grid,
                initial_arrays=arrays,
                num_rounds=task.rounds,
                evaluate_fn=lambda number, arrays: stamps.append(time.perf_counter()),
            )

        run_simulation(
            server_app,
            client_app,
            num_supernodes=len(task.parts),
            backend_config={
                "init_args": {"num_cpus": workers, "log_to_driver": False},
                "client_resources": resources,
            },
        )
    return intervals(stamps)


def intervals(stamps: Sequence[float]) -> list[float]:
    """Return the times between stamps."""
    return [after - before for before, after in pairwise(stamps)]


class PflModule(nn.Module):
    """A model with the two functions that pfl asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        self.model.train(len(labels) > 1)
        return functional.cross_entropy(self.model(to_float(images)), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the loss in pfl's form; it asks for it in the first round only."""
        from pfl.metrics import Weighted

        self.model.eval()
        loss = functional.cross_entropy(self.model(to_float(images)), labels, reduction="sum")
        return {"loss": Weighted(float(loss), len(labels))}


def time_pfl(task: PeerTask) -> list[float]:
    """Return the seconds of each round of pfl's federated averaging in its simulated backend, one
    process."""
    device = task.images.device
    os.environ["PFL_PYTORCH_DEVICE"] = device.type
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    stamps: list[float] = []

    class Stamp(TrainingProcessCallback):  # type: ignore[misc, unused-ignore]
        """Notes when a round begins and ends."""

        def on_train_begin(self, *, model: Any) -> Any:
            wait(device)
            stamps.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            wait(device)
            stamps.append(time.perf_counter())
            return False, Metrics()

    def examples_of(client: int) -> Any:
        # pfl takes batches in the order of the data, so they are shuffled where a user's data is
        # made.
        order = torch.randperm(len(task.parts[client]), device=device)
        examples = task.parts[client][order]
        return Dataset((task.images[examples], task.labels[examples]), user_id=str(client))

    module = PflModule(task.build())
    optimizers = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    model = PyTorchModel(
        model=module,
        local_optimizer_create=optimizers[task.local.optimizer],
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if task.precision == "bf16" else None,
    )
    clients = FederatedDataset(
        examples_of, get_user_sampler("minimize_reuse", list(range(len(task.parts))))
    )
    backend = SimulatedBackend(
        training_data=clients, val_data=clients, postprocessors=[WeightByDatapoints()]
    )
    FederatedAveraging().run(
        backend=backend,
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds + 1,
            train_cohort_size=task.participants,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task.local.epochs,
            local_learning_rate=task.local.learning_rate,
            local_batch_size=task.local.batch_size,
        ),
        callbacks=[Stamp()],
        send_metrics_to_platform=False,
    )
    return intervals(stamps)


@dataclass(frozen=True)
class Peer:
    """Another simulator."""

    title: str
    distribution: str
    modules: tuple[str, ...]
    """What has to be importable."""
    install: str
    time: Callable[[PeerTask], list[float]]

    def missing(self) -> bool:
        """Whether it is not installed."""
        return any(importlib.util.find_spec(module) is None for module in self.modules)

    def version(self) -> str:
        """Return the installed version."""
        return importlib.metadata.version(self.distribution)


PEERS: dict[str, Peer] = {
    "flower": Peer(
        "Flower's simulation engine",
        "flwr",
        ("flwr", "ray"),
        "pip install 'flwr[simulation]>=1.41,<1.42'",
        time_flower,
    ),
    "pfl": Peer("pfl-research", "pfl", ("pfl",), "pip install 'pfl[pytorch]'", time_pfl),
}


def refuse_missing(names: Sequence[str]) -> None:
    """End with how to install it where a simulator is asked for that is not there."""
    for name in names:
        if PEERS[name].missing():
            raise SystemExit(
                f"--peer {name}: {PEERS[name].title} is not installed here: {PEERS[name].install}"
            )
