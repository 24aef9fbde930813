"""Write docs/configuration.md from the configuration itself: `python docs/make_configuration.py`."""

from __future__ import annotations

from pathlib import Path

from fedaux.recipes import reference

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """# Configuration

A recipe is a TOML file with the settings that differ from the defaults below. The defaults are the paper's settings
where it states them.
Any key can be changed on the command line: `fedaux run RECIPE.toml --set local.epochs=5 --set
method=[fedaux,feddf+p]`. In Python the same keys are arguments: `fedaux.Experiment(rounds=10, split={"alpha": 0.1})`.
All problems are reported at once, before anything runs. A list for a single-valued key is a [sweep](sweeps.md).

This page is made from `src/fedaux/config.py` by `python docs/make_configuration.py`.

"""


def page() -> str:
    """Return the page."""
    return INTRODUCTION + reference().rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
