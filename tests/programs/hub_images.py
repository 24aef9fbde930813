"""Read images of two folders in the hub's layout, and ask for missing files."""

from __future__ import annotations

import sys

from fedaux.config import Auxiliary, Data
from fedaux.data import count_labelled, load_auxiliary, load_labelled

section = Data(source="huggingface", path=sys.argv[1])
data = load_labelled(section)
print(
    data.classes,
    data.labels.tolist(),
    data.test_labels.tolist(),
    count_labelled(section),
    data.images.sum().item(),
)
print(
    load_labelled(Data(source="huggingface", path=sys.argv[1], test="train")).test_labels.tolist()
)
print(
    tuple(
        load_auxiliary(
            Auxiliary(source="huggingface", path=sys.argv[1], size=2, image_size=3)
        ).shape
    )
)
print(
    load_auxiliary(Auxiliary(source="huggingface", path=sys.argv[1], split="unlabeled"))
    .sum()
    .item()
)
whole = Data(source="huggingface", path=sys.argv[2], split="full", test_fraction=0.2)
print(len(load_labelled(whole).labels), len(load_labelled(whole).test_labels))
for path, split in ((sys.argv[1], "unlabelled"), (sys.argv[2], None)):
    try:
        load_auxiliary(Auxiliary(source="huggingface", path=path, split=split))
    except ValueError as error:
        print(error)
dogs = Auxiliary(source="huggingface", path=sys.argv[2], split="full", wordnet="dogs")
print(load_auxiliary(dogs).sum().item())
try:
    load_labelled(Data(source="huggingface", path="nobody/nothing-like-this"))
except ValueError as error:
    print(error)
