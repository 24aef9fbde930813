"""Run an experiment: checks, the run directory, plugins, output."""
