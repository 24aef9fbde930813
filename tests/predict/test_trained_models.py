"""Models that runs leave behind: their files, what they predict, and their export."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from helpers.corpus import news, texts_of, write_csv
from helpers.experiments import tiny
from helpers.typing_commands import called
from PIL import Image
from safetensors import safe_open
from torch import nn

import fedaux
import fedaux.report
from fedaux.data import embedded
from fedaux.data.tensor_files import save_tensors
from fedaux.predict.files import FORMAT
from fedaux.predict.trained_model import TrainedModel
from fedaux.running import plugins
from fedaux.running.run import Result

pytestmark = pytest.mark.usefixtures("without_pages")
TWO = [
    {"name": "small", "model": "cnn", "options": {"width": 4}},
    {"name": "flat", "model": "mlp", "options": {}},
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as image files: train and test, one folder per class."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = embedded.digits()
    for number, (image, label) in enumerate(zip(images[:420], labels[:420], strict=True)):
        place = folder / ("test" if number % 3 == 0 else "train") / f"digit {label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of two methods with two prototypes."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    experiment = of_images(digits, method=["fedavg+p", "fedaux"], prototypes=TWO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedaux.report, "write_report", lambda path: path)
        return fedaux.run(experiment, out=out)


def of_images(folder: Path, **changes: Any) -> fedaux.Experiment:
    means = {"channel_mean": [0.3], "channel_deviation": [0.4]}
    data = {"source": "folder", "path": str(folder), **means}
    return tiny(**{"data": data, "rounds": 2, "local": {"epochs": 3}, **changes})


def last_row(result: Result, method: str) -> dict[str, Any]:
    lines = (result.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row: dict[str, Any]
    (*_, row) = [row for row in map(json.loads, lines) if row["method"] == method]
    return row


def predicted(*words: Any, cwd: Path) -> list[dict[str, str]]:
    done = called("predict", *map(str, words), "--out", "predictions.csv", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    with (cwd / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def accuracy(rows: list[dict[str, str]], truth: list[str]) -> float:
    assert len(rows) == len(truth) > 0
    return float(np.mean([row["class"] == name for row, name in zip(rows, truth, strict=True)]))


def test_predictions_on_test_images_have_the_accuracy_of_the_run(
    digits: Path, finished: Result, tmp_path: Path
) -> None:
    measured = {name: last_row(finished, name) for name in ("fedavg+p", "fedaux")}
    found = {}
    for method, row in measured.items():
        for prototype, figure in row["accuracy_by_prototype"].items():
            choice = ("--method", method, "--prototype", prototype)
            rows = predicted(finished.directory, digits / "test", *choice, cwd=tmp_path)
            found[method, prototype] = accuracy(
                rows, [Path(one["path"]).parent.name for one in rows]
            )
            assert found[method, prototype] == figure
            card = finished.model(method, prototype=prototype).card
            assert card["accuracy"]["last"] == figure
        assert row["accuracy"] == np.mean([found[method, one["name"]] for one in TWO])
    assert len(set(found.values())) > 2, "models that predict alike would prove nothing"
    assert max(found.values()) > 0.3
    assert sorted(file.name for file in (finished.directory / "models").iterdir()) == [
        "fedaux-seed0-flat.safetensors",
        "fedaux-seed0-small.safetensors",
        "fedavg_p-seed0-flat.safetensors",
        "fedavg_p-seed0-small.safetensors",
    ]


def test_the_table_has_the_probability_of_every_class(
    digits: Path, finished: Result, tmp_path: Path
) -> None:
    file = finished.directory / "models" / "fedaux-seed0-small.safetensors"
    image = next((digits / "test" / "digit 3").iterdir())
    (row,) = predicted(file, image, cwd=tmp_path)
    classes = [f"digit {number}" for number in range(10)]
    assert list(row) == ["path", "row", "class", "probability", *(f"p_{one}" for one in classes)]
    numbers = {name: float(row[f"p_{name}"]) for name in classes}
    assert sum(numbers.values()) == pytest.approx(1, abs=1e-5)
    assert row["class"] == max(numbers, key=numbers.__getitem__)
    assert float(row["probability"]) == max(numbers.values())
    assert row["path"] == str(image)


def test_the_card_says_what_the_model_is_and_what_is_not_protected(finished: Result) -> None:
    with safe_open(
        finished.directory / "models" / "fedaux-seed0-small.safetensors", framework="pt"
    ) as file:
        card = json.loads(file.metadata()["card"])
    assert (card["method"], card["seed"], card["prototype"]) == ("fedaux", 0, "small")
    assert (card["model"], card["options"]["width"]) == ("cnn", 4)
    assert (card["input_shape"], card["input"]["mean"]) == ([1, 8, 8], [0.3])
    assert (card["rounds"], card["accuracy"]["test_examples"]) == (2, 140)
    assert card["accuracy"]["max"] >= card["accuracy"]["last"]
    assert (card["privacy"]["epsilon"], card["privacy"]["delta"]) == (1.0, 1e-5)
    assert "model updates" in card["privacy"]["not_protected"]
    assert "not differentially private" in card["privacy"]["not_protected"]
    assert finished.model("fedavg+p", prototype="flat").card["privacy"]["epsilon"] is None
    assert card["versions"]["fedaux"] == fedaux.__version__


def test_cards_of_other_methods_state_what_holds_for_them(digits: Path, tmp_path: Path) -> None:
    methods = ["fedaux2", "private-head", "fedavg", "pooled", "local-only+p"]
    certainty = {"components": 4, "epsilon": 100.0}
    experiment = of_images(digits, method=methods, rounds=1, certainty=certainty)
    result = fedaux.run(experiment, out=tmp_path / "run")
    privacy = {name: result.model(name).card["privacy"] for name in methods[:4]}
    assert [one["mechanism"] for one in privacy.values()] == ["classes", "classes", None, None]
    said = {name: one["not_protected"] for name, one in privacy.items()}
    assert "updates of local training are sent without" in said["fedaux2"]
    assert "No model update leaves a client" in said["private-head"]
    assert "not differentially private" not in said["private-head"]
    assert "An (epsilon, delta)" in said["fedaux2"]
    assert "An (epsilon, delta)" not in said["fedavg"]
    assert said["pooled"].startswith("One party holds the examples of all clients.")
    done = called("export", str(result.directory), "--method", "fedavg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(ε, δ)" not in done.stdout
    with pytest.raises(
        ValueError,
        match=r"local-only\+p trains one model per client and keeps none; choose fedaux2 and",
    ):
        result.model("local-only+p")
    assert not list((tmp_path / "run/models").glob("local*"))


def test_a_run_of_clients_that_train_alone_has_no_model(tmp_path: Path) -> None:
    recipe = tiny(method="local-only", rounds=1, pretraining={"kind": "none"})
    (tmp_path / "alone.toml").write_text(tomli_w.dumps(recipe.to_dict()), encoding="utf-8")
    done = called("run", "alone.toml", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Models:" not in done.stdout
    done = called("predict", "run", "alone.toml", cwd=tmp_path)
    assert done.stderr == (
        "error: run: local-only trains one model per client and keeps none; choose another method, "
        "and run it\n"
    )


def test_a_model_is_a_module_with_its_preprocessing(
    digits: Path, finished: Result, tmp_path: Path
) -> None:
    model = finished.model("fedaux", prototype="small")
    assert isinstance(model, nn.Module)
    file = finished.directory / "models/fedaux-seed0-small.safetensors"
    rows = predicted(file, digits / "test", cwd=tmp_path)
    files = [Path(row["path"]) for row in rows]
    with torch.no_grad():
        by_path = model(torch.stack([model.preprocess(one) for one in files]))
    expected = torch.tensor([[float(row[f"p_{one}"]) for one in model.classes] for row in rows])
    assert torch.allclose(by_path, expected, atol=1e-5)
    picture = Image.open(files[0])
    pixels = np.array(picture)[None]
    for given in (str(files[0]), files[0].read_bytes(), picture, pixels):
        assert torch.equal(model.preprocess(given), torch.from_numpy(pixels))
    with pytest.raises(AttributeError, match=r"removed after fedaux 0\.2\.0: use model\("):
        model.predict(files)


def test_a_table_of_images_predicts_as_the_files_do(
    digits: Path, finished: Result, tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    file = finished.directory / "models/fedaux-seed0-flat.safetensors"
    by_path = predicted(file, digits / "test", cwd=tmp_path)
    cells = [{"bytes": Path(one["path"]).read_bytes()} for one in by_path]
    (tmp_path / "tables").mkdir()
    table = tmp_path / "tables/test.parquet"
    parquet.write_table(pyarrow.table({"image": cells}), table)
    for given in (table, table.parent):
        found = predicted(file, given, cwd=tmp_path)
        assert [row["p_digit 0"] for row in found] == [row["p_digit 0"] for row in by_path]
        assert (found[1]["path"], found[1]["row"]) == (str(table), "1")


def test_images_of_another_size_or_colour_are_converted(finished: Result) -> None:
    model = finished.model("fedaux", prototype="small")
    sizes = [((8, 8), "L"), ((32, 20), "RGB"), ((8, 8), "RGB")]
    for size, mode in sizes:
        white = torch.full((1, 8, 8), 255, dtype=torch.uint8)
        assert torch.equal(model.preprocess(Image.new(mode, size, "white")), white)


def test_what_cannot_be_read_is_named_or_skipped(
    digits: Path, finished: Result, tmp_path: Path
) -> None:
    file = finished.directory / "models" / "fedaux-seed0-flat.safetensors"
    (tmp_path / "broken.png").write_bytes(b"no image")
    image = next((digits / "test" / "digit 1").iterdir())
    done = called("predict", str(file), "broken.png", str(image), cwd=tmp_path)
    assert done.returncode == 2
    assert "broken.png: cannot be decoded as an image" in done.stderr
    assert "(--skip-bad leaves such inputs out)" in done.stderr
    assert not (tmp_path / "predictions.csv").exists()
    done = called("predict", str(file), "broken.png", str(image), "--skip-bad", cwd=tmp_path)
    assert done.returncode == 0
    assert "Skipped 1, first: broken.png" in done.stderr
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 2
    done = called("predict", str(file), "nowhere", cwd=tmp_path)
    assert done.stderr == "error: nowhere: not found\n"


def test_oblong_images_are_cut_to_the_shape_of_the_training(finished: Result) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(1, 6, 8)
    wide = np.full((1, 6, 20), 9, dtype=np.uint8)
    wide[:, :, 6:14] = pixels
    card = finished.model("fedaux", prototype="flat").card | {"input_shape": [1, 6, 8]}
    model = TrainedModel(fedaux.MODELS["mlp"]((1, 6, 8), 10), card, vocabulary=None)
    for given in (pixels, wide):
        assert np.array_equal(model.preprocess(given).numpy(), pixels)


def test_a_damaged_card_and_a_wrong_device_are_named(finished: Result, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for card, problem in (("{", "its card is damaged"), ("{}", "it has no method, seed")):
        metadata = {"format": FORMAT, "card": card}
        save_tensors(file, {"head.weight": torch.zeros(1)}, metadata=metadata)
        with pytest.raises(ValueError, match=f"model.safetensors: .*{problem}"):
            fedaux.load(file)
    good = finished.directory / "models" / "fedaux-seed0-flat.safetensors"
    with pytest.raises(ValueError, match=r"--device gpu \(device=\): should be auto, cpu"):
        fedaux.load(good, device="gpu")


def test_a_run_without_models_names_the_setting_and_the_command_that_writes_them(
    tmp_path: Path,
) -> None:
    run = fedaux.run(tiny(rounds=1, output={"models": False}), out=tmp_path / "run").directory
    assert not (run / "models").exists()
    for words in (("predict", "run", "."), ("export", "run")):
        done = called(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert "output.models = false" in done.stderr
    with pytest.raises(ValueError, match=r"output\.models = false; `fedaux run .*`") as raised:
        fedaux.load(run)
    before = (run / "metrics.jsonl").read_text()
    done = called(*str(raised.value).split("`")[1].split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (run / "metrics.jsonl").read_text() == before
    assert fedaux.load(run).card["rounds"] == 1


def test_a_choice_among_several_models_is_asked_for(
    digits: Path, finished: Result, tmp_path: Path
) -> None:
    run = str(finished.directory)
    done = called("predict", run, str(digits), cwd=tmp_path)
    assert done.returncode == 2
    assert "4 models; choose one with --method and --prototype" in done.stderr
    assert "fedavg+p, seed 0, flat, test accuracy" in done.stderr
    done = called("export", run, "--method", "fedaus", cwd=tmp_path)
    assert "it has fedaux, fedavg+p; did you mean fedaux?" in done.stderr
    with pytest.raises(ValueError, match="choose one with --prototype"):
        finished.model("fedaux")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no trained models"):
        fedaux.load(tmp_path / "empty")
    with pytest.raises(ValueError, match=f"folder of runs; .*: {finished.directory.name}"):
        fedaux.load(finished.directory.parent)
    (tmp_path / "model.pt").write_bytes(b"PK" * 100)
    with pytest.raises(
        ValueError, match=r"not a readable safetensors file .*; should be a file in"
    ):
        fedaux.load(tmp_path / "model.pt")
    h0 = next((finished.directory / "pretrained").glob("*.safetensors"))
    with pytest.raises(ValueError, match="is no trained model; should be a file in the folder"):
        fedaux.load(h0)


def test_linear_mode_leaves_a_whole_network(digits: Path, tmp_path: Path) -> None:
    local = {"epochs": 3, "learning_rate": 0.05}
    experiment = of_images(digits, mode="linear", method="fedaux", local=local)
    result = fedaux.run(experiment, out=tmp_path / "run")
    rows = predicted(result.directory, digits / "test", cwd=tmp_path)
    figure = last_row(result, "fedaux")["accuracy"]
    assert accuracy(rows, [Path(one["path"]).parent.name for one in rows]) == figure > 0.2
    with safe_open(result.directory / "models/fedaux-seed0.safetensors", framework="pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} == {"features", "head"}  # noqa: SIM118


def test_texts_with_their_vocabulary_inside(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra text")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    tested = news(60, seed=7)
    write_csv(corpus / "news.csv", news(120))
    write_csv(corpus / "public.csv", [(text, "") for text, _ in news(160, seed=3)])
    write_csv(corpus / "new.csv", tested)
    data = {"test": str(corpus / "new.csv")}
    local = {"epochs": 6, "learning_rate": 1e-2}
    result = fedaux.run(texts_of(corpus, data=data, local=local), out=tmp_path / "run")
    figure = last_row(result, "fedaux")["accuracy"]
    assert figure > 0.5
    truth = [label for _, label in tested]
    alone = (result.directory / "models/fedaux-seed0.safetensors").rename(
        tmp_path / "m.safetensors"
    )
    rows = predicted(alone, corpus / "new.csv", cwd=tmp_path)
    assert accuracy(rows, truth) == figure
    assert [row["row"] for row in rows[:3]] == ["0", "1", "2"]
    model = fedaux.load(alone)
    with torch.no_grad():
        by_text = model(torch.stack([model.preprocess(text) for text, _ in tested])).argmax(dim=1)
    assert [model.classes[label] for label in by_text.tolist()] == [row["class"] for row in rows]
    assert model.preprocess("long " * 999).shape == model.preprocess("short").shape
    with pytest.raises(ValueError, match="is a model of texts"):
        model.preprocess(Image.new("L", (8, 8)))
    lines = [json.dumps({"note": text}) for text, _ in tested]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines), encoding="utf-8")
    done = called("predict", str(alone), "notes.jsonl", cwd=tmp_path)
    assert "has no column text; it has note; set --column" in done.stderr
    noted = predicted(alone, "notes.jsonl", "--column", "note", cwd=tmp_path)
    assert [row["p_sport"] for row in noted] == [row["p_sport"] for row in rows]
    rows_of = [("café " + text, label) for text, label in tested]
    write_csv(tmp_path / "utf8.csv", [tested[0], *rows_of])
    content = (tmp_path / "utf8.csv").read_text(encoding="utf-8")
    (tmp_path / "latin.csv").write_text(content, encoding="latin-1")
    done = called("predict", str(alone), "latin.csv", cwd=tmp_path)
    assert (
        "latin.csv, row 1: not UTF-8; should be saved as UTF-8, or give --encoding" in done.stderr
    )
    spelled = predicted(alone, tmp_path / "latin.csv", "--encoding", "latin-1", cwd=tmp_path)
    expected = predicted(alone, tmp_path / "utf8.csv", cwd=tmp_path)
    assert [one["p_sport"] for one in spelled] == [one["p_sport"] for one in expected]
    (tmp_path / "latin.txt").write_text(rows_of[0][0], encoding="latin-1")
    assert len(predicted(alone, "latin.txt", "--encoding", "latin-1", cwd=tmp_path)) == 1
    done = called("predict", str(alone), "latin.txt", "--encoding", "latin-one", cwd=tmp_path)
    assert "--encoding latin-one: should be an encoding of Python" in done.stderr


def test_the_columns_of_the_training_are_the_default(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra text")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    file = write_csv(corpus / "news.csv", news(60))
    named = file.read_text(encoding="utf-8").replace("text,label", "headline,label", 1)
    file.write_text(named, encoding="utf-8")
    write_csv(corpus / "public.csv", [(text, "") for text, _ in news(80, seed=3)])
    experiment = texts_of(corpus, rounds=1, data={"text_column": "headline"})
    model = fedaux.run(experiment, out=tmp_path / "run").directory
    (tmp_path / "new.csv").write_text("text,headline\n,right\n", encoding="utf-8")
    assert len(predicted(model, "new.csv", cwd=tmp_path)) == 1
    (tmp_path / "other.csv").write_text("title\nright\n", encoding="utf-8")
    done = called("predict", str(model), "other.csv", cwd=tmp_path)
    assert "'headline': other.csv has no such column; it has title" in done.stderr


@pytest.mark.slow
def test_a_checkpoint_of_bert_is_not_needed_any_more(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    own = tmp_path / "checkpoint"
    own.mkdir()
    for file in checkpoint.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    prototypes = [{"name": "bert", "model": "tinybert", "options": {"checkpoint": str(own)}}]
    experiment = texts_of(corpus, rounds=1, prototypes=prototypes)
    result = fedaux.run(experiment, out=tmp_path / "run")
    for file in own.iterdir():
        file.unlink()
    model = result.model()
    assert model.card["options"]["checkpoint"] == ""
    assert model(model.preprocess("Stocks rose.")[None]).shape == (1, 3)


PLUGIN = """
from torch import nn
from fedaux.models import MODELS, SplitModel

def thin(image_shape, num_classes, *, width=4):
    channels, height, side = image_shape
    body = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * side, width), nn.ReLU())
    return SplitModel(body, nn.Linear(width, num_classes), feature_width=width)

MODELS["thin"] = thin
"""


def test_a_plugins_model_needs_its_file(digits: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "own.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    before = dict(plugins.LOADED)
    fedaux.load_plugin(plugin)
    try:
        prototypes = [{"name": "thin", "model": "thin", "options": {"width": 6}}]
        experiment = of_images(digits, method="fedavg", prototypes=prototypes)
        result = fedaux.run(experiment, out=tmp_path / "run")
    finally:
        del fedaux.MODELS["thin"]
        plugins.LOADED.clear()
        plugins.LOADED.update(before)
    with pytest.raises(
        ValueError, match=r"its model 'thin' is not known here; the plugin .*own.py"
    ):
        result.model()
    try:
        rows = predicted(result.directory, digits / "test", "--plugin", plugin, cwd=tmp_path)
    finally:
        del fedaux.MODELS["thin"]
        plugins.LOADED.clear()
        plugins.LOADED.update(before)
    truth = [Path(one["path"]).parent.name for one in rows]
    assert accuracy(rows, truth) == last_row(result, "fedavg")["accuracy"]


def test_a_finished_run_without_models_gets_them_when_it_is_resumed(
    digits: Path, tmp_path: Path
) -> None:
    experiment = of_images(digits, method="fedavg")
    result = fedaux.run(experiment, out=tmp_path / "run")
    file = tmp_path / "run/models/fedavg-seed0.safetensors"
    pixels = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    before = result.model()(pixels)
    file.unlink()
    again = fedaux.run(experiment, out=tmp_path / "run", resume=True)
    assert torch.equal(again.model()(pixels), before)


def test_export_copies_the_file(finished: Result, tmp_path: Path) -> None:
    choice = ("--method", "fedavg+p", "--prototype", "small")
    done = called("export", str(finished.directory), *choice, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedavg+p, seed 0, small, test accuracy" in done.stdout
    assert "Not protected: The model updates" in done.stdout
    copy = fedaux.load(tmp_path / "fedavg_p-seed0-small.safetensors")
    original = finished.model("fedavg+p", prototype="small")
    image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    assert torch.equal(copy(image), original(image))


def test_a_format_that_is_not_available_is_named(
    finished: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaux.predict.export.find_spec", lambda name: None)
    file = str(finished.directory / "models" / "fedaux-seed0-flat.safetensors")
    done = called("export", file, "--format", "onnx", cwd=tmp_path)
    assert done.returncode == 2
    assert "needs the package onnx and onnxscript: pip install -e '.[onnx]'" in done.stderr
    done = called("export", file, "--format", "keras", cwd=tmp_path)
    assert "should be safetensors, onnx" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_ending_of_an_exported_file_gives_its_format(finished: Result, tmp_path: Path) -> None:
    file = str(finished.directory / "models" / "fedaux-seed0-flat.safetensors")
    for words in (("--out", "model.pt"), ("--format", "torchscript")):
        done = called("export", file, *words, cwd=tmp_path)
        assert (
            "fedaux 0.2.0 was the last version that writes it; should be safetensors" in done.stderr
        )
    done = called("export", file, "--format", "onnx", "--out", "other.safetensors", cwd=tmp_path)
    assert done.returncode == 2
    assert "--format onnx: --out other.safetensors ends like safetensors" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_exported_network_predicts_alike(finished: Result, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = finished.model("fedaux", prototype="small")
    pixels = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)
    done = called(
        "export",
        str(finished.directory),
        "--method",
        "fedaux",
        "--prototype",
        "small",
        "--out",
        "model.onnx",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    found = torch.from_numpy(session.run(None, {"inputs": pixels.numpy()})[0])
    assert json.loads(session.get_modelmeta().custom_metadata_map["card"]) == model.card
    with torch.no_grad():
        assert torch.allclose(found, model(pixels), atol=1e-5)
