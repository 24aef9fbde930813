"""A node's configuration, written by its operator: its client number, its data and its privacy
policy.

Nothing in it comes from the network, and the network cannot change it. A node reads it once, at its
start: later changes of the file apply after a restart.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from fedaux.config import (
    FEATURES,
    ConfigError,
    Count,
    Data,
    Fraction,
    Place,
    Positive,
    Section,
    _as_tuple,
)
from fedaux.config_errors import DEVICE_PATTERN, parsed_toml, problems_in
from fedaux.files import save_text
from fedaux.privacy.bounds import DELTA, EPSILON

LOGGER = logging.getLogger("fedaux.node")
STARTED_VARIABLE = "FEDAUX_POLICY"
"""Environment variable of a running node: the copy of node.toml that it was started with."""


NODE_SOURCES = ("folder", "csv", "jsonl", "tensors", "features", "digits")
"""Values of `data.source`: fewer than in a recipe."""


class NodePrivacy(Section):
    """What may leave this node, and what it takes, whatever a server requests."""

    epsilon: Positive = 1.0
    """Budget for everything that ever leaves: certainty scores and, where they are trained with
    DP-SGD, updates."""
    delta: Fraction = 1e-5
    """The delta at which that budget is counted."""
    accountant: Literal["gaussian", "renyi"] = "gaussian"
    """How the budget is counted when the server chooses requests after seeing answers.
    `gaussian` is exact for scores and counts DP-SGD without amplification by sampling; `renyi`
    is for DP-SGD and counts scores at a little more than they state. Choose before the node is
    first used."""
    mechanisms: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ("mean", "paper")
    """Allowed mechanisms. The budget covers `classes`, `counts` and `heads` too, which also
    reveal labels; `released-code` and `none` are not private and not covered by the budget."""
    noise: Literal["secure", "simulated"] = "secure"
    """`simulated` noise can be computed by the server, so it is not private: for trials only."""
    plain_updates: bool = False
    """Whether updates without DP-SGD may leave. The budget then covers only the scores: a server
    can extract private data from unprotected updates."""
    public_data: bool = False
    """Whether the server may give this node public images to rehearse in training. They are kept
    in its state."""


class NodeSplit(Section):
    """For trials: the node holds the part that the simulator would give its client."""

    num_clients: Count
    """Into how many parts."""
    alpha: Positive
    """Concentration of the Dirichlet distribution."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of the split."""


class Limits(Section):
    """How much a server can make this node hold in memory."""

    message_megabytes: Count = 1024
    """Largest accepted message and model."""


class NodeConfig(Section):
    """One node: a client, its data and its terms."""

    client: Annotated[int, Field(ge=0)] | None = None
    """Which client of the federation this is; when not given, `partition-id` of Flower's node
    configuration."""
    name: str = ""
    """A display name; the server sees it."""
    state: Place = "state"
    """Folder on this node's disk for its releases and its ledger, relative to this file. It must
    outlive the node: without it, earlier releases are no longer counted."""
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: Count | None = None
    """Threads of torch on the CPU; torch's default when not given."""
    classes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """The names of the classes this node takes part with. Examples of other classes count as
    examples and contribute nothing, so that no answer tells which classes are held."""
    data: Data
    """This node's labelled data, as in a recipe; all of it is used for training. Paths are
    relative to this file. `image_size` and `channels` must be given: no answer may depend on the
    first image."""
    encoder: Place | None = None
    """The encoder that makes features of this node's images: a safetensors file that `fedaux
    encoder --out` wrote, relative to this file. The server's terms must name its digest."""
    split: NodeSplit | None = None
    privacy: NodePrivacy = NodePrivacy()
    limits: Limits = Limits()
    _digest: str = PrivateAttr("")

    @property
    def digest(self) -> str:
        """The SHA-256 of the file, as `sha256sum node.toml` prints it."""
        return self._digest

    @property
    def number(self) -> int:
        """The client number of this node."""
        assert self.client is not None, "load_node requires it"
        return self.client

    @property
    def folder(self) -> Path:
        """The folder of this client's state."""
        return Path(self.state) / f"client-{self.number:05d}"


def load_node(path: Path, *, partition: int | None = None) -> NodeConfig:
    """Read a node's configuration. Raises ConfigError with all problems at once."""
    return _parsed(_content(path), path, partition=partition)


def keep_policy(path: Path, config: NodeConfig) -> dict[str, str]:
    """Copy a node's configuration into its state; return the environment variable that makes the
    node's processes use this copy.

    The copies of earlier starts stay, so that every digest in the ledger can be looked up. Raises
    ValueError if the file is no longer the one that was read.
    """
    content = _content(path)
    if _sha256(content) != config.digest:
        raise ValueError(f"{path}: changed while the node started; start it again")
    copy = Path(config.state).resolve() / "policies" / f"{config.digest}.toml"
    save_text(copy, content.decode("utf-8"))
    return {STARTED_VARIABLE: str(copy)}


def load_started(path: Path, *, partition: int | None = None) -> NodeConfig:
    """Read the configuration that this node was started with; logs if the file has changed since.

    Raises ConfigError, also if the copy is not what its name states.
    """
    if (given := os.environ.get(STARTED_VARIABLE)) is None:
        return load_node(path, partition=partition)
    copy = Path(given)
    content = _content(copy)
    if _sha256(content) != copy.stem:
        raise ConfigError([f"{copy}: was changed; restart the node"])
    if changed_since(path, copy.stem):
        LOGGER.warning("%s changed; restart to apply", path)
    return _parsed(content, path, partition=partition)


def changed_since(path: Path, digest: str) -> bool:
    """Return whether a file no longer has this digest."""
    try:
        return _sha256(path.read_bytes()) != digest
    except OSError:
        return True


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from error


def _parsed(content: bytes, path: Path, *, partition: int | None) -> NodeConfig:
    """Return the configuration of a file with this content; its paths are relative to the file."""
    try:
        raw = parsed_toml(content.decode("utf-8"), origin=path)
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not valid TOML ({error})"]) from error
    if partition is not None:
        raw.setdefault("client", partition)
    problems = problems_in(NodeConfig, raw)
    if problems:
        raise ConfigError(problems, origin=str(path))
    config = NodeConfig.model_validate(raw)
    if config.client is None:
        problems.append("client: missing; the number of this client, from 0 upwards")
    if config.data.clients:
        problems.append("data.clients: a node has only its own data; should be data.path")
    if not config.classes:
        problems.append(
            'classes: missing; the names of all classes of the federation, such as ["cat", "dog"]'
        )
    elif len(set(config.classes)) < len(config.classes):
        problems.append(f"classes = {list(config.classes)}: should be different names")
    if (
        config.data.path is not None
        and config.split is None
        and config.encoder is None
        and config.data.source != FEATURES
    ):  # others are not private, and have another shape
        problems += [
            f"data.{key}: missing; should be {right}, so that no answer depends on the first image"
            for key, right in (("image_size", "a number of pixels"), ("channels", "1 or 3"))
            if getattr(config.data, key) is None
        ]
    if config.data.source not in NODE_SOURCES and config.split is None:
        problems.append(
            f"data.source = {config.data.source!r}: a node reads {', '.join(NODE_SOURCES)}, where "
            "no row decides how another is read; convert the data"
        )
    if config.data.encoding is not None:
        problems.append(
            "data.encoding: a node reads UTF-8 only; convert the file, and leave it out"
        )
    if config.data.source == "jsonl":
        problems += [
            f"data.{key}: missing; should be the name of a field, so that no row decides how the "
            "others are read"
            for key in ("image_column", "label_column")
            if getattr(config.data, key) is None
        ]
    if "release" in config.privacy.mechanisms:
        problems.append("privacy.mechanisms: `release` is now called `released-code`")
    if problem := EPSILON.problem("privacy.epsilon", config.privacy.epsilon):
        problems.append(problem)
    if problem := DELTA.problem("privacy.delta", config.privacy.delta):
        problems.append(problem)
    if (
        config.split is not None
        and config.client is not None
        and config.client >= config.split.num_clients
    ):
        problems.append(
            f"client = {config.client}: there are {config.split.num_clients} parts, numbered from 0"
        )
    if problems:
        raise ConfigError(problems, origin=str(path))
    beside = path.resolve().parent
    own = config.data.path
    if own is not None and (beside / own).exists():  # a name on the hub is no path
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"path": str(beside / own)})}
        )
    config = config.model_copy(update={"state": str(beside / config.state)})
    if config.encoder is not None:
        config = config.model_copy(update={"encoder": str(beside / config.encoder)})
    config._digest = _sha256(content)
    return config
