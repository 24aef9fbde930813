"""Experiment: every setting of a run, validated, from TOML or Python, with all the defaults."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedaux.config_errors import (
    DEVICE_PATTERN,
    DIGEST_PATTERN,
    FORMER_DEFAULTS,
    NAME_PATTERN,
    inspected,
    keys_of,
    plain,
    touches,
    without_none,
)
from fedaux.config_errors import ConfigError as ConfigError

NO_DATA = "none"
"""The value of `data.source` without labelled data."""
FEATURES = "features"
"""The source of feature vectors."""


def _as_tuple(value: object) -> object:
    """Accept a single name for a list of one."""
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


def _known_encoding(name: str) -> str:
    try:
        " ".encode(name)
    except (LookupError, UnicodeError) as error:
        raise ValueError("should be an encoding of Python, such as latin-1 or cp1252") from error
    return name


def _rising(interval: tuple[float, float]) -> tuple[float, float]:
    if not 0 < interval[0] <= interval[1] < float("inf"):
        raise ValueError("should be two rising numbers above 0")
    return interval


def _share(interval: tuple[float, float]) -> tuple[float, float]:
    if not 0 < interval[0] <= interval[1] <= 1:
        raise ValueError("should be two rising numbers above 0, at most 1")
    return interval


Fraction = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _path(value: str) -> str:
    if any(len(part.encode()) > LONGEST_NAME for part in value.split("/")):
        raise ValueError(f"has a name of more than {LONGEST_NAME} bytes, as no file has")
    return value


LONGEST_NAME = 255
Place = Annotated[str, Field(min_length=1), AfterValidator(_path)]
Name = Annotated[str, Field(min_length=1, pattern=NAME_PATTERN)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Places = Annotated[tuple[Place, ...], BeforeValidator(_as_tuple)]
Interval = Annotated[tuple[float, float], Field(strict=False)]


class Section(BaseModel):
    """A table of the configuration: immutable; unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class _Dataset(Section):
    source: str
    """Where the data comes from: a name in `fedaux.data.SOURCES`."""
    path: Place | None = None
    """File or folder, for sources that read one; for `huggingface` the dataset's name on the
    hub."""
    split: Place | None = None
    """Which split to use, for `huggingface`, `parquet`, `csv`, `jsonl` and `folder`: its name on
    the hub, the beginning of file names (`unlabeled-00000-of-00002.parquet`), or the name of a
    folder. Default: `train`."""
    size: Count | None = None
    subset: str | None = None
    """`huggingface`: the configuration of the dataset."""
    image_column: str | None = None
    """Column of a table that contains the images or paths to them. Default: found by name or
    type."""
    text_column: Names = ()
    """Column of a table that contains the texts; several columns are joined by a space. Default:
    found by name."""
    feature_column: Names = ()
    """`features`: name of the array or column of the features, or columns of numbers that are the
    features. Default: found by name; of a Parquet file without such a column, all numbers except
    the labels."""
    image_size: Count | None = None
    channels: Literal[1, 3] | None = None
    """1 converts all images to greyscale, 3 to RGB. Default: as the first image."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] | None = None
    """Encoding of text files, CSV and JSON Lines that are neither UTF-8 nor UTF-16 with a byte
    order mark, such as `latin-1`. Default: such files are an error."""
    skip_bad: bool = False
    """Skip and count rows without a readable image, text or label, instead of stopping the run.
    Without `image_size`, images of another size than most are skipped, too."""
    contained: bool = False
    """`csv` and `jsonl`: names of files that lead out of the folder of their table are bad rows,
    also by links."""


class Data(_Dataset):
    """The clients' labelled data."""

    source: str = "digits"
    """Where the data comes from: a name in `fedaux.data.SOURCES`, or `none` without labelled data,
    which only `fedaux pretrain` accepts. If `auxiliary.path` is given and neither a source nor a
    path of labelled data is, the default is `none`."""
    split: Place | None = None
    """The split to train on, as in `auxiliary.split`. It is used as test data only if `test` names
    it."""
    size: Count | None = None
    """Number of training examples to use, from the start (per client, with `clients`). Default:
    all."""
    test_size: Count | None = None
    """Number of test examples to use. Default: all."""
    image_size: Count | None = None
    """Side in pixels to which images are resized, after cropping the centre square. Default: no
    resizing."""
    clients: Places = ()
    """One file or folder per client, instead of `path`. Each client then has its own data, and
    nothing is split."""
    test: Place | None = None
    """File or folder of the test data, if it is separate; for `huggingface` the name of its
    split."""
    test_fraction: Fraction = 0.2
    """Share held out for testing if the source has no test set (per client, with `clients`); the
    same examples for every seed."""
    label_column: str | None = None
    """Column of a table that contains the labels. Default: found by name or type. For
    `cifar100-binary`, `fine` or `coarse`."""
    client_column: str | None = None
    """`features`: column of a Parquet file that names the client of each row. Nothing is split, and
    `split.num_clients` is the number of different names."""
    channel_mean: Annotated[tuple[float, ...], BeforeValidator(_as_tuple)] = ()
    """Subtracted from every image, private and public: one number between 0 and 1 per channel.
    Default: 0."""
    channel_deviation: Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)] = ()
    """Every image is then divided by this: one number per channel. Default: 1."""
    mirror: bool = False
    """Whether mirroring an image keeps its label: then local training and distillation see half of
    the images mirrored, at random."""
    server_validation: Index = 0
    """Number of labelled training examples at the server, for methods that need some; the paper
    uses none."""

    @property
    def given(self) -> bool:
        """Whether there is labelled data."""
        return self.source != NO_DATA

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of clients with their own files: what distinguishes the paths; empty otherwise."""
        from fedaux.formatting import distinct_names  # late: a round needs no text

        return distinct_names(self.clients)


class Auxiliary(_Dataset):
    """The server's public unlabeled data D_aux, split into negatives D- and the distill set."""

    source: str = "letters"
    """Where the data comes from: a name in `fedaux.data.SOURCES`."""
    size: Count | None = None
    """Number of examples to use. Default: all; 5000 for `letters`, which are generated; required
    for `noise`."""
    image_size: Count | None = None
    """Side in pixels to which images are resized, after cropping the centre square. Default: no
    resizing; `noise` has the size of the clients' images."""
    seed: Index = 0
    """`noise`: seed of the pixels. Public data does not depend on the seeds of a run."""
    wordnet: str | None = None
    """`parquet`, `csv`, `jsonl`, `huggingface` and `folder`: keep only images of this noun, such
    as devices, birds, animals, dogs, invertebrates, structures, or a WordNet id such as n02084071.
    The ids are in a column `wnid` or are the names of folders."""
    negatives_fraction: Fraction = 0.2
    """Share of the negatives; the rest is the distill set."""


class Text(Section):
    """Texts as token ids; one tokenizer for private and public texts. Without this table, the data
    are images."""

    length: Annotated[int, Field(ge=4)] = 128
    """Maximum number of tokens per text, including the special tokens at both ends; longer texts
    are truncated."""
    auxiliary_length: Annotated[int, Field(ge=4)] | None = None
    """The same for public texts. Default: `length`. Texts are padded to the longest text only."""
    vocabulary: Place | None = None
    """Origin of the tokenizer: a folder or hub id with a checkpoint, a file tokenizer.json or
    vocab.txt, or a file written by fedaux; `auxiliary` learns one from the public texts. Default:
    the tokenizer of `pretraining.checkpoint` or of the first prototype's checkpoint, if there is
    one; otherwise a learned one."""
    vocabulary_size: Annotated[int, Field(ge=100)] = 30522
    """Maximum number of tokens of a learned vocabulary; the default is BERT's."""


class Split(Section):
    """How the labelled data is split among the clients (appendix, Data Splitting Methodology)."""

    num_clients: Count = 20
    """Number of clients n; with `data.clients`, the number of entries there."""
    alpha: Positive = 0.01
    """Concentration of the Dirichlet distribution: with 0.01 most clients have a single class,
    with 100 all classes."""


class Prototype(Section):
    """A model architecture and the clients that use it."""

    name: Name
    """Name of the prototype in metrics and checkpoints."""
    model: str
    """The architecture: a name in `fedaux.models.MODELS`. Images: `cnn` (three small convolutions),
    `mlp`, `resnet8`, `mobilenetv2`, `shufflenet`; the last three also with `-gn` at the end, group
    normalisation for DP-SGD. Texts: `bert`, `tinybert`, `minilm`. Features: `linear`. Default,
    without any prototype: `cnn`; of features `linear`."""
    clients: Annotated[tuple[Index, ...], BeforeValidator(_as_tuple)] | None = None
    """The clients that use it; with `[]` the server alone trains it, as a student of the others.
    Default: a share of the clients that no prototype lists."""
    share: Positive = 1.0
    """Its share, relative to the other prototypes without `clients`."""
    options: dict[str, bool | int | float | str] = {}
    """Options of the architecture, such as width."""


class EncoderSection(Section):
    """A frozen encoder: its features are what heads are trained on, and nothing is pretrained.
    `model = "hf:OWNER/NAME"` at the top of a recipe is short for it."""

    source: Place
    """`hf:OWNER/NAME` or `hf:FOLDER`, in the Hugging Face layout; `timm:NAME`; a safetensors file
    that `fedaux encoder --out` wrote; or `efficientnet-lite0`. Only safetensors are read."""
    digest: Annotated[str, Field(pattern=DIGEST_PATTERN)] | None = None
    """The digest that it must have, as `fedaux encoder` shows it. Default: any."""
    image_size: Count | None = None
    """Side of its square images in pixels. Default: as its processor states."""
    resize: Literal["stretch", "crop", "pad"] | None = None
    """How oblong images become square: `crop` keeps the middle, `pad` adds margins, `stretch`
    changes proportions. Default: as its processor states."""
    batch_size: Count | None = None
    """Inputs per batch. Default: 32 images of 224 pixels on a CPU, 256 on a GPU; halved where they
    do not fit into its memory."""


class Augmentation(Section):
    """Random views of images for contrastive pretraining; the defaults are SimCLR's, without
    blur."""

    crop_scale: Annotated[Interval, AfterValidator(_share)] = (0.08, 1.0)
    """Area of a crop as a share of the image: minimum and maximum."""
    crop_ratio: Annotated[Interval, AfterValidator(_rising)] = (0.75, 4 / 3)
    """Width over height of a crop: minimum and maximum."""
    flip: Probability = 0.5
    """Probability of a horizontal flip; use 0 if flipping changes the meaning, as for
    characters."""
    rotation: NonNegative = 0.0
    """Maximum rotation in degrees."""
    shear: NonNegative = 0.0
    """Maximum shear, as a share of the height."""
    jitter: Probability = 0.8
    """Probability of colour jitter."""
    brightness: NonNegative = 0.4
    """Strength of brightness jitter."""
    contrast: NonNegative = 0.4
    """Strength of contrast jitter."""
    saturation: NonNegative = 0.4
    """Strength of saturation jitter."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Strength of hue jitter, in turns."""
    greyscale: Probability = 0.2
    """Probability of conversion to greyscale."""


class Pretraining(Section):
    """Self-supervised training of h0 on the auxiliary data, for methods that start from it."""

    kind: Literal["auto", "contrastive", "masked", "none"] = "auto"
    """Images: `contrastive` is SimCLR. Texts: `masked` is BERT's masked language modelling.
    `none` uses the initial features as h0: random, or from the prototype's own checkpoint. `auto`
    is `none` with such a checkpoint, otherwise `contrastive` or `masked`."""
    checkpoint: Place | None = None
    """A safetensors file with h0, as written by `fedaux pretrain --out`; nothing is trained
    then."""
    epochs: Count = 100
    """Number of passes over the auxiliary data."""
    batch_size: Annotated[int, Field(ge=2)] = 512
    """Examples per batch; images in two views each."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """`adam` adds the weight decay to the gradient; `adamw` decouples it."""
    learning_rate: Positive = 1e-3
    """Learning rate; the maximum of a schedule."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices and convolutions; biases and normalisation layers have none."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule; `cosine` decays to 0."""
    warmup_epochs: Index = 0
    """Epochs of linear warm-up from 0."""
    temperature: Positive = 0.5
    """`contrastive`: temperature of the NT-Xent loss."""
    projection_widths: Annotated[tuple[Count, Count], BeforeValidator(_as_tuple)] = (512, 128)
    """Widths of the projection head, which is discarded after pretraining."""
    projection_batch_norm: bool = False
    """Batch normalisation in the hidden layer of the projection head."""
    masked_share: Fraction = 0.15
    """`masked`: share of the tokens to predict."""
    augmentation: Augmentation = Augmentation()

    @model_validator(mode="after")
    def _warms_up_in_time(self) -> Pretraining:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs should be below epochs, {self.epochs}")
        return self


MEAN_COMPONENTS = 96
"""`certainty.components` of the mechanism `mean`, when not given."""


class Certainty(Section):
    """The private release from which certainty scores are computed."""

    mechanism: str = "mean"
    """The mechanism: a name in `fedaux.privacy.mechanisms.MECHANISMS`. `fedaux2`, `private-head`,
    `private-student` and `ccvr` always use `classes`, `fedcounts` always `counts`."""
    epsilon: Positive = 0.1
    """Privacy loss ε of a client's release; neighbouring datasets differ by replacing one
    example."""
    delta: Fraction = 1e-5
    """The δ of the release."""
    components: Count | None = None
    """`mean` and `classes`: number of principal components of the negatives' features. When not
    given, 96 for `mean`; for `classes` it follows from the public features, the numbers of
    clients, examples and classes, and from ε and δ."""
    sharpness: Positive = 0.5
    """`mean`: exponent applied to density ratios before they become weights."""
    regularisation: Positive = 0.1
    """`paper` and `released-code`: λ of the logistic regression."""
    head_epsilon: Positive = 0.5
    """ε of the heads that clients of `fedauxfdp` release besides their scores; δ is that of the
    scores."""


class LocalPrivacy(Section):
    """Differentially private local training (DP-SGD). Without this table, updates are sent
    unprotected."""

    noise_multiplier: Positive = 1.0
    """Noise on the sum of a batch's gradients, in units of `clip`; `fedaux privacy` reports the
    resulting ε."""
    clip: Positive = 1.0
    """Maximum norm of each example's gradient."""
    delta: Fraction = 1e-5
    """The δ at which a client's ε is reported, for one update and for all updates together."""


class Local(Section):
    """Local training of one client in one round."""

    epochs: Count = 1
    """Number of passes over the client's data."""
    batch_size: Count = 32
    """Examples per batch."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer. Default in linear mode: `sgd`."""
    optimizer_state: Literal["reset", "kept"] = "reset"
    """`reset`: a new optimizer every round, and clients keep no state. `kept`: each client
    continues with its own."""
    learning_rate: Positive = 1e-3
    """Learning rate. Default in linear mode: 0.1, and 0.01 with `adam`."""
    momentum: Momentum = 0.0
    """Momentum of `sgd`; ignored by `adam`."""
    weight_decay: NonNegative = 0.0
    """L2 penalty, added to the gradient."""
    proximal: NonNegative = 0.01
    """μ of FedPROX, α of FedDyn; ignored by other methods."""
    objectives: Names = ()
    """Objectives that every method gets besides its own: names in
    `fedaux.core.objectives.OBJECTIVES`, such as `logit-adjusted` or `rehearsal`."""
    strengths: dict[str, NonNegative] = {}
    """Strengths of objectives by name. Default: the strengths in
    `fedaux.core.objectives.OBJECTIVES`; `fedaux2` and `fedcounts` choose the strength of
    `jointly-adjusted`."""
    privacy: LocalPrivacy | None = None


class Rehearsal(Section):
    """Public examples that clients rehearse with the server's soft labels (`rehearsal`)."""

    batch_size: Count = 96
    """Public examples that join each batch of local training."""
    examples: Count | None = None
    """Examples of the distill set that clients rehearse. Default: all."""


class Distillation(Section):
    """Distillation of the averaged model on the teacher's soft labels (Eq. 1)."""

    epochs: Count = 1
    """Number of passes over the distill set."""
    steps: Count | None = None
    """Number of batches, instead of `epochs`; the distill set is repeated as needed."""
    batch_size: Count = 128
    """Examples per batch."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer, new every round."""
    learning_rate: Positive = 5e-5
    """Learning rate. Default in linear mode, with `adam`: 0.001."""
    momentum: Momentum = 0.0
    """Momentum of `sgd`; ignored by `adam`."""
    weight_decay: NonNegative = 0.0
    """L2 penalty, added to the gradient."""


class Bayesian(Section):
    """The distribution over models from which the Bayesian teacher samples (FedBE, Chen & Chao
    2021), per prototype."""

    samples: Count = 10
    """Models sampled per round and prototype; the average model is always included."""
    scale: NonNegative = 1.0
    """Factor on the variance of the clients' weights; 0 samples their mean itself."""
    include_clients: bool = True
    """Include the clients' own models in the ensemble."""


class Memory(Section):
    """How methods with a memory (`+m`) use the predictions of clients that are absent from a
    round."""

    discount: Share = 1.0
    """Factor on the weight of a remembered prediction for every round since it was made."""


class Evaluation(Section):
    """When and how the server's models are evaluated on the test data."""

    every: Count = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    batch_size: Count | None = None
    """Examples per batch without training: evaluation, teachers, features. Default: 256 on a CPU,
    4096 on a GPU."""


class Engine(Section):
    """Device, precision and parallelism."""

    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    """auto, cpu, cuda or cuda:N; auto uses a GPU if one is available."""
    threads: Count | None = None
    """Number of torch's CPU threads. Default: torch's own."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """fp32 for reproducible numbers; bf16 computes in bfloat16 and keeps weights in fp32; auto is
    bf16 on a GPU. On a device without bf16, fedaux prints a warning and uses fp32."""
    compile: bool | None = None
    """Compile training steps. Default: on a GPU only."""
    clients_at_once: Count | None = None
    """Clients trained in parallel. Default: 8. 1 trains one after another in a plain loop."""


class Federation(Section):
    """A real federation over Flower: which clients the server waits for, and what it sends."""

    wire: Literal["fp32", "fp16"] = "fp32"
    """Precision of weights on the network; fp16 halves the size of messages. Simulations round in
    the same way."""
    deadline: Positive = 600.0
    """Seconds a client has to answer; the round then continues without it."""
    wait_for: Count | None = None
    """Number of clients that must be connected before the run starts. Default: all."""
    wait_seconds: NonNegative = 300.0
    """Seconds to wait for clients; the run then starts or continues with the connected clients, if
    any."""
    largest_share: Share = 0.5
    """Largest share of all examples with which one client counts in the average and in class sums,
    if at least three clients state theirs; 1 trusts what clients state. Simulations ignore it."""
    authenticated: bool = True
    """Whether nodes have keys: a client is then bound to the node that first registered it. Use
    false for Flower's simulation and for tests without keys, where a node gets a new identity at
    every start."""
    nodes: Names = ()
    """Public key of each client's node, in the order of the clients, as in its .pub file; no other
    node can act for that client. Default: the first node that registers a client is bound to
    it."""


class Output(Section):
    """Where results are written."""

    directory: Place | None = None
    """The run directory. Default: runs/NAME."""
    models: bool = True
    """Whether to write trained models to the folder `models`, for `fedaux predict` and `fedaux
    export`."""


ENCODER_PREFIXES, ENCODER_NAMES = ("hf:", "timm:"), ("efficientnet-lite0",)
"""How `model` names an encoder."""
LINEAR = {"name": "linear", "model": "linear"}
"""The prototype of feature vectors."""
LINEAR_RATES = {"sgd": 0.1, "adam": 0.01}
"""Default learning rates of local training in linear mode, where the default optimizer is SGD: the
loss of a head is convex, and features are standardised."""
LINEAR_DISTILLATION = 0.001
"""Default learning rate of distillation in linear mode."""


class ExperimentFields(Section):
    """The fields of an experiment, each validated independently."""

    name: Name = "experiment"
    """Name of the run. Default: the name of the recipe's file."""
    method: Annotated[Names, Field(min_length=1)] = ("fedaux",)
    """One method or a list: names in `fedaux.METHODS`, see `fedaux methods`. `NAME@sgd-0.1` and
    `NAME@adam-0.001` have an optimizer of their own."""
    seeds: Annotated[tuple[Index, ...], Field(min_length=1), BeforeValidator(_as_tuple)] = (0,)
    """Seeds; each determines split, h0, client selection, noise and batches, and every method runs
    once per seed."""
    rounds: Count = 100
    """Number of communication rounds T."""
    mode: Literal["full", "linear"] = "full"
    """The trained part: `full` models, or `linear` heads on the frozen features of h0."""
    participation_rate: Share = 0.4
    """Share C of the clients selected per round, at least one client."""
    aggregation: Literal["mean", "clipped", "trimmed-mean", "median"] = "mean"
    """How clients' models are averaged. `mean` is weighted by numbers of examples; with `fedaux2`,
    rows of the head by numbers of their class. The others limit what one client can do: `clipped`
    first cuts each update to the median norm of the round's updates, `trimmed-mean` leaves out the
    highest and lowest 20 % of each coordinate's values (at least one each of three or more),
    `median` takes each coordinate's median; the last two ignore numbers of examples."""
    data: Data = Data()
    auxiliary: Auxiliary = Auxiliary()
    encoder: EncoderSection | None = None
    text: Text | None = None
    split: Split = Split()
    prototypes: Annotated[
        tuple[Prototype, ...], Field(min_length=1), BeforeValidator(_as_tuple)
    ] = (Prototype(name="cnn", model="cnn"),)
    pretraining: Pretraining = Pretraining()
    certainty: Certainty = Certainty()
    local: Local = Local()
    rehearsal: Rehearsal = Rehearsal()
    distillation: Distillation = Distillation()
    bayesian: Bayesian = Bayesian()
    memory: Memory = Memory()
    evaluation: Evaluation = Evaluation()
    engine: Engine = Engine()
    federation: Federation = Federation()
    output: Output = Output()

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, values: Any) -> Any:
        """Set the number of clients by `data.clients`, no labelled data for public data alone,
        linear heads for an encoder or features, `model` in one line, and the learning rates of
        heads."""
        if not isinstance(values, dict):
            return values
        for table, former in FORMER_DEFAULTS.items():
            if isinstance(given := values.get(table), dict):
                left = [key for key in given if key not in former or given[key] != former[key]]
                others = {key: own for key, own in values.items() if key != table}
                values = others | ({table: {key: given[key] for key in left}} if left else {})
        data, public, split = (values.get(key, {}) for key in ("data", "auxiliary", "split"))
        if not isinstance(data, dict):
            return values  # the section's own validation reports the problem
        silos = _as_tuple(data.get("clients", ()))
        if isinstance(split, dict) and isinstance(silos, tuple) and silos:
            values = {**values, "split": {"num_clients": len(silos), **split}}
        named = data.keys() & {"source", "path", "clients", "test"}
        if isinstance(public, dict) and public.get("path") is not None and not named:
            values = {**values, "data": {**data, "source": NO_DATA}}
        model, encoder = values.get("model"), values.get("encoder")
        if isinstance(model, str):
            values = {key: value for key, value in values.items() if key != "model"}
            if model in ENCODER_NAMES or model.startswith(ENCODER_PREFIXES):
                encoder = {**(encoder if isinstance(encoder, dict) else {}), "source": model}
                values = {**values, "encoder": encoder}
            else:
                values = {"prototypes": [{"name": model, "model": model}], **values}
        if encoder is not None or FEATURES in (
            data.get("source"),
            isinstance(public, dict) and public.get("source"),
        ):
            values = {"mode": "linear", "prototypes": [LINEAR], **values}
            pretraining = values.get("pretraining", {})
            if isinstance(pretraining, dict):
                values = {**values, "pretraining": {"kind": "none", **pretraining}}
        if values.get("mode") == "linear":
            local, distillation = values.get("local", {}), values.get("distillation", {})
            if isinstance(local, dict):
                chosen = {"optimizer": "sgd", **local}
                if (rate := LINEAR_RATES.get(str(chosen["optimizer"]))) is not None:
                    values = {**values, "local": {"learning_rate": rate, **chosen}}
            if isinstance(distillation, dict) and distillation.get("optimizer", "adam") == "adam":
                rate = LINEAR_DISTILLATION
                values = {**values, "distillation": {"learning_rate": rate, **distillation}}
        return values

    def joint_problems(self) -> list[tuple[set[str], str]]:
        """Return the problems that concern several keys, each with these keys."""
        found: list[tuple[set[str], str]] = []
        clients = self.split.num_clients
        silos = len(self.data.clients) if self.data.given else 0
        if silos and clients != silos:
            line = (
                f"split.num_clients = {clients}: should be {silos}, as in data.clients, or left out"
            )
            found.append(({"split.num_clients", "data.clients"}, line))
        for key in ("method", "seeds"):
            values = getattr(self, key)
            repeated = sorted(str(value) for value, count in Counter(values).items() if count > 1)
            if repeated:
                found.append(
                    ({key}, f"{key} = {list(values)}: {', '.join(repeated)} appears more than once")
                )
        names = [prototype.name for prototype in self.prototypes]
        for name in sorted({name for name in names if names.count(name) > 1}):
            found.append(
                ({"prototypes"}, f"prototypes.name = {name!r}: used by more than one prototype")
            )
        owner: dict[int, str] = {}
        for prototype in self.prototypes:
            for client in prototype.clients or ():
                if client >= clients:
                    line = f"there are {clients} clients, numbered 0 to {clients - 1}"
                    line = f"prototypes.clients = {client}: {line}"
                    found.append(({"prototypes", "split.num_clients"}, line))
                elif owner.setdefault(client, prototype.name) != prototype.name:
                    both = f"both {owner[client]!r} and {prototype.name!r}"
                    line = f"prototypes.clients = {client}: given to {both}"
                    found.append(({"prototypes"}, line))
        if (
            all(prototype.clients is not None for prototype in self.prototypes)
            and len(owner) < clients
        ):
            left = [client for client in range(clients) if client not in owner]
            shown = ", ".join(map(str, left[:5])) + (", ..." if len(left) > 5 else "")
            line = (
                f"prototypes.clients: no prototype for client {shown}; add them, or leave "
                "`clients` out of one prototype"
            )
            found.append(({"prototypes", "split.num_clients"}, line))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as TOML can represent it: no None, lists for tuples."""
        table: dict[str, Any] = without_none(self.model_dump(mode="json"))
        return table

    def essentials(self) -> dict[str, Any]:
        """Return the settings that results depend on; the others may change when a run is
        resumed."""
        content = self.to_dict()
        for key in ("output", "engine", "federation"):
            del content[key]
        if self.federation.wire != "fp32":
            content["federation"] = {"wire": self.federation.wire}
        return content

    def sha256(self) -> str:
        """Return the digest of :meth:`essentials`."""
        return hashlib.sha256(json.dumps(self.essentials(), sort_keys=True).encode()).hexdigest()


def inspect(values: Mapping[str, Any]) -> tuple[ExperimentFields, list[str]]:
    """Return the fields of an experiment and all problems; a field with a wrong value has its
    default, so that callers can check the others further."""
    fields, problems, broken = inspected(ExperimentFields, values)
    joint = [line for keys, line in fields.joint_problems() if not touches(keys, broken)]
    return fields, problems + joint


def known_keys() -> list[str]:
    """Return every dotted key a recipe may hold."""
    return list(keys_of(ExperimentFields))


class Experiment(ExperimentFields):
    """Every setting of a run. Raises ConfigError with all problems at once."""

    def __init__(self, **values: Any) -> None:
        _, problems = inspect(values)
        if problems:
            raise ConfigError(problems)
        super().__init__(**plain(values))
