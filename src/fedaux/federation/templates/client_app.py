"""A node's side: fedaux, as installed there."""

from fedaux.federation.client import app

__all__ = ["app"]
