"""Folders of small encoders, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
PROCESSOR: dict[str, Any] = {
    "do_resize": True,
    "do_normalize": True,
    "do_rescale": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 32, "width": 32},
}
KINDS = ("vit", "dinov2", "clip", "siglip", "resnet", "convnext")
"""Encoders of images."""


def image_encoder(folder: Path, kind: str = "vit", **processor: Any) -> Path:
    """Write a small encoder of images with random weights and its processor."""
    transformers = pytest.importorskip("transformers", reason="needs the extra encoders")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "vit":
            made = transformers.ViTModel(transformers.ViTConfig(**SMALL))
        elif kind == "dinov2":
            made = transformers.Dinov2Model(transformers.Dinov2Config(**SMALL))
        elif kind in ("clip", "siglip"):
            name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
            text = {key: SMALL[key] for key in SMALL if not key.endswith("_size")}
            text |= {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 99}
            config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=SMALL)
            made = getattr(transformers, f"{name}Model")(config)
        elif kind == "resnet":
            shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
            made = transformers.ResNetModel(transformers.ResNetConfig(**shape, layer_type="basic"))
        else:
            shape = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
            made = transformers.ConvNextModel(transformers.ConvNextConfig(**shape))
        made.save_pretrained(folder)
    content = json.dumps(PROCESSOR | processor)
    (folder / "preprocessor_config.json").write_text(content, encoding="utf-8")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n", encoding="utf-8")
    return folder


def text_encoder(folder: Path, *, pooling: str = "mean", normalise: bool = False) -> Path:
    """Write a small BERT with its tokenizer, as sentence-transformers does."""
    transformers = pytest.importorskip("transformers", reason="needs the extra encoders")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    shape = {key: value for key, value in SMALL.items() if key not in ("image_size", "patch_size")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(**shape, vocab_size=len(words), max_position_embeddings=40)
        transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    parts = ["Transformer", "Pooling"] + (["Normalize"] if normalise else [])
    modules = [
        {
            "path": f"{number}_{part}" if number else "",
            "type": f"sentence_transformers.models.{part}",
        }
        for number, part in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    about = {f"pooling_mode_{name}_tokens": name == pooling for name in ("mean", "max")}
    about["pooling_mode_cls_token"] = pooling == "cls"
    (folder / "1_Pooling/config.json").write_text(json.dumps(about), encoding="utf-8")
    limits = {"max_seq_length": 16}
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits), encoding="utf-8")
    return folder
