"""Export of trained models: a copy of the file, or ONNX for programs that do not have fedaux."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaux.data.tensor_files import save_tensors
from fedaux.encoders import Images, Tokens
from fedaux.files import replacing
from fedaux.formatting import install_hint
from fedaux.predict.files import ENCODER_FORMAT, INSIDE, read_model
from fedaux.predict.trained_model import TrainedModel, encoder_of, load

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx"}
"""The formats, and how the names of their files end."""
TOLERANCE = 1e-4
"""Largest difference of probabilities between an exported network and the model."""
EXAMPLES = 2, 3
"""Batch sizes with which a network is exported and checked."""


def format_of(out: Path | None, format: str | None) -> str:
    """Return the given format, or the format of the file's ending.

    Raises ValueError if the two contradict each other.
    """
    endings = {suffix: name for name, suffix in SUFFIXES.items()} | {".pt": "torchscript"}
    of_file = endings.get(out.suffix) if out else None
    if format and of_file and format != of_file:
        raise ValueError(f"--format {format}: --out {out} ends like {of_file}")
    return format or of_file or "safetensors"


def export(
    file: Path, out: Path, *, format: str, whole: bool = False, encoder: str | None = None
) -> None:
    """Write a model's file in a format; the card is inside, the tokenizer of texts beside it.

    `whole` writes its encoder too, which is found as in `load`.

    Raises ValueError if the format is not available or the exported network predicts otherwise.
    """
    if format == "torchscript":
        raise ValueError(
            "--format torchscript (.pt): fedaux 0.2.0 was the last version that writes it; should "
            f"be {' or '.join(SUFFIXES)}"
        )
    if format not in SUFFIXES:
        raise ValueError(f"--format {format}: should be {', '.join(SUFFIXES)}")
    if format == "safetensors" and whole:
        weights, card, metadata = read_model(file)
        if "encoder" not in card["input"]:
            raise ValueError(f"--whole: {file} has no encoder, and is whole already")
        tensors, about = encoder_of(card, {}, {}, file=file, source=encoder).packed()
        about[ENCODER_FORMAT] = about.pop("format")
        inside = {INSIDE + name: tensor for name, tensor in tensors.items()}
        save_tensors(out, weights | inside, metadata=about | metadata)
        return
    if format == "safetensors":
        with replacing(out) as temporary:
            shutil.copyfile(file, temporary)
        return
    model = load(file, device="cpu", encoder=encoder)
    small, large = (_examples(model, count) for count in EXAMPLES)
    with replacing(out) as temporary:
        run = _write_onnx(model, small, temporary, json.dumps(model.card))
        if run is not None:
            with torch.no_grad():
                difference = float((run(large) - model(large)).abs().max())
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"--format {format}: the exported {model.card['model']!r} predicts otherwise "
                    f"(by {difference:.2g}); should be safetensors"
                )
    if model.vocabulary is not None:
        with replacing(out.with_name("tokenizer.json")) as temporary:
            temporary.write_text(model.vocabulary.tokenizer, encoding="utf-8")


def _examples(model: TrainedModel, count: int) -> Tensor:
    shape: list[int] = model.card["input_shape"]
    if model.kind == "features":
        return torch.arange(count * shape[0]).reshape(count, -1).sin()
    if model.encoder is not None and isinstance(inputs := model.encoder.inputs, Tokens):
        return torch.arange(count * inputs.length).reshape(count, -1) % 20
    if model.encoder is not None and isinstance(inputs := model.encoder.inputs, Images):
        shape = list(inputs.shape)
    if model.kind == "image":
        numbers = torch.arange(count * shape[0] * shape[1] * shape[2]) * 37 % 256
        return numbers.to(torch.uint8).reshape(count, *shape)
    width = shape[0] if count == EXAMPLES[0] else max(4, shape[0] // 2)
    return 1 + torch.arange(count * width).reshape(count, width) % (shape[1] - 1)


def _write_onnx(
    module: TrainedModel, example: Tensor, path: Path, card: str
) -> Callable[[Tensor], Tensor] | None:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--format onnx: needs the package {' and '.join(missing)}: {install_hint('onnx')}"
        )
    sizes: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    if example.ndim == 2 and module.vocabulary is not None:
        sizes[1] = torch.export.Dim.DYNAMIC
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names packages that we never use
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own packages
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            dynamic_shapes=(sizes,),
            input_names=["inputs"],
            output_names=["probabilities"],
            verbose=False,
        )
    assert program is not None, "the new exporter returns a program"
    program.model.metadata_props["card"] = card
    program.save(str(path))
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])
