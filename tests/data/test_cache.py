from __future__ import annotations

import io
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedaux.config import Auxiliary
from fedaux.data import cache, load_auxiliary, tables
from fedaux.data.decoding import DecodedBlock


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))


def decoded() -> Path:
    place = cache.folder()
    assert place is not None
    return place


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)).save(
        buffer, format="PNG"
    )
    return buffer.getvalue()


def folder(place: Path, size: int = 4) -> Auxiliary:
    place.mkdir()
    for number in range(size):
        (place / f"{number}.png").write_bytes(png(number))
    return Auxiliary(source="folder", path=str(place))


def blocks(*, start: int = 0, count: int = 3) -> Iterator[DecodedBlock]:
    for number in range(start, start + count):
        yield DecodedBlock(
            np.full((2, 3, 4, 4), number, dtype=np.uint8), [2 * number, 2 * number + 1], {}
        )


def test_what_was_decoded_is_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = folder(tmp_path / "set")
    first = load_auxiliary(section)
    moved = Auxiliary(source="folder", path=str((tmp_path / "set").rename(tmp_path / "elsewhere")))

    def fail(*_: object, **__: object) -> Iterator[DecodedBlock]:
        raise AssertionError("decoded again")

    monkeypatch.setattr(tables, "decode_all", fail)
    assert torch.equal(load_auxiliary(moved), first)
    for change in ({"image_size": 3}, {"channels": 1}):
        with pytest.raises(AssertionError, match="decoded again"):
            load_auxiliary(moved.model_copy(update=change))
    (tmp_path / "elsewhere" / "2.png").write_bytes(png(99))
    with pytest.raises(AssertionError, match="decoded again"):
        load_auxiliary(moved)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 on a fork
def test_another_process_finds_the_same_key_and_may_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / str(number) for number in range(200)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]))
    found = cache.Key(files, settings={})()
    monkeypatch.setattr(cache, "MANY", 100)
    for dies in (False, True):
        if dies:
            monkeypatch.setattr(cache, "_send", lambda *_: None)
        key = cache.Key(files, settings={})
        key.read_meanwhile()
        assert multiprocessing.active_children()
        assert key() == found


def test_what_is_not_finished_is_of_files_that_did_not_change(tmp_path: Path) -> None:
    folder(tmp_path / "set", size=2)
    files = [tmp_path / "set" / "0.png", tmp_path / "set" / "1.png"]
    before = cache.Key(files, settings={})
    assert cache.Key(files, settings={}).moment == before.moment
    os.utime(files[1], ns=(0, 1))
    touched = cache.Key(files, settings={})
    assert touched() == before()
    assert touched.moment != before.moment


def test_the_key_knows_names_content_and_settings(tmp_path: Path) -> None:
    folder(tmp_path / "set", size=2)
    files = [tmp_path / "set" / "0.png", tmp_path / "set" / "1.png"]
    keys = {cache.Key(files, settings={})(), cache.Key(files, settings={"side": 3})()}
    keys.add(cache.Key(files[::-1], settings={})())
    files[0].write_bytes(png(7))
    keys.add(cache.Key(files, settings={})())
    keys.add(cache.Key([files[0].rename(tmp_path / "set" / "a.png"), files[1]], settings={})())
    assert len(keys) == 5


def test_a_damaged_entry_is_made_anew(tmp_path: Path) -> None:
    section = folder(tmp_path / "set")
    first = load_auxiliary(section).clone()
    (entry,) = decoded().iterdir()
    for name in ("examples.bin", "about.json", "rows.npy"):
        content = (entry / name).read_bytes()
        (entry / name).write_bytes(content[: len(content) // 2])
        assert cache.load(entry.name) is None
        assert torch.equal(load_auxiliary(section), first)
        assert cache.load(entry.name) is not None


def test_what_stops_half_way_leaves_nothing() -> None:
    def stops() -> Iterator[DecodedBlock]:
        yield from blocks()
        raise ValueError("row 6")

    with pytest.raises(ValueError, match="row 6"):
        cache.store("key", stops())
    assert cache.load("key") is None
    assert list(decoded().iterdir()) == []


def test_several_may_write_the_same_at_once() -> None:
    together = threading.Barrier(4)
    found: list[cache.Stored] = []

    def work() -> None:
        def waited() -> Iterator[DecodedBlock]:
            yield from blocks()
            together.wait()  # all have written, and take the place now

        found.append(cache.store("key", waited()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for stored in found:
        assert stored.images[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert stored.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert [entry.name for entry in decoded().iterdir()] == ["key"]


def test_the_file_does_not_change_with_the_images() -> None:
    stored = cache.store("key", blocks())
    tensor = torch.from_numpy(stored.images)
    tensor += 1
    again = cache.load("key")
    assert again is not None
    assert again.images[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_where_nothing_can_be_kept_images_are_decoded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = folder(tmp_path / "set")
    first = load_auxiliary(section).clone()
    (tmp_path / "file").write_text("")
    before = set(Path(tempfile.gettempdir()).glob("fedaux-*"))
    for place in (str(tmp_path / "file" / "below"), ""):
        monkeypatch.setenv("FEDAUX_CACHE", place)
        assert torch.equal(load_auxiliary(section), first)
    assert not set(Path(tempfile.gettempdir()).glob("fedaux-*")) - before


def test_what_killed_processes_left_is_removed_after_a_day() -> None:
    ages = {".part-old": cache.ABANDONED_SECONDS + 60, ".part-new": 60}
    for name, age in ages.items():
        (decoded() / name).mkdir(parents=True)
        (decoded() / name / "examples.bin").write_bytes(b"half")
        then = time.time() - age
        os.utime(decoded() / name / "examples.bin", (then, then))
    cache.store("key", blocks())
    assert sorted(entry.name for entry in decoded().iterdir()) == [".part-new", "key"]


def test_the_place_is_the_users_to_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDAUX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "fedaux" / "decoded"


def test_entries_are_plain_files() -> None:
    cache.store("key", blocks(count=1))
    about = json.loads((decoded() / "key" / "about.json").read_text())
    assert about == {"shape": [2, 3, 4, 4], "kind": "uint8", "reasons": [], "lost": {}}
    assert (decoded() / "key" / "examples.bin").stat().st_size == 2 * 3 * 4 * 4


def test_long_decodes_say_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = folder(tmp_path / "set")
    monkeypatch.setattr(tables, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("fedaux.data.decoding.BLOCK", 1)
    load_auxiliary(section)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in said] == [
        f"{n} of 4 rows decoded" for n in (1, 2, 3)
    ]
