"""Pretraining that somebody stops: saved files, messages, and resuming."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from helpers.experiments import tiny
from helpers.stored_h0 import equal, model, wanted
from safetensors import safe_open

from fedaux.config import Augmentation, Pretraining
from fedaux.pretrain import EpochProgress, Stopped, pretrained
from fedaux.running.pretraining import stopped_line

SECTION = Pretraining(epochs=5, batch_size=20, augmentation=Augmentation(flip=0.0))


def losses_in(progress: Path) -> list[float]:
    with safe_open(progress, framework="pt") as file:
        losses: list[float] = json.loads(file.metadata()["losses"])
    return losses


@pytest.mark.parametrize("last", [1, 3, 5])
@pytest.mark.parametrize("save_seconds", [0.0, 30.0])
def test_what_is_stopped_is_saved_and_ends_with_the_same_weights(
    tmp_path: Path, last: int, save_seconds: float
) -> None:
    def stop(passed: EpochProgress) -> None:
        if passed.epoch == last:
            raise KeyboardInterrupt

    whole = pretrained(wanted(model(), SECTION))
    with pytest.raises(Stopped) as stopped:
        pretrained(
            wanted(model(), SECTION), shared=tmp_path, on_epoch=stop, save_seconds=save_seconds
        )
    assert (stopped.value.saved, stopped.value.epochs) == (last, 5)
    (progress,) = tmp_path.glob("*.progress.safetensors")
    assert len(losses_in(progress)) == last
    epochs: list[EpochProgress] = []
    again = pretrained(wanted(model(), SECTION), shared=tmp_path, on_epoch=epochs.append)
    assert [passed.epoch for passed in epochs] == list(range(last + 1, 6))
    assert equal(whole.weights, again.weights)
    assert whole.card["loss"] == again.card["loss"]
    assert not progress.exists()


def test_an_epoch_that_is_not_over_is_lost_and_those_before_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedaux.pretrain.training import Training

    steps = 0
    step = Training._step

    def stop_at(training: Training) -> None:
        nonlocal steps
        steps += 1
        if steps == 8:  # the second of the third epoch
            raise KeyboardInterrupt
        step(training)

    whole = pretrained(wanted(model(), SECTION))
    monkeypatch.setattr(Training, "_step", stop_at)
    with pytest.raises(Stopped) as stopped:
        pretrained(wanted(model(), SECTION), shared=tmp_path)
    assert stopped.value.saved == 2
    assert equal(whole.weights, pretrained(wanted(model(), SECTION), shared=tmp_path).weights)
    assert steps == 8 + 3 * 3


@pytest.mark.parametrize("kept", [True, False])
def test_the_line_is_true_where_nothing_can_be_saved(tmp_path: Path, kept: bool) -> None:
    def stop(passed: EpochProgress) -> None:
        if not kept:
            (tmp_path / "store").rename(tmp_path / "gone")
            (tmp_path / "store").touch()
        raise KeyboardInterrupt

    with pytest.raises(Stopped) as stopped:
        pretrained(wanted(model(), SECTION), shared=tmp_path / "store", on_epoch=stop)
    assert stopped.value.saved == kept


def test_the_line_says_from_where_it_goes_on(tmp_path: Path) -> None:
    some, none = Stopped(saved=12, epochs=100), Stopped(saved=0, epochs=100)
    told = [
        stopped_line(stop, prototype="cnn", shared=tmp_path)
        for stop in (some, none, KeyboardInterrupt())
    ]
    assert "cnn is saved after epoch 12 of 100: the same command continues from there" in told[0]
    assert "No epoch of cnn is saved" in told[1]
    assert "outside training" in told[2]
    assert "Nothing is saved" in stopped_line(some, prototype="cnn", shared=None)
    assert "Stopped before training" in stopped_line(
        KeyboardInterrupt(), prototype="", shared=tmp_path
    )


@pytest.mark.slow
def test_ctrl_c_says_from_which_epoch_the_same_command_goes_on(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(tiny(pretraining={"epochs": 20_000}).to_dict()))
    command = [sys.executable, "-m", "fedaux", "pretrain", str(recipe), "--no-probe"]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"FEDAUX_CACHE": store},
        )
        for store in (str(tmp_path / "cache"), "")
    ]
    told = []
    for process in processes:
        assert process.stdout is not None
        assert "cnn: epoch 1/20000" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        told.append(output)
    (progress,) = (tmp_path / "cache").rglob("*.progress.safetensors")
    said = re.search(
        r"cnn is saved after epoch (\d+) of 20000: the same command continues", told[0]
    )
    assert said is not None, told[0]
    assert int(said.group(1)) == len(losses_in(progress)) > 0
    assert "Nothing is saved without a store (FEDAUX_CACHE)." in told[1]


def test_an_h0_that_the_store_cannot_take_is_not_lost(tmp_path: Path) -> None:
    store = tmp_path / "store"

    def spoil(passed: EpochProgress) -> None:
        if passed.epoch == passed.epochs:
            store.rename(tmp_path / "elsewhere")
            store.write_text("a file where the folder was")

    with pytest.warns(UserWarning, match=r"store: h0 cannot be stored"):
        found = pretrained(wanted(model(), SECTION), shared=store, on_epoch=spoil)
    assert equal(found.weights, pretrained(wanted(model(), SECTION)).weights)
    with pytest.raises(OSError, match="store"):  # a run's own directory has to take it
        pretrained(wanted(model(), SECTION), store=store)
