"""Write docs/configuration.md from the configuration itself: `python
docs/make_configuration.py`."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path

from fedaux.config import Experiment
from fedaux.federation.node import NodeConfig
from fedaux.recipes import reference

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """# Configuration

A recipe is a TOML file with the settings that differ from the defaults below.
The defaults are the paper's settings if it states them.
Any key can be changed on the command line: `fedaux run RECIPE.toml --set local.epochs=5 --set method=[fedaux,feddf+p]`.
In Python the same keys are arguments: `fedaux.Experiment(rounds=10, split={"alpha": 0.1})`.
All problems are reported at once, before anything runs.
A list for a single-valued key is a [sweep](sweeps.md).

This page is written by `python docs/make_configuration.py` from `src/fedaux/config.py`.

## The ten that matter most

| key | default | why change it |
|---|---|---|
"""
IMPORTANT = {
    "model": "an [encoder](your-data.md#your-own-encoder), or one network for all clients; short for "
    "`[encoder]` and `[[prototypes]]`",
    "method": "the [methods](methods.md) to compare, in one run",
    "seeds": "use at least three to compare methods",
    "rounds": "fewer for a first look",
    "participation_rate": "the share of the clients in each round",
    "data.source": "the clients' data: [your data](your-data.md), with `data.path` or "
    "`data.clients`",
    "auxiliary.source": "the public data, with `auxiliary.path`",
    "split.alpha": "how different the clients are, if one data set is split; `split.num_clients` "
    "says over how many",
    "certainty.epsilon": "the price of the scores: smaller is more private and noisier "
    "([tuning](tuning.md))",
    "local.learning_rate": "larger with few examples per client, or if only heads are trained",
}
NODE = """## A node's file: node.toml

The operator of a [node](deployment.md) writes it; nothing in it comes from the network.
A node reads it once, at its start.
`[data]` has the keys of a recipe's [`[data]`](#data); `image_size` and `channels` are required for images.

```toml
client = 0
name = "Hospital A"
classes = ["benign", "malignant"]

[data]
source = "folder"
path = "scans"
image_size = 224
channels = 3

[privacy] # what may leave, whatever a server asks
epsilon = 1.0
mechanisms = ["mean"]
plain_updates = false
```
"""


def page() -> str:
    """Return the page."""
    rows = ""
    for key, advice in IMPORTANT.items():
        value = "" if key == "model" else reduce(getattr, key.split("."), Experiment())
        rows += f"| `{key}` | {f'`{json.dumps(value)}`' if value else '–'} | {advice} |\n"
    recipe, node = reference().rstrip(), reference(NodeConfig).rstrip()
    # Headings of a page differ, and data are described in the recipe's section.
    node = node.replace("## Top level", NODE).replace("## `[", "### node.toml: `[")
    before, _, after = node.partition("### node.toml: `[data]`")
    node = before + after.partition("### ")[1] + after.partition("### ")[2]
    return f"{INTRODUCTION}{rows}\n{recipe}\n\n{node.rstrip()}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
