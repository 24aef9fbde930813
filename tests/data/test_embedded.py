from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedaux.data import embedded
from fedaux.data.embedded import digits, letters


def test_digits_are_scikit_learns_scaled_to_bytes() -> None:
    images, labels = digits()
    bunch = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert images.min() == 0
    assert images.max() == 255
    np.testing.assert_allclose(images[:, 0] / 255 * 16, bunch.images, atol=0.05)
    np.testing.assert_array_equal(labels, bunch.target)


def test_digits_are_the_same_where_the_file_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = digits()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    again, same = digits()
    assert np.array_equal(images, again)
    assert np.array_equal(labels, same)


@pytest.mark.parametrize("size", [0, 1, 1025])
def test_letters_have_the_digits_shape(size: int) -> None:
    images = letters(size, generator=np.random.default_rng(0))
    assert images.shape == (size, 1, 8, 8)
    assert images.dtype == np.uint8


def test_letters_have_the_digits_style() -> None:
    drawn = letters(2000, generator=np.random.default_rng(0))
    handwritten, _ = digits()
    assert abs(float(drawn.mean()) - float(handwritten.mean())) < 20
    assert abs(float((drawn > 127).mean()) - float((handwritten > 127).mean())) < 0.08
    # Ink counts of 4 x 4 blocks: 17 grey levels, the same ones.
    assert set(np.unique(drawn)) <= set(np.rint(np.arange(17) * 255 / 16).astype(np.uint8))
    # Bright on dark: every letter has ink, and the corners hold little of it.
    assert (drawn.max(axis=(1, 2, 3)) > 100).all()
    assert drawn[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]].mean() < 30


def test_letters_differ_from_one_another() -> None:
    drawn = letters(1000, generator=np.random.default_rng(0))
    assert len(np.unique(drawn.reshape(1000, -1), axis=0)) > 990


def test_letters_are_a_function_of_the_generator() -> None:
    first = letters(300, generator=np.random.default_rng(5))
    again = letters(300, generator=np.random.default_rng(5))
    other = letters(300, generator=np.random.default_rng(6))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_letters_leave_the_global_generators_alone() -> None:
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    letters(10, generator=np.random.default_rng(0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == str(np.random.get_state())  # noqa: NPY002
    assert before[2] == random.getstate()


def test_only_letters_are_rendered() -> None:
    assert len(set(embedded.LETTERS)) == 52
    assert embedded.LETTERS.isalpha()


def test_every_glyph_has_ink_from_top_to_bottom() -> None:
    rows = torch.from_numpy(
        np.stack([embedded._glyph(*entry) for entry in embedded._catalogue()])
    ).amax(dim=2)
    assert (rows[:, :4].amax(dim=1) > 60).all()
    assert (rows[:, -4:].amax(dim=1) > 60).all()


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="got -1"):
        letters(-1, generator=np.random.default_rng(0))


def test_labelled_letters_are_the_same_letters_and_can_be_told_apart() -> None:
    images, labels = embedded.labelled_letters(4000, generator=np.random.default_rng(3))
    np.testing.assert_array_equal(images, letters(4000, generator=np.random.default_rng(3)))
    assert set(labels) == set(range(26))
    flat = images.reshape(len(images), -1).astype(np.float32)
    means = np.stack([flat[:3000][labels[:3000] == letter].mean(axis=0) for letter in range(26)])
    nearest = ((flat[3000:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (
        nearest == labels[3000:]
    ).mean() > 0.3  # chance is 0.04; capitals and small letters share a mean
