"""Read texts of a folder in the hub's layout."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer

from fedaux.config import Auxiliary, Data
from fedaux.data import load_auxiliary, load_labelled, vocabulary
from fedaux.data.texts import Texts

reader = Texts(vocabulary.of_file(Path(sys.argv[2])), 16)
data = load_labelled(Data(source="huggingface", path=sys.argv[1]), converter=reader)
print(data.classes, data.labels.tolist(), data.test_labels.tolist())
decoder = Tokenizer.from_str(reader.vocabulary.tokenizer)
print([decoder.decode(row).replace(" ##", "") for row in data.images.tolist()])
print(
    tuple(
        load_auxiliary(
            Auxiliary(source="huggingface", path=sys.argv[1], size=2), converter=reader
        ).shape
    )
)
