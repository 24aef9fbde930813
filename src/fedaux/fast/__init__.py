"""Optional speed: the fast backend behind `fedaux.core.backend`. Nothing in core imports it."""

from fedaux.fast.backend import FastBackend, best_backend

__all__ = ["FastBackend", "best_backend"]
