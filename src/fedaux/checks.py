"""What can be known to be wrong with an experiment before any work starts, besides the fields themselves."""

from __future__ import annotations

from pathlib import Path

from fedaux.certainty import MECHANISMS
from fedaux.config import ConfigError, ExperimentFields
from fedaux.data.sources import SOURCES, LabelledData
from fedaux.methods import METHODS
from fedaux.mistakes import nearest
from fedaux.models import MODELS, model_options


def problems_of(experiment: ExperimentFields) -> list[str]:
    """Return a line for each unknown name, missing file and impossible size."""
    problems: list[str] = []

    def known(key: str, value: str, names: list[str]) -> bool:
        if value not in names:
            guess = nearest(value, names) or f"; there are {', '.join(names)}"
            problems.append(f"{key} = {value!r}: not known{guess}")
        return value in names

    for name in experiment.method:
        known("method", name, list(METHODS))
    for prototype in experiment.prototypes:
        if known("prototypes.model", prototype.model, list(MODELS)):
            for option in sorted(prototype.options.keys() - set(model_options(prototype.model))):
                guess = nearest(option, model_options(prototype.model))
                problems.append(f"prototypes.options.{option}: {prototype.model} has no such option{guess}")
    known("certainty.mechanism", experiment.certainty.mechanism, list(MECHANISMS))
    labelled = [name for name, source in SOURCES.items() if source.load_labelled]
    public = [name for name, source in SOURCES.items() if source.load_auxiliary]
    if known("data.source", experiment.data.source, labelled) and not (
        missing := _missing_file("data", experiment.data.source, experiment.data.path)
    ):
        problems += _size_problems(experiment)
    elif experiment.data.source in labelled:
        problems += missing
    if known("auxiliary.source", experiment.auxiliary.source, public):
        problems += _missing_file("auxiliary", experiment.auxiliary.source, experiment.auxiliary.path)
    checkpoint = experiment.pretraining.checkpoint
    if checkpoint is not None and not Path(checkpoint).is_file():
        problems.append(f"pretraining.checkpoint = {checkpoint!r}: there is no such file")
    return problems


def check(experiment: ExperimentFields) -> None:
    """Raise ConfigError with everything `problems_of` finds."""
    if problems := problems_of(experiment):
        raise ConfigError(problems)


def check_shapes(data: LabelledData, auxiliary_shape: tuple[int, ...]) -> None:
    """Raise ConfigError unless private, test and auxiliary images have one shape."""
    shape = tuple(data.images.shape[1:])
    if auxiliary_shape[1:] != shape:
        raise ConfigError(
            [f"auxiliary: its images are {list(auxiliary_shape[1:])} and those of data {list(shape)}; should be equal"]
        )
    if tuple(data.test_images.shape[1:]) != shape:
        raise ConfigError([f"data: test images are {list(data.test_images.shape[1:])}, the others {list(shape)}"])


def _missing_file(key: str, source: str, path: str | None) -> list[str]:
    if not SOURCES[source].needs_path:
        return [f"{key}.path = {path!r}: the source {source} takes no path"] if path is not None else []
    if path is None:
        return [f"{key}.path: missing; the source {source} needs one"]
    return [] if Path(path).exists() else [f"{key}.path = {path!r}: there is no such file or folder"]


def _size_problems(experiment: ExperimentFields) -> list[str]:
    count = SOURCES[experiment.data.source].count_labelled
    assert count is not None, "a source of labelled data can count it"
    try:
        examples = count(experiment.data)
    except ValueError as error:
        return [str(error)]
    clients = experiment.split.num_clients
    if clients > examples:
        return [f"split.num_clients = {clients}: more clients than the {examples} training examples"]
    return []
