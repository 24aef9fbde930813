"""`fedaux pretrain`: h0 of every prototype of a recipe, how good it is, and the file that a run can take it from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

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
from fedaux.models import MODELS
from fedaux.pretrain import H0, Wanted, content_digest, keep_probe, pretrained
from fedaux.pretrain.probe import Probe, probe
from fedaux.pretrain.store import save_h0, save_several, shared_store
from fedaux.pretrain.training import Passed, Stopped
from fedaux.running import preflight as checks
from fedaux.running.display import QUIET_SECONDS, live_bar
from fedaux.running.run import choose_device


@dataclass(frozen=True)
class Outcome:
    """The h0 of one prototype."""

    prototype: str
    h0: H0
    vocabulary: Vocabulary | None = None
    """What it reads, where that is texts."""


def pretrain_prototypes(
    experiment: Experiment,
    *,
    seed: int,
    watch: Watch,
    probing: bool = True,
    shared: Path | None = None,
) -> list[Outcome]:
    """Return h0 of every prototype for a seed, from the shared store or newly trained, with probes in the cards.

    The probe uses the labels of all clients' training data, which a federation has in no one place: it measures h0 and
    changes nothing about it. Its figures go onto the card in the store, too, and are not measured again on the same
    data. Without labelled data nothing is measured.
    """
    section = experiment.pretraining
    own = all(checkpoint_of(prototype) is not None for prototype in experiment.prototypes)
    if section.checkpoint is not None or (section.kind == "none" and not own):
        found = "checkpoint is given" if section.checkpoint is not None else "kind = 'none'"
        raise ValueError(f"pretraining.{found}: there is nothing to pretrain; should be left out")
    checks.check(experiment, unlabelled=True)
    device = choose_device(experiment.engine.device)
    if experiment.engine.threads is not None:
        torch.set_num_threads(experiment.engine.threads)
    data: LabelledData | None = None
    if experiment.data.given:
        data, images = load_both(experiment)
        checks.check_data(experiment, data, images)
        data, vocabulary = data.to(device), data.vocabulary
    else:
        images, vocabulary = load_public(experiment)
        checks.check_public(experiment, images, vocabulary)
    images = images.to(device)
    shape = input_shape(images, vocabulary) if data is None else data.input_shape
    num_classes = checks.ANY_CLASSES if data is None else len(data.classes)
    compute = compute_for(experiment.engine, device, experiment.data)
    backend = best_backend(compute)
    content = content_digest(images)
    about = about_data(experiment.data, data) if data is not None and probing else {}
    outcomes = []
    for prototype in experiment.prototypes:
        with seeding.initialisation(seed, part=prototype.name):
            model = MODELS[prototype.model](shape, num_classes, **prototype.options)
        model = backend.place(model)
        watch.begin(prototype.name, epochs=section.epochs)
        wanted = Wanted(
            prototype,
            model,
            section=section,
            images=images,
            content=content,
            seed=seed,
            compute=compute,
            vocabulary=vocabulary,
        )
        h0 = pretrained(wanted, shared=shared, on_epoch=watch)
        if data is not None and probing and not about.items() <= (h0.card["probe"] or {}).items():
            watch.say(f"{prototype.name}: probing")
            try:
                measured = probe_h0(backend.predictor(model.features), h0.weights, data, seed=seed)
            except torch.cuda.OutOfMemoryError as error:
                raise ValueError(
                    f"probe of {prototype.name}: the GPU's memory is not enough; --no-probe leaves it out"
                ) from error
            h0 = keep_probe(h0, asdict(measured) | about, wanted=wanted, shared=shared)
        outcomes.append(Outcome(prototype.name, h0, vocabulary))
    return outcomes


def about_data(section: Data, data: LabelledData) -> dict[str, Any]:
    """Return what a card says about how a probe was measured, and on which labelled data."""
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


def write_outcomes(path: Path, outcomes: Sequence[Outcome], *, half: bool = False) -> None:
    """Write h0 and its card where `pretraining.checkpoint` can name it; several prototypes go into one file.

    `half` writes half-precision numbers: half the bytes, and weights are off by a two-thousandth at most.
    """
    words = outcomes[0].vocabulary
    parts = {
        one.prototype: (
            {name: _halved(t) if half else t for name, t in one.h0.weights.items()},
            one.h0.card,
        )
        for one in outcomes
    }
    if len(outcomes) == 1:
        save_h0(path, *parts[outcomes[0].prototype], vocabulary=words)
    else:
        save_several(path, parts, vocabulary=words)
    if (
        card := path.with_suffix(".json")
    ).exists():  # safetensors makes files for the user alone; this is to be shared
        path.chmod(card.stat().st_mode & 0o777)


def unwritten(
    error: OSError, path: Path, outcomes: Sequence[Outcome], *, shared: Path | None
) -> OSError:
    """Return an error of the same kind that names the option and says where h0 lies all the same."""
    files = (
        []
        if shared is None
        else [shared / f"{outcome.h0.stem}.safetensors" for outcome in outcomes]
    )
    if stored := ", ".join(str(file) for file in files if file.exists()):
        left = f"h0 lies in the store ({stored}): the same command with another --out takes it from there"
    else:
        left = (
            "h0 is kept nowhere else"
            if shared
            else "without a store (FEDAUX_CACHE) h0 is kept nowhere else"
        )
    return OSError(
        error.errno, f"could not be written ({error.strerror or error}); {left}", f"--out {path}"
    )


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def outcome_table(outcomes: Sequence[Outcome], *, name: str, seed: int) -> Table:
    """Return the table for people."""
    table = Table(
        title=f"{name}: pretrained features, seed {seed}; test accuracy in %", title_justify="left"
    )
    table.add_column("prototype")
    for column in ("epochs", "seconds", "loss", "linear probe", "20 neighbours"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        card = outcome.h0.card
        measured = card["probe"] or {}
        accuracies = [
            f"{100 * measured[key]:.1f}" if key in measured else "–"
            for key in ("linear", "neighbours")
        ]
        seconds = f"{card['seconds']:.1f}" + (" (stored)" if outcome.h0.stored else "")
        loss = "–" if card["loss"] is None else f"{card['loss']:.3f}"
        table.add_row(outcome.prototype, str(card["epochs"]), seconds, loss, *accuracies)
    return table


def unmeasured_line(outcomes: Sequence[Outcome]) -> str:
    """Say why h0 has no figures, or where they come from if it has some nevertheless."""
    why = "no labelled data given, so h0 is not measured"
    before = any(outcome.h0.card["probe"] for outcome in outcomes)
    return f"{why} again: the figures are those of its card in the store" if before else why


def stopped_line(stop: KeyboardInterrupt, *, prototype: str, shared: Path | None) -> str:
    """Say from where the same command goes on after Ctrl-C; `prototype` is the one that was at work, if any was."""
    if not prototype:
        return "Stopped before anything was trained: the same command begins anew."
    if shared is None:
        return "Stopped. Without a store (FEDAUX_CACHE) nothing is saved: the same command begins anew."
    if not isinstance(stop, Stopped):
        return "Stopped while nothing was in training. The same command finds in the store what was trained before."
    if stop.saved == 0:
        return f"Stopped. Nothing of {prototype} is saved, no epoch was over: the same command begins it anew."
    where = f"after epoch {stop.saved} of {stop.epochs}"
    return f"Stopped. {prototype} is saved as it was {where}: the same command goes on from there."


class Watch:
    """What a person sees meanwhile: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spoke = 0.0
        self.name = ""
        """Of the prototype whose turn it is; nothing before the first."""
        columns = (
            MofNCompleteColumn(),
            TextColumn("epochs  {task.fields[said]}"),
            TimeElapsedColumn(),
        )
        self._live = live_bar(console, *columns)
        self._bar = self._live.add_task("starting", total=1, said="")

    def __enter__(self) -> Watch:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def begin(self, name: str, *, epochs: int) -> None:
        """Turn to another prototype."""
        self.name = name
        self._live.reset(self._bar, total=epochs, description=name, said="")

    def __call__(self, passed: Passed) -> None:
        """Show an epoch that is over."""
        said = f"loss {passed.loss:.3f}  ETA {passed.seconds_left:.0f} s"
        self._live.update(self._bar, completed=passed.epoch, said=said)
        last = passed.epoch == passed.epochs
        if not self._console.is_terminal and (
            last or time.monotonic() - self._spoke >= QUIET_SECONDS
        ):
            self._spoke = time.monotonic()
            self.say(f"{self.name}: epoch {passed}")

    def say(self, line: str) -> None:
        """Say a line where there is no bar, and beside the bar where there is one."""
        self._live.update(self._bar, description=line)
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)


__all__ = [
    "Outcome",
    "Watch",
    "outcome_table",
    "pretrain_prototypes",
    "shared_store",
    "stopped_line",
    "unmeasured_line",
    "unwritten",
    "write_outcomes",
]
