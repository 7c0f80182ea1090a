"""Print a config with everything that it inherits.

usage: python tools/misc/print_config.py CONFIG [--cfg-options KEY=VALUE ...] [--save-path FILE]
"""

import argparse
from pathlib import Path

from mmspectral.arguments import add_config_arguments, read_config, report_usage_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print a config with everything that it inherits")
    add_config_arguments(parser)
    parser.add_argument("--save-path", metavar="FILE", help="write the config there too (.py, .yml or .json)")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    cfg = read_config(args.config, args.cfg_options, import_modules=False)
    print(cfg.pretty_text)
    if args.save_path:
        Path(args.save_path).parent.mkdir(parents=True, exist_ok=True)
        cfg.dump(args.save_path)


if __name__ == "__main__":
    main()
