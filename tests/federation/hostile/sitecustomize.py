"""What a test puts into a node's Python to make it misbehave: FEDAUX_FAULT says how. Nothing of fedaux knows of it."""

from __future__ import annotations

import os
import sys
from typing import Any

FAULT = os.environ.get("FEDAUX_FAULT", "")

if FAULT and {"fedaux.federate.clientapp", "fedaux.federate.warm"} & set(sys.orig_argv):
    import json
    import time

    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
    from flwr.clientapp import ClientApp

    app: Any = ClientApp
    honest = app.__call__

    def misbehave(self: Any, message: Any, context: Any) -> Any:
        training = message.metadata.message_type == "train"
        if training and FAULT in {"slow", "silent"}:
            time.sleep(3600)
        reply: Any = honest(self, message, context)
        if not training or "weights" not in reply.content:
            return reply
        arrays, said = dict(reply.content["weights"]), json.loads(reply.content["answer"]["text"])
        name = next(name for name, array in arrays.items() if array.dtype == "float32")
        old = arrays[name]
        if FAULT == "nan":
            arrays[name] = Array(old.dtype, old.shape, old.stype, b"\xff" * len(old.data))
        elif FAULT == "shape":
            arrays[name] = Array(old.dtype, (10**9, 10**9), old.stype, old.data)
        elif FAULT == "other":
            said["client"] = 0
        reply.content = RecordDict({"weights": ArrayRecord(arrays), "answer": ConfigRecord({"text": json.dumps(said)})})
        return reply

    app.__call__ = misbehave
