"""Where things are."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"
GOLDEN = TESTS / "core" / "golden.json"


def shared(name: str) -> Path:
    """Return a folder or file of `shared/`, which lies in the repository or in a folder above it;
    it may not exist."""
    places = [parent / "shared" / name for parent in (ROOT, *ROOT.parents)]
    return next((place for place in places if place.exists()), places[0])
