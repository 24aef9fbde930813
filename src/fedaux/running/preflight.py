"""Checks of an experiment before it runs, beyond the validation of single settings."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty, ConfigError, Data, ExperimentFields, Prototype
from fedaux.config_errors import nearest
from fedaux.core.algorithms import METHODS, all_asks
from fedaux.core.asks import release_sections
from fedaux.core.dpsgd import check_ready
from fedaux.core.objectives import OBJECTIVES
from fedaux.data import SOURCES, LabelledData, count_labelled, notes, wordnet
from fedaux.data.checkpoints import checkpoint_of, locate, read_tokenizer
from fedaux.data.labelled import input_shape
from fedaux.data.sources import WITH_WORDNET_IDS, size_missing
from fedaux.data.splits import split_auxiliary
from fedaux.data.vocabulary import Vocabulary, of_folder
from fedaux.formatting import short
from fedaux.models import MODELS, SHIPPED, SplitModel, model_input, model_options
from fedaux.models.split import random_layers
from fedaux.pretrain import fitting_weights
from fedaux.pretrain.objectives import resolved
from fedaux.privacy.mechanisms import MECHANISMS

ANY_CLASSES = 2
"""Number of classes of models whose head is not used."""
ONLY_SIMULATED = {
    "data": "needs all private data in one place, and in a federation it stays at the nodes",
    "nothing": "each client trains alone, so the nodes have nothing to send to a server",
    "last_releases": "its release after the last round is not supported in a federation",
    "personal": "part of its models stays with the clients, which nodes do not support",
}
"""Why a method cannot run in a federation, by what it shares or by the field of `Asks`."""
OPTIONAL_HINT = "; labelled data is optional: --set data.source=none"
"""Added by `fedaux pretrain` to problems of labelled data."""


def problems_of(
    experiment: ExperimentFields, *, federated: bool = False, unlabelled: bool = False
) -> list[str]:
    """Return a line for each unknown name, missing file and impossible size.

    `federated`: clients have their own data; `unlabelled`: labelled data is optional.
    """
    problems: list[str] = []

    def known(key: str, value: str, names: list[str]) -> bool:
        if value not in names:
            guess = nearest(value, names, most=3) or f"; there are {', '.join(names)}"
            if "," in value:
                guess = f"; several are a list, [{value}]"
            problems.append(f"{key} = {value!r}: not known{guess}")
        return value in names

    for name in experiment.method:
        if name not in METHODS:
            known("method", name, list(METHODS))
    for key, names in (
        ("local.objectives", experiment.local.objectives),
        ("local.strengths", tuple(experiment.local.strengths)),
    ):
        for name in names:
            known(key, name, list(OBJECTIVES))
    if "proximal" in experiment.local.strengths:
        problems.append("local.strengths.proximal: should be local.proximal, which is its strength")
    for prototype in experiment.prototypes:
        if known("prototypes.model", prototype.model, list(MODELS)):
            options = model_options(prototype.model)
            for option, value in sorted(prototype.options.items()):
                if option not in options:
                    line = f"{prototype.model} has no such option{nearest(option, options)}"
                    problems.append(f"prototypes.options.{option}: {line}")
                elif problem := _option_problem(options[option], value):
                    problems.append(f"prototypes.options.{option} = {value!r}: {problem}")
    problems += _text_problems(experiment)
    problems += _contradictions(experiment)
    scored = [name for name, make in MECHANISMS.items() if make(Certainty()).scores != "none"]
    known("certainty.mechanism", experiment.certainty.mechanism, scored)
    labelled = labelled_sources()
    public = [name for name, source in SOURCES.items() if source.load_auxiliary]
    so_far = len(problems)
    if missing := source_problems(experiment.data):
        problems += missing if experiment.data.given or not unlabelled else []
    elif experiment.data.source in SOURCES and experiment.data.source not in labelled:
        problems.append(
            f"data.source = {experiment.data.source!r}: has no labels, so it can only be "
            f"auxiliary.source; should be {', '.join(labelled)}"
        )
    elif known("data.source", experiment.data.source, labelled) and federated:
        problems += _missing_test(experiment.data)
        if experiment.text is not None:
            problems.append("text: not supported in a federation; use the simulator")
        asked = all_asks(experiment)
        sections = release_sections(asked.values()).values()
        releasing = [
            MECHANISMS[one.mechanism](one) for one in sections if one.mechanism in MECHANISMS
        ]
        together = any(mechanism.scores == "together" for mechanism in releasing)
        if together and experiment.certainty.components is None:
            problems.append(
                "certainty.components: missing; mechanism classes needs a whole number such as 16 "
                "in a federation, because one node that overstates its examples would choose too "
                "many for all; `fedaux privacy` suggests one"
            )
        problems += [
            f"method = {name!r}: {why}; run it in the simulator"
            for asked_for, why in ONLY_SIMULATED.items()
            for name, asks in asked.items()
            if asks.shares == asked_for or getattr(asks, asked_for, False)
        ]
    elif experiment.data.source in labelled and not (missing := _missing_data(experiment.data)):
        if experiment.text is None or SOURCES[experiment.data.source].holds_texts:
            problems += _size_problems(experiment)
    elif experiment.data.source in labelled:
        problems += missing
    if unlabelled:
        problems[so_far:] = [line + OPTIONAL_HINT for line in problems[so_far:]]
    if known("auxiliary.source", experiment.auxiliary.source, public):
        problems += _missing_file(
            "auxiliary", experiment.auxiliary.source, experiment.auxiliary.path
        )
        if SOURCES[experiment.auxiliary.source].is_made and experiment.auxiliary.size is None:
            problems.append(size_missing(experiment.auxiliary.source))
    problems += _split_problems(experiment) + _wordnet_problems(experiment)
    checkpoint = experiment.pretraining.checkpoint
    if checkpoint is not None and not Path(checkpoint).is_file():
        problems.append(f"pretraining.checkpoint = {checkpoint!r}: there is no such file")
    return problems


def labelled_sources() -> list[str]:
    """Return the names of the sources that have labelled data."""
    return [name for name, source in SOURCES.items() if source.load_labelled]


def source_problems(section: Data) -> list[str]:
    """Return a line if labelled data or its source is missing."""
    able = labelled_sources()
    if not section.given:
        return [
            f"data: required except by `fedaux pretrain`; data.source should be {', '.join(able)}"
        ]
    places = [key for key in ("path", "clients", "test") if getattr(section, key)]
    if places and "source" not in section.model_fields_set:
        read = ", ".join(name for name in able if SOURCES[name].needs_path)
        return [f"data.source: missing, while data.{places[0]} is given; should be {read}"]
    return []


def _option_problem(default: object, value: object) -> str | None:
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "should be true or false"
    if isinstance(default, int):
        good = type(value) is int and value >= 1
        return None if good else "should be a whole number of at least 1"
    return "should be a text" if isinstance(default, str) and not isinstance(value, str) else None


def _text_problems(experiment: ExperimentFields) -> list[str]:
    """Return a line for each model or source of another kind of data: images, texts, features."""
    problems: list[str] = []
    texts = experiment.text is not None
    both = (("data", experiment.data.source), ("auxiliary", experiment.auxiliary.source))
    held = [name in SOURCES and SOURCES[name].holds_features for _, name in both]
    features = any(held) or experiment.encoder is not None
    if any(held) and experiment.encoder is not None:
        problems.append(
            f"encoder.source = {experiment.encoder.source!r}: {both[held.index(True)][0]} has "
            "features already; should be left out"
        )
    elif any(held) and experiment.data.given and not all(held):
        key, name = both[held.index(False)]
        problems.append(
            f"{key}.source = {name!r}: should be features, like {both[held.index(True)][0]}.source"
        )
    if features:
        problems += _settings_of_images(experiment)
    for prototype in experiment.prototypes:
        wanted = model_input(prototype.model) if prototype.model in MODELS else None
        if wanted == "image" and texts and not features:
            line = "is for images, but there is a table [text]; use tinybert, minilm or bert"
            problems.append(f"prototypes.model = {prototype.model!r}: {line}")
        elif wanted == "text" and not texts:
            problems.append(
                f"prototypes.model = {prototype.model!r}: is for texts; add the table [text]"
            )
        elif (wanted == "feature") != features and wanted is not None:
            right = "linear, for features" if features else "another; this one is for features"
            problems.append(f"prototypes.model = {prototype.model!r}: should be {right}")
    if experiment.auxiliary.source == "lines" and not texts:
        problems.append("auxiliary.source = 'lines': has texts; add the table [text]")
    if texts:
        for key, name in both:
            if name in SOURCES and not SOURCES[name].holds_texts:
                able = ", ".join(
                    source
                    for source, row in SOURCES.items()
                    if row.holds_texts and (key == "auxiliary" or row.load_labelled)
                )
                problems.append(f"{key}.source = {name!r}: has no texts; should be {able}")
    return problems


def _settings_of_images(experiment: ExperimentFields) -> list[str]:
    """Return a line for each setting that features do not have."""
    why = "features are no images" if experiment.encoder is None else "the encoder states its own"
    found = [
        f"{key}.{name}: {why}; should be left out"
        for key, section in (("data", experiment.data), ("auxiliary", experiment.auxiliary))
        for name in ("image_size", "channels", "channel_mean", "channel_deviation", "mirror")
        if getattr(section, name, None)
    ]
    if experiment.pretraining.kind != "none":
        found.append(
            f"pretraining.kind = {experiment.pretraining.kind!r}: should be 'none' for features"
        )
    if experiment.encoder is not None and experiment.mode != "linear":
        found.append("mode = 'full': encoders are frozen, only heads are trained; should be linear")
    return found


def _split_problems(experiment: ExperimentFields) -> list[str]:
    able = ", ".join(name for name, source in SOURCES.items() if source.takes_split)
    return [
        f"{key}.split = {section.split!r}: not supported by {section.source}; only by {able}"
        for key, section in (("data", experiment.data), ("auxiliary", experiment.auxiliary))
        if section.split is not None
        and section.source in SOURCES
        and not SOURCES[section.source].takes_split
    ]


def _wordnet_problems(experiment: ExperimentFields) -> list[str]:
    name, source = experiment.auxiliary.wordnet, experiment.auxiliary.source
    if name is None:
        return []
    if source not in WITH_WORDNET_IDS:
        able = ", ".join(WITH_WORDNET_IDS)
        return [f"auxiliary.wordnet = {name!r}: not supported by {source}; only by {able}"]
    try:
        wordnet.subset(name, key="auxiliary.wordnet")
    except ValueError as error:
        return [str(error)]
    return []


def _contradictions(experiment: ExperimentFields) -> list[str]:
    """Return a line for each pair of settings that exclude each other."""
    problems: list[str] = []
    asked = all_asks(experiment)
    scratch = [name for name, asks in asked.items() if not asks.pretrained]
    if experiment.mode == "linear" and scratch:
        problems.append(
            f"mode = 'linear': {', '.join(scratch)} should be a method that starts from h0; heads "
            "on random features are not comparable"
        )
    if experiment.data.given and experiment.data.clients and experiment.data.server_validation > 0:
        problems.append(
            "data.server_validation: should be 0, as each client has its own data (data.clients)"
        )
    untaught = [
        name
        for name, asks in asked.items()
        if asks.trains and not asks.distills and asks.shares != "data"
    ]
    for prototype in experiment.prototypes:
        if prototype.clients == () and untaught:
            problems.append(
                f"prototypes.clients = []: nobody trains {prototype.name!r}, because "
                f"{', '.join(untaught)} has no teacher; should list clients or be left out"
            )
    mechanism = experiment.certainty.mechanism
    releases = release_sections(asked.values())
    if releases and mechanism in MECHANISMS and mechanism not in {Certainty().mechanism, *releases}:
        problems.append(
            f"certainty.mechanism = {mechanism!r}: has no effect, because the methods of this run "
            f"always use {' and '.join(releases)}; should be left out. For hardly any noise set "
            "certainty.epsilon = 1000"
        )
    for name in asked:
        problems += METHODS[name].problems(METHODS[name].own_settings(experiment))
    used = {
        one: name
        for name, asks in asked.items()
        for one in (*asks.objectives, *experiment.local.objectives)
        if one != "proximal"
    }
    if experiment.local.privacy is not None and used:
        one, name = next(iter(used.items()))
        problems.append(
            f"local.privacy: the objective {one!r} of {name} depends on all examples of a client; "
            "DP-SGD should have cross-entropy, with or without the proximal term"
        )
    if experiment.local.privacy is not None and experiment.local.optimizer_state == "kept":
        problems.append("local.optimizer_state = 'kept': should be 'reset' with local.privacy")
    if experiment.local.privacy is not None and experiment.data.mirror:
        problems.append("data.mirror = true: should be false with local.privacy")
    return problems


def check(
    experiment: ExperimentFields, *, federated: bool = False, unlabelled: bool = False
) -> None:
    """Raise ConfigError with everything `problems_of` finds."""
    if problems := problems_of(experiment, federated=federated, unlabelled=unlabelled):
        raise ConfigError(problems)


def check_data(experiment: ExperimentFields, data: LabelledData, auxiliary: Tensor) -> None:
    """Raise ConfigError if shapes, sizes, models or checkpoints do not fit the loaded data."""
    if data.vocabulary is None:
        _check_shapes(data, tuple(auxiliary.shape))
    problems: list[str] = []
    if len(data.test_labels) == 0:
        problems.append(
            "data: no examples to hold out for testing; data.test should be a file or folder"
        )
    clients = experiment.split.num_clients
    if data.clients is not None and len(data.clients) != clients:
        problems.append(
            f"split.num_clients = {clients}: should be {len(data.clients)}, the number of clients "
            "with training examples"
        )
    problems += _channel_problems(experiment.data, data.images) if data.vocabulary is None else []
    try:
        split_auxiliary(
            len(auxiliary),
            negatives_fraction=experiment.auxiliary.negatives_fraction,
            generator=seeding.generator(0, "check"),
        )
    except ValueError as error:
        problems.append(str(error))
    problems += _model_problems(
        experiment,
        data.images,
        num_classes=len(data.classes),
        vocabulary=data.vocabulary,
        num_examples=len(data.labels),
    )
    if problems:
        raise ConfigError(problems)


def check_public(
    experiment: ExperimentFields, auxiliary: Tensor, vocabulary: Vocabulary | None
) -> None:
    """Raise ConfigError if models or numbers of channels do not fit the loaded public data."""
    problems = _channel_problems(experiment.data, auxiliary) if vocabulary is None else []
    problems += _model_problems(
        experiment, auxiliary, num_classes=ANY_CLASSES, vocabulary=vocabulary
    )
    if problems:
        raise ConfigError(problems)


def _channel_problems(section: Data, images: Tensor) -> list[str]:
    if images.ndim == 2:
        return []  # of features
    channels = images.shape[1]
    return [
        f"data.{key} = {list(numbers)}: should be {channels} numbers, one per channel"
        for key in ("channel_mean", "channel_deviation")
        if len(numbers := getattr(section, key)) not in (0, channels)
    ]


def _model_problems(
    experiment: ExperimentFields,
    examples: Tensor,
    *,
    num_classes: int,
    vocabulary: Vocabulary | None,
    num_examples: int = 0,
) -> list[str]:
    """Return a line for each prototype that does not fit the examples or its checkpoint."""
    problems: list[str] = []
    shape = input_shape(examples, vocabulary)
    pretrained = any(asks.pretrained for asks in all_asks(experiment).values())
    for prototype in experiment.prototypes:
        try:
            with seeding.initialisation(0, part=prototype.name):
                model = MODELS[prototype.model](shape, num_classes, **prototype.options)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            line = f"{prototype.model} cannot be built ({error})"
            problems.append(f"prototypes.options = {prototype.options}: {line}")
            continue
        if not isinstance(model, SplitModel):
            problems.append(
                f"prototypes.model = {prototype.model!r}: returns a {type(model).__name__}, should "
                "be a SplitModel: fedaux.split_model(module, head=..., example=...)"
            )
            continue
        if experiment.mode == "linear" and num_examples:
            _warn_of_small_steps(experiment, model, num_examples=num_examples)
        try:
            if prototype.model not in SHIPPED:
                _check_outputs(model, prototype, examples, num_classes=num_classes)
                _warn_of_random_layers(model, prototype)
            if experiment.local.privacy is not None:
                check_ready([model])
            if pretrained and experiment.pretraining.checkpoint is None:
                given = model.given is not None
                resolved(
                    experiment.pretraining,
                    model.features,
                    texts=vocabulary is not None,
                    given=given,
                )
                _check_words(prototype, vocabulary)
            elif pretrained and experiment.pretraining.checkpoint is not None:
                fitting_weights(
                    Path(experiment.pretraining.checkpoint),
                    model,
                    key="pretraining.checkpoint",
                    prototype=prototype,
                    image_shape=shape if vocabulary is None else None,
                    vocabulary=vocabulary,
                    data=experiment.data,
                )
        except ValueError as error:
            problems.append(str(error))
    return problems


def _warn_of_small_steps(
    experiment: ExperimentFields, model: SplitModel, *, num_examples: int
) -> None:
    """Warn if heads hardly leave their random start: accuracy would stay at chance.

    Adam moves a weight by at most about the learning rate per step, and a head of F features starts
    at random weights of up to 1 / sqrt(F).
    """
    section, own = experiment.local, num_examples / experiment.split.num_clients
    steps = experiment.rounds * section.epochs * math.ceil(own / section.batch_size)
    start = model.feature_width**-0.5
    if section.optimizer == "adam" and section.learning_rate * steps < start:
        notes.warn(
            f"mode = 'linear': {steps} local steps at local.learning_rate = "
            f"{section.learning_rate:g} hardly move heads from their random start; about "
            f"{short(10 * start / steps)} would, and distillation.learning_rate = "
            f"{short(start / steps)}"
        )


def _check_outputs(
    model: SplitModel, prototype: Prototype, examples: Tensor, *, num_classes: int
) -> None:
    """Raise ValueError if a user's model returns features or logits of a wrong shape."""
    example = torch.zeros(2, *examples.shape[1:], dtype=examples.dtype)
    model.eval()
    with torch.no_grad():
        try:
            features = model.features(example.float() if example.dtype is torch.uint8 else example)
            logits = model.head(features)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"prototypes.model = {prototype.model!r}: fails on two empty examples ({error})"
            ) from error
    outputs: tuple[tuple[str, object, int], ...] = (
        ("features", features, model.feature_width),
        ("logits", logits, num_classes),
    )
    for what, found, width in outputs:
        shape = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        if shape != [2, width]:
            line = f"returns {what} {shape} for two examples, should be {[2, width]}"
            raise ValueError(f"prototypes.model = {prototype.model!r}: {line}")


def _warn_of_random_layers(model: SplitModel, prototype: Prototype) -> None:
    """Warn of dropout and the like: their draws have no separate random stream."""
    if layers := random_layers(model):
        warnings.warn(
            f"prototypes.model = {prototype.model!r}: {', '.join(layers)} draws random numbers in "
            "training, so a repeated or resumed run gives other figures; leave it out, or set its "
            "probability to 0",
            stacklevel=2,
        )


def _check_words(prototype: Prototype, vocabulary: Vocabulary | None) -> None:
    """Raise ValueError if a prototype's own checkpoint was trained with another vocabulary."""
    checkpoint = checkpoint_of(prototype)
    if checkpoint is None or vocabulary is None:
        return
    key = "prototypes.options.checkpoint"
    folder = locate(checkpoint, key=key)
    if (
        read_tokenizer(folder) is not None
        and of_folder(folder, key=key).tokens != vocabulary.tokens
    ):
        raise ValueError(
            f"text.vocabulary: is that of {vocabulary.origin}, but {checkpoint}, the checkpoint of "
            f"{prototype.name}, was trained with another one; should be its own"
        )


def _check_shapes(data: LabelledData, auxiliary_shape: tuple[int, ...]) -> None:
    """Raise ConfigError unless private, test and auxiliary images have one shape."""
    shape = tuple(data.images.shape[1:])
    if auxiliary_shape[1:] != shape:
        raise ConfigError(
            [
                f"auxiliary: its images are {list(auxiliary_shape[1:])} and images of data "
                f"{list(shape)}; should be equal, see image_size and channels"
            ]
        )
    if tuple(data.test_images.shape[1:]) != shape:
        raise ConfigError(
            [f"data: test images are {list(data.test_images.shape[1:])}, the others {list(shape)}"]
        )


def _missing_file(key: str, source: str, path: str | None) -> list[str]:
    if not SOURCES[source].needs_path:
        given = path is not None
        return [f"{key}.path = {path!r}: the source {source} takes no path"] if given else []
    if path is None:
        return [f"{key}.path: missing; the source {source} needs one"]
    return _not_there(f"{key}.path", source, path)


def _not_there(key: str, source: str, path: str) -> list[str]:
    if not SOURCES[source].path_on_disk or Path(path).exists():
        return []
    folder = Path(path).absolute().parent
    near = nearest(
        Path(path).name, [one.name for one in folder.iterdir()] if folder.is_dir() else []
    )
    return [f"{key} = {path!r}: there is no such file or folder in {folder}{near}"]


def _missing_data(section: Data) -> list[str]:
    """Return the problems of the paths of the labelled data."""
    source = SOURCES[section.source]
    problems: list[str] = []
    if section.test is not None and not source.takes_test:
        problems.append(f"data.test = {section.test!r}: the source {section.source} takes none")
    elif section.test is not None:
        problems += _not_there("data.test", section.source, section.test)
    if section.client_column and (section.clients or not source.holds_features):
        problems.append(
            f"data.client_column = {section.client_column!r}: only for data.source = 'features' in "
            "a Parquet file, data.path"
        )
    if not section.clients:
        return _missing_file("data", section.source, section.path) + problems
    if not source.needs_path:
        problems.append(f"data.clients: the source {section.source} reads no files")
    if section.path is not None:
        problems.append(
            f"data.path = {section.path!r}: should not be given together with data.clients"
        )
    places = [Path(path).absolute() for path in section.clients]
    for path, place in zip(section.clients, places, strict=True):
        problems += _not_there("data.clients", section.source, path)
        if places.count(place) > 1:
            problems.append(f"data.clients = {path!r}: named more than once")
    if section.test is not None and Path(section.test).absolute() in places:
        problems.append(f"data.test = {section.test!r}: is also one of data.clients, to train on")
    return list(dict.fromkeys(problems))


def _missing_test(section: Data) -> list[str]:
    """Return the problems of the test data of a federation's server."""
    if section.clients:
        return ["data.clients: in a federation each node has its own data; use data.test only"]
    if not SOURCES[section.source].needs_path or section.path is not None:
        return _missing_data(section)
    if section.test is None:
        return [f"data.test: missing; the server needs its own test data ({section.source})"]
    return _not_there("data.test", section.source, section.test)


def _size_problems(experiment: ExperimentFields) -> list[str]:
    clients = experiment.split.num_clients
    try:
        examples = count_labelled(experiment.data, texts=experiment.text is not None)
        held = experiment.data.server_validation
    except ValueError as error:
        return [str(error)]
    if examples < 1:
        fraction = experiment.data.test_fraction
        return [f"data.test_fraction = {fraction}: leaves no training examples"]
    if held >= examples:
        return [
            f"data.server_validation = {held}: should be below {examples}, all training examples"
        ]
    examples -= held
    if clients > examples:
        return [
            f"split.num_clients = {clients}: more clients than the {examples} training examples"
        ]
    return []
