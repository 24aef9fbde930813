from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers.programs import command, environment
from helpers.shared_pretraining import pretrain
from helpers.stored_h0 import IMAGES, equal, extractor, model, wanted
from safetensors.torch import save_file

from fedaux.config import Augmentation, Pretraining
from fedaux.core.weights import snapshot
from fedaux.data.tensor_files import weights_digest
from fedaux.pretrain import pretrained, shared_store
from fedaux.pretrain.store import CHECKPOINT_ADVICE


def test_h0_is_trained_once_and_then_read(tmp_path: Path) -> None:
    first = extractor(tmp_path)
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    assert equal(first, extractor(tmp_path))
    assert path.stat().st_mtime_ns == written
    assert not equal(first, snapshot(model().features))
    assert equal(first, extractor(tmp_path / "elsewhere"))  # the seed decides, not the store


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"epochs": 2},
        {"images": IMAGES[:50]},
        {"temperature": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
)
def test_whatever_h0_depends_on_makes_another(tmp_path: Path, change: dict[str, object]) -> None:
    first = extractor(tmp_path)
    assert not equal(first, extractor(tmp_path, **change))  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 2


def test_without_pretraining_h0_is_the_initial_features(tmp_path: Path) -> None:
    assert equal(extractor(tmp_path, kind="none"), snapshot(model().features))


def test_a_checkpoint_is_used_in_the_models_precision(tmp_path: Path) -> None:
    given = {name: tensor.half() for name, tensor in extractor(tmp_path).items()}
    path = tmp_path / "h0.safetensors"
    save_file(given, path)
    loaded = extractor(tmp_path, checkpoint=str(path))
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert all(torch.allclose(tensor, given[name].float()) for name, tensor in loaded.items())


def test_a_checkpoint_that_does_not_fit_is_explained(tmp_path: Path) -> None:
    weights = snapshot(model().features)
    path = tmp_path / "h0.safetensors"
    save_file({name: tensor for name, tensor in weights.items() if name != "0.weight"}, path)
    with pytest.raises(
        ValueError, match=rf"h0.safetensors: has no tensor 0\.weight, .*; {CHECKPOINT_ADVICE}$"
    ):
        extractor(tmp_path, checkpoint=str(path))
    save_file(weights | {"0.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(
        ValueError, match=rf"shape \[2, 2\], the model's has \[4, 1, 3, 3\]; {CHECKPOINT_ADVICE}$"
    ):
        extractor(tmp_path, checkpoint=str(path))
    save_file(weights | {"0.weight": torch.full((4, 1, 3, 3), float("nan"))}, path)
    with pytest.raises(ValueError, match="NaN"):
        extractor(tmp_path, checkpoint=str(path))


# The store that runs share


def test_runs_share_h0_and_each_keeps_its_own_copy(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    first = extractor(tmp_path / "one", shared=shared)
    (path,) = shared.glob("*.safetensors")
    written = path.stat().st_mtime_ns
    assert equal(first, extractor(tmp_path / "two", shared=shared))
    assert path.stat().st_mtime_ns == written
    for run in ("one", "two"):
        (own,) = (tmp_path / run).iterdir()
        assert own.name == path.name
        assert own.read_bytes() == path.read_bytes()
    changed = {
        name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in first.items()
    }
    save_file(changed, tmp_path / "one" / path.name)
    assert equal(changed, extractor(tmp_path / "one", shared=shared))  # the run's own comes first


def test_what_is_damaged_in_the_store_is_named_and_can_be_removed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    first = extractor(tmp_path / "one", shared=shared)
    (path,) = shared.glob("*.safetensors")
    card = path.with_suffix(".json")
    whole, content = card.read_text(encoding="utf-8"), path.read_bytes()
    for text, problem in (
        (whole[:40], "not readable as JSON"),
        ("{}", "its card lacks epochs, seconds, loss, probe"),
        (json.dumps(json.loads(whole) | {"probe": 3}), "its card lacks probe"),
    ):
        card.write_text(text, encoding="utf-8")
        with pytest.raises(
            ValueError, match=rf"{card.name}: damaged, .*{problem}.*; remove this file"
        ):
            extractor(tmp_path / "two", shared=shared)
    card.unlink()
    assert equal(first, extractor(tmp_path / "two", shared=shared))
    for damaged in (content[: len(content) // 2], b""):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"{path.name}: not a readable safetensors file .*; remove this file"
        ):
            extractor(tmp_path / "three", shared=shared)
    path.unlink()
    assert equal(first, extractor(tmp_path / "three", shared=shared))
    assert path.exists()


def test_other_initial_weights_make_another_h0(tmp_path: Path) -> None:
    extractor(tmp_path)
    other = model()
    with torch.no_grad():
        next(other.features.parameters()).mul_(1.01)
    section = Pretraining(epochs=1, batch_size=20, augmentation=Augmentation(flip=0.0))
    pretrained(wanted(other, section), store=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_weights_digest_sees_names_shapes_and_values() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.ones((), dtype=torch.int64)}
    others = [
        {"a": torch.zeros(3, 2), "b": weights["b"]},
        {"c": weights["a"], "b": weights["b"]},
        {"a": weights["a"] + 1e-7, "b": weights["b"]},
    ]
    assert weights_digest(weights) == weights_digest(dict(reversed(weights.items())))
    assert len({weights_digest(each) for each in [weights, *others]}) == 4


def test_the_environment_says_where_the_shared_store_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    assert shared_store() == tmp_path / "cache" / "pretrained"
    assert (tmp_path / "cache" / "pretrained").is_dir()
    monkeypatch.setenv("FEDAUX_CACHE", "")
    assert shared_store() is None
    monkeypatch.delenv("FEDAUX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shared_store() == tmp_path / ".cache" / "fedaux" / "pretrained"
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="h0 is not shared"):
        assert shared_store() is None


def start(shared: Path) -> subprocess.Popen[str]:
    line = command("pretrain_shared.py", str(shared), options=["-W", "ignore"])
    return subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> tuple[int, str, int]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    trained, digest, epochs = json.loads(output)
    return trained, digest, epochs


@pytest.mark.chance
@pytest.mark.slow
def test_a_killed_process_is_continued_by_one_of_two(tmp_path: Path) -> None:
    whole = pretrain(None)
    killed = start(tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.progress.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    (left,) = tmp_path.glob("*.safetensors")
    assert left.name.endswith(".progress.safetensors")

    both = [start(tmp_path) for _ in range(2)]
    idle, busy = sorted(said(process) for process in both)
    assert idle[0] == 0
    assert 0 < busy[0] < whole[0] == 12
    assert idle[1:] == busy[1:] == whole[1:]
    assert not left.exists()
