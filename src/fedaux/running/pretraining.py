"""`fedaux pretrain`: train and measure h0 of every prototype of a recipe, and write it to a
file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

from fedaux import seeding
from fedaux.config import Data, Experiment
from fedaux.core.backend import Predictor
from fedaux.core.compute import compute_for
from fedaux.core.messages import Weights
from fedaux.data import LabelledData, load_both, load_public
from fedaux.data.checkpoints import checkpoint_of
from fedaux.data.labelled import input_shape
from fedaux.data.vocabulary import Vocabulary
from fedaux.fast import best_backend
from fedaux.formatting import UNKNOWN, decimal, mean_and_deviation
from fedaux.models import MODELS
from fedaux.pretrain import H0, H0Request, content_digest, keep_probe, pretrained
from fedaux.pretrain.probe import Probe, probe
from fedaux.pretrain.store import save_h0, save_several
from fedaux.pretrain.store import shared_store as shared_store
from fedaux.pretrain.training import EpochProgress, Stopped
from fedaux.report.tables import Table, TerminalTable
from fedaux.running import preflight
from fedaux.running.display import LINE_SECONDS, live_bar
from fedaux.running.run import prepare_device


@dataclass(frozen=True)
class Outcome:
    """The h0 of one prototype."""

    prototype: str
    h0: H0
    vocabulary: Vocabulary | None = None
    """Its vocabulary, for texts."""


def pretrain_prototypes(
    experiment: Experiment,
    *,
    seed: int,
    display: PretrainDisplay,
    probing: bool = True,
    shared: Path | None = None,
) -> list[Outcome]:
    """Return h0 of every prototype for a seed, from the shared store or newly trained.

    With `probing` and labelled data, h0 is measured with the labels of all clients (in simulation
    only; h0 does not depend on it). The result is added to the card, and reused for the same data.
    """
    section = experiment.pretraining
    own = all(checkpoint_of(prototype) is not None for prototype in experiment.prototypes)
    if section.checkpoint is not None or (section.kind == "none" and not own):
        found = "checkpoint is given" if section.checkpoint is not None else "kind = 'none'"
        raise ValueError(f"pretraining.{found}: nothing to pretrain; should be left out")
    preflight.check(experiment, unlabelled=True)
    device = prepare_device(experiment)
    data: LabelledData | None = None
    if experiment.data.given:
        data, images = load_both(experiment)
        preflight.check_data(experiment, data, images)
        data, vocabulary = data.to(device), data.vocabulary
    else:
        images, vocabulary = load_public(experiment)
        preflight.check_public(experiment, images, vocabulary)
    images = images.to(device)
    shape = input_shape(images, vocabulary) if data is None else data.input_shape
    num_classes = preflight.ANY_CLASSES if data is None else len(data.classes)
    compute = compute_for(experiment.engine, device, experiment.data)
    backend = best_backend(compute)
    content = content_digest(images)
    about = about_data(experiment.data, data) if data is not None and probing else {}
    outcomes = []
    for prototype in experiment.prototypes:
        with seeding.initialisation(seed, part=prototype.name):
            model = MODELS[prototype.model](shape, num_classes, **prototype.options)
        model = backend.place(model)
        display.begin(prototype.name, epochs=section.epochs)
        request = H0Request(
            prototype,
            model,
            section=section,
            images=images,
            content=content,
            seed=seed,
            compute=compute,
            vocabulary=vocabulary,
        )
        h0 = pretrained(request, shared=shared, on_epoch=display)
        if data is not None and probing and not about.items() <= (h0.card["probe"] or {}).items():
            display.say(f"{prototype.name}: probing")
            try:
                measured = probe_h0(backend.predictor(model.features), h0.weights, data, seed=seed)
            except torch.cuda.OutOfMemoryError as error:
                raise ValueError(
                    f"probe of {prototype.name}: out of GPU memory; --no-probe skips it"
                ) from error
            h0 = keep_probe(h0, asdict(measured) | about, request=request, shared=shared)
        outcomes.append(Outcome(prototype.name, h0, vocabulary))
    return outcomes


def about_data(section: Data, data: LabelledData) -> dict[str, Any]:
    """Return the card's description of a probe: the method and the labelled data."""
    labels = torch.cat([data.labels, data.test_labels])
    parts = {"digest": data.images, "test_digest": data.test_images, "label_digest": labels}
    counts = {
        "examples": len(data.labels),
        "test_examples": len(data.test_labels),
        "classes": len(data.classes),
    }
    digests = {key: content_digest(part) for key, part in parts.items()}
    return {"by": "softmax regression", "data": {"source": section.source, **counts, **digests}}


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


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write h0 of all prototypes to one file for `pretraining.checkpoint`, with a card."""
    words = outcomes[0].vocabulary
    parts = {one.prototype: (dict(one.h0.weights), one.h0.card) for one in outcomes}
    if len(outcomes) == 1:
        save_h0(path, *parts[outcomes[0].prototype], vocabulary=words)
    else:
        save_several(path, parts, vocabulary=words)
    card = path.with_suffix(".json")
    if card.exists():  # safetensors makes private files, but h0 is shared
        path.chmod(card.stat().st_mode & 0o777)


def write_error(
    error: OSError, path: Path, outcomes: Sequence[Outcome], *, shared: Path | None
) -> OSError:
    """Return an error that names the option, and the copy of h0 in the store."""
    files = (
        []
        if shared is None
        else [shared / f"{outcome.h0.stem}.safetensors" for outcome in outcomes]
    )
    if stored := ", ".join(str(file) for file in files if file.exists()):
        left = f"h0 is in the store ({stored}); use the same command with another --out"
    else:
        left = "h0 is not saved" if shared else "without a store (FEDAUX_CACHE) h0 is not saved"
    reason = f"could not be written ({error.strerror or error}); {left}"
    return OSError(error.errno, reason, f"--out {path}")


def outcome_table(outcomes: Sequence[Outcome], *, name: str, seed: int) -> TerminalTable:
    """Return the final table, one row per prototype."""
    headers = ("prototype", "epochs", "seconds", "loss", "linear probe")
    rows = []
    for outcome in outcomes:
        card = outcome.h0.card
        measured = card["probe"] or {}
        seconds = decimal(card["seconds"]) + (" (stored)" if outcome.h0.stored else "")
        loss = UNKNOWN if card["loss"] is None else f"{card['loss']:.3f}"
        accuracy = mean_and_deviation(measured.get("linear"))
        rows.append((outcome.prototype, card["epochs"], seconds, loss, accuracy))
    caption = f"{name}: pretrained features, seed {seed}; test accuracy in %"
    return TerminalTable(Table(headers, rows, caption=caption))


def unmeasured_line(outcomes: Sequence[Outcome]) -> str:
    """Explain why h0 was not measured."""
    why = "no labelled data given: h0 is not measured"
    before = any(outcome.h0.card["probe"] for outcome in outcomes)
    return f"{why} again; the accuracies are from its card in the store" if before else why


def stopped_line(stop: KeyboardInterrupt, *, prototype: str, shared: Path | None) -> str:
    """Return a sentence on what Ctrl-C left; `prototype` was being processed, if any."""
    if not prototype:
        return "Stopped before training: the same command starts from the beginning."
    if shared is None:
        return "Stopped. Nothing is saved without a store (FEDAUX_CACHE)."
    if not isinstance(stop, Stopped):
        return "Stopped outside training: the same command continues with the stored h0."
    if stop.saved == 0:
        return f"Stopped. No epoch of {prototype} is saved: the same command starts it again."
    where = f"epoch {stop.saved} of {stop.epochs}"
    return f"Stopped. {prototype} is saved after {where}: the same command continues from there."


class PretrainDisplay:
    """A progress bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed = 0.0
        self.name = ""
        """The current prototype; empty before the first."""
        epochs = TextColumn("epochs  {task.fields[text]}")
        self._live = live_bar(console, MofNCompleteColumn(), epochs, TimeElapsedColumn())
        self._bar = self._live.add_task("starting", total=1, text="")

    def __enter__(self) -> PretrainDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, name: str, *, epochs: int) -> None:
        """Start another prototype."""
        self.name = name
        self._live.reset(self._bar, total=epochs, description=name, text="")

    def __call__(self, progress: EpochProgress) -> None:
        """Display a finished epoch."""
        text = f"loss {progress.loss:.3f}  ETA {progress.seconds_left:.0f} s"
        self._live.update(self._bar, completed=progress.epoch, text=text)
        if progress.epoch == progress.epochs or time.monotonic() - self._printed >= LINE_SECONDS:
            self._print(f"{self.name}: epoch {progress}")

    def say(self, line: str) -> None:
        """Display the present step."""
        self._live.update(self._bar, description=line)
        self._print(line)

    def _print(self, line: str) -> None:
        if not self._console.is_terminal:
            self._printed = time.monotonic()
            self._console.print(line, highlight=False, soft_wrap=True)
