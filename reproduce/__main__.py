"""`python -m reproduce NAME` is `fedaux reproduce NAME`. Without a name: run missing cells, show
what is there, and check the tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedaux.config import ConfigError
from reproduce import results, tables
from reproduce.cells import Cell, all_cells
from reproduce.running import Work, run_one
from reproduce.sitting import report_status, sitting

STATE = Path("runs/reproduce")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m reproduce", description=__doc__)
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--status", action="store_true", help="finished and missing runs")
    what.add_argument("--next", action="store_true", help="run the most valuable missing cells")
    what.add_argument("--cell", metavar="NAME", help="run one cell, as --next does")
    what.add_argument("--check", action="store_true", help="compare the tables with the results")
    what.add_argument("--write", action="store_true", help="write the tables from the results")
    made.add_argument("--only", metavar="TEXT", help="cells whose name contains TEXT, as table1/")
    made.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets and of h0/")
    made.add_argument("--minutes", type=float, default=9.0, help="time to run for (default: 9)")
    made.add_argument("--at-once", type=int, default=1, metavar="N", help="cells side by side")
    made.add_argument("--whole", action="store_true", help="start no cell that does not fit")
    made.add_argument("--pretrain", action="store_true", help="train an h0 that DIR/h0 lacks")
    made.add_argument("--state", type=Path, default=STATE, metavar="DIR", help="unfinished runs")
    made.add_argument("--out", type=Path, metavar="DIR", help="folder of new results")
    made.add_argument("--commit", help="commit of the source, where git does not know it")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change all cells, for a trial; needs --out",
    )
    made.add_argument(
        "--until", type=float, help=argparse.SUPPRESS
    )  # of --cell: seconds since 1970
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and (words[0] == "--list" or not words[0].startswith("-")):
        from fedaux import cli

        sys.argv = ["fedaux", "reproduce", *words]
        cli.main()
    given = parser().parse_args(words)
    try:
        return _run(given)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    if given.check or given.write:
        return tables.check() if given.check else tables.write()
    cells = [cell for cell in all_cells() if not given.only or given.only in cell.name]
    if not cells:
        raise ValueError(f"--only {given.only}: no cell has this in its name; see --status")
    found = results.read_all(*dict.fromkeys([results.FOLDER, given.out or results.FOLDER]))
    if given.status:
        report_status(cells, found)
        return 0
    work = _work(given)
    if given.cell:
        return run_one(_named(given.cell, cells), work, until=given.until)
    return sitting(
        cells,
        work,
        found,
        minutes=given.minutes,
        whole=given.whole,
    )


def _work(given: argparse.Namespace) -> Work:
    """Return the places that runs read and write."""
    if given.data is None or not given.data.is_dir():
        raise ValueError(f"--data {given.data}: should be a folder with cifar10/, h0/ and so on")
    if given.at_once < 1:
        raise ValueError(f"--at-once {given.at_once}: should be at least 1")
    if given.set and given.out is None:
        raise ValueError("--set: the cells are not the paper's then; add --out DIR for the results")
    return Work(
        data=given.data,
        state=given.state,
        out=given.out or results.FOLDER,
        commit=given.commit or results.commit(),
        overrides=tuple(given.set),
        pretrain=given.pretrain,
        at_once=given.at_once,
    )


def _named(name: str, cells: Sequence[Cell]) -> Cell:
    for cell in cells:
        if cell.name == name:
            return cell
    raise ValueError(f"--cell {name}: no such cell; see --status")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
