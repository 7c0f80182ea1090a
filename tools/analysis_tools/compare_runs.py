#!/usr/bin/env python
"""Print a table of finished detection runs, grouped by config over seeds: AP and condition numbers.

usage: compare_runs.py work_dirs/stock-seed0 work_dirs/stock-seed1 work_dirs/spectral-seed0 ...
"""

import argparse
from pathlib import Path

from mmspectral.analysis.run_comparison import comparison_table, read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="WORK_DIR", help="folder of a run, named ...-seedN")
    args = parser.parse_args()
    try:
        runs = [read_run(folder) for folder in args.runs]
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    print(comparison_table(runs))


if __name__ == "__main__":
    main()
