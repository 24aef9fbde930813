"""Encoders: frozen networks that make features of images or texts."""

from fedaux.encoders.extraction import Extractor, extractor_of, token_ids
from fedaux.encoders.network import ENCODERS, Encoder, of_file, open_encoder, unpacked
from fedaux.encoders.preprocessing import Images, Tokens, from_json

__all__ = [
    "ENCODERS",
    "Encoder",
    "Extractor",
    "Images",
    "Tokens",
    "extractor_of",
    "from_json",
    "of_file",
    "open_encoder",
    "token_ids",
    "unpacked",
]
