"""Texts from files to token ids, from token ids to features, and whole runs on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("tokenizers", reason="needs the extra text: pip install 'fedaux[text]'")

from corpus import BERT, TOPICS, news, sentences, texts_of, write_corpus, write_csv
from safetensors.torch import load_file, save_file

import fedaux
from fedaux import checkpoints, seeding
from fedaux.compute import Compute
from fedaux.config import ConfigError, Data, Experiment, Local
from fedaux.data import LabelledData, load_both, load_labelled, load_private, vocabulary
from fedaux.data.loading import vocabulary_of
from fedaux.data.texts import Texts, trimmed
from fedaux.data.tokens import save_tokens
from fedaux.data.vocabulary import BEGIN, END, MASK, PAD, UNKNOWN, Vocabulary
from fedaux.dpsgd import train_privately
from fedaux.inference import FusedInference, Predictor, Untraceable
from fedaux.models import MODELS, SplitModel, model_input
from fedaux.server import snapshot


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return vocabulary.learned([*sentences(160), *(text for text, _ in news(120))], size=300)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, words: Vocabulary) -> Path:
    """Return a checkpoint that transformers itself has written, with the tokenizer beside it."""
    transformers = pytest.importorskip("transformers", reason="the independent truth: pip install transformers")
    place = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=words.size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        initializer_range=0.2,
    )
    transformers.BertModel(config).save_pretrained(place)
    (place / "tokenizer.json").write_text(words.tokenizer, encoding="utf-8")
    return place


def model(name: str = "bert", *, size: int = 300, classes: int = 3, **options: Any) -> SplitModel:
    with seeding.initialisation(0, part=name):
        return MODELS[name]((16, size), classes, **(BERT | options if name == "bert" else options))


def ids_of(words: Vocabulary, count: int = 12, *, length: int = 16) -> Tensor:
    return torch.from_numpy(words.encode([text for text, _ in news(count)], length=length))


# Vocabularies


def test_a_learned_vocabulary_depends_on_its_texts_alone(words: Vocabulary) -> None:
    texts = [*sentences(160), *(text for text, _ in news(120))]
    assert vocabulary.learned(iter(texts), size=300).digest == words.digest
    assert vocabulary.learned(texts[1:], size=300).digest != words.digest
    assert words.size <= 300
    assert [words.mark(token) for token in (PAD, UNKNOWN, BEGIN, END, MASK)] == [0, 1, 2, 3, 4]


def test_token_ids_are_marked_cut_and_padded(words: Vocabulary) -> None:
    short, long = words.encode(["Oil.", "stocks " * 50], length=8)
    assert short.dtype == np.int32
    assert short[0] == long[0] == words.mark(BEGIN)
    assert short[np.flatnonzero(short)[-1]] == long[-1] == words.mark(END)
    assert words.words(short) == "oil ."
    assert words.words(long) == " ".join(["stocks"] * 6)
    assert words.encode(["☃"], length=4).tolist() == [[2, words.mark(UNKNOWN), 3, 0]]


def test_ids_are_those_of_the_tokenizer_of_transformers(folder: Path, words: Vocabulary) -> None:
    transformers = pytest.importorskip("transformers")
    own = vocabulary.of_folder(folder, key="x")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token=PAD, unk_token=UNKNOWN
    )
    texts = [text for text, _ in news(60)] + ["Naïve ZÜRICH's 3.5% — 中文 \t tab", "a" * 300]
    expected = theirs(texts, padding="max_length", truncation=True, max_length=16)["input_ids"]
    assert own.encode(texts, length=16).tolist() == expected
    assert own.digest == words.digest


def test_a_vocabulary_file_makes_berts_own_tokenizer(tmp_path: Path, words: Vocabulary) -> None:
    transformers = pytest.importorskip("transformers")
    listed = sorted(words.tokens, key=lambda token: words.tokens[token])
    (tmp_path / "vocab.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
    own = vocabulary.of_folder(tmp_path, key="x")
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"), do_lower_case=True)
    texts = [text for text, _ in news(30)] + ["Élan, [MASK] THE\u00a0end"]
    expected = theirs(texts, padding="max_length", truncation=True, max_length=12)["input_ids"]
    assert own.encode(texts, length=12).tolist() == expected
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert vocabulary.of_folder(tmp_path, key="x").encode(["THE the"], length=4)[0, 1] == words.mark(UNKNOWN)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "not a tokenizer"),
        ("nonsense", "not a tokenizer"),
        (json.dumps({"model": {"vocab": {"<pad>": 1}}, "added_tokens": []}), r"\[PAD\] has the id None, should be 0"),
    ],
)
def test_what_is_no_tokenizer_of_the_family_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        vocabulary.of_folder(tmp_path, key="text.vocabulary")
    with pytest.raises(ValueError, match=r"text.vocabulary = .*: holds neither tokenizer.json nor vocab.txt"):
        vocabulary.of_folder(tmp_path / "nothing", key="text.vocabulary")


# Sources


def test_all_formats_hold_the_same_texts(tmp_path: Path, words: Vocabulary) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    rows = news(30)
    write_csv(tmp_path / "news.csv", rows)
    lines = [json.dumps({"sentence": text, "label": label}) for text, label in rows]
    (tmp_path / "news.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = pyarrow.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
    parquet.write_table(table, tmp_path / "news.parquet")
    for number, (text, label) in enumerate(rows):
        (tmp_path / "folder" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / label / f"{number:03}.txt").write_text(text, encoding="utf-8")
    reader = Texts(words, 16)
    found = {
        source: load_labelled(Data(source=source, path=str(tmp_path / name)), texts=reader)
        for source, name in (("csv", "news.csv"), ("jsonl", "news.jsonl"), ("parquet", "news.parquet"))
    }
    first = found["csv"]
    assert first.classes == tuple(TOPICS)
    assert first.vocabulary is words
    assert first.input_shape == (16, words.size)
    assert first.images.dtype == torch.int32
    for other in found.values():
        assert torch.equal(other.images, first.images)
        assert torch.equal(other.labels, first.labels)
    files = load_labelled(Data(source="folder", path=str(tmp_path / "folder")), texts=reader)

    def pairs(data: LabelledData) -> set[tuple[int, ...]]:
        parts = ((data.images, data.labels), (data.test_images, data.test_labels))
        return {(*map(int, row[row > 0]), -int(label)) for ids, labels in parts for row, label in zip(ids, labels)}  # noqa: B905

    assert pairs(files) == pairs(first)


HUB = """
import sys
from pathlib import Path
from fedaux.config import Auxiliary, Data
from fedaux.data import load_auxiliary, load_labelled, vocabulary
from fedaux.data.texts import Texts
reader = Texts(vocabulary.of_file(Path(sys.argv[2])), 16)
data = load_labelled(Data(source="huggingface", path=sys.argv[1]), texts=reader)
print(data.classes, data.labels.tolist(), data.test_labels.tolist())
print([reader.vocabulary.words(row) for row in data.images.tolist()])
print(tuple(load_auxiliary(Auxiliary(source="huggingface", path=sys.argv[1], size=2), texts=reader).shape))
"""


def test_a_data_set_of_the_hub_holds_texts(tmp_path: Path, words: Vocabulary) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra data: pip install 'fedaux[data]'")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(TOPICS))})
    (tmp_path / "set" / "data").mkdir(parents=True)
    rows = news(6)
    for name, part in (("train", rows[:4]), ("test", rows[4:])):
        columns = {"text": [text for text, _ in part], "label": [list(TOPICS).index(label) for _, label in part]}
        split = datasets.Dataset.from_dict(columns, features=features)
        split.to_parquet(str(tmp_path / "set" / "data" / f"{name}-00000-of-00001.parquet"))
    (tmp_path / "tokenizer.json").write_text(words.tokenizer, encoding="utf-8")
    home = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "FEDAUX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", HUB, str(tmp_path / "set"), str(tmp_path / "tokenizer.json")],
        capture_output=True,
        text=True,
        env=os.environ | home,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tuple(TOPICS)} [0, 1, 2, 0] [1, 2]", done.stderr
    assert lines[1] == str([text.lower().replace(".", " .") for text, _ in rows[:4]])
    assert lines[2] == "(2, 16)"


def test_columns_can_be_named_and_joined(tmp_path: Path, words: Vocabulary) -> None:
    (tmp_path / "reviews.csv").write_text("stars,title,body\n0,Oil,the market\n1,,team\n0,goal,\n1,a,b\n")
    section = Data(
        source="csv", path=str(tmp_path / "reviews.csv"), text_column=("title", "body"), label_column="stars", size=2
    )
    data = load_labelled(section.model_copy(update={"test_fraction": 0.25}), texts=Texts(words, 8))
    said = {words.words(row) for row in data.images.tolist()}
    assert len(data.labels) == 2
    assert said <= {"oil the market", "team", "goal", "a b"}
    with pytest.raises(ValueError, match=r"has no column text; it has stars, title, body; say with data.text_column"):
        load_labelled(section.model_copy(update={"text_column": ()}), texts=Texts(words, 8))
    with pytest.raises(ValueError, match=r"data.size = 9: there are 3 training examples"):
        load_labelled(section.model_copy(update={"size": 9}), texts=Texts(words, 8))


def test_missing_texts_stop_the_run_or_are_skipped(
    tmp_path: Path, words: Vocabulary, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "news.csv", [*news(6), ("  ", "sport"), ("good", "")])
    section = Data(source="csv", path=str(path))
    with pytest.raises(ValueError, match=r"row 6: the text is empty.*skip_bad"):
        load_labelled(section, texts=Texts(words, 8))
    data = load_labelled(section.model_copy(update={"skip_bad": True}), texts=Texts(words, 8))
    assert len(data.labels) + len(data.test_labels) == 6
    assert "skipped 2 of 8 rows" in capsys.readouterr().err


def test_tokenised_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(corpus / "cache"))
    first, public = load_both(texts_of(corpus))
    with monkeypatch.context() as broken:  # nothing is encoded or learned a second time
        broken.setattr(Vocabulary, "encode", None)
        broken.setattr(vocabulary, "learned", None)
        again, same = load_both(texts_of(corpus))
    assert torch.equal(first.images, again.images)
    assert torch.equal(public, same)
    assert again.vocabulary is not None
    assert first.vocabulary is not None
    assert again.vocabulary.digest == first.vocabulary.digest
    entries = len(list((corpus / "cache" / "decoded").iterdir()))
    shorter, _ = load_both(texts_of(corpus, text={"length": 8}))
    assert shorter.images.shape[1] == 8
    assert len(list((corpus / "cache" / "decoded").iterdir())) == entries + 2
    learned = json.loads(next((corpus / "cache" / "vocabularies").iterdir()).read_text())
    assert learned["model"]["vocab"]["[PAD]"] == 0


def test_columns_without_tokens_are_left_out() -> None:
    ids = np.zeros((2, 40), dtype=np.int32)
    ids[0, :9] = ids[1, :3] = 5
    assert trimmed(ids).shape == (2, 16)
    assert trimmed(np.ones((1, 20), dtype=np.int32)).shape == (1, 20)


def test_silos_of_texts_are_filled_up_to_the_longest(tmp_path: Path, words: Vocabulary) -> None:
    write_csv(tmp_path / "a.csv", [("oil", "markets"), ("bank", "markets"), ("bank", "markets")])
    write_csv(tmp_path / "b.csv", [("goal " * 12, "sport"), ("team", "sport"), ("team", "sport")])
    section = Data(source="csv", clients=(str(tmp_path / "a.csv"), str(tmp_path / "b.csv")))
    data = load_labelled(section, texts=Texts(words, 24))
    assert data.classes == ("markets", "sport")
    assert data.images.shape[1] == data.test_images.shape[1] == 16
    assert data.clients is not None
    assert [len(part) for part in data.clients] == [2, 2]
    assert data.vocabulary is words


def test_token_ids_travel_with_their_tokenizer(corpus: Path, words: Vocabulary) -> None:
    experiment = texts_of(corpus)
    data, public = load_both(experiment)
    private_file, public_file = save_tokens(corpus / "tokens", data, public)
    assert load_file(private_file)["texts"].dtype == torch.int16
    moved = texts_of(
        corpus,
        data={"source": "tensors", "path": str(private_file)},
        auxiliary={"source": "tensors", "path": str(public_file)},
    )
    again, same = load_both(moved)
    assert torch.equal(again.images, data.images)
    assert torch.equal(again.test_images, data.test_images)
    assert torch.equal(same, public)
    assert again.classes == data.classes
    assert again.vocabulary is not None
    assert data.vocabulary is not None
    assert again.vocabulary.digest == data.vocabulary.digest
    with pytest.raises(ValueError, match=r"more than the 8 that"):
        load_both(moved.model_copy(update={"text": moved.text and moved.text.model_copy(update={"length": 8})}))
    with pytest.raises(ValueError, match=r"was tokenised by .*should be one"):
        load_labelled(moved.data, texts=Texts(words, 16))
    save_file({"texts": torch.zeros(3, 4), "labels": torch.zeros(3).long()}, private_file)
    with pytest.raises(ValueError, match=r"carries no tokenizer"):
        load_private(moved)


# Features


def test_features_are_those_of_transformers(folder: Path, words: Vocabulary) -> None:
    transformers = pytest.importorskip("transformers")
    ours = model(size=words.size, checkpoint=str(folder)).eval()
    assert ours.given is not None
    assert ours.feature_width == 32
    ours.features.load_state_dict(ours.given())
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = ids_of(words, 20)
    present = (ids != 0).long()
    with torch.no_grad():
        hidden = theirs(input_ids=ids.long(), attention_mask=present).last_hidden_state
        found = ours.features.tokens(ids)  # type: ignore[operator]
        mean = (hidden * present[:, :, None]).sum(dim=1) / present.sum(dim=1, keepdim=True)
        assert torch.allclose(found[present.bool()], hidden[present.bool()], atol=1e-5)
        assert torch.allclose(ours.features(ids), mean, atol=1e-5)
        first = model(size=words.size, checkpoint=str(folder), pooling="cls").eval()
        first.features.load_state_dict(ours.features.state_dict())
        assert torch.allclose(first.features(ids), hidden[:, 0], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"pooling": "cls"}, {"causal": True}], ids=str)
def test_padding_and_neighbours_change_no_features(words: Vocabulary, options: dict[str, Any]) -> None:
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


def test_checkpoints_of_other_kinds_are_refused(folder: Path, tmp_path: Path, words: Vocabulary) -> None:
    def changed(name: str, **changes: Any) -> str:
        place = tmp_path / name
        shutil.copytree(folder, place)
        config = json.loads((place / "config.json").read_text()) | changes
        (place / "config.json").write_text(json.dumps(config))
        return str(place)

    with pytest.raises(ValueError, match=r"its model_type is 'roberta', should be 'bert'"):
        model(checkpoint=changed("a", model_type="roberta"))
    with pytest.raises(ValueError, match=r"its hidden_act is 'relu', should be 'gelu'"):
        model(checkpoint=changed("b", hidden_act="relu"))
    with pytest.raises(ValueError, match=r"knows 50 tokens, and the vocabulary in use has 300"):
        model(checkpoint=changed("c", vocab_size=50))
    with pytest.raises(ValueError, match=r"texts of 16 tokens, and positions = 8"):
        model(size=words.size, checkpoint=changed("d", max_position_embeddings=8))
    pickled = Path(changed("e"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    made = model(size=words.size, checkpoint=str(pickled))
    assert made.given is not None
    with pytest.raises(ValueError, match=r"would have to be unpickled"):
        made.given()
    with pytest.raises(ValueError, match=r"there is no such folder"):
        model(checkpoint="./nowhere")
    with pytest.raises(ValueError, match=r"pooling = 'max': should be mean or cls"):
        model(pooling="max")


def test_a_hub_id_is_taken_from_the_hubs_own_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    place = tmp_path / "models--owner--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, place / "snapshots" / ("0" * 40))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    assert checkpoints.locate("owner/name", key="x") == place / "snapshots" / ("0" * 40)
    with pytest.raises(ValueError, match=r"x = 'owner/other': there is no such folder, and the hub could not be asked"):
        checkpoints.locate("owner/other", key="x")


def test_models_say_what_they_read() -> None:
    assert {name for name in MODELS if model_input(name) == "text"} == {"bert", "minilm", "tinybert"}


# Computing


def test_token_ids_stay_whole_numbers(words: Vocabulary) -> None:
    ids = ids_of(words)
    assert Compute().floats(ids) is ids
    assert torch.equal(Compute().place_inputs(ids), ids)
    made = model(size=words.size)
    with pytest.raises(Untraceable):
        FusedInference(made)
    predict = Predictor(made, Compute())
    with torch.no_grad():
        assert torch.equal(predict(snapshot(made), ids, batch_size=12), made.eval()(ids))


def test_a_step_asks_the_host_for_nothing(words: Vocabulary) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    called: set[str] = set()

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            called.update(str(operation).split("."))
            return operation(*arguments, **(options or {}))

    made, ids = model(size=words.size, causal=True), ids_of(words)
    with Listening():  # type: ignore[no-untyped-call]
        made(ids).sum().backward()
    assert "embedding" in called
    assert not called & {"scalar_tensor", "lift_fresh", "_local_scalar_dense", "nonzero", "rand", "bernoulli"}


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
        generator=seeding.generator(0, "local"),
        client=0,
    )
    assert entry.epsilon > 0
    moved = {name for name, tensor in made.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == set(before)


# Whole runs


def rows_of(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


METHODS = ["fedavg", "feddf+p", "fedaux+m"]


def test_a_federation_of_texts_learns(corpus: Path, tmp_path: Path) -> None:
    experiment = texts_of(corpus, rounds=4, method=["fedavg", "fedaux"], local={"epochs": 8, "learning_rate": 1e-2})
    result = fedaux.run(experiment, out=tmp_path / "run")
    best = {row["method"]: row["accuracy_max_mean"] for row in result.summary["rows"]}
    assert best["fedavg"] > 0.7  # of three topics
    assert best["fedaux"] > 0.5
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(name in page for name in TOPICS)
    assert "texts that each client scores highest" in page
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    assert split["classes"] == list(TOPICS)


def test_the_fast_engine_equals_the_plain_loop(corpus: Path, tmp_path: Path) -> None:
    found = []
    for name, engine in (("plain", {"clients_at_once": 1}), ("fast", {"clients_at_once": 8, "threads": 2})):
        fedaux.run(texts_of(corpus, method=METHODS, engine=engine), out=tmp_path / name)
        found.append(rows_of(tmp_path / name))
    torch.set_num_threads(1)
    assert len(found[0]) == 2 * len(METHODS)
    for plain, fast in zip(*found, strict=True):
        assert fast["clients_answered"] == plain["clients_answered"]
        assert fast["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert fast["local_loss"] == pytest.approx(plain["local_loss"], rel=1e-4)
        assert fast["accuracy"] == pytest.approx(plain["accuracy"], abs=0.05)


def test_an_interrupted_run_goes_on_to_the_same_figures(corpus: Path, tmp_path: Path) -> None:
    whole = texts_of(corpus, method=["fedaux", "feddf+p"])
    fedaux.run(whole, out=tmp_path / "whole")

    class Interrupted(Exception):
        pass

    class Watcher:
        def phase(self, task: Any, round: int, name: str) -> None:
            if round == 2 and name == "distill":
                raise Interrupted

        def round(self, row: Any) -> None:
            pass

    with pytest.raises(Interrupted):
        fedaux.run(whole, out=tmp_path / "parts", watcher=Watcher())
    fedaux.run(whole, out=tmp_path / "parts", resume=True)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


def test_linear_mode_and_pretokenised_files_give_what_texts_give(corpus: Path, tmp_path: Path) -> None:
    experiment = texts_of(corpus, mode="linear")
    fedaux.run(experiment, out=tmp_path / "texts")
    files = save_tokens(tmp_path, *load_both(experiment))
    moved = texts_of(
        corpus,
        mode="linear",
        data={"source": "tensors", "path": str(files[0])},
        auxiliary={"source": "tensors", "path": str(files[1])},
    )
    fedaux.run(moved, out=tmp_path / "tokens")
    assert rows_of(tmp_path / "tokens") == rows_of(tmp_path / "texts")


def test_a_run_begins_with_the_checkpoints_weights(folder: Path, corpus: Path, tmp_path: Path) -> None:
    prototype = {"name": "given", "model": "bert", "options": {"checkpoint": str(folder)}}
    experiment = texts_of(corpus, prototypes=[prototype], method=["fedavg+p", "fedavg"], rounds=1)
    assert vocabulary_of(experiment).origin == str(folder / "tokenizer.json")
    fedaux.run(experiment, out=tmp_path / "run")
    assert not (tmp_path / "run" / "pretrained").exists()  # nothing was trained
    with pytest.raises(ConfigError, match=r"begins with .*, which was trained with another; should be its own"):
        fedaux.run(texts_of(corpus, prototypes=[prototype], text={"vocabulary": "auxiliary"}), out=tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prototypes": [{"name": "a", "model": "cnn"}]}, "prototypes.model = 'cnn': is for images"),
        ({"text": {"length": 3}}, "text.length = 3: should be greater than or equal to 4"),
        ({"pretraining": {"kind": "contrastive"}}, "pretraining.kind = 'contrastive': is for images"),
        ({"pretraining": {"kind": "next-token"}}, "prototypes.options.causal should be true"),
        ({"text": {"length": 64}}, "texts of 64 tokens, and positions = 32"),
        ({"text": {"vocabulary": "./nowhere"}}, "text.vocabulary = './nowhere': there is no such folder"),
        ({"prototypes": [{"name": "a", "model": "bert", "options": {"causal": 1}}]}, "should be true or false"),
        ({"prototypes": [{"name": "a", "model": "bert", "options": {"pooling": 1}}]}, "should be a text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_told_before_anything_is_written(
    corpus: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    write_csv(corpus / "news.csv", [("goal " * 90, "sport"), *news(60)])
    with pytest.raises(ValueError, match=told):
        fedaux.run(texts_of(corpus, **changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("section", "source"), [("data", "digits"), ("auxiliary", "letters"), ("data", "svhn")])
def test_images_are_not_taken_for_texts(corpus: Path, tmp_path: Path, section: str, source: str) -> None:
    settings = texts_of(corpus).to_dict()
    path = {"path": str(corpus)} if source == "svhn" else {}
    wrong = Experiment(**settings | {section: {"source": source, **path}})
    with pytest.raises(ConfigError, match=f"{section}.source = '{source}': holds no texts"):
        fedaux.run(wrong, out=tmp_path / "run")
    del settings["text"]
    with pytest.raises(ConfigError, match=r"prototypes.model = 'bert': is for texts; add the table \[text\]"):
        fedaux.run(Experiment(**settings), out=tmp_path / "run")
