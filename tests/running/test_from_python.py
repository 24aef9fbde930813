"""Runs on plain modules and on datasets in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import fedaux
from fedaux.core.task import Task
from fedaux.data import SOURCES, embedded
from fedaux.data.in_memory import class_names, read_labelled, read_public
from fedaux.running.from_python import ModelRow, in_memory

pytestmark = pytest.mark.usefixtures("without_pages")

PIXELS, DIGITS = (torch.from_numpy(part) for part in embedded.digits())
PUBLIC = torch.from_numpy(embedded.letters(100, generator=np.random.default_rng(0)))
QUICK: dict[str, Any] = {"method": ["fedavg"], "rounds": 2}


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(images))
        return logits


class Tanh(Net):
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.tanh(self.body(images)))
        return logits


class Own(Dataset[tuple[Tensor, int]]):
    """A dataset as people write them: floats in [0, 1], and no end but its length."""

    def __init__(self, rows: range) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        row = self._rows[place % len(self._rows)]
        return PIXELS[row].float() / 255, int(DIGITS[row])


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter((PIXELS[row], DIGITS[row]) for row in range(30))


def slices(*, size: int = 60) -> list[Own]:
    return [Own(range(start, start + size)) for start in (0, size, 2 * size)]


def test_gives_the_figures_of_the_same_data_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = fedaux.run(
        tiny(**QUICK), model=Net, clients=slices(), public=PUBLIC, out=tmp_path / "memory"
    )
    for number, own in enumerate(slices()):
        content = {"images": PIXELS[own._rows.start : own._rows.stop].contiguous()}
        content["labels"] = DIGITS[own._rows.start : own._rows.stop].contiguous()
        save_file(content, tmp_path / f"{number}.safetensors")
    save_file({"images": PUBLIC}, tmp_path / "public.safetensors")
    monkeypatch.setitem(
        fedaux.MODELS,
        "net",
        lambda image_shape, num_classes: fedaux.split_model(
            Net(), head="out", example=torch.zeros(2, *image_shape)
        ),
    )
    files = tiny(
        **QUICK,
        data={
            "source": "tensors",
            "clients": [str(tmp_path / f"{n}.safetensors") for n in range(3)],
        },
        auxiliary={"source": "tensors", "path": str(tmp_path / "public.safetensors"), "size": None},
        split={"num_clients": 3},
        prototypes=[{"name": "Net", "model": "net"}],
    )
    read = fedaux.run(files, out=tmp_path / "files")
    assert [row["accuracy"] for row in given.metrics()] == [
        row["accuracy"] for row in read.metrics()
    ]
    assert given.metrics()[-1]["loss"] == read.metrics()[-1]["loss"]
    assert not {name for name in SOURCES if name == "python"}


def test_clients_have_names_and_share_the_test_data(tmp_path: Path) -> None:
    names = ("Köln", "Bonn", "Aachen")
    result = fedaux.run(
        tiny(**QUICK),
        model=Net(),
        clients=dict(zip(names, slices(), strict=True)),
        public=TensorDataset(PUBLIC),
        test=(PIXELS[600:700], DIGITS[600:700].numpy()),
        out=tmp_path / "run",
    )
    experiment = fedaux.load_experiment(tmp_path / "run/config.toml")
    assert experiment.data.clients == names
    assert experiment.split.num_clients == 3
    assert {round(100 * row["accuracy"], 6) % 1 for row in result.metrics()} == {0.0}


def test_runs_without_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fedaux.running.from_python.SMALL, "rounds", 1)
    monkeypatch.setitem(fedaux.running.from_python.SMALL, "pretraining", {"epochs": 1})
    result = fedaux.run(model=Net, clients=slices(), public=PUBLIC, out=tmp_path / "run")
    assert [row["method"] for row in result.summary["rows"]] == ["fedaux", "fedavg+p"]
    experiment = fedaux.load_experiment(tmp_path / "run/config.toml")
    assert experiment.certainty.components == 9  # 60 examples over a noise multiplier of 6.7
    assert experiment.pretraining.batch_size == 50  # half of the public images


@pytest.mark.parametrize(
    "given",
    [
        (PIXELS[:30], DIGITS[:30]),
        [(PIXELS[row], DIGITS[row]) for row in range(30)],
        (PIXELS[:30, 0].numpy(), DIGITS[:30].numpy()),
        (PIXELS[:30].permute(0, 2, 3, 1).numpy().astype(np.int64), DIGITS[:30].int()),
        TensorDataset(PIXELS[:30].double() / 255, DIGITS[:30]),
        Own(range(30)),
        Subset(Own(range(60)), range(30)),
        Stream(),
        [
            (Image.fromarray(image[0].numpy()), label)
            for image, label in zip(PIXELS[:30], DIGITS[:30].numpy(), strict=True)
        ],
    ],
    ids=[
        *("tensors", "pairs", "grey", "channels last", "TensorDataset", "Dataset"),
        *("Subset", "stream", "PIL"),
    ],
)
def test_every_form_of_data_gives_the_same_examples(given: Any) -> None:
    examples = read_labelled(given, name="clients[0]")
    assert torch.equal(examples.images, PIXELS[:30])
    assert torch.equal(examples.labels, DIGITS[:30])
    assert torch.equal(read_public(given), PIXELS[:30])


def test_classes_are_joined_by_name(tmp_path: Path) -> None:
    clients = [Own(range(40)), Own(range(40, 80))]
    few = [Subset(part, [row for row in range(40) if part[row][1] < 2]) for part in clients]
    few[0].dataset.classes = ["zero", "one"]  # type: ignore[attr-defined]
    few[1].dataset.classes = ["one", "two"]  # type: ignore[attr-defined]
    assert class_names(few[1]) == ("one", "two")
    with in_memory(
        tiny(**QUICK), model=None, clients=few, public=PUBLIC, test=few[1]
    ) as experiment:
        data = fedaux.data.load_both(experiment)[0]
    assert data.classes == ("zero", "one", "two")
    assert data.clients is not None
    first, second = (data.labels[torch.from_numpy(part)] for part in data.clients)
    names = [["zero", "one"][few[0][row][1]] for row in range(len(few[0]))]
    assert [data.classes[label] for label in first] == names
    assert torch.equal(second, data.test_labels)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clients": Own(range(9))}, "clients: is a Own; should be a list of datasets"),
        ({"clients": []}, "clients: is empty"),
        ({"clients": [DataLoader(Own(range(9)))]}, "client-0: is a DataLoader; should be its"),
        ({"clients": [PIXELS]}, r"client-0: example 0 is a Tensor of shape \[1, 8, 8\]; should be"),
        ({"clients": [(PIXELS / 127 - 1, DIGITS)]}, "client-0: pixels are from -1 to 1.00787; flo"),
        ({"clients": [(PIXELS, DIGITS / 2)]}, "client-0: labels should be whole numbers from 0"),
        ({"clients": [(PIXELS, DIGITS[:9])]}, "client-0: 1797 images, but 9 labels"),
        ({"clients": {"A": [(PIXELS[0, 0, 0], 1)]}}, r"clients\[A\]: example 0: examples have the"),
        ({"clients": [[("a.png", 1)]]}, "client-0: example 0: is a str; should be images"),
        ({"clients": [[(PIXELS[0], 1), (PIXELS[0, :, 1:], 1)]]}, "client-0: images have the shap"),
        ({"test": Own(range(9)), "clients": None}, "test: needs clients"),
        ({"model": 3}, "model: is a int; should be an nn.Module"),
        ({"model": lambda: 3}, "model: lambda returns a int; should be an nn.Module"),
        ({"model": lambda width: Net(width)}, "model: lambda takes width; should take no argum"),
        (
            {"model": nn.Sequential(Net(), nn.Softmax(1))},
            r"last step should be an nn.Linear .*0.ou",
        ),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(9, 2))}, r"Sequential fails on images \["),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 2))},
            "returns 2 logits, but there ar",
        ),
        (
            {"experiment": {"rounds": 1}},
            "experiment: should be an Experiment or a recipe, not dict",
        ),
        ({"callback": print}, "callback: builtin_function_or_method has no phase and no round"),
    ],
)
def test_unusable_input_is_named(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"experiment": tiny(**QUICK), "out": tmp_path / "run"}
    arguments |= {"model": Net, "clients": slices(), "public": PUBLIC} | given
    with pytest.raises(ValueError, match=said):
        fedaux.run(**arguments)
    assert not (tmp_path / "run").exists()
    assert "python" not in SOURCES


def test_public_data_is_asked_for() -> None:
    with pytest.raises(ValueError, match="public: missing; should be public unlabeled images"):
        fedaux.run(model=Net, clients=slices())


def test_a_module_keeps_its_weights_and_a_factory_draws_them() -> None:
    def weight(row: ModelRow) -> Tensor:
        head = row((1, 8, 8), 10).head
        assert isinstance(head, nn.Linear)
        return head.weight

    net = Net()
    row, drawn = ModelRow(net), ModelRow(lambda: Net())
    assert torch.equal(weight(row), net.out.weight)
    weight(row).data.zero_()
    assert torch.equal(weight(row), net.out.weight)
    assert not torch.equal(weight(drawn), weight(drawn))
    shaped = ModelRow(lambda shape, classes: nn.Sequential(nn.Flatten(), nn.LazyLinear(classes)))
    assert shaped.outputs((3, 4, 4), 7) == 7


def test_the_digest_tells_models_apart() -> None:
    def digest(model: nn.Module | Callable[..., nn.Module]) -> str:
        return ModelRow(model).digest((1, 8, 8), 10)

    net = Net()
    assert digest(net) == digest(net)
    assert digest(Net) == digest(Net)
    different: list[Any] = [net, Net(), Net, Tanh, lambda: Net(), lambda: Net(9), lambda: Tanh()]
    assert len({digest(model) for model in different}) == len(different)


def test_dropout_is_warned_of(tmp_path: Path) -> None:
    net = Net()
    net.body.append(nn.Dropout(0.1))
    with pytest.warns(UserWarning, match=r"features.body.3 \(Dropout\) draws random numbers"):
        fedaux.run(tiny(**QUICK), model=net, clients=slices(), public=PUBLIC, out=tmp_path)


def test_two_runs_at_once_do_not_mix_their_data(tmp_path: Path) -> None:
    class Nested:
        def phase(self, task: Task, round: int, name: str) -> None:
            fedaux.run(tiny(**QUICK), clients=slices(), public=PUBLIC, out=tmp_path / "inner")

        def round(self, row: Any) -> None:
            raise AssertionError("no round ends")

    with pytest.raises(ValueError, match="another run of this process uses data in memory"):
        fedaux.run(
            tiny(**QUICK),
            clients=slices(),
            public=PUBLIC,
            out=tmp_path / "outer",
            callback=Nested(),
        )


def test_a_resumed_run_needs_the_same_module(tmp_path: Path) -> None:
    def start(model: Any, *, resume: bool) -> fedaux.Result:
        return fedaux.run(
            tiny(**QUICK), model=model, clients=slices(), public=PUBLIC, out=tmp_path, resume=resume
        )

    done = start(Net, resume=False)
    assert start(Net, resume=True).metrics() == done.metrics()
    with pytest.raises(ValueError, match="another experiment and cannot be resumed"):
        start(lambda: Net(9), resume=True)
