"""What a node tells of an example is a function of that example alone, to the last bit.

The server chooses weights that amplify the last bit, the batch size and the map. If another row
decided how an example is rounded, replacing one row would move the contributions of all others.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("flwr", reason="needs the extra flower")
pytest.importorskip("opendp", reason="needs the extra privacy (opendp)")
from flwr.app import RecordDict
from helpers.encoders import KINDS, image_encoder
from helpers.loopback import asked
from helpers.recorded_draws import Recorded

from fedaux.config import Certainty, EncoderSection, Local, LocalPrivacy, Prototype
from fedaux.core import dpsgd
from fedaux.core.compute import Compute
from fedaux.core.plain_backend import PlainPredictor
from fedaux.core.weights import snapshot
from fedaux.data import load_rows
from fedaux.encoders import Encoder, Extractor, Images, open_encoder
from fedaux.federation import records, work
from fedaux.federation.node import load_node
from fedaux.federation.policy import digest_of
from fedaux.federation.terms import PREPARE, TRAIN, Plan, PrepareTerms, TrainTerms
from fedaux.models import MODELS, SplitModel, model_input
from fedaux.models.standardised import MAP, standardised
from fedaux.privacy.accounting import Query
from fedaux.privacy.mechanism import products, within_unit_ball

QUERY = Query(100.0, 0.2)
CLASSES = ("a", "b", "c")
SHAPE = (1, 8, 8)
COUNT = 9
MODEL = Prototype(name="p", model="mlp", options={"width": 24})


def pictures(count: int = COUNT, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8), dtype=np.uint8)


def write(folder: Path, images: np.ndarray, labels: list[str]) -> Path:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / label / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return folder


def node(folder: Path, data: Path, **privacy: Any) -> Path:
    table = {
        "client": 0,
        "device": "cpu",
        "threads": 1,
        "classes": list(CLASSES),
        "data": {"source": "folder", "path": str(data), "image_size": 8, "channels": 1},
        "privacy": {"epsilon": 50.0, "accountant": "renyi", **privacy},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "node.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    return folder / "node.toml"


def model() -> SplitModel:
    torch.manual_seed(0)
    return MODELS["mlp"](SHAPE, len(CLASSES), width=24)


def noiseless(file: Path, public: dict[str, Tensor], *, batch_size: int) -> Tensor:
    """The vector that `mean` releases, without its noise: the mechanism `none`, allowed by name."""
    section = Certainty(mechanism="none")
    terms = PrepareTerms(
        certainty=section,
        client=0,
        run="r",
        plan=Plan(run="r", certainty=(section,), releases=1),
        seed=0,
        prototype=MODEL,
        mode="full",
        image_shape=SHAPE,
        classes=CLASSES,
        batch_size=batch_size,
    )
    content: dict[str, Any] = {
        "terms": records.text_record(terms.model_dump_json()),
        "extractor": records.arrays(model().features.state_dict()),
        "public": records.arrays(public),
    }
    answer = asked(file, RecordDict(content), PREPARE).content
    assert "refusal" not in answer, answer["refusal"]
    return records.some_tensors(answer["release"], most_bytes=10**6)["vector"]


def amplifying(target: np.ndarray, batch: np.ndarray) -> dict[str, Tensor]:
    """A map that tells whether an image was alone in its batch: the last bit of one feature, times
    2^60."""
    extract = model().features.eval()
    with torch.no_grad():
        images = torch.from_numpy(np.concatenate([target[None], batch]))[:, None].float() / 255
        alone, among = extract(images[:1])[0].double(), extract(images)[0].double()
    found = (alone - among).abs().argmax()
    assert alone[found] != among[found], "this machine rounds both alike: choose other images"
    whitening = torch.zeros(len(alone), 1, dtype=torch.float64)
    whitening[found] = 2.0**60
    return {
        "centre": (alone + among) / 2,
        "whitening": whitening,
        "bound": torch.ones((), dtype=torch.float64),
    }


def test_an_example_that_moves_to_another_batch_releases_the_same(tmp_path: Path) -> None:
    """One image gets another label, and so another place: what `none` releases of all stays."""
    labels = ["b"] * (COUNT - 1) + ["c"]
    before = node(tmp_path, write(tmp_path / "data", pictures(), labels), mechanisms=["none"])
    public = amplifying(pictures()[-1], pictures()[:-2])
    first = noiseless(before, public, batch_size=COUNT - 1)  # the last image is alone in its batch
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "data/b/000.png").rename(tmp_path / "data/c/zzz.png")
    assert torch.equal(first, noiseless(before, public, batch_size=COUNT - 1))


def test_products_and_norms_round_every_row_as_if_it_were_alone() -> None:
    """Rows that cancel, times numbers that amplify the rest."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(257, 37, dtype=torch.float64, generator=generator)
    matrix = torch.randn(37, 13, dtype=torch.float64, generator=generator) * 2.0**30
    together = within_unit_ball(products(rows, matrix) * 2.0**-33)
    order = torch.randperm(257, generator=generator)
    assert torch.equal(within_unit_ball(products(rows[order], matrix) * 2.0**-33), together[order])
    for row in range(257):
        alone = within_unit_ball(products(rows[row : row + 1], matrix) * 2.0**-33)
        assert torch.equal(alone[0], together[row])
    assert torch.allclose(products(rows, matrix), rows @ matrix, rtol=1e-12)
    assert float(together.norm(dim=1).max()) <= 1 + 1e-15


IMAGE_MODELS = sorted(name for name in MODELS if model_input(name) == "image")


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_features_are_a_function_of_their_image(name: str, precision: torch.dtype) -> None:
    """Permuted, replaced, fewer, on other threads: not a bit changes."""
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    module = MODELS[name]((3, 16, 16), 10).features
    extractor = snapshot(module)

    def features(some: Tensor, *, workers: int) -> Tensor:
        compute = Compute(precision=precision, workers=workers)
        return PlainPredictor(module, compute).alone(extractor, some)

    whole = features(images, workers=1)
    order = torch.tensor([4, 2, 5, 0, 3, 1])
    replaced = torch.cat([255 - images[:1], images[1:]])
    assert torch.equal(features(images[order], workers=2), whole[order])
    assert torch.equal(features(replaced, workers=3)[1:], whole[1:])
    assert torch.equal(features(images[3:4], workers=2), whole[3:4])
    assert features(images[:0], workers=2).shape == (0, whole.shape[1])


def test_an_extractor_that_mixes_the_examples_of_a_batch_sees_one_at_a_time() -> None:
    images = torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8)
    assert not bool(PlainPredictor(Mixing(), Compute()).alone({}, images).any())


class Mixing(nn.Module):
    """A network whose features depend on everything in their batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1) - inputs.flatten(1).mean(dim=0)


def test_features_of_a_node_never_come_from_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not from the cache, in which a run on the same images left features of batches."""
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    encoder = Encoder(Mixing(), Images(4, 4, (0.5,), (0.5,)))
    monkeypatch.setattr(work, "encoder_of", lambda path: encoder)
    labels = ["a", "b", "b", "b", "c"]
    file = node(tmp_path, write(tmp_path / "data", pictures(5), labels))
    file.write_text(f'encoder = "e"\n{file.read_text(encoding="utf-8")}', encoding="utf-8")
    section = load_node(file).data.model_copy(update={"skip_bad": True, "encoding": "utf-8"})
    batched, _ = load_rows(section, converter=Extractor(encoder, Compute()))
    assert bool(batched.images.any())
    examples = work.own_examples(load_node(file), CLASSES)
    assert examples.images.shape == (5, 16)
    assert not bool(examples.images.any())


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_an_encoder_are_a_function_of_their_image(tmp_path: Path, kind: str) -> None:
    """Permuted, replaced by an image that cannot be read, fewer, on other threads."""
    encoder = open_encoder(EncoderSection(source=f"hf:{image_encoder(tmp_path / kind, kind)}"))
    generator = np.random.default_rng(0)
    sizes = [(9, 33), (32, 32), (64, 20), (47, 47), (5, 5)]
    images = [generator.integers(0, 256, (3, *size), dtype=np.uint8) for size in sizes]

    def features(contents: list[Any], *, workers: int) -> dict[int, np.ndarray]:
        extractor = Extractor(encoder, Compute(workers=workers), batch_size=1)
        entries = ((str(place), one) for place, one in enumerate(contents))
        (block,) = extractor.encode_all(entries, bad_labels={})
        return dict(zip(block.rows, block.images, strict=True))

    whole = features(images, workers=1)
    order = [4, 2, 0, 3, 1]
    moved = features([images[place] for place in order], workers=3)
    assert all((moved[place] == whole[row]).all() for place, row in enumerate(order))
    replaced = features([b"no image", *images[1:]], workers=2)
    assert sorted(replaced) == [1, 2, 3, 4]
    assert all((own == whole[row]).all() for row, own in replaced.items())
    assert (features(images[3:4], workers=2)[0] == whole[3]).all()


def gradient_sums(
    file: Path, steps: list[list[int]], monkeypatch: pytest.MonkeyPatch, *, mode: Any, name: str
) -> list[Tensor]:
    """The sums of clipped gradients of a node's steps of DP-SGD before noise, in lattice points.

    The learning rate is so small that weights stay as they are.
    """
    shutil.rmtree(file.parent / "state", ignore_errors=True)
    recorded = Recorded(steps)
    monkeypatch.setattr(work, "private_draws", lambda *_: recorded)
    torch.manual_seed(0)
    options: Any = {"width": 24} if name in ("mlp", "cnn") else {}
    whole = MODELS[name](SHAPE, len(CLASSES), **options)
    if mode == "linear":  # with a map that a hostile server chose
        whole = standardised(whole)
        whole.features.load_state_dict({MAP: torch.randn(2 * (whole.feature_width,))}, strict=False)
    local = Local(
        batch_size=1,
        epochs=len(steps),
        learning_rate=1e-30,
        privacy=LocalPrivacy(noise_multiplier=100.0, clip=0.5),
    )
    monkeypatch.setattr(dpsgd, "schedule", lambda section, num_examples: (QUERY, len(steps)))
    extractor = snapshot(whole.features)
    terms = TrainTerms(
        client=0,
        run="r",
        plan=Plan(run="r", local=local, updates=1),
        seed=0,
        prototype=Prototype(name="p", model=name, options=options),
        mode=mode,
        image_shape=SHAPE,
        classes=CLASSES,
        batch_size=2,
        round=1,
        local=local,
        proximal=0.0,
        wire="fp32",
        extractor=digest_of("extractor", extractor) if mode == "linear" else None,
    )
    trained = whole if mode == "full" else whole.head
    prefix = "" if mode == "full" else "head."
    weights = {prefix + key: own for key, own in snapshot(trained).items()}
    content: dict[str, Any] = {
        "terms": records.text_record(terms.model_dump_json()),
        "weights": records.arrays(weights),
    }
    if mode == "linear":
        content["extractor"] = records.arrays(extractor)
    answer = asked(file, RecordDict(content), TRAIN).content
    assert "refusal" not in answer, answer["refusal"]
    return [recorded.step(number) for number in range(len(steps))]


@pytest.mark.quickly("cnn-full", "cnn-linear", "mlp-full", "mlp-linear", "resnet8-gn-linear")
@pytest.mark.parametrize("mode", ["full", "linear"])
@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet8-gn"])
def test_private_gradients_do_not_depend_on_who_else_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, name: str
) -> None:
    """Amplification by sampling asks that the rest of a batch has the same sum with and without an
    example; a replaced label moves files, and so rows."""
    pytest.importorskip("opacus")
    labels = ["a", "b", "b", "b", "c"]
    file = node(tmp_path, write(tmp_path / "data", pictures(5), labels))
    steps = [[0], [1], [2], [3], [4], [0, 1, 2, 3, 4], [1, 2], [1, 2, 4], []]
    sums = gradient_sums(file, steps, monkeypatch, mode=mode, name=name)
    alone, together = sums[:5], sums[5:]
    for rows, own in zip(steps[5:], together, strict=True):
        expected = sum((alone[row] for row in rows), torch.zeros_like(own))
        assert torch.equal(own, expected)
    assert all(0 < float(own.norm()) <= 2.0**24 * (1 + 1e-6) for own in alone)
    (tmp_path / "data/a/000.png").rename(tmp_path / "data/c/zzz.png")
    moved = gradient_sums(file, [[0], [1], [2], [3], [4]], monkeypatch, mode=mode, name=name)
    assert all(torch.equal(*pair) for pair in zip(moved[:4], alone[1:], strict=True))
