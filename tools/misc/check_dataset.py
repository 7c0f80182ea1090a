"""Check the data of a config before training: classes, heads, annotations, files, overlap.

usage: python tools/misc/check_dataset.py CONFIG [--cfg-options KEY=VALUE ...]

Prints a table, warnings and errors; the exit status is 1 if there is an error.
"""

import argparse
import sys

from mmspectral.arguments import add_config_arguments, read_config, report_usage_errors
from mmspectral.datasets import check_dataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the data of a config before training")
    add_config_arguments(parser)
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    report = check_dataset(read_config(args.config, args.cfg_options))
    print(report)
    if report.all_errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
