"""Data: sources, the split over clients, the split of the auxiliary data, batches and views."""

from fedaux.data.labelled import LabelledData
from fedaux.data.sources import (
    SOURCES,
    Source,
    count_labelled,
    count_rows,
    load_auxiliary,
    load_both,
    load_labelled,
    load_own,
    load_private,
    load_public,
    load_rows,
    load_test,
)
from fedaux.data.splits import split_auxiliary, split_dirichlet

__all__ = [
    "SOURCES",
    "LabelledData",
    "Source",
    "count_labelled",
    "count_rows",
    "load_auxiliary",
    "load_both",
    "load_labelled",
    "load_own",
    "load_private",
    "load_public",
    "load_rows",
    "load_test",
    "split_auxiliary",
    "split_dirichlet",
]
