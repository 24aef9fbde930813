from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from helpers.experiments import tiny
from PIL import Image
from safetensors.torch import save_file

import fedaux
from fedaux.config import ConfigError, Data, Experiment, Split, inspect
from fedaux.data import count_labelled, load_labelled
from fedaux.data.labelled import union_of_classes
from fedaux.recipes import load_experiment
from fedaux.report.run import client_names
from fedaux.running.preflight import problems_of
from fedaux.running.run import split_for, split_table
from fedaux.sweep import expand

pytestmark = pytest.mark.usefixtures("without_pages")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))


def silo(place: Path, counts: dict[str, int], *, value: int, side: int = 8) -> str:
    """Write grey images, whose first pixel names the client and whose second the class."""
    for name, count in counts.items():
        (place / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((side, side), number, dtype=np.uint8)
            pixels[0, :2] = value, ord(name[0])
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    return str(place)


@pytest.fixture
def hospitals(tmp_path: Path) -> tuple[str, ...]:
    return (
        silo(tmp_path / "hospital_a", {"cold": 8, "flu": 12}, value=1),
        silo(tmp_path / "hospital_b", {"flu": 10}, value=2),
        silo(tmp_path / "hospital_c", {"well": 20, "cold": 10}, value=3),
    )


def test_each_client_holds_its_own(hospitals: tuple[str, ...]) -> None:
    section = Data(source="folder", clients=hospitals)
    data = load_labelled(section)
    assert data.classes == ("cold", "flu", "well")
    assert data.clients is not None
    assert [len(part) for part in data.clients] == [16, 8, 24]
    assert sorted(np.concatenate(data.clients).tolist()) == list(range(48))
    for number, part in enumerate(data.clients, start=1):
        assert (data.images[part][:, 0, 0, 0] == number).all()
    for images, labels in ((data.images, data.labels), (data.test_images, data.test_labels)):
        assert [chr(int(value)) for value in images[:, 0, 0, 1]] == [
            data.classes[label][0] for label in labels.tolist()
        ]
    assert torch.bincount(data.test_images[:, 0, 0, 0].long()).tolist() == [0, 4, 2, 6]
    assert count_labelled(section) == 48


def test_test_data_may_lie_elsewhere(tmp_path: Path, hospitals: tuple[str, ...]) -> None:
    test = silo(tmp_path / "held", {"well": 3, "asthma": 2}, value=9)
    section = Data(source="folder", clients=hospitals, test=test)
    data = load_labelled(section)
    assert data.clients is not None
    assert [len(part) for part in data.clients] == [20, 10, 30]
    assert data.classes == ("asthma", "cold", "flu", "well")
    assert data.test_labels.tolist() == [0, 0, 3, 3, 3]
    assert count_labelled(section) == 60


def test_clients_with_nothing_to_hold_out_need_test_data(tmp_path: Path) -> None:
    places = [silo(tmp_path / name, {"flu": 1}, value=1) for name in ("s1", "s2")]
    section = {"source": "folder", "clients": places}
    with pytest.raises(
        ConfigError, match=r"data: no examples to hold out for testing; data\.test should be"
    ):
        fedaux.run(tiny(data=section, split={"num_clients": 2}, rounds=1), out=tmp_path / "run")
    assert not list((tmp_path / "run").glob("**/*.safetensors"))  # nothing was trained
    section |= {"test": silo(tmp_path / "held", {"flu": 2}, value=9)}
    summary = fedaux.run(
        tiny(data=section, split={"num_clients": 2}, rounds=1), out=tmp_path / "other"
    ).summary
    assert summary["complete"]


def test_a_run_splits_nothing(tmp_path: Path, hospitals: tuple[str, ...]) -> None:
    experiment = tiny(
        data={"source": "folder", "clients": list(hospitals)}, split={"num_clients": 3}, rounds=1
    )
    data = load_labelled(experiment.data)
    expected = np.zeros((3, 3), dtype=int)
    for image in data.images:
        expected[int(image[0, 0, 0]) - 1, "cfw".index(chr(int(image[0, 0, 1])))] += 1
    assert split_table(experiment, data, 0).tolist() == expected.tolist()
    for one, other in zip(
        split_for(experiment, data, 0), split_for(experiment, data, 1), strict=True
    ):
        assert one.tolist() == other.tolist()
    assert fedaux.run(experiment, out=tmp_path / "run").summary["complete"]
    stored = json.loads((tmp_path / "run" / "split.json").read_text())
    assert stored["names"] == ["hospital_a", "hospital_b", "hospital_c"]
    assert client_names(tmp_path / "run") == tuple(stored["names"])
    written = json.loads((tmp_path / "run" / "split.json").read_text())
    assert (written["classes"], written["clients"]) == (["cold", "flu", "well"], list(hospitals))
    assert "alpha" not in written


def test_validation_at_the_server_leaves_the_clients(hospitals: tuple[str, ...]) -> None:
    data = load_labelled(Data(source="folder", clients=hospitals, server_validation=10))
    assert data.clients is not None
    assert sorted(np.concatenate(data.clients).tolist()) == list(range(38))
    for number, part in enumerate(data.clients, start=1):
        assert (data.images[part][:, 0, 0, 0] == number).all()


def test_classes_without_names_are_joined_by_number(tmp_path: Path) -> None:
    paths = []
    for client, labels in enumerate(([0, 1, 2, 0], [2, 11, 2, 11])):
        paths.append(str(tmp_path / f"{client}.safetensors"))
        save_file(
            {"images": torch.zeros(4, 1, 6, 6, dtype=torch.uint8), "labels": torch.tensor(labels)},
            paths[-1],
        )
    data = load_labelled(Data(source="tensors", clients=tuple(paths), test_fraction=0.25))
    assert data.classes == tuple(str(number) for number in range(12))
    everything = [*data.labels.tolist(), *data.test_labels.tolist()]
    assert sorted(everything) == [0, 0, 1, 2, 2, 2, 11, 11]


def test_the_union_of_classes_keeps_an_order_that_has_them_all() -> None:
    assert union_of_classes([("dog",), ("zebra", "dog", "ant")]) == ("zebra", "dog", "ant")
    assert union_of_classes([("10", "9"), ("2", "b", "a")]) == ("2", "9", "10", "a", "b")


def test_there_are_as_many_clients_as_places(tmp_path: Path, hospitals: tuple[str, ...]) -> None:
    silos = {"source": "folder", "clients": list(hospitals)}
    assert Experiment(data=silos).split.num_clients == 3
    assert Experiment(data=silos, split={"alpha": 1.0}).split == Split(num_clients=3, alpha=1.0)
    assert Experiment(data={"source": "folder", "clients": "one"}).split.num_clients == 1
    assert Experiment().split.num_clients == 20
    assert Experiment(**Experiment(data=silos).to_dict()).split.num_clients == 3
    recipe = tmp_path / "own hospitals.toml"
    recipe.write_text(
        tomli_w.dumps(
            {"data": silos, "prototypes": [{"name": "a", "model": "cnn", "clients": [0, 3]}]}
        )
    )
    with pytest.raises(
        ConfigError, match=r"prototypes\.clients = 3: there are 3 clients, numbered 0 to 2"
    ):
        load_experiment(recipe)
    with pytest.raises(ConfigError, match=r"split\.num_clients = 4: should be 3"):
        load_experiment(
            recipe, overrides=["split.num_clients=4", "prototypes=[{name='a', model='cnn'}]"]
        )
    swept = expand({"data": silos | {"clients": [list(hospitals), list(hospitals[:2])]}})
    assert [cell.experiment.split.num_clients for cell in swept] == [3, 2]
    told = inspect({"data": {"clients": 5}, "split": {"num_clients": "x"}})[1]
    assert [line.partition(" = ")[0] for line in told] == ["data.clients", "split.num_clients"]


def test_mistakes_are_told_before_anything_runs(tmp_path: Path, hospitals: tuple[str, ...]) -> None:
    silos = {"source": "folder", "clients": list(hospitals)}
    with pytest.raises(ConfigError, match=r"split\.num_clients = 4: should be 3"):
        tiny(data=silos)
    right = {"num_clients": 3}
    assert problems_of(tiny(data=silos, split=right)) == []
    gone = {"source": "folder", "clients": [*hospitals[:2], "gone"], "path": "x", "test": "nowhere"}
    assert problems_of(tiny(data=gone, split=right)) == [
        f"data.test = 'nowhere': there is no such file or folder in {Path.cwd()}",
        "data.path = 'x': should not be given together with data.clients",
        f"data.clients = 'gone': there is no such file or folder in {Path.cwd()}",
    ]
    near = str(Path(hospitals[0]).with_name(Path(hospitals[0]).name + "s"))
    (line,) = problems_of(tiny(data=silos | {"clients": [*hospitals[1:], near]}, split=right))
    assert line.endswith(f"; did you mean {Path(hospitals[0]).name}?")
    assert problems_of(tiny(data={"clients": list(hospitals)}, split=right)) == [
        "data.clients: the source digits reads no files"
    ]
    twice = {"source": "folder", "clients": [*hospitals[:2], hospitals[0]], "test": hospitals[1]}
    assert problems_of(tiny(data=twice, split=right)) == [
        f"data.clients = {hospitals[0]!r}: named more than once",
        f"data.test = {hospitals[1]!r}: is also one of data.clients, to train on",
    ]
    assert problems_of(tiny(data={"test": "x"})) == [
        "data.test = 'x': the source digits takes none"
    ]


def test_clients_with_images_of_another_size_are_named(
    tmp_path: Path, hospitals: tuple[str, ...]
) -> None:
    other = silo(tmp_path / "hospital_d", {"flu": 4}, value=4, side=6)
    section = Data(source="folder", clients=(*hospitals, other))
    with pytest.raises(
        ValueError, match=r"hospital_d are \[1, 6, 6\], images of .*hospital_a \[1, 8, 8\]"
    ):
        load_labelled(section)
    assert load_labelled(section.model_copy(update={"image_size": 6})).images.shape[1:] == (1, 6, 6)
