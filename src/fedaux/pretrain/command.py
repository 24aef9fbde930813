"""`fedaux pretrain`: h0 of every prototype of a recipe, how good it is, and the file that a run can take it from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from fedaux import checks, seeding
from fedaux.checkpoints import checkpoint_of
from fedaux.clients import Weights
from fedaux.compute import compute_for
from fedaux.config import Experiment
from fedaux.data import LabelledData, load_both
from fedaux.data.vocabulary import Vocabulary
from fedaux.display import QUIET_SECONDS
from fedaux.execute import choose_device
from fedaux.inference import Predictor
from fedaux.models import MODELS
from fedaux.pretrain import content_digest, pretrained
from fedaux.pretrain.probe import Probe, probe
from fedaux.pretrain.store import Card, save_h0, save_several, shared_store
from fedaux.pretrain.training import Passed


@dataclass(frozen=True)
class Outcome:
    """The h0 of one prototype."""

    prototype: str
    weights: Weights
    card: Card
    stored: bool
    """Whether it was there already."""
    vocabulary: Vocabulary | None = None
    """What it reads, where that is texts."""


def pretrain_prototypes(
    experiment: Experiment, *, seed: int, watch: Watch, probing: bool = True, shared: Path | None = None
) -> list[Outcome]:
    """Return h0 of every prototype for a seed, from the shared store or newly trained, with probes in the cards.

    The probe uses the labels of all clients' training data, which a federation has in no one place: it measures h0 and
    changes nothing about it.
    """
    section = experiment.pretraining
    own = all(checkpoint_of(prototype) is not None for prototype in experiment.prototypes)
    if section.checkpoint is not None or (section.kind == "none" and not own):
        found = "checkpoint is given" if section.checkpoint is not None else "kind = 'none'"
        raise ValueError(f"pretraining.{found}: there is nothing to pretrain; should be left out")
    checks.check(experiment)
    device = choose_device(experiment.engine.device)
    if experiment.engine.threads is not None:
        torch.set_num_threads(experiment.engine.threads)
    data, images = load_both(experiment)
    data, images = data.to(device), images.to(device)
    checks.check_data(experiment, data, images)
    compute = compute_for(experiment.engine, device, experiment.data)
    content = content_digest(images)
    outcomes = []
    for prototype in experiment.prototypes:
        with seeding.initialisation(seed, part=prototype.name):
            model = MODELS[prototype.model](data.input_shape, len(data.classes), **prototype.options)
        model = compute.place(model)
        watch.begin(prototype.name, epochs=section.epochs)
        weights, card = pretrained(
            prototype,
            model,
            section=section,
            images=images,
            content=content,
            seed=seed,
            shared=shared,
            compute=compute,
            on_epoch=watch,
            vocabulary=data.vocabulary,
        )
        if probing:
            watch.say(f"{prototype.name}: probing")
            measured = probe_h0(Predictor(model.features, compute), weights, data, seed=seed)
            card = card | {"probe": asdict(measured) | {"data": content_digest(data.images)}}
        stored = card["epochs"] > 0 and not watch.trained
        outcomes.append(Outcome(prototype.name, weights, card, stored=stored, vocabulary=data.vocabulary))
    return outcomes


def probe_h0(predictor: Predictor, weights: Weights, data: LabelledData, *, seed: int) -> Probe:
    """Measure h0 on labelled data: accuracy on its test examples."""
    return probe(
        predictor(weights, data.images),
        data.labels,
        predictor(weights, data.test_images),
        data.test_labels,
        num_classes=len(data.classes),
        generator=seeding.generator(seed, "probe"),
    )


def write_outcomes(path: Path, outcomes: Sequence[Outcome], *, half: bool = False) -> None:
    """Write h0 and its card where `pretraining.checkpoint` can name it; several prototypes go into one file.

    `half` writes half-precision numbers: half the bytes, and weights are off by a two-thousandth at most.
    """
    words = outcomes[0].vocabulary
    parts = {
        one.prototype: ({name: _halved(t) if half else t for name, t in one.weights.items()}, one.card)
        for one in outcomes
    }
    if len(outcomes) == 1:
        save_h0(path, *parts[outcomes[0].prototype], vocabulary=words)
    else:
        save_several(path, parts, vocabulary=words)
    if (card := path.with_suffix(".json")).exists():  # safetensors makes files for the user alone; this is to be shared
        path.chmod(card.stat().st_mode & 0o777)


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def outcome_table(outcomes: Sequence[Outcome], *, name: str, seed: int) -> Table:
    """Return the table for people."""
    table = Table(title=f"{name}: pretrained features, seed {seed}; test accuracy in %", title_justify="left")
    table.add_column("prototype")
    for column in ("epochs", "seconds", "loss", "linear probe", "20 neighbours"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        card = outcome.card
        measured = card["probe"] or {}
        accuracies = [f"{100 * measured[key]:.1f}" if measured else "–" for key in ("linear", "neighbours")]
        seconds = f"{card['seconds']:.1f}" + (" (stored)" if outcome.stored else "")
        loss = "–" if card["loss"] is None else f"{card['loss']:.3f}"
        table.add_row(outcome.prototype, str(card["epochs"]), seconds, loss, *accuracies)
    return table


class Watch:
    """What a person sees meanwhile: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spoke = 0.0
        self._name = ""
        self.trained = False
        """Whether an epoch has passed since `begin`."""
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("epochs  {task.fields[said]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._bar = self._progress.add_task("starting", total=1, said="")

    def __enter__(self) -> Watch:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, name: str, *, epochs: int) -> None:
        """Turn to another prototype."""
        self._name, self.trained = name, False
        if self._progress is not None:
            self._progress.reset(self._bar, total=epochs, description=name, said="")

    def __call__(self, passed: Passed) -> None:
        """Show an epoch that is over."""
        self.trained = True
        if self._progress is not None:
            said = f"loss {passed.loss:.3f}  ETA {passed.seconds_left:.0f} s"
            self._progress.update(self._bar, completed=passed.epoch, said=said)
        elif passed.epoch == passed.epochs or time.monotonic() - self._spoke >= QUIET_SECONDS:
            self._spoke = time.monotonic()
            self.say(f"{self._name}: epoch {passed}")

    def say(self, line: str) -> None:
        """Say a line where there is no bar, and beside the bar where there is one."""
        if self._progress is not None:
            self._progress.update(self._bar, description=line)
        else:
            self._console.print(line, highlight=False, soft_wrap=True)


__all__ = ["Outcome", "Watch", "outcome_table", "pretrain_prototypes", "shared_store", "write_outcomes"]
