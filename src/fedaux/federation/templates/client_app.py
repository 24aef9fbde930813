"""The client app: fedaux, as installed on the node."""

from fedaux.federation.client import app

__all__ = ["app"]
