from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import nn

from fedaux import seeding


def test_streams_are_reproducible_and_distinct() -> None:
    names = [
        (seed, purpose, round, client)
        for seed, purpose, round, client in itertools.product(
            (0, 1), ("a", "b"), (0, 1), (0, 1, 11)
        )
    ]
    draws = {
        name: seeding.generator(name[0], name[1], round=name[2], client=name[3]).random(4).tobytes()
        for name in names
    }
    assert len(set(draws.values())) == len(names)
    again = seeding.generator(1, "b", round=1, client=11).random(4).tobytes()
    assert again == draws[1, "b", 1, 11]


def test_keys_cannot_run_into_each_other() -> None:
    assert seeding.stream_key(0, "a", round=1, client=11) != seeding.stream_key(
        0, "a", round=11, client=1
    )
    assert seeding.stream_key(1, "a") != seeding.stream_key(0, "a")


def test_a_stream_is_the_same_on_every_machine() -> None:
    # Written down once: splits and selections of published runs must stay what they were.
    assert seeding.generator(0, "split").integers(1000, size=5).tolist() == [409, 849, 602, 771, 37]


def test_initial_weights_come_from_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    with seeding.initialisation(3, part="x"):
        first = nn.Linear(4, 4).weight
    with seeding.initialisation(3, part="x"):
        second = nn.Linear(4, 4).weight
    with seeding.initialisation(3, part="y"):
        third = nn.Linear(4, 4).weight
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(before, torch.random.get_rng_state())


def test_torch_streams_differ_by_name() -> None:
    def draw(seed: int, purpose: str) -> np.ndarray:
        return torch.rand(3, generator=seeding.torch_generator(seed, purpose)).numpy()

    assert (draw(0, "a") == draw(0, "a")).all()
    assert (draw(0, "a") != draw(1, "a")).any()
