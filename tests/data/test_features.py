"""Feature vectors as data: formats, bad rows, runs, and a federation's nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_breast_cancer

import fedaux
from fedaux.config import Auxiliary, ConfigError, Data, Experiment
from fedaux.data import load_auxiliary, load_labelled, load_rows
from fedaux.data.features import feature_width
from fedaux.data.tables import BadRows
from fedaux.running.preflight import problems_of

pytestmark = pytest.mark.usefixtures("without_pages")

ROWS, WIDTH = 24, 5
DRAWN = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
LABELS = np.arange(ROWS) % 3
NAMES = np.array(["low", "middle", "high"])


def write(file: Path, features: Any = DRAWN, labels: Any = LABELS, **more: Any) -> Path:
    """Write features and labels in the format of a file's ending."""
    held = {"features": features, "labels": labels, **more}
    if file.suffix == ".npz":
        np.savez(file, **held)
    elif file.suffix == ".npy":
        np.save(file, features)
    elif file.suffix == ".safetensors":
        save_file({name: torch.from_numpy(np.asarray(one)) for name, one in held.items()}, file)
    elif file.suffix == ".h5":
        with pytest.importorskip("h5py").File(file, "w") as opened:
            for name, one in held.items():
                opened[name] = one
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {"features": list(features), "labels": labels}
        parquet.write_table(pyarrow.table(columns), file)
    return file


def section(path: Path | str, **changes: Any) -> Data:
    return Data(source="features", path=str(path), **changes)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".h5", ".parquet"])
def test_every_format_gives_the_same_examples(tmp_path: Path, suffix: str) -> None:
    data = load_labelled(section(write(tmp_path / f"own{suffix}"), test_fraction=0.25))
    public = load_auxiliary(Auxiliary(source="features", path=str(tmp_path / f"own{suffix}")))
    assert data.input_shape == (WIDTH,)
    assert (len(data.labels), len(data.test_labels)) == (18, 6)
    assert data.classes == ("0", "1", "2")
    halved = torch.from_numpy(DRAWN).half().float()  # as clients get them to rehearse
    torch.testing.assert_close(public, halved, rtol=0, atol=0)
    together = torch.cat([data.images, data.test_images])
    expected = torch.from_numpy(DRAWN)
    assert {tuple(row) for row in together.tolist()} == {tuple(row) for row in expected.tolist()}


def test_a_file_may_hold_test_examples_and_names_of_classes(tmp_path: Path) -> None:
    more = {"test_features": DRAWN[:4], "test_labels": LABELS[:4], "classes": NAMES}
    data = load_labelled(section(write(tmp_path / "both.npz", **more)))
    assert (len(data.labels), len(data.test_labels), data.classes) == (ROWS, 4, tuple(NAMES))
    write(tmp_path / "named.npz", labels=NAMES[LABELS])
    named = load_labelled(section(tmp_path / "named.npz", test=str(tmp_path / "both.npz")))
    assert set(named.classes) == set(NAMES)
    assert len(named.test_labels) == 4


def test_a_folder_has_its_parts_as_files(tmp_path: Path) -> None:
    write(tmp_path / "train-0.npz", DRAWN[:10], LABELS[:10])
    write(tmp_path / "train-1.npz", DRAWN[10:20], LABELS[10:20])
    write(tmp_path / "test.npz", DRAWN[20:], LABELS[20:])
    data = load_labelled(section(tmp_path))
    assert (len(data.labels), len(data.test_labels)) == (20, 4)
    torch.testing.assert_close(data.images, torch.from_numpy(DRAWN[:20]))


def test_a_table_of_measurements_has_a_feature_per_column_of_numbers(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {
        "age": [63, 41, 55],
        "oldpeak": [2.3, None, 0.1],
        "site": list("abc"),
        "num": [1, 0, 1],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "heart.parquet")
    place = section(tmp_path / "heart.parquet", test_fraction=0.5)
    with pytest.raises(
        BadRows, match=r"data\.path = .*heart\.parquet, row 1: a feature is missing"
    ):
        load_labelled(place)
    data = load_labelled(place.model_copy(update={"skip_bad": True}))
    assert sorted(torch.cat([data.images, data.test_images])[:, 0].tolist()) == [55, 63]
    one = section(tmp_path / "heart.parquet", feature_column="age", test_fraction=0.5)
    assert load_labelled(one).input_shape == (1,)
    with pytest.raises(ValueError, match=r"data\.feature_column = 'ages': .* has no such column"):
        load_labelled(section(tmp_path / "heart.parquet", feature_column="ages"))


@pytest.mark.parametrize(
    ("name", "held", "problem"),
    [
        ("flat.npz", {"features": DRAWN[0]}, r"features is float32 \[5\]; should be numbers"),
        ("few.npz", {"labels": LABELS[:3]}, "has 24 rows of features, but 3 labels"),
        ("nan.npz", {"features": DRAWN * np.nan}, "a feature is missing, NaN or infinite"),
        ("large.npz", {"features": DRAWN.astype(float) * 1e300}, "24 rows are bad"),
        ("objects.npz", {"labels": np.array([{}] * ROWS)}, "pickled objects are never loaded"),
        ("bare.npy", {}, "has no labels; labelled features should be an .npz file"),
        ("text.txt", None, "should end in .safetensors"),
        ("torn.safetensors", None, "not a readable safetensors file"),
    ],
)
def test_unusable_files_are_named(
    tmp_path: Path, name: str, held: dict[str, Any] | None, problem: str
) -> None:
    file = tmp_path / name
    if held is None:
        file.write_bytes(b"nothing")
    else:
        write(file, **held)
    with pytest.raises(ValueError, match=problem) as error:
        load_labelled(section(file))
    assert str(file) in str(error.value)


def test_no_row_of_a_node_decides_about_another(tmp_path: Path) -> None:
    bad = DRAWN.copy()
    bad[3] = np.inf
    data, total = load_rows(section(write(tmp_path / "own.npz", bad), skip_bad=True))
    assert (len(data.labels), total) == (ROWS - 1, ROWS)
    ragged = [row[: 4 + (place == 7)] for place, row in enumerate(DRAWN)]
    pytest.importorskip("pyarrow")
    lists = write(tmp_path / "lists.parquet", ragged)
    with pytest.raises(ValueError, match="fixed-size list"):
        feature_width(section(lists))


def experiment(folder: Path, *, scale: float = 1.0, **changes: Any) -> Experiment:
    """Write real measurements of four hospitals, and return their experiment."""
    found = load_breast_cancer()
    inputs = scale * (found.data - found.data.mean(axis=0)) / found.data.std(axis=0)
    order = np.random.default_rng(0).permutation(len(inputs))
    public, test, own = np.split(order, [170, 270])
    write(folder / "public.npy", inputs[public])
    write(folder / "test.npz", inputs[test], found.target[test], classes=found.target_names)
    skewed = own[np.argsort(found.target[own] + np.random.default_rng(1).normal(0, 0.4, len(own)))]
    clients = [
        write(folder / f"{number}.npz", inputs[part], found.target[part])
        for number, part in enumerate(np.array_split(skewed, 4))
    ]
    for client in clients:
        write(client, **dict(np.load(client)), classes=found.target_names)
    values: dict[str, Any] = {
        "method": ["fedaux"],
        "rounds": 5,
        "participation_rate": 1.0,
        "data": {
            "source": "features",
            "clients": [str(client) for client in clients],
            "test": str(folder / "test.npz"),
        },
        "auxiliary": {"source": "features", "path": str(folder / "public.npy")},
        "certainty": {"epsilon": 1.0, "components": 4},
        "local": {"learning_rate": 0.05},
        "engine": {"device": "cpu", "threads": 1, "clients_at_once": 1},
    }
    return Experiment(**{**values, **changes})


def test_linear_heads_without_pretraining_are_the_default_for_features(tmp_path: Path) -> None:
    made = experiment(tmp_path)
    assert (made.mode, made.pretraining.kind) == ("linear", "none")
    assert [prototype.model for prototype in made.prototypes] == ["linear"]
    assert problems_of(made) == []
    result = fedaux.run(made, out=tmp_path / "run", progress=False)
    assert result.metrics()[-1]["accuracy"] > 0.85
    again = fedaux.run(made, out=tmp_path / "run", progress=False, resume=True)
    assert again.summary == result.summary


def test_the_default_rates_suit_features_of_any_norm(tmp_path: Path) -> None:
    figures = []
    for scale in (1.0, 1 / 64, 64.0):
        (folder := tmp_path / str(scale)).mkdir()
        made = experiment(folder, scale=scale, method=["fedavg+p"], local={})
        result = fedaux.run(made, out=folder / "run", progress=False)
        figures.append([row["accuracy"] for row in result.metrics()])
    assert figures[0][-1] > 0.9
    assert figures[1] == figures[0]
    assert figures[2] == figures[0]


def test_settings_of_images_and_other_models_are_refused(tmp_path: Path) -> None:
    made = experiment(tmp_path).to_dict()
    changes: dict[str, dict[str, Any]] = {
        "data.image_size: features are no images": {"data": {**made["data"], "image_size": 8}},
        "prototypes.model = 'cnn': should be linear": {
            "prototypes": [{"name": "a", "model": "cnn"}]
        },
        "auxiliary.source = 'letters': should be features": {"auxiliary": {"source": "letters"}},
        "pretraining.kind = 'auto': should be 'none'": {"pretraining": {"kind": "auto"}},
    }
    for problem, change in changes.items():
        found = problems_of(Experiment(**{**made, **change}))
        assert any(line.startswith(problem) for line in found), (problem, found)
    write(tmp_path / "test.npz", DRAWN, LABELS % 2)
    with pytest.raises(ConfigError, match=r"test images are \[5\], the others \[30\]"):
        fedaux.run(Experiment(**made), out=tmp_path / "run")


@pytest.mark.parametrize("method", ["fedaux", "fedavg+p", "fedaux2"])
def test_a_federation_of_features_comes_to_the_simulators_figures(
    tmp_path: Path, method: str
) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    import tomli_w
    from helpers.loopback import LoopbackGrid

    from fedaux.federation.server import federate

    made = experiment(tmp_path, method=[method], rounds=2)
    fedaux.run(made, out=tmp_path / "simulated", progress=False)
    nodes = {}
    for client, path in enumerate(made.data.clients):
        table = {
            "client": client,
            "state": "state",
            "device": "cpu",
            "threads": 1,
            "classes": ["malignant", "benign"],
            "data": {"source": "features", "path": path},
            "privacy": {
                "epsilon": 1.0,
                "noise": "simulated",
                "plain_updates": True,
                "public_data": True,
                "mechanisms": ["mean", "classes"],
            },
        }
        nodes[1000 + client] = tmp_path / f"node-{client}.toml"
        nodes[1000 + client].write_text(tomli_w.dumps(table), encoding="utf-8")
    settings = made.to_dict()
    del settings["data"]["clients"]
    settings["federation"] = {"authenticated": False, "deadline": 5.0, "wait_seconds": 2.0}
    server = Experiment(**settings)
    federate(server, LoopbackGrid(nodes), path=tmp_path / "federated", resume=False)
    rows = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("simulated", "federated")
    ]
    for simulated, real in zip(*rows, strict=True):
        for key in ("accuracy", "loss", "local_loss", "clients_answered", "bytes_up", "bytes_down"):
            assert real[key] == simulated[key], key


def write_of_clients(file: Path, owners: Any, **more: Any) -> Path:
    """Write a Parquet file with a column that names the client of each row."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"label": LABELS, "features": list(DRAWN), "owner": owners} | more
    parquet.write_table(pyarrow.table(columns), file, row_group_size=7)
    return file


def test_a_column_names_the_client_of_each_row(tmp_path: Path) -> None:
    owners = np.array(["b", "a", "c", "b"] * (ROWS // 4))
    broken = [*DRAWN[:3], np.full(WIDTH, np.nan, np.float32), *DRAWN[4:]]
    own = write_of_clients(tmp_path / "own.parquet", owners, features=broken)
    test = write(tmp_path / "test.parquet")
    data = load_labelled(
        section(own, client_column="owner", skip_bad=True, test=str(test), size=ROWS - 2)
    )
    assert data.clients is not None
    good = np.delete(np.arange(ROWS), 3)[: ROWS - 2]
    for part, name in zip(data.clients, "abc", strict=True):
        expected = good[owners[good] == name]
        assert torch.equal(data.images[part], torch.from_numpy(DRAWN[expected]))
        assert data.labels[part].tolist() == LABELS[expected].tolist()


def test_rows_of_clients_are_read_when_they_are_needed(tmp_path: Path) -> None:
    own = write_of_clients(tmp_path / "own.parquet", np.arange(ROWS) % 4)
    data = load_labelled(
        section(own, client_column="owner", test=str(write(tmp_path / "test.parquet")))
    )
    place, maps = data.images.data_ptr(), Path("/proc/self/maps").read_text(encoding="utf-8")
    ranges = [line.split()[0].split("-") for line in maps.splitlines() if "deleted" in line]
    assert any(int(low, 16) <= place < int(high, 16) for low, high in ranges)
    assert np.array_equal(data.images.numpy(), DRAWN)


def test_a_column_of_clients_that_does_not_fit_is_named(tmp_path: Path) -> None:
    test = str(write(tmp_path / "test.parquet"))
    own = write_of_clients(tmp_path / "own.parquet", np.arange(ROWS) % 4)
    with pytest.raises(ValueError, match=r"data\.client_column = 'owners': .* no such column"):
        load_labelled(section(own, client_column="owners", test=test))
    missing = write_of_clients(tmp_path / "missing.parquet", [None, *["a"] * (ROWS - 1)])
    with pytest.raises(ValueError, match="a row has no owner"):
        load_labelled(section(missing, client_column="owner", test=test))
    with pytest.raises(ValueError, match="should be a column of a Parquet file"):
        load_labelled(section(write(tmp_path / "own.npz"), client_column="owner"))
    settings: dict[str, Any] = {
        "data": {"source": "features", "path": str(own), "test": test, "client_column": "owner"},
        "auxiliary": {"source": "features", "path": test},
    }
    with pytest.raises(ConfigError, match=r"split\.num_clients = 20: should be 4"):
        fedaux.run(Experiment(**settings), out=tmp_path / "run")
    digits = Experiment(data={"client_column": "owner"})
    assert "only for data.source = 'features'" in "\n".join(problems_of(digits))
