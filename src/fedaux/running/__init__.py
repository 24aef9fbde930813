"""From an experiment to a finished run: checks, the run directory, plugins, what people see meanwhile."""
