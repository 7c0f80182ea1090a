#!/usr/bin/env python3
"""Report what mmspectral finds in this environment, with the command that installs what is missing.

The exit status is 1 when Mask R-CNN could not run.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def load_environment_module():
    """Load the checks by their path: importing ``mmspectral`` needs packages that may be the ones missing."""
    spec = importlib.util.spec_from_file_location(
        "mmspectral_environment", ROOT / "mmspectral" / "compat" / "environment.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--versions-only",
        action="store_true",
        help="compare the installed versions and import nothing (0.2 s); list only what is wrong",
    )
    parser.add_argument("--tests", action="store_true", help="with --versions-only: also what the tests need")
    environment = load_environment_module()
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
        environment.format_report(problems)
        return int(bool(problems))
    sys.path.insert(0, str(ROOT))
    findings = environment.check_environment()
    environment.format_report(findings)
    can_run = all(finding.level != "error" for finding in findings)
    print(f"\nMask R-CNN can run here: {'yes' if can_run else 'no'}")
    return int(not can_run)


if __name__ == "__main__":
    sys.exit(main())
