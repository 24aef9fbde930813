"""Reproduction of the paper: a list of runs (cells), one results file each, and tables from them.

`python -m reproduce --status` shows what is there; `--next` runs the most valuable missing cells.
"""
