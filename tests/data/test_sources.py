from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from PIL import Image
from safetensors.torch import save_file

import fedaux
from fedaux.config import Auxiliary, ConfigError, Data, Experiment
from fedaux.data import SOURCES, load_auxiliary, load_labelled
from fedaux.pretrain import content_digest
from fedaux.pretrain.store import read_card
from fedaux.running.preflight import problems_of

pytestmark = pytest.mark.usefixtures("without_pages")


def images(size: int, *, side: int = 6, channels: int = 3) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(size).integers(0, 256, (size, channels, side, side), dtype=np.uint8)
    )


def test_digits_are_split_into_training_and_test_once_for_all() -> None:
    data = load_labelled(Data())
    assert data.images.shape == (1438, 1, 8, 8)
    assert data.test_images.shape == (359, 1, 8, 8)
    assert data.images.dtype == torch.uint8
    assert torch.equal(data.test_images, load_labelled(Data()).test_images)
    everything = torch.cat([data.images, data.test_images]).flatten(1).double().sum()
    assert float(everything) == float(torch.from_numpy(fedaux_digits()).double().sum())


def fedaux_digits() -> np.ndarray:
    from fedaux.data.embedded import digits

    return digits()[0]


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_the_quick_count_is_the_true_one(fraction: float) -> None:
    section = Data(test_fraction=fraction)
    count = SOURCES["digits"].count_labelled
    assert count is not None
    assert count(section) == len(load_labelled(section).labels)


def test_letters_are_public_and_fixed() -> None:
    first = load_auxiliary(Auxiliary(size=50))
    assert torch.equal(first, load_auxiliary(Auxiliary(size=50)))
    assert first.shape == (50, 1, 8, 8)


def test_noise_is_uniform_shaped_as_the_data_and_fixed_by_a_seed_of_its_own(tmp_path: Path) -> None:
    section = Auxiliary(source="noise", size=400)
    first = load_auxiliary(section, shape=(3, 6, 5))
    assert (first.shape, first.dtype) == ((400, 3, 6, 5), torch.uint8)
    counts = torch.bincount(first.flatten().long(), minlength=256).double()
    expected = first.numel() / 256
    assert (
        150 < float(((counts - expected) ** 2 / expected).sum()) < 360
    )  # chi-squared, 255 degrees of freedom
    assert abs(float(np.corrcoef(first[:, 0, 0, 0], first[:, 0, 0, 1])[0, 1])) < 0.2
    assert torch.equal(
        first[:50], load_auxiliary(Auxiliary(source="noise", size=50), shape=(3, 6, 5))
    )
    other = load_auxiliary(Auxiliary(source="noise", size=400, seed=1), shape=(3, 6, 5))
    assert float((first == other).double().mean()) < 0.01
    asked = load_auxiliary(
        Auxiliary(source="noise", size=2, image_size=4, channels=1), shape=(3, 6, 5)
    )
    assert asked.shape == (2, 1, 4, 4)
    experiment = tiny(auxiliary={"source": "noise", "size": 60}, seeds=[0, 7], rounds=1)
    assert problems_of(experiment) == []
    assert fedaux.run(experiment, out=tmp_path / "run").summary["complete"]
    cards = [read_card(file) for file in (tmp_path / "run/pretrained").iterdir()]
    digests = {card["data"]["digest"] for card in cards if card is not None}
    expected_images = load_auxiliary(experiment.auxiliary, shape=(1, 8, 8))
    assert digests == {content_digest(expected_images)}, (
        "the seeds of a run do not change public data"
    )


def test_noise_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    missing = "auxiliary.size: missing; required by the source noise"
    assert problems_of(Experiment(auxiliary={"source": "noise"})) == [missing]
    with pytest.raises(ValueError, match=r"auxiliary\.size: missing"):
        load_auxiliary(Auxiliary(source="noise"), shape=(1, 8, 8))
    with pytest.raises(
        ValueError, match=r"take the shape from; set auxiliary\.image_size and auxiliary\.channels"
    ):
        load_auxiliary(Auxiliary(source="noise", size=5, channels=3))
    texts = tiny(auxiliary={"source": "noise"}, text={})
    assert any("auxiliary.source = 'noise': has no texts" in line for line in problems_of(texts))
    private = problems_of(tiny(data={"source": "noise"}))
    assert len(private) == 1
    assert private[0].startswith("data.source = 'noise': has no labels, so it can only")
    path = problems_of(tiny(auxiliary={"source": "noise", "path": "x"}))
    assert path == ["auxiliary.path = 'x': the source noise takes no path"]
    with pytest.raises(ConfigError, match=r"its images are \[1, 6, 6\]"):
        fedaux.run(tiny(auxiliary={"source": "noise", "image_size": 6}), out=tmp_path / "run")


def test_a_tensor_file_is_a_source(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    labels = torch.arange(60) % 4
    save_file({"images": images(60), "labels": labels}, path)
    public = tmp_path / "public.safetensors"
    save_file({"images": images(80)}, public)
    data = load_labelled(Data(source="tensors", path=str(path)))
    assert (len(data.labels), len(data.test_labels), data.classes) == (48, 12, ("0", "1", "2", "3"))
    experiment = tiny(
        data={"source": "tensors", "path": str(path)},
        auxiliary={"source": "tensors", "path": str(public), "size": 70},
    )
    assert problems_of(experiment) == []
    assert fedaux.run(experiment, out=tmp_path / "run").summary["complete"]
    too_many = tiny(data={"source": "tensors", "path": str(path)}, split={"num_clients": 49})
    assert problems_of(too_many) == [
        "split.num_clients = 49: more clients than the 48 training examples"
    ]


def test_a_tensor_file_may_bring_its_own_test_data(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    tensors = {"images": images(20), "labels": torch.zeros(20, dtype=torch.int32)}
    save_file(tensors | {"test_images": images(5), "test_labels": torch.full((5,), 2)}, path)
    data = load_labelled(Data(source="tensors", path=str(path)))
    assert (len(data.labels), len(data.test_labels), len(data.classes)) == (20, 5, 3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"pictures": images(5)}, "has no tensor images, labels; it has pictures"),
        (
            {"images": images(5).float(), "labels": torch.zeros(5).long()},
            "is float32 .* should be uint8",
        ),
        ({"images": images(5), "labels": torch.zeros(4).long()}, "labels should be"),
        ({"images": images(5), "labels": torch.zeros(5)}, "labels should be"),
        ({"images": images(5), "labels": torch.full((5,), -1)}, "labels should be"),
    ],
)
def test_tensor_files_with_mistakes_are_explained(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    path = tmp_path / "own.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message) as error:
        load_labelled(Data(source="tensors", path=str(path)))
    assert "own.safetensors" in str(error.value)


def test_a_file_that_is_no_tensor_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    path.write_bytes(b"not tensors at all")
    problems = problems_of(tiny(data={"source": "tensors", "path": str(path)}))
    assert len(problems) == 1
    assert "not a readable safetensors file" in problems[0]


def test_private_and_public_images_must_have_one_shape(tmp_path: Path) -> None:
    public = tmp_path / "public.safetensors"
    save_file({"images": images(80)}, public)
    with pytest.raises(
        ConfigError, match=r"its images are \[3, 6, 6\] and images of data \[1, 8, 8\]"
    ):
        fedaux.run(
            tiny(auxiliary={"source": "tensors", "path": str(public), "size": 80}),
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_public_data_can_be_the_images_of_one_noun(tmp_path: Path) -> None:
    for number, folder in enumerate(
        ("n02099601", "n01443537", "n02085620")
    ):  # golden retriever, goldfish, Chihuahua
        (tmp_path / folder).mkdir()
        for index in range(3):
            Image.new("RGB", (4, 4), (80 * number, index, 0)).save(
                tmp_path / folder / f"{index}.png"
            )
    everything = load_auxiliary(Auxiliary(source="folder", path=str(tmp_path)))
    dogs = load_auxiliary(Auxiliary(source="folder", path=str(tmp_path), wordnet="dogs"))
    assert (len(everything), len(dogs)) == (9, 6)
    assert set(dogs[:, 0, 0, 0].tolist()) == {0, 160}
    experiment = tiny(
        auxiliary={"source": "folder", "path": str(tmp_path), "wordnet": "dog", "size": None}
    )
    assert any(
        "auxiliary.wordnet = dog: no such subset; did you mean dogs?" in line
        for line in problems_of(experiment)
    )
    letters = tiny(auxiliary={"wordnet": "dogs"})
    assert any(
        "not supported by letters; only by parquet, folder, csv, jsonl, huggingface" in line
        for line in problems_of(letters)
    )
