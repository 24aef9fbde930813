"""The paper's tables, figures and analyses: `fedaux reproduce NAME` writes a page, tables, numbers
and figures.

`studies.STUDIES` are grids of runs, `experiments.EXPERIMENTS` the others; `command.reproduce` runs
either.
"""
