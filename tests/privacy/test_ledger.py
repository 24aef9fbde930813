from __future__ import annotations

import json
import math

from fedaux.privacy.ledger import LedgerEntry, basic_composition, worst_client


def entry(client: int, epsilon: float, delta: float = 1e-5) -> LedgerEntry:
    return LedgerEntry(
        client, 10, "mean", "certainty scores", 0.2, 1.0, epsilon, delta, "simulated"
    )


def test_basic_composition_adds_up() -> None:
    assert basic_composition([entry(0, 0.1), entry(0, 0.4, 0.5), entry(0, 1.0, 0.7)]) == (1.5, 1.0)


def test_the_worst_client_counts() -> None:
    assert worst_client([entry(0, 0.5), entry(1, 0.3), entry(1, 0.3)]) == (0.6, 2e-5)
    assert worst_client([]) is None


def test_entries_survive_json_with_infinite_epsilon() -> None:
    for original in (entry(3, 0.1), entry(3, math.inf)):
        text = json.dumps(original.to_json(), allow_nan=False)
        assert LedgerEntry.from_json(json.loads(text)) == original
