"""BERT: features equal to another implementation's, checkpoints, half precision, private
training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.operations import Listening
from torch import Tensor

pytest.importorskip("tokenizers", reason="needs the extra text")

from helpers.corpus import BERT, news

from fedaux import seeding
from fedaux.config import Local
from fedaux.core.compute import Compute
from fedaux.core.dpsgd import train_privately
from fedaux.core.weights import load, snapshot
from fedaux.data import checkpoints, vocabulary
from fedaux.data.texts import token_lengths
from fedaux.data.vocabulary import PAD_ID, Vocabulary
from fedaux.fast.fusion import FusedInference, Untraceable
from fedaux.fast.inference import FastPredictor
from fedaux.models import MODELS, SplitModel, model_input
from fedaux.privacy.exact_gaussian import SimulatedDraws


def model(name: str = "bert", *, size: int = 300, classes: int = 3, **options: Any) -> SplitModel:
    with seeding.initialisation(0, part=name):
        return MODELS[name]((16, size), classes, **(BERT | options if name == "bert" else options))


def ids_of(words: Vocabulary, count: int = 12, *, length: int = 16) -> Tensor:
    return torch.from_numpy(words.encode([text for text, _ in news(count)], length=length))


def test_features_are_those_of_transformers(checkpoint: Path, words: Vocabulary) -> None:
    transformers = pytest.importorskip("transformers")
    ours = model(size=words.size, checkpoint=str(checkpoint)).eval()
    assert ours.given is not None
    assert ours.feature_width == 32
    ours.features.load_state_dict(ours.given())
    theirs = transformers.BertModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    ids = ids_of(words, 20)
    present = (ids != 0).long()
    with torch.no_grad():
        hidden = theirs(input_ids=ids.long(), attention_mask=present).last_hidden_state
        found = ours.features.tokens(ids)  # type: ignore[operator]
        mean = (hidden * present[:, :, None]).sum(dim=1) / present.sum(dim=1, keepdim=True)
        assert torch.allclose(found[present.bool()], hidden[present.bool()], atol=1e-5)
        assert torch.allclose(ours.features(ids), mean, atol=1e-5)
        first = model(size=words.size, checkpoint=str(checkpoint), pooling="cls").eval()
        first.features.load_state_dict(ours.features.state_dict())
        assert torch.allclose(first.features(ids), hidden[:, 0], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"pooling": "cls"}, {"causal": True}], ids=str)
def test_padding_and_neighbours_change_no_features(
    words: Vocabulary, options: dict[str, Any]
) -> None:
    made = model(size=words.size, **options).eval()
    ids = ids_of(words)
    with torch.no_grad():
        alone = torch.cat([made.features(row[row > 0][None]) for row in ids])
        wide = made.features(torch.nn.functional.pad(ids, (0, 12)))
        assert torch.allclose(made.features(ids), alone, atol=1e-6)
        assert torch.allclose(wide, alone, atol=1e-6)
        assert (alone[0] - alone[1]).abs().max() > 1e-4


def test_a_causal_model_does_not_look_ahead(words: Vocabulary) -> None:
    ids = ids_of(words, 4)
    changed = ids.clone()
    changed[:, 3] = 77
    for causal in (True, False):
        made = model(size=words.size, causal=causal).eval().features
        with torch.no_grad():
            moved = (made.tokens(ids) - made.tokens(changed)).abs().amax(dim=(0, 2))  # type: ignore[operator]
        assert (float(moved[:3].max()) == 0.0) == causal
        assert float(moved[3:].min()) > 0


def test_shapes_are_the_papers() -> None:
    published = {"tinybert": (14_350_248, 312), "minilm": (22_713_216, 384)}
    for name, (parameters, width) in published.items():
        made = model(name, size=30522)
        assert made.feature_width == width
        # Published counts are with the pooler and two token types, which are not here.
        own = sum(parameter.numel() for parameter in made.features.parameters())
        assert own == parameters - width * (width + 1) - 2 * width


def test_minilm_is_the_packages(words: Vocabulary) -> None:
    try:
        place = checkpoints.locate("minilm", key="x")
    except ValueError as error:
        pytest.skip(str(error))
    transformers = pytest.importorskip("transformers")
    own = vocabulary.of_folder(place, key="x")
    made = model("minilm", size=own.size).eval()
    assert made.given is not None
    made.features.load_state_dict(made.given())
    theirs = transformers.BertModel.from_pretrained(place, attn_implementation="eager").eval()
    ids = torch.from_numpy(own.encode([text for text, _ in news(6)], length=24))
    present = (ids != 0).long()
    with torch.no_grad():
        hidden = theirs(input_ids=ids.long(), attention_mask=present).last_hidden_state
        mean = (hidden * present[:, :, None]).sum(dim=1) / present.sum(dim=1, keepdim=True)
        assert torch.allclose(made.features(ids), mean, atol=1e-4)


def test_checkpoints_of_other_kinds_are_refused(
    checkpoint: Path, tmp_path: Path, words: Vocabulary
) -> None:
    def changed(name: str, **changes: Any) -> str:
        place = tmp_path / name
        shutil.copytree(checkpoint, place)
        config = json.loads((place / "config.json").read_text()) | changes
        (place / "config.json").write_text(json.dumps(config))
        return str(place)

    with pytest.raises(ValueError, match=r"its model_type is 'roberta', should be 'bert'"):
        model(checkpoint=changed("a", model_type="roberta"))
    with pytest.raises(ValueError, match=r"its hidden_act is 'relu', should be 'gelu'"):
        model(checkpoint=changed("b", hidden_act="relu"))
    with pytest.raises(ValueError, match=r"has 50 tokens, the vocabulary 300"):
        model(checkpoint=changed("c", vocab_size=50))
    with pytest.raises(ValueError, match=r"should be at most positions = 8"):
        model(size=words.size, checkpoint=changed("d", max_position_embeddings=8))
    pickled = Path(changed("e"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    made = model(size=words.size, checkpoint=str(pickled))
    assert made.given is not None
    with pytest.raises(ValueError, match=r"pytorch_model.bin, which is pickled"):
        made.given()
    with pytest.raises(ValueError, match=r"there is no such folder"):
        model(checkpoint="./nowhere")
    with pytest.raises(ValueError, match=r"pooling = 'max': should be mean or cls"):
        model(pooling="max")


def test_a_hub_id_is_taken_from_the_hubs_own_cache(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    place = tmp_path / "models--owner--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    shutil.copytree(checkpoint, place / "snapshots" / ("0" * 40))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    newest = place / "snapshots" / ("0" * 40)
    assert checkpoints.locate(f"owner/name@{'0' * 40}", key="x") == newest
    assert capsys.readouterr().err == ""
    for given, found in (("owner/name", "names no revision"), ("owner/name@main", "'main' is no")):
        assert checkpoints.locate(given, key="x") == newest
        assert f"x = '{given}': " in (told := " ".join(capsys.readouterr().err.split()))
        assert found in told
        assert "should be owner/name@COMMIT" in told
    with pytest.raises(
        ValueError,
        match=r"x = 'owner/other': there is no such folder, and the hub is not available",
    ):
        checkpoints.locate("owner/other", key="x")


def test_models_say_what_they_read() -> None:
    assert {name for name in MODELS if model_input(name) == "text"} == {
        "bert",
        "minilm",
        "tinybert",
    }


# Computing


def test_token_ids_stay_whole_numbers(words: Vocabulary) -> None:
    ids = ids_of(words)
    assert Compute().floats(ids) is ids
    assert torch.equal(Compute().place_inputs(ids), ids)
    made = model(size=words.size)
    with pytest.raises(Untraceable):
        FusedInference(made)
    predict = FastPredictor(made, Compute())
    with torch.no_grad():
        assert torch.equal(predict(snapshot(made), ids, batch_size=12), made.eval()(ids))


def test_a_step_asks_the_host_for_nothing(words: Vocabulary) -> None:

    made, ids = model(size=words.size, causal=True), ids_of(words)
    with Listening() as heard:
        made(ids).sum().backward()
    assert "embedding" in heard.called
    assert not heard.called & {
        "scalar_tensor",
        "lift_fresh",
        "_local_scalar_dense",
        "nonzero",
        "rand",
        "bernoulli",
    }


@pytest.mark.usefixtures("bf16")
def test_half_precision_is_near(words: Vocabulary) -> None:
    made, ids = model(size=words.size).eval(), ids_of(words)
    with torch.no_grad():
        exact = made(ids)
        with Compute(precision=torch.bfloat16).autocast():
            near = made(ids).float()
    assert torch.allclose(exact, near, atol=0.05)
    assert not torch.equal(exact, near)


def test_private_training_takes_texts(words: Vocabulary) -> None:
    pytest.importorskip("opacus", reason="needs the extra dpsgd")
    made = model(size=words.size)
    before = snapshot(made)
    section = Local(batch_size=6, learning_rate=1e-3, privacy={"noise_multiplier": 1.0})  # type: ignore[arg-type]
    _, entry = train_privately(
        made,
        ids_of(words),
        torch.arange(12) % 3,
        section=section,
        proximal=0.0,
        draws=SimulatedDraws(seeding.generator(0, "local"), device=torch.device("cpu")),
        client=0,
    )
    assert entry.epsilon > 0
    moved = {
        name for name, tensor in made.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert moved == set(before)


def test_predictions_do_not_work_on_padding(words: Vocabulary) -> None:
    text_model = model(size=words.size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, words.size, (30, 16), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 17, (30,), generator=generator)
    lengths[3] = 0  # a text of nothing at all
    ids[torch.arange(16) >= lengths[:, None]] = PAD_ID
    assert torch.equal(token_lengths(ids), lengths)
    predictor = FastPredictor(text_model, Compute())
    widths: list[int] = []
    predictor._module.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    found = predictor(snapshot(text_model), ids, batch_size=8)
    assert widths == sorted(widths, reverse=True)
    assert len(widths) == 4
    assert widths[-1] == 8
    with torch.no_grad():
        torch.testing.assert_close(found, text_model.eval()(ids), rtol=1e-4, atol=1e-5)
    rows = torch.tensor([7, 3, 29, 3])
    torch.testing.assert_close(
        predictor(snapshot(text_model), ids, rows=rows), found[rows], rtol=1e-4, atol=1e-5
    )
    again = {name: 0.5 * tensor for name, tensor in snapshot(text_model).items()}
    load(text_model, again)
    with torch.no_grad():  # other weights, the same texts, whose lengths are known by now
        torch.testing.assert_close(
            predictor(again, ids, batch_size=8), text_model(ids), rtol=1e-4, atol=1e-5
        )
