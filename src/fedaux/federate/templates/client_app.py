"""A node's side: fedaux, as installed there."""

from fedaux.engines.flower.client import app

__all__ = ["app"]
