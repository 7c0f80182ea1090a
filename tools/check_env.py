#!/usr/bin/env python3
"""Report what mmspectral finds in this environment, with the command that installs what is missing.

The exit status is 1 when Mask R-CNN could not run.
"""

import argparse
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
# By its path: importing ``mmspectral`` needs packages that may be the ones missing.
environment = SimpleNamespace(**runpy.run_path(str(ROOT / "mmspectral" / "compat" / "environment.py")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--versions-only",
        action="store_true",
        help="compare the installed versions and import nothing (0.2 s); list only what is wrong",
    )
    parser.add_argument("--tests", action="store_true", help="with --versions-only: also what the tests need")
    parser.add_argument(
        "--family",
        choices=sorted(environment.FAMILIES),
        help="with --versions-only: ask for this family of packages (default: the one of which more is installed)",
    )
    args = parser.parse_args()
    if (args.tests or args.family) and not args.versions_only:
        parser.error("--tests and --family go with --versions-only")
    if args.versions_only:
        problems = [f for f in environment.check_versions(args.tests, args.family) if f.level != "ok"]
        environment.print_report(problems)
        return int(bool(problems))
    sys.path.insert(0, str(ROOT))
    findings = environment.check_environment()
    environment.print_report(findings)
    can_run = all(finding.level != "error" for finding in findings)
    print(f"\nMask R-CNN can run here: {'yes' if can_run else 'no'}")
    return int(not can_run)


if __name__ == "__main__":
    sys.exit(main())
