"""Logs of a node's processes: every line with its time, no colours, JSON lines on request."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

VARIABLE = "FEDAUX_LOG"
"""Environment variable: `json` for one JSON object per line."""
CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours, and everything else that a terminal obeys, but tabs and ends of lines."""


class Lines(logging.Formatter):
    """One line per message: time in UTC, level, text; further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a message as text."""
        text = plain(super().format(record)).strip()
        return f"{_time(record)} {record.levelname} {text}".replace("\n", "\n    ")


class JsonLines(logging.Formatter):
    """One JSON object per message, with time, level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a message as JSON."""
        said = {"time": _time(record), "level": record.levelname, "logger": record.name}
        return json.dumps({**said, "message": plain(super().format(record)).strip()})


def configure() -> None:
    """Let the loggers of this process, also Flower's and uvicorn's, write to standard error in one
    format."""
    import_module("flwr.supercore.logger")  # adds its own handler, which is replaced here
    uvicorn: Any = import_module("uvicorn.config")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if os.environ.get(VARIABLE) == "json" else Lines())
    handler.addFilter(lambda record: bool(record.getMessage().strip()))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    logging.getLogger("fedaux").setLevel(logging.INFO)
    flower = logging.getLogger("flwr")
    flower.handlers = []
    flower.propagate = True
    flower.setLevel(os.environ.get("FLWR_LOG_LEVEL", "INFO").upper())
    loggers = uvicorn.LOGGING_CONFIG["loggers"]
    for name in loggers:
        loggers[name] = {"level": "WARNING", "handlers": [], "propagate": True}


def plain(text: str) -> str:
    """Return a text without colours and control characters."""
    return CONTROL.sub("", text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
