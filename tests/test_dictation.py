"""Distilling while teachers are at work gives what one after the other gives, whoever is quick."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest
import torch
from test_engines import federation
from torch import Tensor

from fedaux.clients import TrainRequest, Update, Weights
from fedaux.dictation import Dictation, TeachRows
from fedaux.student import FEW_WORKERS, Student

ORDER = torch.randperm(50, generator=torch.Generator().manual_seed(0))
PIECES: dict[str, Any] = {"evaluation": {"batch_size": 16}, "distillation": {"batch_size": 24}}
"""160 public images: ten pieces, seven batches, which begin and end elsewhere."""


class Teacher:
    """Writes down who taught which rows; the labels of a row are its number and the number's square."""

    def __init__(self, *, seconds: Callable[[int], float] = lambda worker: 0.0) -> None:
        self.taught: list[tuple[int, list[int]]] = []
        self._seconds = seconds
        self._lock = Lock()

    def __call__(self, rows: Tensor, worker: int) -> Tensor:
        time.sleep(self._seconds(worker))
        with self._lock:
            self.taught.append((worker, rows.tolist()))
        return labels(rows)


def labels(rows: Tensor) -> Tensor:
    return torch.stack([rows.float(), rows.float().square()], dim=1)


def helped(dictation: Dictation, helpers: int) -> list[Thread]:
    threads = [Thread(target=dictation.help, args=(number,)) for number in range(1, helpers + 1)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize("slow", [None, 0, 1])
def test_rows_are_there_when_they_are_asked_for(helpers: int, slow: int | None) -> None:
    teacher = Teacher(seconds=lambda worker: 0.01 * (worker == slow))
    dictation = Dictation(teacher, ORDER, piece=8)
    threads = helped(dictation, helpers)
    targets = dictation.targets
    for count in (3, 8, 9, 30, 30, 50):
        dictation.until(count)
        assert torch.equal(targets[ORDER[:count]], labels(ORDER[:count]))
    for thread in threads:
        thread.join()
    assert sorted(row for _, rows in teacher.taught for row in rows) == list(range(50))  # each of them once
    assert [rows for _, rows in sorted(teacher.taught, key=lambda entry: ORDER.tolist().index(entry[1][0]))] == [
        piece.tolist() for piece in ORDER.split(8)
    ]
    assert {worker for worker, _ in teacher.taught} <= set(range(helpers + 1))


def test_who_waits_for_a_piece_teaches_the_next_one() -> None:
    begun, go_on = Event(), Event()

    def teach(rows: Tensor, worker: int) -> Tensor:
        if worker == 1:
            begun.set()
            go_on.wait(10)
        elif worker == 0:
            go_on.set()
        return labels(rows)

    dictation = Dictation(teach, ORDER, piece=25)
    (thread,) = helped(dictation, 1)
    assert begun.wait(10)
    dictation.until(1)  # would wait for ever if the learner did not teach: the helper waits for it
    thread.join()
    assert torch.equal(dictation.targets[ORDER[:25]], labels(ORDER[:25]))
    assert dictation.seconds > 0


def test_the_end_lets_helpers_go() -> None:
    teacher = Teacher(seconds=lambda worker: 0.02)
    dictation = Dictation(teacher, ORDER, piece=1)
    threads = helped(dictation, 1)
    dictation.until(1)
    dictation.end()
    for thread in threads:
        thread.join()
    assert len(teacher.taught) < 10


@pytest.mark.parametrize("guilty", [0, 1])
def test_what_a_teacher_raises_reaches_the_learner(guilty: int) -> None:
    def teach(rows: Tensor, worker: int) -> Tensor:
        time.sleep(0.01)
        if worker == guilty:
            raise ZeroDivisionError(worker)
        return labels(rows)

    dictation = Dictation(teach, ORDER, piece=5)
    threads = helped(dictation, 1)
    with pytest.raises(ZeroDivisionError):
        dictation.until(50)
    for thread in threads:
        thread.join()


@pytest.fixture
def alongside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a distillation has begun while teachers were at work."""
    original, counted = Student.learn_alongside, []

    def learn(self: Student, weights: Weights, teach: TeachRows, **others: Any) -> tuple[Weights, float]:
        counted.append(1)
        return original(self, weights, teach, **others)

    monkeypatch.setattr(Student, "learn_alongside", learn)
    return counted


def played(folder: Path, *, workers: int, rounds: int = 2, **changes: Any) -> tuple[Weights, dict[str, Any]]:
    server, state, _ = federation(folder, clients_at_once=8, workers=workers, **changes)
    for _ in range(rounds):
        state, row = server.play_round(state)
    return state.weights["cnn"], row


@pytest.mark.parametrize("method", ["feddf", "feddf+p", "fedaux", "fedaux+logits"])
def test_a_round_alongside_equals_one_after_the_other(method: str, tmp_path: Path, alongside: list[int]) -> None:
    expected, expected_row = played(tmp_path / "one", workers=1, method=method, **PIECES)
    assert not alongside
    results = []
    for attempt in ("first", "second"):
        found, row = played(tmp_path / attempt, workers=2, method=method, **PIECES)
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-3)
        assert set(row["seconds"]) == set(expected_row["seconds"])
        assert min(row["seconds"].values()) >= 0
        results.append(found)
    assert len(alongside) == 4
    moved = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert float((tensor - results[0][name]).abs().max()) < 1e-3 * moved
        assert torch.equal(results[0][name], results[1][name])  # however the threads were scheduled
    assert torch.get_num_threads() == 1  # as the tests set it


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedaux+m"},
        {"method": "fedbe"},
        {"method": "fedavg"},
        {"mode": "linear"},
        {"workers": FEW_WORKERS + 1},
        {"distillation": {"epochs": 2}},
        {"distillation": {"sharpening": 0.5}},
        {"distillation": {"negligible_weight": 0.01}},
        {"batch_normalisation": {"teachers": "batch"}},
    ],
    ids=str,
)
def test_the_rest_is_taught_before_it_is_distilled(
    changes: dict[str, Any], tmp_path: Path, alongside: list[int]
) -> None:
    everything: dict[str, Any] = {"workers": 2, "method": "fedaux"} | changes
    played(tmp_path, rounds=1, **everything)
    assert not alongside


def test_a_client_that_predicts_no_numbers_is_found_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alongside: list[int]
) -> None:
    results, rows = [], []
    for workers in (1, 2):
        server, state, clients = federation(
            tmp_path / str(workers), clients_at_once=8, workers=workers, method="fedaux", **PIECES
        )
        original = clients.train

        def train(
            asked: Sequence[int], request: TrainRequest, original: Callable[..., Iterator[Update]] = original
        ) -> Iterator[Update]:
            for update in original(asked, request):
                huge = {name: tensor * 1e30 for name, tensor in update.weights.items()}
                yield replace(update, weights=huge) if update.client == 2 else update

        monkeypatch.setattr(clients, "train", train)
        # The average, of which the huge one is a part, is no good start either: the weights before serve as well.
        monkeypatch.setattr("fedaux.rounds.average_by_prototype", lambda members, state=state: dict(state.weights))
        state, row = server.play_round(state)
        results.append(state.weights["cnn"])
        rows.append(row)
    assert len(alongside) == 1
    assert "predicts NaN or infinity" in rows[0]["clients_dropped"]["2"]
    assert rows[1]["clients_dropped"] == rows[0]["clients_dropped"]
    for name, tensor in results[0].items():
        assert torch.allclose(tensor, results[1][name], atol=1e-4)
