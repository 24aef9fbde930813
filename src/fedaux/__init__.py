"""Federated learning with unlabeled auxiliary data."""

__version__ = "0.1.0"
