"""Run every method and seed of an experiment in a run directory, resumable after every round."""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import fedaux
from fedaux import seeding
from fedaux.config import Certainty, Experiment, ExperimentFields
from fedaux.core import ranks
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.core.compute import (
    CLIENTS_AT_ONCE,
    Compute,
    choose_device,
    compute_for,
    inference_batch,
)
from fedaux.core.messages import Clients, Weights
from fedaux.core.server import Server, prepare
from fedaux.core.simulation import SimulatedClients
from fedaux.core.task import Callback, State, Task, population
from fedaux.core.weights import flat
from fedaux.data import LabelledData, load_both, notes, split_auxiliary, split_dirichlet
from fedaux.data.tensor_files import save_tensors
from fedaux.encoders import Encoder, Extractor, extractor_of
from fedaux.fast import best_backend
from fedaux.fast.feature_cache import FeatureCache
from fedaux.files import read_json, save_json
from fedaux.formatting import optional
from fedaux.models import SplitModel
from fedaux.predict.trained_model import TrainedModel, load
from fedaux.pretrain import H0Request, content_digest, pretrained_extractor, shared_store
from fedaux.privacy.mechanisms import MECHANISMS, Public
from fedaux.recipes import load_experiment
from fedaux.running import model_files, plugins, preflight
from fedaux.running.callbacks import watched
from fedaux.running.from_python import Factory, in_memory
from fedaux.running.privacy_plan import noise_warnings
from fedaux.running.run_directory import Progress, RunDirectory, stored_experiment
from fedaux.running.shared import turn
from fedaux.running.summary import summarise

MOST_LISTED_CLIENTS = 200
"""Clients in split.json and in the figures of the report: at most the first ones."""


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run; printed, or as the last line of a notebook's cell, it is a table."""

    directory: Path
    summary: Mapping[str, Any]

    def model(
        self, method: str | None = None, *, seed: int | None = None, prototype: str | None = None
    ) -> TrainedModel:
        """Return a trained model; method, seed and prototype are needed if there are several."""
        return load(self.directory, method=method, seed=seed, prototype=prototype)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every method, seed and round (metrics.jsonl)."""
        lines = (self.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def to_pandas(self) -> Any:
        """Return the metrics as a DataFrame, one row per method, seed and round.

        Raises ValueError if pandas is not installed.
        """
        pandas = optional("pandas", "to_pandas needs the package pandas", extras="pandas")
        return pandas.DataFrame(self.metrics())

    def __repr__(self) -> str:
        from rich.console import Console

        from fedaux.running import display

        console = Console(width=120, color_system=None, force_jupyter=False, force_terminal=False)
        with console.capture() as captured:
            console.print(display.result_table(self.summary))
            if (compared := display.verdict_table(self.directory)) is not None:
                console.print(compared)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        lines += [
            *display.warning_lines(self.directory),
            *display.privacy_lines(self.directory),
        ]
        return "\n".join([*lines, f"Report: {self.directory / 'report.html'}"])

    def _repr_html_(self) -> str:
        from fedaux.report.tables import to_html
        from fedaux.running.display import summary_table

        report = f"<p>Report: <code>{escape(str(self.directory / 'report.html'))}</code></p>"
        return to_html(summary_table(self.summary)) + report


class NullCallback:
    """A callback that does nothing."""

    def phase(self, task: Task, round: int, name: str) -> None:
        """Do nothing."""

    def round(self, row: Mapping[str, Any]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run besides its experiment: data on the device, and how to compute."""

    data: LabelledData
    auxiliary: Tensor
    compute: Compute
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What loading skipped and warned of, for data.json."""


def load_inputs(
    experiment: Experiment,
    *,
    extractor_for: Callable[[Experiment, Compute], Extractor | None] = extractor_of,
) -> Inputs:
    """Load the data of an experiment onto its device; an extractor makes features, if any."""
    device = prepare_device(experiment)
    compute = compute_for(experiment.engine, device, experiment.data)
    with notes.collected() as found:
        extractor = extractor_for(experiment, compute)
        data, auxiliary = load_both(experiment, converter=extractor)
    if extractor is not None:
        data = replace(data, encoder=extractor.encoder.card())
    return Inputs(data.to(device), auxiliary.to(device), compute, found.to_dict())


def run(
    experiment: Experiment | Path | str | None = None,
    *,
    model: nn.Module | Encoder | Factory | None = None,
    clients: Sequence[Any] | Mapping[str, Any] | None = None,
    public: Any = None,
    test: Any = None,
    out: Path | str | None = None,
    resume: bool = False,
    callback: Callback | Iterable[Callback] | None = None,
    progress: bool = True,
    load: Callable[[Experiment], Inputs] = load_inputs,
) -> Result:
    """Run every method and seed of an experiment in a run directory, and write the report.

    Raises ConfigError or ValueError, before anything is written, if the experiment cannot be run.

    Args:
        experiment: An Experiment, or anything that `load_experiment` takes. Default: settings for
            small data, `fedaux.running.from_python.SMALL`.
        model: A plain nn.Module whose last step is an nn.Linear, a class or function that returns
            one (called without arguments, or with the input shape and the number of classes), or a
            SplitModel; or an Encoder, on whose features heads are trained. It replaces the
            prototypes of the experiment.
        clients: One dataset per client, in a list or in a dict by name: a torch Dataset of (image,
            label) pairs, or a pair of images [N, C, H, W] and labels [N]. Pixels are uint8 or
            floats in [0, 1]. Datasets are read once, so random transforms are not repeated.
        public: Public unlabeled images of the same shape: a Dataset, whose labels are ignored, or
            an array [N, C, H, W].
        test: Test data, as `clients`. Default: a share of each client's examples
            (`data.test_fraction`).
        out: The run directory. Default: runs/NAME.
        resume: Continue the run in this directory.
        callback: One or several objects with `phase(task, round, name)` and `round(row)`.
        progress: Show a progress bar in terminals and notebooks.
        load: Loads the data; a sweep reuses it between runs.
    """
    if isinstance(experiment, Path | str):
        experiment = load_experiment(experiment)
    elif not isinstance(experiment, Experiment | None):
        raise ValueError(
            f"experiment: should be an Experiment or a recipe, not {type(experiment).__name__}; "
            "settings in a dict are fedaux.Experiment(**settings)"
        )
    given = in_memory(experiment, model=model, clients=clients, public=public, test=test)
    with given as experiment, ranks.connected(choose_device(experiment.engine.device)):
        path = run_path(experiment, out)

        def checked() -> None:
            preflight.check(experiment)
            if resume:
                plugins.check_same(path)
            stored_experiment(path, experiment, resume=resume)  # before much data is read

        ranks.of_first(checked)
        inputs = load(experiment)
        first = partial(split_for, experiment, inputs.data, experiment.seeds[0])
        if ranks.rank():
            callback, progress = None, False
        with watched(experiment, callback, progress=progress) as watching:
            return run_with_clients(
                experiment,
                inputs,
                simulated(inputs.data),
                path=path,
                resume=resume,
                callback=watching,
                tables=partial(split_tables, experiment, inputs.data),
                sizes=lambda: [len(part) for part in first()],
            )


def simulated(data: LabelledData) -> Callable[[Task], Clients]:
    """Return a factory of simulated clients for a task."""
    return lambda task: SimulatedClients(task, data.images, data.labels, client_parts(task, data))


def prepare_device(experiment: Experiment) -> torch.device:
    """Return the experiment's device, and set torch's number of threads."""
    if experiment.engine.threads is not None:
        torch.set_num_threads(experiment.engine.threads)
    return choose_device(experiment.engine.device)


def run_path(experiment: Experiment, out: Path | str | None) -> Path:
    """Return the run directory: `out`, the experiment's own, or runs/NAME."""
    return Path(out or experiment.output.directory or Path("runs") / experiment.name)


def run_with_clients(
    experiment: Experiment,
    inputs: Inputs,
    clients: Callable[[Task], Clients],
    *,
    path: Path,
    resume: bool,
    callback: Callback,
    tables: Callable[[], Mapping[str, Any]] | None = None,
    sizes: Callable[[], Sequence[int]] | None = None,
) -> Result:
    """Run every method and seed with any clients; the server uses test data and class names only.

    `tables` returns the content of split.json and `sizes` the clients' numbers of examples, if
    they are known. Warns before pretraining if noise drowns what clients release.
    """
    data, auxiliary, compute = inputs.data, inputs.auxiliary, inputs.compute
    preflight.check_data(experiment, data, auxiliary)
    if resume:
        plugins.check_same(path)
    drowned = (
        []
        if sizes is None
        else noise_warnings(
            experiment,
            sizes(),
            input_shape=data.input_shape,
            num_negatives=round(experiment.auxiliary.negatives_fraction * len(auxiliary)),
            num_classes=len(data.classes),
        )
    )
    for line in drowned:
        warnings.warn(line, stacklevel=3)
    if ranks.rank():
        directory = RunDirectory(path, experiment)  # which rank 0 alone opens and writes
        runner = ExperimentRunner(
            experiment, directory, data, auxiliary, callback, compute, clients
        )
        for method, seed in directory.tasks():
            runner.run(method, seed)
        return Result(path, {})
    with RunDirectory.open(path, experiment, resume=resume) as directory:
        save_json(path / "environment.json", environment(compute))
        if data.encoder is not None:
            keep_encoder(path / "encoder.json", data.encoder)
        save_json(path / "data.json", {**inputs.notes, "test": describe_test(data)})
        if tables is not None:
            save_json(path / "split.json", tables())
        save_json(path / "warnings.json", {"noise": drowned})
        directory.write_metrics()
        directory.write_ledger()
        runner = ExperimentRunner(
            experiment, directory, data, auxiliary, callback, compute, clients
        )
        later: list[tuple[str, int]] = []
        for wait, tasks in ((False, directory.tasks()), (True, later)):
            for method, seed in tasks:
                with turn(directory, method, seed, wait=wait) as mine:
                    if not mine:  # another run of a sweep is at it
                        later.append((method, seed))
                        continue
                    try:
                        runner.run(method, seed)
                    except torch.cuda.OutOfMemoryError as error:
                        hint = "; engine settings can be changed with --resume"
                        raise ValueError(
                            out_of_memory(experiment, f"{method}, seed {seed}") + hint
                        ) from error
        directory.write_metrics()
        summary = write_summary(directory)
        from fedaux.report import write_report  # a slow import

        write_report(path)
    return Result(path, summary)


class ExperimentRunner:
    """Runs the methods and seeds of one experiment."""

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory,
        data: LabelledData,
        auxiliary: Tensor,
        callback: Callback,
        compute: Compute | None = None,
        clients: Callable[[Task], Clients] | None = None,
    ) -> None:
        self._experiment = experiment
        self._directory = directory
        self._compute = compute or compute_for(experiment.engine, auxiliary.device, experiment.data)
        self._clients = clients or simulated(data)
        self._data = data
        self._auxiliary = auxiliary
        self._content = content_digest(auxiliary)
        self._callback = callback

    def run(self, method: str, seed: int) -> None:
        """Run one method and seed, from its last saved round to the end."""
        directory, rounds = self._directory, self._experiment.rounds
        finished, progress = ranks.of_first(lambda: self._stored(method, seed))
        if finished:
            return
        task = self.task(method, seed)
        clients = self._clients(task)
        if progress is not None:
            clients.load_client_states(progress.kept)
        else:
            state, preparation = prepare(
                task,
                clients,
                extractor=self.extractor(task),
                callback=self._callback,
                choose_public=lambda public, section: ranks.of_first(
                    lambda: self._shared_public(public, section, seed)
                ),
            )
            progress = Progress(state, preparation, [])
            if ranks.rank() == 0:
                directory.save(method, seed, progress)
                directory.write_ledger()
        federation = Server(task, progress.preparation, clients, callback=self._callback)
        while progress.state.round < rounds:
            state, row = federation.play_round(progress.state)
            released = state.releases.keys() != progress.state.releases.keys()
            progress = Progress(
                state, progress.preparation, [*progress.rows, row], clients.client_states()
            )
            if ranks.rank():
                continue
            directory.save(method, seed, progress)
            directory.append_metrics(row)
            if released:
                directory.write_ledger()
        if ranks.rank():
            return
        listed = any(client < MOST_LISTED_CLIENTS for client in progress.state.releases)
        if self._lacks_scores(method, seed) and listed:
            tensors, metadata = describe_scores(federation, progress.state)
            save_tensors(directory.path / "scores.safetensors", tensors, metadata=metadata)
        self._write_models(method, seed, progress)
        write_summary(directory)

    def _stored(self, method: str, seed: int) -> tuple[bool, Progress | None]:
        """Return whether a method and seed is finished, and otherwise its saved progress."""
        directory, progress = self._directory, None
        finished = directory.rounds_done(method, seed) >= self._experiment.rounds
        lacks_models = model_files.lacks_models(directory, method, seed)
        lacks_scores = self._lacks_scores(method, seed)
        if not finished or lacks_models or lacks_scores:  # else its tensors are not read again
            progress = directory.load(method, seed, device=str(self._auxiliary.device))
        if progress is not None and finished and lacks_models:
            self._write_models(method, seed, progress)
        return finished and not lacks_scores, progress

    def _write_models(self, method: str, seed: int, progress: Progress) -> None:
        model_files.write_models(
            self._directory,
            method,
            seed,
            progress=progress,
            data=self._data,
            compute=self._compute,
        )

    def task(self, method: str, seed: int) -> Task:
        """Return the task of one method and seed; all methods of a seed share the public data."""
        negatives, distill_set = split_auxiliary(
            len(self._auxiliary),
            negatives_fraction=self._experiment.auxiliary.negatives_fraction,
            generator=seeding.generator(seed, "auxiliary split"),
        )
        device, placed = self._auxiliary.device, self._compute.place_inputs
        rows = [torch.from_numpy(own).to(device) for own in (negatives, distill_set)]
        parts = [placed(self._auxiliary[own]) for own in rows]
        features = None
        if self._experiment.mode == "linear":
            batch_size, store = self._experiment.evaluation.batch_size, shared_store("features")
            features = FeatureCache(
                self._compute,
                batch_size=batch_size,
                folder=store,
                report=lambda done, total: self._callback.phase(
                    task, 0, f"features of {done}/{total}"
                ),
            )
            for part, own in zip(parts, rows, strict=True):
                features.tell(part, whole=self._auxiliary, rows=own)
        settings = METHODS[method].own_settings(self._experiment)
        experiment, prototype_of = population(settings, METHODS[method])
        task = Task(
            experiment=experiment,
            method=METHODS[method],
            seed=seed,
            input_shape=self._data.input_shape,
            num_classes=len(self._data.classes),
            prototype_of=prototype_of,
            negatives=parts[0],
            distill_set=parts[1],
            test_images=placed(self._data.test_images),
            test_labels=self._data.test_labels,
            backend=best_backend(self._compute, features=features),
            validation=self._data.validation,
        )
        return task

    def extractor(self, task: Task) -> Callable[[str, SplitModel], Weights]:
        """Return the function that trains or loads each prototype's h0, for `prepare`."""
        section = self._experiment.pretraining
        prototypes = {prototype.name: prototype for prototype in self._experiment.prototypes}

        def extract(name: str, model: SplitModel) -> Weights:
            request = H0Request(
                prototypes[name],
                model,
                section=section,
                images=self._auxiliary,
                content=self._content,
                seed=task.seed,
                compute=self._compute,
                vocabulary=self._data.vocabulary,
            )
            return ranks.of_first(
                lambda: pretrained_extractor(
                    request,
                    store=self._directory.path / "pretrained",
                    shared=shared_store(),
                    on_epoch=lambda progress: self._callback.phase(task, 0, f"pretrain {progress}"),
                )
            )

        return extract

    def _shared_public(
        self, public: dict[str, Public], section: Certainty, seed: int
    ) -> dict[str, Public]:
        """Return the first public map of a seed in this run, which all methods with the same
        mechanism share."""
        recipe = self._experiment.certainty.mechanism
        own = "" if section.mechanism == recipe else f"-{section.mechanism}"
        file = self._directory.path / "public" / f"seed{seed}{own}.safetensors"
        if not file.exists():
            save_tensors(file, flat(public))
        try:
            stored = load_file(file, device=str(self._auxiliary.device))
        except SafetensorError as error:
            raise ValueError(
                f"{file}: damaged ({error}); delete it and use --resume, it is computed again"
            ) from error
        return {name: {key: stored[f"{name}/{key}"] for key in own} for name, own in public.items()}

    def _lacks_scores(self, method: str, seed: int) -> bool:
        """Return whether scores.safetensors is missing and comes from this method and seed."""
        scoring = [
            name
            for name in self._experiment.method
            if any(MECHANISMS[one.mechanism](one).reads_features for one in asks_of(name).releases)
        ]
        first = (scoring[:1], self._experiment.seeds[0]) == ([method], seed)
        return first and not (self._directory.path / "scores.safetensors").exists()


def client_parts(task: Task, data: LabelledData) -> list[NDArray[np.int64]]:
    """Return the examples of each client of a task; clients of pooled data hold all of them."""
    parts = split_for(task.experiment, data, task.seed)
    if task.asks.shares == "data":
        return [np.sort(np.concatenate(parts))] * len(task.prototype_of)
    return parts


def split_for(
    experiment: ExperimentFields, data: LabelledData, seed: int
) -> list[NDArray[np.int64]]:
    """Return the examples of each client: `data.clients`, or a split that depends on the seed."""
    if data.clients is not None:
        return list(data.clients)
    return split_dirichlet(
        data.labels.cpu().numpy(),
        num_clients=experiment.split.num_clients,
        alpha=experiment.split.alpha,
        num_classes=len(data.classes),
        generator=seeding.generator(seed, "split"),
    )


def split_table(experiment: Experiment, data: LabelledData, seed: int) -> NDArray[np.int64]:
    """Return the number of examples per client and class."""
    labels = data.labels.cpu().numpy()
    parts = split_for(experiment, data, seed)
    return np.stack([np.bincount(labels[part], minlength=len(data.classes)) for part in parts])


def split_tables(experiment: Experiment, data: LabelledData) -> dict[str, Any]:
    """Return the client-by-class table of every seed, of at most `MOST_LISTED_CLIENTS` clients, for
    split.json."""
    tables = {
        str(seed): split_table(experiment, data, seed)[:MOST_LISTED_CLIENTS].tolist()
        for seed in experiment.seeds
    }
    drawn = (
        {"alpha": experiment.split.alpha}
        if data.clients is None
        else {"clients": list(experiment.data.clients), "names": list(experiment.data.client_names)}
    )
    return {"classes": list(data.classes), **drawn, "tables": tables}


def describe_test(data: LabelledData) -> dict[str, Any]:
    """Return the number of test examples and the share of the most frequent class among them."""
    counts = torch.bincount(data.test_labels)
    return {"examples": int(counts.sum()), "largest_class": float(counts.max() / counts.sum())}


def describe_scores(federation: Server, state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each client's weight by test class. Test labels are used for this figure only."""
    task, scorer = federation.task, federation.scorer
    chosen = [client for client in sorted(state.releases) if client < MOST_LISTED_CLIENTS]
    projected = {
        name: scorer.project(name, task.test_images) for name in federation.preparation.public
    }
    weights = torch.softmax(scorer.log_scores(state.releases, chosen, projected), dim=0)
    members = torch.nn.functional.one_hot(task.test_labels, task.num_classes).to(weights)
    by_class = (weights @ members) / members.sum(dim=0).clamp_min(1)
    words = {"method": task.method.name, "seed": str(task.seed), "clients": json.dumps(chosen)}
    return {"weights_by_class": by_class.float()}, words


def out_of_memory(experiment: Experiment, what: str) -> str:
    """Return which settings to reduce, with their values."""
    at_once = experiment.engine.clients_at_once or CLIENTS_AT_ONCE
    batch = experiment.evaluation.batch_size or inference_batch(torch.device("cuda"))
    return (
        f"{what}: out of GPU memory. Reduce engine.clients_at_once (now {at_once}), "
        f"evaluation.batch_size (now {batch}) or distillation.batch_size "
        f"(now {experiment.distillation.batch_size})"
    )


def keep_encoder(file: Path, card: Mapping[str, Any]) -> None:
    """Write the card of a run's encoder. Raises ValueError if the run began with another one."""
    before = read_json(file) if file.is_file() else card
    if before["digest"] != card["digest"]:
        raise ValueError(
            f"{file.parent} was started with the encoder {before['source']} of digest "
            f"{before['digest'][:12]}..., and {card['source']} has {card['digest'][:12]}...; use "
            "the same, or start a new run in another directory"
        )
    save_json(file, card)


def environment(compute: Compute) -> dict[str, Any]:
    """Return versions, machine, precision and plugins, for environment.json."""
    device = compute.device
    return {
        "fedaux": fedaux.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": str(compute.precision).removeprefix("torch."),
        "compiled": compute.compile,
        "clients_at_once": compute.clients_at_once,
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    } | ({"plugins": plugins.loaded()} if plugins.loaded() else {})


def write_summary(directory: RunDirectory) -> dict[str, Any]:
    """Write and return summary.json."""
    summary = summarise(directory.experiment, directory.headers())
    save_json(directory.path / "summary.json", summary)
    return summary
