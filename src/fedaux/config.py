"""Experiment: everything a run depends on, validated, from TOML or Python. Defaults stand here and nowhere else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

NO_DATA = "none"
"""The source of labelled data where there are none."""
NAME_PATTERN = r"^[A-Za-z0-9._-]+$"
DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"
PATTERN_MEANING = {
    NAME_PATTERN: "should be letters, digits, dots, dashes and underscores",
    DEVICE_PATTERN: "should be auto, cpu, cuda or cuda:N",
}

Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _as_tuple(value: object) -> object:
    """Let one name stand for a list of one."""
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


def _rising(interval: tuple[float, float]) -> tuple[float, float]:
    if not 0 < interval[0] <= interval[1] < float("inf"):
        raise ValueError("should be two rising numbers above 0")
    return interval


def _share(interval: tuple[float, float]) -> tuple[float, float]:
    if not 0 < interval[0] <= interval[1] <= 1:
        raise ValueError("should be two rising numbers above 0, at most 1")
    return interval


class ConfigError(ValueError):
    """Every problem found in a configuration, one line each."""

    def __init__(self, problems: Iterable[str], *, origin: str = "") -> None:
        self.problems = list(problems)
        heading = f"{origin}: " if origin else ""
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__("\n".join([f"{heading}{count} in the configuration", *self.problems]))


class Section(BaseModel):
    """A table of the configuration: unknown keys and wrong types are refused, values never change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class Data(Section):
    """The clients' labelled data."""

    source: str = "digits"
    """Where the data comes from: a row of `fedaux.data.SOURCES`; `none` where there are none, which is enough for
    `fedaux pretrain`. When not given, it is `none` where `auxiliary.path` is given and no place of labelled data is."""
    path: str | None = None
    """A file or folder, for sources that read one; for `huggingface` the data set's name on the hub."""
    split: str | None = None
    """The split to train on, as for `auxiliary.split`; it is never the test data as well, unless `test` names it."""
    clients: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """A file or folder a client, instead of `path`: then each client holds its own data and nothing is split."""
    test: str | None = None
    """A file or folder with the test data, where it lies elsewhere; for `huggingface` the name of its split."""
    test_fraction: Fraction = 0.2
    """Share held out for testing where the source has no test set (of each client, where `clients` are given); the same
    examples for every seed."""
    size: Count | None = None
    """How many training examples to use, the first ones (of each client, where `clients` are given); all of them when
    not given."""
    test_size: Count | None = None
    """The same of test examples."""
    subset: str | None = None
    """`huggingface`: which configuration of the data set."""
    image_column: str | None = None
    """Column of tables that holds the images, or paths to them; found by its name or type when not given."""
    text_column: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Column of tables that holds the texts, found by its name when not given; several are joined by a blank."""
    label_column: str | None = None
    """Column of tables that holds the labels, found likewise; for `cifar100-binary` `fine` or `coarse`."""
    image_size: Count | None = None
    """Side in pixels to which images are resized, after their middle square was cut out; as they are when not given."""
    channels: Literal[1, 3] | None = None
    """1 makes all images grey, 3 makes them coloured; as the first image when not given."""
    skip_bad: bool = False
    """Whether rows without a readable image or text, or without a proper label, are left out and counted, rather than
    stop the run."""
    channel_mean: Annotated[tuple[float, ...], BeforeValidator(_as_tuple)] = ()
    """Taken from every image, private and public, a number a channel between 0 and 1; nothing when not given."""
    channel_deviation: Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)] = ()
    """By which every image is then divided, a number a channel; by 1 when not given."""
    server_validation: Annotated[int, Field(ge=0)] = 0
    """Training examples that the server holds with their labels, to stop distillation early; the paper has none."""

    @property
    def given(self) -> bool:
        """Whether there are labelled data at all."""
        return self.source != NO_DATA


class Auxiliary(Section):
    """The server's public unlabeled data D_aux, split into negatives D- and the distill set."""

    source: str = "letters"
    """Where the data comes from: a row of `fedaux.data.SOURCES`."""
    path: str | None = None
    """A file or folder, for sources that read one; for `huggingface` the data set's name on the hub."""
    split: str | None = None
    """`huggingface`, `parquet`, `csv`, `jsonl` and `folder`: which split, by its name on the hub, how names of files
    begin (`unlabeled-00000-of-00002.parquet`), or that of a folder; `train` when not given."""
    size: Count | None = None
    """How many examples to use, all of them when not given; letters are drawn at will, 5000 when not given; `noise`
    must be told."""
    seed: Annotated[int, Field(ge=0)] = 0
    """`noise`: of its pixels. Public data is a fixed thing: the seeds of a run do not change it."""
    subset: str | None = None
    """`huggingface`: which configuration of the data set."""
    wordnet: str | None = None
    """`parquet`, `csv`, `jsonl`, `huggingface` and `folder`: only images of what this noun names: devices, birds,
    animals, dogs, invertebrates, structures, or a WordNet id such as n02084071; rows (in a column `wnid`) or folders
    carry such ids."""
    image_column: str | None = None
    """Column of tables that holds the images, or paths to them; found by its name or type when not given."""
    text_column: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Column of tables that holds the texts, found by its name when not given; several are joined by a blank."""
    image_size: Count | None = None
    """Side in pixels to which images are resized, after their middle square was cut out; as they are when not given.
    `noise` is drawn in this size, or in that of the clients' images."""
    channels: Literal[1, 3] | None = None
    """1 makes all images grey, 3 makes them coloured; as the first image when not given; `noise` as the clients'."""
    skip_bad: bool = False
    """Whether rows without a readable image or text are left out and counted, rather than stop the run."""
    negatives_fraction: Fraction = 0.2
    """Share of the negatives; the rest is the distill set."""


class Text(Section):
    """Texts as token ids, private and public ones by one tokenizer. Without this table, the data are images."""

    length: Annotated[int, Field(ge=4)] = 128
    """Tokens of a text, the marks at its two ends included; what is longer is cut."""
    auxiliary_length: Annotated[int, Field(ge=4)] | None = None
    """The same of public texts; `length` when not given. Nothing is padded beyond the longest text."""
    vocabulary: str | None = None
    """Where the tokenizer comes from: a folder or hub id with a checkpoint, a file tokenizer.json or vocab.txt, a file
    that fedaux has written; `auxiliary` learns one from the public texts. When not given: that of the data, of
    `pretraining.checkpoint` or of the first prototype's checkpoint, where they bring one, else a learned one."""
    vocabulary_size: Annotated[int, Field(ge=100)] = 30522
    """Tokens of a learned vocabulary, at most; the default is BERT's."""


class Split(Section):
    """How the labelled data is spread over the clients (appendix, Data Splitting Methodology)."""

    num_clients: Count = 20
    """Population n; as many as `data.clients` names, where it does."""
    alpha: Positive = 0.01
    """Concentration of the Dirichlet distribution: 0.01 gives a client hardly more than one class, 100 all of them."""


class Prototype(Section):
    """A model architecture, and which clients hold it: named ones, or a share of those not named."""

    name: Annotated[str, Field(min_length=1, pattern=NAME_PATTERN)]
    """What the prototype is called in metrics and checkpoints."""
    model: str
    """The architecture: a row of `fedaux.models.MODELS`."""
    clients: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple)] | None
    ) = None
    """The clients that hold it; when not given, it takes its share of those that no prototype names."""
    share: Positive = 1.0
    """Its share relative to the other prototypes without named clients."""
    options: dict[str, bool | int | float | str] = {}
    """Options of the architecture, such as width."""


class Augmentation(Section):
    """Random views of images, for contrastive pretraining; the defaults are those of SimCLR, without the blur."""

    crop_scale: Annotated[tuple[float, float], Field(strict=False), AfterValidator(_share)] = (
        0.08,
        1.0,
    )
    """Share of the image's area that a crop keeps, least and most."""
    crop_ratio: Annotated[tuple[float, float], Field(strict=False), AfterValidator(_rising)] = (
        0.75,
        4 / 3,
    )
    """Width over height of a crop, least and most."""
    flip: Probability = 0.5
    """Probability of a mirror image; 0 for what means something else in the mirror, such as characters."""
    rotation: NonNegative = 0.0
    """Largest rotation in degrees."""
    shear: NonNegative = 0.0
    """Largest shear, as a share of the height."""
    jitter: Probability = 0.8
    """Probability that brightness, contrast, saturation and hue change."""
    brightness: NonNegative = 0.4
    """Strength of the change in brightness."""
    contrast: NonNegative = 0.4
    """Strength of the change in contrast."""
    saturation: NonNegative = 0.4
    """Strength of the change in saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Strength of the change in hue, in turns."""
    greyscale: Probability = 0.2
    """Probability that a colour image loses its colour."""


class Pretraining(Section):
    """Self-supervised training of h0 on the auxiliary data, for methods that start from it."""

    kind: Literal["auto", "contrastive", "barlow", "masked", "next-token", "none"] = "auto"
    """Images: `contrastive` is SimCLR; `barlow` Barlow Twins. Texts: `masked` is BERT's cloze test; `next-token` is for
    models that look back only. `none` takes the initial features as h0: random ones, or those of the prototype's own
    checkpoint. `auto`: `none` where there is such a checkpoint, else `contrastive`, `masked` or `next-token`."""
    checkpoint: str | None = None
    """A safetensors file with h0, such as `fedaux pretrain --out` writes; then nothing is trained."""
    epochs: Count = 100
    """Passes over the auxiliary data."""
    batch_size: Annotated[int, Field(ge=2)] = 512
    """Examples a batch; images in two views each."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """`adam` adds the weight decay to the gradient, `adamw` takes it from the weights."""
    learning_rate: Positive = 1e-3
    """Of the optimizer; where a schedule is highest."""
    weight_decay: NonNegative = 0.0
    """Of matrices and convolutions; biases and normalisation have none."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate over the steps; `cosine` falls to 0."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs over which the learning rate first rises on a line from 0."""
    temperature: Positive = 0.5
    """`contrastive`: of the NT-Xent loss."""
    redundancy: Positive = 0.005
    """`barlow`: weight of the correlations between different outputs."""
    projection_widths: Annotated[tuple[Count, Count], BeforeValidator(_as_tuple)] = (512, 128)
    """Widths of the projection head, which is thrown away afterwards."""
    projection_batch_norm: bool = False
    """Whether the hidden layer of the projection head is normalised over the batch."""
    masked_share: Fraction = 0.15
    """`masked`: share of the tokens that are to be guessed."""
    augmentation: Augmentation = Augmentation()

    @model_validator(mode="after")
    def _warms_up_in_time(self) -> Pretraining:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs should be below epochs, {self.epochs}")
        return self


class Certainty(Section):
    """The private release that certainty scores are computed from."""

    mechanism: str = "mean"
    """How: a row of `fedaux.privacy.mechanisms.MECHANISMS`."""
    epsilon: Positive = 0.1
    """Privacy loss of a client's release; neighbours differ by replacing one example."""
    delta: Fraction = 1e-5
    """Probability with which that loss may be exceeded."""
    components: Count = 96
    """`mean`: how many principal components of the negatives' features are kept."""
    sharpness: Positive = 0.5
    """`mean`: the power to which density ratios are raised before they become weights."""
    regularisation: Positive = 0.1
    """`paper` and `release`: lambda of the logistic regression."""


class LocalPrivacy(Section):
    """Differentially private local training (DP-SGD). Without this table, updates are sent unprotected."""

    noise_multiplier: Positive = 1.0
    """Noise on the sum of a batch's gradients, in units of `clip`; `fedaux privacy` tells the epsilon it comes to."""
    clip: Positive = 1.0
    """Norm to which the gradient of each example is clipped."""
    delta: Fraction = 1e-5
    """The delta at which a client's epsilon is stated, for one update as for all of them together."""


class Local(Section):
    """Local training of one client in one round."""

    epochs: Count = 1
    """Passes over the client's data."""
    batch_size: Count = 32
    """Examples a batch."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer."""
    optimizer_state: Literal["reset", "kept"] = "reset"
    """`reset`: the optimizer starts anew every round and clients keep nothing; `kept`: each goes on with its own."""
    learning_rate: Positive = 1e-3
    """Of the optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of sgd; adam does not look at it."""
    weight_decay: NonNegative = 0.0
    """Strength of the penalty on squared weights, added to the gradient."""
    proximal: NonNegative = 0.01
    """mu of FedPROX; other methods do not look at it."""
    privacy: LocalPrivacy | None = None


class Averaging(Section):
    """The result is the mean of the weights at several steps (SWA). Without this table, it is the last weights."""

    start: Annotated[int, Field(ge=0)] = 0
    """Steps after which weights begin to count."""
    every: Count = 25
    """Weights count after every so many steps, counted from the first; with `cyclic`, best `cycle_steps`."""


class Stopping(Section):
    """Measuring on `data.server_validation`, to end early and keep the best. Without this table, no label is seen."""

    every: Count = 100
    """Steps between two measurements; the last step is always measured."""
    patience: Count = 1000
    """Distillation ends so many steps after the best measurement."""
    include_start: bool = False
    """Whether the averaged model, before any step, is measured too and can be the best."""


class Distillation(Section):
    """Distillation of the averaged model on the teacher's soft labels (Eq. 1); other authors' settings: presets.md."""

    epochs: Count = 1
    """Passes over the distill set."""
    steps: Count | None = None
    """Number of batches, instead of `epochs`; the distill set is passed over as often as that takes."""
    batch_size: Count = 128
    """Examples a batch."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer; it starts anew every round."""
    learning_rate: Positive = 5e-5
    """Of the optimizer; where a schedule begins."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of `sgd`; `adam` does not look at it."""
    weight_decay: NonNegative = 0.0
    """Times the weights is added to their gradient."""
    clip: Positive | None = None
    """Norm to which the gradient of a batch is clipped; it is not when not given."""
    schedule: Literal["constant", "cosine", "cyclic"] = "constant"
    """The learning rate over the steps: `cosine` falls to 0, `cyclic` falls on a line again and again."""
    cycle_steps: Count = 25
    """`cyclic`: steps of a cycle."""
    lowest_learning_rate: NonNegative = 0.0
    """`cyclic`: learning rate at the last step of a cycle."""
    sharpening: Positive = 1.0
    """T: targets are proportional to p^(1/T) of the teacher's p; below 1 sharper, 1 leaves them."""
    averaging: Averaging | None = None
    stopping: Stopping | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Distillation:
        if self.averaging is not None and self.stopping is not None:
            raise ValueError(
                "should have [distillation.averaging] or [distillation.stopping], not both"
            )
        if self.schedule == "cyclic" and self.lowest_learning_rate > self.learning_rate:
            raise ValueError("lowest_learning_rate should be at most learning_rate")
        return self


class Bayesian(Section):
    """The distribution over models that the Bayesian teacher draws from (FedBE, Chen & Chao 2021), per prototype."""

    samples: Count = 10
    """Models drawn a round, for each prototype; their average always takes part besides."""
    distribution: Literal["gaussian", "dirichlet"] = "gaussian"
    """`gaussian`: mean and diagonal variance of the clients' weights; `dirichlet`: convex combinations of them."""
    scale: NonNegative = 1.0
    """`gaussian`: the variance is multiplied by it; 0 draws the mean itself."""
    concentration: Positive = 1.0
    """`dirichlet`: small values draw single clients, large ones their average."""
    include_clients: bool = True
    """Whether the clients' own models take part, besides the drawn ones and the average."""


class Memory(Section):
    """What methods with a memory (`+m`) do with the predictions of clients that are absent from a round."""

    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the weight of a remembered prediction for every round since it was made."""


class BatchNormalisation(Section):
    """Which statistics batch normalisation uses where; models without it do not look at this."""

    teachers: Literal["client", "auxiliary", "batch"] = "client"
    """Clients' predictions on the distill set: running statistics of the client's own training, those of its model on
    public images, or (as the authors' released code) those of the batch at hand."""
    server: Literal["training", "auxiliary", "batch"] = "training"
    """Server models, when measured and sent: the clients' average, then whatever distillation has tracked; those of the
    model on public images; or (as the authors' released code) those of the batch at hand."""
    images: Annotated[int, Field(ge=2)] = 4096
    """How many public images `auxiliary` looks at, the first of the distill set."""


class Evaluation(Section):
    """When and how the server's models are measured on the test data."""

    every: Count = 1
    """Rounds between two measurements; the last round is always measured."""
    batch_size: Count | None = None
    """Examples a batch wherever nothing is trained: evaluation, teachers, features. When not given, 256 on a CPU, whose
    caches are small, and 4096 on a GPU."""


class Engine(Section):
    """Where the work is done."""

    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    threads: Count | None = None
    """Threads of torch on the CPU; its own choice when not given."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """fp32 for reproducible figures; bf16 computes in half the bits, with weights kept in fp32; auto: bf16 on a GPU.
    A device that has no bf16 computes in fp32, with one line."""
    compile: bool | None = None
    """Whether steps are compiled; on a GPU when not given."""
    clients_at_once: Count | None = None
    """Clients trained side by side; 8 when not given. 1 is one after another, in a plain loop."""


class Federation(Section):
    """A real federation over Flower: whom the server waits for, and what it sends."""

    wire: Literal["fp32", "fp16"] = "fp32"
    """Precision in which weights cross the network; fp16 halves the messages of a round, and simulations round too."""
    deadline: Positive = 600.0
    """Seconds a client has for an answer; then the round goes on without it."""
    wait_for: Count | None = None
    """Clients that must be there before the run begins; all of them when not given."""
    wait_seconds: NonNegative = 300.0
    """How long clients are waited for; then the run begins or goes on with those present, if there are any."""
    authenticated: bool = True
    """Whether nodes have keys: then a client belongs for good to the node that first spoke for it. false for Flower's
    simulation and for trials without keys, where a node is another one after every start."""
    nodes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """The public key of each client's node, by rising client, as its .pub file has it; then no other node speaks for
    that client. When not given, the first one does."""


class Output(Section):
    """Where results go."""

    directory: str | None = None
    """The run directory; runs/NAME when not given."""
    tensorboard: bool = False
    """Whether TensorBoard's event files are written besides, into its folder `tensorboard`; extra `tensorboard`."""


class ExperimentFields(Section):
    """The fields of an experiment, each validated on its own."""

    name: Annotated[str, Field(min_length=1, pattern=NAME_PATTERN)] = "experiment"
    """What the run is called; a recipe that does not say is called as its file."""
    method: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_as_tuple)] = (
        "fedaux",
    )
    """One method or a list: rows of `fedaux.core.methods.METHODS`, see `fedaux methods`."""
    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), BeforeValidator(_as_tuple)
    ] = (0,)
    """Each seed is a run of its own: split, h0, selection, noise and batches."""
    rounds: Count = 100
    """Communication rounds T."""
    mode: Literal["full", "linear"] = "full"
    """What is trained: `full` models, or `linear` heads on the frozen features of h0."""
    participation_rate: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share C of the population asked in a round, at least one client."""
    data: Data = Data()
    auxiliary: Auxiliary = Auxiliary()
    text: Text | None = None
    split: Split = Split()
    prototypes: Annotated[
        tuple[Prototype, ...], Field(min_length=1), BeforeValidator(_as_tuple)
    ] = (Prototype(name="cnn", model="cnn"),)
    pretraining: Pretraining = Pretraining()
    certainty: Certainty = Certainty()
    local: Local = Local()
    distillation: Distillation = Distillation()
    bayesian: Bayesian = Bayesian()
    memory: Memory = Memory()
    batch_normalisation: BatchNormalisation = BatchNormalisation()
    evaluation: Evaluation = Evaluation()
    engine: Engine = Engine()
    federation: Federation = Federation()
    output: Output = Output()

    @model_validator(mode="before")
    @classmethod
    def _counts_silos(cls, values: Any) -> Any:
        """Where clients bring their own data, there are as many as there are places."""
        data, split = (
            values.get(key, {}) if isinstance(values, dict) else None for key in ("data", "split")
        )
        if not isinstance(data, dict) or not isinstance(split, dict):
            return values  # what is wrong with them is told where they are validated
        silos = _as_tuple(data.get("clients", ()))
        if not isinstance(silos, tuple) or not silos or "num_clients" in split:
            return values
        return {**values, "split": {**split, "num_clients": len(silos)}}

    @model_validator(mode="before")
    @classmethod
    def _has_no_labels(cls, values: Any) -> Any:
        """Where public data are named and labelled ones are not, there are none: nobody wants digits with those."""
        data, public = (
            values.get(key, {}) if isinstance(values, dict) else None
            for key in ("data", "auxiliary")
        )
        if not isinstance(data, dict) or not isinstance(public, dict):
            return values  # what is wrong with them is told where they are validated
        if public.get("path") is None or data.keys() & {"source", "path", "clients", "test"}:
            return values
        return {**values, "data": {**data, "source": NO_DATA}}

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as TOML can hold it: no None, lists for tuples."""
        table: dict[str, Any] = without_none(self.model_dump(mode="json"))
        return table

    def sha256(self) -> str:
        """Return the digest of what the results depend on; output, engine and waiting do not belong to it."""
        return hashlib.sha256(json.dumps(self.essentials(), sort_keys=True).encode()).hexdigest()

    def essentials(self) -> dict[str, Any]:
        """Return what the results depend on; the rest may change when a run goes on."""
        content = {
            key: value
            for key, value in self.to_dict().items()
            if key not in {"output", "engine", "federation"}
        }
        return (
            content
            if self.federation.wire == "fp32"
            else content | {"federation": {"wire": self.federation.wire}}
        )


class Experiment(ExperimentFields):
    """Everything a run depends on. Raises ConfigError with all problems at once."""

    def __init__(self, **values: Any) -> None:
        from fedaux.config_errors import inspect, plain  # which is about the fields above

        _, problems = inspect(values)
        if problems:
            raise ConfigError(problems)
        super().__init__(**plain(values))


def without_none(value: Any) -> Any:
    """Return nested tables and lists without the keys that hold None, which TOML cannot say."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
