"""Privacy: what a client releases, with how much noise, what it costs, and attacks on it. Imports nothing of `core`."""
