"""Data: sources, the split over clients, the split of the auxiliary data, batches and views."""

from fedaux.data.sources import SOURCES, LabelledData, Source, load_auxiliary, load_labelled
from fedaux.data.splits import split_auxiliary, split_dirichlet

__all__ = [
    "SOURCES",
    "LabelledData",
    "Source",
    "load_auxiliary",
    "load_labelled",
    "split_auxiliary",
    "split_dirichlet",
]
