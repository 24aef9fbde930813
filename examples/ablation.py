"""A plugin: `fedaux2` without one of its parts, and its peers with parts of it.

    fedaux run demo --plugin examples/ablation.py --set 'method=["fedaux2","fedaux2-rehearsal"]'

`fedaux2-X` lacks part X. A peer's name tells what it is given: `adj` logit adjustment, `reh`
rehearsal, `head` a start from the private head instead of `p`, h0 alone.
"""

from __future__ import annotations

from dataclasses import replace

from fedaux import METHODS

WHOLE = METHODS["fedaux2"]
WITHOUT = {
    "head": replace(WHOLE, start="pretrained"),
    "adjustment": replace(WHOLE, objectives=("rehearsal",)),
    "rehearsal": replace(WHOLE, objectives=("logit-adjusted",)),
    "belief": replace(WHOLE, teacher="mean"),
    "teacher": replace(WHOLE, teacher=None, memory=()),
    "memory": replace(WHOLE, memory=()),
    "anchor": replace(WHOLE, anchor=0.0),
    "rate": replace(WHOLE, server_rate=1.0),
    "by-class": replace(WHOLE, head_by_class=False),
    "smoothing": replace(WHOLE, smoothing=0.0),
}
OBJECTIVES = {"adj": "logit-adjusted", "reh": "rehearsal"}

for part, method in WITHOUT.items():
    name = f"fedaux2-{part}"
    METHODS[name] = replace(method, name=name)
for peer in ("fedavg", "fedprox", "feddf"):
    plain = METHODS[f"{peer}+p"]
    from_head = replace(plain, start="private-head", scores=True, mechanism="classes")
    for start, method in (("p", plain), ("head", from_head)):
        for given in ((), ("adj",), ("reh",), ("adj", "reh")):
            name = "+".join((peer, start, *given))
            own = tuple(OBJECTIVES[one] for one in given)
            METHODS.setdefault(name, replace(method, name=name, objectives=method.objectives + own))
