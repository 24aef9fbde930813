"""A first experiment: FedAUX and FedAVG on handwritten digits that ten clients hold, a class or two
each.

python examples/first_experiment.py
python examples/first_experiment.py --quick    # the same with less; its figures mean nothing
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import fedaux


def main(*, quick: bool, out: Path) -> None:
    """Run both methods, then print how good they are and what the clients gave away."""
    experiment = fedaux.Experiment(
        name="first",
        method=["fedaux", "fedavg+p"],
        rounds=1 if quick else 5,
        seeds=[0] if quick else [0, 1, 2],
        participation_rate=1.0,  # all clients in every round
        data={"source": "digits"},  # what the clients hold, with labels
        auxiliary={
            "source": "letters",
            "size": 300 if quick else 3000,
        },  # what the server has, without
        prototypes=[{"name": "cnn", "model": "cnn", "options": {"width": 16}}],
        split={"num_clients": 10, "alpha": 0.01},
        pretraining={
            "epochs": 1 if quick else 10,
            "batch_size": 100 if quick else 200,
            "learning_rate": 2e-3,
        },
        certainty={"epsilon": 0.5, "components": 12, "sharpness": 1.0},
        local={"learning_rate": 3e-3},
        distillation={"learning_rate": 3e-4},
    )
    result = fedaux.run(experiment, out=out)

    for row in result.summary["rows"]:
        print(
            f"{row['method']}: {row['accuracy_mean']:.1%} of the test digits after the last round"
        )

    ledger = json.loads((result.directory / "ledger.json").read_text(encoding="utf-8"))
    entry = ledger["entries"][0]
    print(
        f"Each client released one vector a seed, at ε = {entry['epsilon']} and δ = "
        f"{entry['delta']}."
    )
    print(f"Not protected: {ledger['unprotected']}")
    print(f"Everything about it: {result.directory / 'report.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same with less")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/first"),
        help="the run directory; must not be there yet",
    )
    main(**vars(parser.parse_args()))
