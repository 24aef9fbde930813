"""Vocabularies, and texts from files to token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.programs import run_program

pytest.importorskip("tokenizers", reason="needs the extra text")

from helpers.corpus import TOPICS, news, sentences, text_of_ids, texts_of, write_csv

from fedaux.config import Auxiliary, Data
from fedaux.data import (
    LabelledData,
    load_auxiliary,
    load_both,
    load_labelled,
    vocabulary,
)
from fedaux.data.texts import Texts, trimmed
from fedaux.data.vocabulary import BEGIN, END, MASK, PAD, UNKNOWN, Vocabulary

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
    assert text_of_ids(words, short) == "oil."
    assert text_of_ids(words, long) == " ".join(["stocks"] * 6)
    assert words.encode(["☃"], length=4).tolist() == [[2, words.mark(UNKNOWN), 3, 0]]


@pytest.mark.slow
def test_ids_are_those_of_the_tokenizer_of_transformers(
    checkpoint: Path, words: Vocabulary
) -> None:
    transformers = pytest.importorskip("transformers")
    own = vocabulary.of_folder(checkpoint, key="x")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"), pad_token=PAD, unk_token=UNKNOWN
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
    assert vocabulary.of_folder(tmp_path, key="x").encode(["THE the"], length=4)[
        0, 1
    ] == words.mark(UNKNOWN)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "not a tokenizer"),
        ("nonsense", "not a tokenizer"),
        (
            json.dumps({"model": {"vocab": {"<pad>": 1}}, "added_tokens": []}),
            r"\[PAD\] has the id None, should be 0",
        ),
    ],
)
def test_what_is_no_tokenizer_of_the_family_is_refused(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        vocabulary.of_folder(tmp_path, key="text.vocabulary")
    with pytest.raises(
        ValueError, match=r"text.vocabulary = .*: has neither tokenizer.json nor vocab.txt"
    ):
        vocabulary.of_folder(tmp_path / "nothing", key="text.vocabulary")


# Sources


def test_all_formats_hold_the_same_texts(tmp_path: Path, words: Vocabulary) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    rows = news(30)
    write_csv(tmp_path / "news.csv", rows)
    lines = [json.dumps({"sentence": text, "label": label}) for text, label in rows]
    (tmp_path / "news.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = pyarrow.table(
        {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
    )
    parquet.write_table(table, tmp_path / "news.parquet")
    for number, (text, label) in enumerate(rows):
        (tmp_path / "folder" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / label / f"{number:03}.txt").write_text(text, encoding="utf-8")
    reader = Texts(words, 16)
    found = {
        source: load_labelled(Data(source=source, path=str(tmp_path / name)), converter=reader)
        for source, name in (
            ("csv", "news.csv"),
            ("jsonl", "news.jsonl"),
            ("parquet", "news.parquet"),
        )
    }
    first = found["csv"]
    assert first.classes == tuple(TOPICS)
    assert first.vocabulary is words
    assert first.input_shape == (16, words.size)
    assert first.images.dtype == torch.int32
    for other in found.values():
        assert torch.equal(other.images, first.images)
        assert torch.equal(other.labels, first.labels)
    files = load_labelled(Data(source="folder", path=str(tmp_path / "folder")), converter=reader)

    def pairs(data: LabelledData) -> set[tuple[int, ...]]:
        parts = ((data.images, data.labels), (data.test_images, data.test_labels))
        return {
            (*map(int, row[row > 0]), -int(label))
            for ids, labels in parts
            for row, label in zip(ids, labels, strict=True)
        }

    assert pairs(files) == pairs(first)


def test_a_plain_file_has_one_public_text_per_line(tmp_path: Path, words: Vocabulary) -> None:
    texts = [text for text, _ in news(20)]
    write_csv(tmp_path / "public.csv", news(20))
    file = tmp_path / "public.txt"
    file.write_text("\ufeff" + "\r\n\n \n".join(texts) + "\n", encoding="utf-8")
    reader = Texts(words, 16)
    sections = [
        Auxiliary(source=source, path=str(tmp_path / f"public.{end}"))
        for source, end in (("csv", "csv"), ("lines", "txt"))
    ]
    table, lines = (load_auxiliary(section, converter=reader) for section in sections)
    assert torch.equal(table, lines)
    file.write_bytes("fine\ncafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"auxiliary.path = .*public.txt.*, row 1: not UTF-8"):
        load_auxiliary(sections[1], converter=reader)
    file.write_bytes(b"\n")
    with pytest.raises(ValueError, match="is empty; should have a row for each example"):
        load_auxiliary(sections[1], converter=reader)


def test_a_data_set_of_the_hub_holds_texts(tmp_path: Path, words: Vocabulary) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(TOPICS))}
    )
    (tmp_path / "set" / "data").mkdir(parents=True)
    rows = news(6)
    for name, part in (("train", rows[:4]), ("test", rows[4:])):
        columns = {
            "text": [text for text, _ in part],
            "label": [list(TOPICS).index(label) for _, label in part],
        }
        split = datasets.Dataset.from_dict(columns, features=features)
        split.to_parquet(str(tmp_path / "set" / "data" / f"{name}-00000-of-00001.parquet"))
    (tmp_path / "tokenizer.json").write_text(words.tokenizer, encoding="utf-8")
    home = {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "FEDAUX_CACHE": str(tmp_path / "cache"),
    }
    done = run_program(
        "hub_texts.py", str(tmp_path / "set"), str(tmp_path / "tokenizer.json"), changes=home
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tuple(TOPICS)} [0, 1, 2, 0] [1, 2]", done.stderr
    assert lines[1] == str([text.lower().replace(".", " .") for text, _ in rows[:4]])
    assert lines[2] == "(2, 16)"


def test_columns_can_be_named_and_joined(tmp_path: Path, words: Vocabulary) -> None:
    (tmp_path / "reviews.csv").write_text(
        "stars,title,body\n0,Oil,the market\n1,,team\n0,goal,\n1,a,b\n"
    )
    section = Data(
        source="csv",
        path=str(tmp_path / "reviews.csv"),
        text_column=("title", "body"),
        label_column="stars",
        size=2,
    )
    data = load_labelled(
        section.model_copy(update={"test_fraction": 0.25}), converter=Texts(words, 8)
    )
    said = {text_of_ids(words, row) for row in data.images.tolist()}
    assert len(data.labels) == 2
    assert said <= {"oil the market", "team", "goal", "a b"}
    with pytest.raises(
        ValueError, match=r"has no column text; it has stars, title, body; set data.text_column"
    ):
        load_labelled(section.model_copy(update={"text_column": ()}), converter=Texts(words, 8))
    with pytest.raises(ValueError, match=r"data.size = 9: should be at most 3"):
        load_labelled(section.model_copy(update={"size": 9}), converter=Texts(words, 8))


def test_missing_texts_stop_the_run_or_are_skipped(
    tmp_path: Path, words: Vocabulary, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "news.csv", [*news(6), ("  ", "sport"), ("good", "")])
    section = Data(source="csv", path=str(path))
    with pytest.raises(ValueError, match=r"(?s)skip_bad.*row 6: the text is empty"):
        load_labelled(section, converter=Texts(words, 8))
    data = load_labelled(section.model_copy(update={"skip_bad": True}), converter=Texts(words, 8))
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
    data = load_labelled(section, converter=Texts(words, 24))
    assert data.classes == ("markets", "sport")
    assert data.images.shape[1] == data.test_images.shape[1] == 16
    assert data.clients is not None
    assert [len(part) for part in data.clients] == [2, 2]
    assert data.vocabulary is words


def test_texts_beyond_the_size_are_not_tokenised(words: Vocabulary, tmp_path: Path) -> None:
    texts = sentences(30)
    lines = [json.dumps({"text": text if row != 20 else "  "}) for row, text in enumerate(texts)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines), encoding="utf-8")
    section = Auxiliary(source="jsonl", path=str(tmp_path / "own.jsonl"), size=20)
    ids = load_auxiliary(section, converter=Texts(words, 16))
    assert [text_of_ids(words, row) for row in ids.numpy()] == [
        text_of_ids(words, row) for row in words.encode(texts[:20], length=16)
    ]
    with pytest.raises(ValueError, match=r"own\.jsonl, row 20: the text is empty"):
        load_auxiliary(section.model_copy(update={"size": 21}), converter=Texts(words, 16))
