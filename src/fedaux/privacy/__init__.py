"""Privacy mechanisms, noise, accounting and audit. Imports nothing from `core`."""
