"""Trained models: load, predict, export."""
