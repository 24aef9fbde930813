"""The paper's tables, figures and analyses, and their results on full data.

`python -m reproduce NAME` (or `fedaux reproduce NAME`) writes a page, tables, numbers and figures:
`studies.STUDIES` are grids of runs, `experiments.EXPERIMENTS` the others; `command.reproduce` runs
either. `python -m reproduce --status` shows which runs (cells) have a results file; `--next` runs
the most valuable missing ones.
"""
