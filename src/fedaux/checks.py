"""What can be known to be wrong with an experiment before any work starts, besides the fields themselves."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fedaux import seeding
from fedaux.certainty import MECHANISMS
from fedaux.config import ConfigError, ExperimentFields
from fedaux.data.sources import SOURCES, LabelledData
from fedaux.data.splits import split_auxiliary
from fedaux.dpsgd import check_ready
from fedaux.methods import METHODS
from fedaux.mistakes import nearest
from fedaux.models import MODELS, model_options
from fedaux.pretrain import fitting_weights


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
            options = model_options(prototype.model)
            for option, value in sorted(prototype.options.items()):
                if option not in options:
                    line = f"{prototype.model} has no such option{nearest(option, options)}"
                    problems.append(f"prototypes.options.{option}: {line}")
                elif isinstance(options[option], int) and not (type(value) is int and value >= 1):
                    problems.append(f"prototypes.options.{option} = {value!r}: should be a whole number of at least 1")
    problems += _contradictions(experiment)
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


def _contradictions(experiment: ExperimentFields) -> list[str]:
    """Return a line for each pair of settings that cannot go together."""
    problems: list[str] = []
    scratch = [name for name in experiment.method if name in METHODS and METHODS[name].start != "pretrained"]
    if experiment.mode == "linear" and scratch:
        problems.append(
            f"mode = 'linear': {', '.join(scratch)} should be a method that starts from h0; a head on random "
            "features is no fair comparison"
        )
    if experiment.distillation.stopping is not None and experiment.data.server_validation == 0:
        problems.append("distillation.stopping: measures on labelled data at the server; set data.server_validation")
    if experiment.local.privacy is not None and experiment.local.optimizer_state == "kept":
        problems.append("local.optimizer_state = 'kept': not together with local.privacy; should be 'reset'")
    return problems


def check(experiment: ExperimentFields) -> None:
    """Raise ConfigError with everything `problems_of` finds."""
    if problems := problems_of(experiment):
        raise ConfigError(problems)


def check_data(experiment: ExperimentFields, data: LabelledData, auxiliary: Tensor) -> None:
    """Raise ConfigError for what only loaded data can tell: shapes, sizes, models and checkpoints that do not fit."""
    _check_shapes(data, tuple(auxiliary.shape))
    problems: list[str] = []
    channels = data.images.shape[1]
    for key in ("channel_mean", "channel_deviation"):
        if len(numbers := getattr(experiment.data, key)) not in (0, channels):
            problems.append(f"data.{key} = {list(numbers)}: should be {channels} numbers, one a channel")
    try:
        split_auxiliary(
            len(auxiliary),
            negatives_fraction=experiment.auxiliary.negatives_fraction,
            generator=seeding.generator(0, "check"),
        )
    except ValueError as error:
        problems.append(str(error))
    pretrained = any(METHODS[name].start == "pretrained" for name in experiment.method)
    for prototype in experiment.prototypes:
        try:
            with seeding.initialisation(0, part=prototype.name):
                model = MODELS[prototype.model](tuple(data.images.shape[1:]), len(data.classes), **prototype.options)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            problems.append(f"prototypes.options = {prototype.options}: {prototype.model} cannot be built ({error})")
            continue
        try:
            if experiment.local.privacy is not None:
                check_ready([model])
            if pretrained and experiment.pretraining.checkpoint is not None:
                fitting_weights(Path(experiment.pretraining.checkpoint), model, key="pretraining.checkpoint")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)


def _check_shapes(data: LabelledData, auxiliary_shape: tuple[int, ...]) -> None:
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
        held = experiment.data.server_validation
    except ValueError as error:
        return [str(error)]
    clients = experiment.split.num_clients
    if examples < 1:
        return [f"data.test_fraction = {experiment.data.test_fraction}: leaves no training examples"]
    if held >= examples:
        return [f"data.server_validation = {held}: leaves none of the {examples} training examples to the clients"]
    examples -= held
    if clients > examples:
        return [f"split.num_clients = {clients}: more clients than the {examples} training examples"]
    return []
