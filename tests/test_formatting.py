from __future__ import annotations

import pytest

from fedaux.formatting import client_label, distinct_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/hospital_a", "data/hospital_b/"], ["hospital_a", "hospital_b"]),
        (["/x/a/train.csv", "/x/b/train.csv"], ["a", "b"]),
        (["north.parquet", "south.parquet"], ["north", "south"]),
        (["a/b", "a/b/c"], ["b", "b/c"]),
        (["data/only.csv"], ["only"]),
        (["one", "one", "two"], ["one (0)", "one (1)", "two"]),
        ([], []),
    ],
)
def test_names_are_what_distinguishes_paths(paths: list[str], names: list[str]) -> None:
    assert list(distinct_names(paths)) == names


def test_clients_without_names_are_numbered() -> None:
    assert client_label(1, ["north", "south"]) == "south"
    assert client_label(1, []) == "client 1"
