"""Trial: heads of fedaux2 whose server has a velocity (heavy ball), on validation examples.

    python notes/lab/momentum.py RECIPE [KEY=VALUE ...]

RECIPE has mode = "linear"; its methods are replaced by fedaux2, two velocities and peers.
"""
import sys, tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from fedaux import METHODS
from fedaux.core.algorithms.by_class import smoothed
from fedaux.core.algorithms.fedaux2 import FedAux2
from fedaux.recipes import load_experiment
from fedaux.running.run import run
from fedaux.sweep.tuning import on_validation
@dataclass(frozen=True)
class Ball(FedAux2):
    beta: float = 0.5
    def round(self, server, state):
        after = super().round(server, state)
        known, moved, velocity = state.carried("velocity"), {}, {}
        for name, old in state.models.items():
            push = {key: after.models[name][key] - tensor for key, tensor in old.items()}
            last = known.get(name, {key: 0 * tensor for key, tensor in old.items()})
            velocity[name] = {key: push[key] + self.beta * last[key] for key in old}
            moved[name] = {key: tensor + velocity[name][key] for key, tensor in old.items()}
        after = replace(after, models=moved).carry("velocity", velocity)
        return after.carry("final", smoothed(state, moved, decay=self.smoothing, round=server.log.round))
whole = METHODS["fedaux2"]
for beta in (0.5, 0.7):
    METHODS[f"ball-{beta}"] = Ball(**{**vars(whole), "name": f"ball-{beta}"}, beta=beta)
methods = 'method=["fedaux2","ball-0.5","ball-0.7","feddyn+p@sgd-0.1","scaffold+p@sgd-0.1"]'
experiment = load_experiment(sys.argv[1], overrides=[methods, "local.proximal=0.1", *sys.argv[2:]])
found = run(experiment, out=Path(tempfile.mkdtemp()) / "run", load=on_validation)
print({row["method"]: round(100 * row["accuracy_mean"], 1) for row in found.summary["rows"]})
