"""What a test puts into a node's Python to make it misbehave: FEDAUX_FAULT says how. Nothing of
fedaux knows of it."""

from __future__ import annotations

import os
import sys
from typing import Any

FAULT = os.environ.get("FEDAUX_FAULT", "")

if FAULT.startswith("clock") and "fedaux.federation.flower_internals.supernode" in sys.orig_argv:
    from datetime import timedelta

    from flwr.supercore import date

    right: Any = date.now
    date.now = lambda: right() + timedelta(seconds=float(FAULT.removeprefix("clock")))

if FAULT and {
    "fedaux.federation.flower_internals.clientapp",
    "fedaux.federation.flower_internals.warm",
} & set(sys.orig_argv):
    import json
    import time

    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
    from flwr.clientapp import ClientApp

    app: Any = ClientApp
    honest = app.__call__

    def misbehave(self: Any, message: Any, context: Any) -> Any:
        training = message.metadata.message_type == "train"
        if FAULT == "mute" or (training and FAULT in {"slow", "silent"}):
            time.sleep(3600)
        reply: Any = honest(self, message, context)
        if not training or "weights" not in reply.content:
            return reply
        old, said = reply.content["weights"]["tensors"], json.loads(reply.content["answer"]["text"])
        length = int.from_bytes(old.data[:8], "little")
        header, body = json.loads(old.data[8 : 8 + length]), old.data[8 + length :]
        name = next(name for name, entry in header.items() if entry["dtype"] == "F32")
        begin, end = header[name]["data_offsets"]
        if FAULT == "nan":
            body = body[:begin] + b"\xff" * (end - begin) + body[end:]
        elif FAULT == "shape":
            header[name]["shape"] = [10**9, 10**9]
        elif FAULT == "other":
            said["client"] = 0
        packed = json.dumps(header).encode()
        data = len(packed).to_bytes(8, "little") + packed + body
        weights = ArrayRecord({"tensors": Array(old.dtype, (len(data),), old.stype, data)})
        reply.content = RecordDict(
            {"weights": weights, "answer": ConfigRecord({"text": json.dumps(said)})}
        )
        return reply

    app.__call__ = misbehave
