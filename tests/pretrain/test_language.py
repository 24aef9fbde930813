"""Language modelling as pretraining: masked tokens, the loss, and the stored h0."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.operations import Listening
from torch import Tensor

pytest.importorskip("tokenizers", reason="needs the extra text")

import tomli_w
from helpers.corpus import BERT, sentences, texts_of, write_csv
from safetensors import safe_open
from safetensors.torch import load_file

import fedaux
from fedaux import seeding
from fedaux.config import ConfigError, Pretraining, Prototype
from fedaux.core.compute import Compute
from fedaux.core.weights import snapshot
from fedaux.data import vocabulary
from fedaux.data.vocabulary import BEGIN, END, MASK, Vocabulary
from fedaux.models import MODELS, SplitModel
from fedaux.pretrain import H0Request, content_digest, pretrained, pretrained_extractor
from fedaux.pretrain.language import MaskedTokens
from fedaux.pretrain.objectives import resolved
from fedaux.pretrain.training import Training, pretrain

pytestmark = pytest.mark.usefixtures("without_pages")

TEXTS = sentences(200)
PROTOTYPE = Prototype(name="bert", model="bert", options=BERT)


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return vocabulary.learned(TEXTS, size=300)


@pytest.fixture(scope="module")
def ids(words: Vocabulary) -> Tensor:
    return torch.from_numpy(words.encode(TEXTS, length=16))


def model(words: Vocabulary, **options: Any) -> SplitModel:
    with seeding.initialisation(0, part="bert"):
        return MODELS["bert"]((16, words.size), 3, **BERT, **options)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def asked(words: Vocabulary, inputs: Tensor, **settings: Any) -> MaskedTokens:
    return MaskedTokens(
        model(words).features,
        inputs,
        section=Pretraining(batch_size=len(inputs), **settings),
        generator=generator(),
        compute=Compute(),
        vocabulary=words,
    )


def test_masks_hide_eight_of_ten_swap_one_and_leave_one(words: Vocabulary, ids: Tensor) -> None:
    masked = asked(words, ids)
    marks = [0, words.mark(BEGIN), words.mark(END)]
    hidden = swapped = left = total = 0
    for seed in range(40):
        seen, places, targets, counts = masked.question(
            ids, masked.draw(len(ids), generator=generator(seed))
        )
        chosen = torch.zeros(ids.numel(), dtype=torch.bool)
        chosen[places] = True
        assert len(set(places.tolist())) == len(places)
        assert bool((counts == 1).all())
        assert torch.equal(
            seen.flatten()[~chosen], ids.flatten()[~chosen]
        )  # the rest is shown as it is
        assert torch.equal(targets, ids.flatten()[places].long())
        assert not set(targets.tolist()) & set(marks)
        shown = seen.flatten()[places]
        hidden += int((shown == words.mark(MASK)).sum())
        left += int((shown == targets).sum())
        swapped += int(((shown != targets) & (shown != words.mark(MASK))).sum())
        total += len(places)
    qualified = sum(int(token) not in marks for token in ids.flatten())
    assert total == 40 * round(0.15 * qualified)
    # Five standard deviations; a random token is the right one, or the mask, once in a hundred.
    for found, share in ((hidden, 0.8), (swapped, 0.1), (left, 0.1)):
        assert found == pytest.approx(
            share * total, abs=5 * math.sqrt(share * (1 - share) * total) + 0.002 * total
        )


def test_every_token_is_asked_for_equally_often(words: Vocabulary, ids: Tensor) -> None:
    few = ids[:8]
    masked = asked(words, few)
    times = torch.zeros(few.numel())
    for seed in range(1000):
        _, places, _, _ = masked.question(few, masked.draw(8, generator=generator(seed)))
        times[places] += 1
    free = (few > 4).flatten() | (few == 1).flatten()
    assert float(times[~free].sum()) == 0
    expected = float(times.sum()) / int(free.sum())
    assert float((times[free] - expected).abs().max()) < 5 * math.sqrt(expected)


def test_the_loss_is_the_mean_over_the_places_asked_for(words: Vocabulary, ids: Tensor) -> None:
    objective = asked(words, ids[:20])
    numbers = objective.draw(20, generator=generator(3))
    seen, places, targets, counts = objective.question(ids[:20], numbers)
    language: Any = objective.model
    with torch.no_grad():
        found = objective.loss(dict(language.named_parameters()), {}, ids[:20], numbers)
        head, hidden = language.head, language.features.tokens(seen)
        losses = []
        for place, target, counted in zip(
            places.tolist(), targets.tolist(), counts.tolist(), strict=True
        ):
            state = hidden[place // 16, place % 16]
            turned = torch.nn.functional.layer_norm(
                torch.nn.functional.gelu(head.dense.weight @ state + head.dense.bias),
                (16,),
                head.norm.weight,
                head.norm.bias,
                1e-12,
            )
            logits = language.features.words.weight @ turned + head.bias
            if counted:
                losses.append(float(logits.logsumexp(dim=0) - logits[target]))
    assert len(losses) > 10
    assert float(found) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_places_that_do_not_exist_count_for_nothing(words: Vocabulary, ids: Tensor) -> None:
    objective = asked(words, ids, masked_share=0.9)
    short = torch.from_numpy(words.encode(["oil"] * len(ids), length=16))
    seen, places, _, counts = objective.question(
        short, objective.draw(len(ids), generator=generator())
    )
    assert int(counts.sum()) == int((short > 4).sum())
    assert len(places) > int(counts.sum())
    assert torch.equal(seen[short <= 4], short[short <= 4])


def test_a_step_brings_no_numbers_from_the_host_and_asks_for_none(
    words: Vocabulary, ids: Tensor
) -> None:
    section = Pretraining(kind="masked", batch_size=32)
    made = Training(
        model(words).features,
        ids,
        feature_width=16,
        section=section,
        generator=generator(),
        vocabulary=words,
    )
    numbers = made._objective.draw(32, generator=generator())
    with Listening() as heard:
        made._loss(ids[:32], numbers)
    assert "topk" in heard.called
    assert not heard.called & {
        "scalar_tensor",
        "lift_fresh",
        "_local_scalar_dense",
        "nonzero",
        "bernoulli",
    }


def test_the_language_is_learned(words: Vocabulary, ids: Tensor) -> None:
    made = model(words)
    section = Pretraining(kind="masked", epochs=12, batch_size=50, learning_rate=1e-2)
    training = Training(
        made.features,
        ids,
        feature_width=16,
        section=section,
        generator=generator(),
        vocabulary=words,
    )
    pretrain(training)
    losses = training.losses
    assert losses[0] == pytest.approx(math.log(words.size), rel=0.15)
    assert losses[-1] < losses[0] - 1.0


def h0(words: Vocabulary, ids: Tensor, **where: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    section = where.pop("section", Pretraining(epochs=2, batch_size=50))
    made = pretrained(wanted(words, ids, model(words), section), **where)
    return dict(made.weights), made.card


def wanted(words: Vocabulary, ids: Tensor, made: SplitModel, section: Pretraining) -> H0Request:
    return H0Request(
        PROTOTYPE,
        made,
        section=section,
        images=ids,
        content=content_digest(ids),
        seed=0,
        vocabulary=words,
    )


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_interrupted_pretraining_goes_on_to_the_bit(
    tmp_path: Path, words: Vocabulary, ids: Tensor
) -> None:
    section = Pretraining(epochs=3, batch_size=50)
    whole, _ = h0(words, ids, section=section)

    def stop(passed: Any) -> None:
        if passed.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        h0(words, ids, section=section, store=tmp_path, on_epoch=stop, save_seconds=0.0)
    assert list(tmp_path.glob("*.progress.safetensors"))
    seen: list[int] = []
    again, card = h0(
        words,
        ids,
        section=section,
        store=tmp_path,
        on_epoch=lambda passed: seen.append(passed.epoch),
    )
    assert seen == [3]
    assert same(whole, again)
    assert card["epochs"] == 3


def test_h0_is_kept_with_its_words(tmp_path: Path, words: Vocabulary, ids: Tensor) -> None:
    first, card = h0(words, ids, shared=tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    assert card["vocabulary"] == {
        "digest": words.digest,
        "size": words.size,
        "origin": "the public texts",
    }
    assert "image_shape" not in card
    assert card["pretraining"]["kind"] == "masked"  # what `auto` has come to
    assert vocabulary.of_file(path).digest == words.digest
    seen: list[int] = []
    again, _ = h0(words, ids, shared=tmp_path, on_epoch=lambda passed: seen.append(passed.epoch))
    assert not seen
    assert same(first, again)
    explicit, _ = h0(
        words, ids, shared=tmp_path, section=Pretraining(kind="masked", epochs=2, batch_size=50)
    )
    assert same(first, explicit)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    other, _ = h0(
        words, ids, shared=tmp_path, section=Pretraining(epochs=2, batch_size=50, masked_share=0.3)
    )
    assert not same(first, other)


def test_auto_means_what_fits(words: Vocabulary) -> None:
    section = Pretraining()
    plain, causal = model(words).features, model(words, causal=True).features
    cnn = MODELS["cnn"]((1, 8, 8), 3).features
    assert resolved(section, plain, texts=True, given=False).kind == "masked"
    assert resolved(section, plain, texts=True, given=True).kind == "none"
    assert resolved(section, cnn, texts=False, given=False).kind == "contrastive"
    with pytest.raises(
        ValueError, match=r"causal should be false; 'next-token', .* fedaux 0\.3\.0"
    ):
        resolved(section, causal, texts=True, given=False)
    with pytest.raises(ValueError, match=r"is for texts, and there is no table"):
        resolved(Pretraining(kind="masked"), cnn, texts=False, given=False)
    with pytest.raises(ValueError, match=r"needs a model of the BERT family"):
        resolved(Pretraining(kind="masked"), cnn, texts=True, given=False)


def test_pretraining_can_go_on_from_a_checkpoint(
    tmp_path: Path, words: Vocabulary, ids: Tensor
) -> None:
    start, _ = h0(words, ids)

    def extract(kind: str) -> dict[str, Tensor]:
        made = model(words)
        made.given = lambda: start
        section = Pretraining(kind=kind, epochs=1, batch_size=50, learning_rate=1e-4)  # type: ignore[arg-type]
        return dict(pretrained_extractor(wanted(words, ids, made, section), store=tmp_path))

    assert same(extract("auto"), start)
    assert not list(tmp_path.iterdir())
    further = extract("masked")
    assert not same(further, start)
    moved = max(float((further[name] - start[name]).abs().max()) for name in start)
    assert moved < 0.01  # a few small steps from there, not from random weights
    made = model(words)
    made.given = lambda: {name: tensor for name, tensor in start.items() if "query" not in name}
    with pytest.raises(
        ValueError, match=r"has no tensor encoder.layer.0.attention.self.query.weight"
    ):
        pretrained(wanted(words, ids, made, Pretraining()), store=tmp_path)


def invoked(*words: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's use of click
        from typer.testing import CliRunner

        from fedaux.cli import app

        return CliRunner().invoke(app, words)


def test_the_command_pretrains_probes_and_writes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    experiment = texts_of(corpus, pretraining={"epochs": 3})
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(experiment.to_dict()))
    out = tmp_path / "h0.safetensors"
    done = invoked("pretrain", str(tmp_path / "recipe.toml"), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "linear probe" in done.output
    card = json.loads(out.with_suffix(".json").read_text())
    assert card["probe"]["linear"] > 0.5
    with safe_open(out, framework="pt") as file:
        assert set(file.metadata()) == {"card", "tokenizer"}
    # The file brings its words along, and another data set's are refused.
    write_csv(corpus / "other.csv", [(text + " xyzzy", "") for text in sentences(80, seed=5)])
    moved = {
        "auxiliary": {"path": str(corpus / "other.csv")},
        "pretraining": {"checkpoint": str(out)},
    }
    fedaux.run(texts_of(corpus, rounds=1, **moved), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"was trained with the vocabulary of the public texts"):
        fedaux.run(
            texts_of(corpus, rounds=1, **moved, text={"vocabulary": "auxiliary"}),
            out=tmp_path / "other",
        )
    named = texts_of(corpus, rounds=1, **moved, text={"vocabulary": str(out)})
    fedaux.run(named, out=tmp_path / "named")
    assert vocabulary.of_file(out).digest == card["vocabulary"]["digest"]


def test_several_text_prototypes_share_a_file(corpus: Path, tmp_path: Path) -> None:
    prototypes = [
        {"name": "one", "model": "bert", "options": BERT},
        {"name": "two", "model": "bert", "options": BERT | {"pooling": "cls"}},
    ]
    experiment = texts_of(corpus, prototypes=prototypes, rounds=1)
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(experiment.to_dict()))
    out = tmp_path / "h0.safetensors"
    done = invoked("pretrain", str(tmp_path / "recipe.toml"), "--out", str(out), "--no-probe")
    assert done.exit_code == 0, done.output
    cards = json.loads(out.with_suffix(".json").read_text())["prototypes"]
    assert {name: card["options"].get("pooling") for name, card in cards.items()} == {
        "one": None,
        "two": "cls",
    }
    again = texts_of(corpus, prototypes=prototypes, rounds=1, pretraining={"checkpoint": str(out)})
    fedaux.run(again, out=tmp_path / "run")
    weights = snapshot(MODELS["bert"]((16, 300), 3, **BERT))
    assert len(load_file(out)) == 2 * sum(name.startswith("features.") for name in weights)
