#!/usr/bin/env python
"""Write one HTML page on what conditioning does to a model, beside its stock twin; it needs no network.

usage: python tools/analysis_tools/conditioning_report.py CONFIG [CHECKPOINT ...] [--twin CONFIG CHECKPOINT ...]

The page begins with a verdict: condition numbers of W and W + C, entropy of attention, gradients, loss and AP, beside
the stock twin. Loss, AP, gradients and the history of condition numbers come from the logs in the folders of the runs;
gradients and history need the ConditioningHook.
"""

import argparse
from pathlib import Path

from mmspectral.arguments import (
    add_config_arguments,
    add_trust_argument,
    read_config,
    report_usage_errors,
    require_checkpoint,
    set_loading,
)
from mmspectral.errors import UsageError


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="checkpoint files or URLs, oldest first")
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="folder of the run, for its log (default: that of the checkpoint)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: conditioning_report.html in --work-dir")
    parser.add_argument(
        "--twin",
        nargs="+",
        metavar=("CONFIG", "CHECKPOINT"),
        help="stock model to compare with (default: CONFIG without conditioning, at initialisation)",
    )
    parser.add_argument(
        "--jacobian-layer", metavar="NAME", help="attention layer (default: the first); 'none' for none"
    )
    parser.add_argument("--jacobian-tokens", type=int, default=8, metavar="N", help="probe tokens")
    parser.add_argument("--jacobian-dims", type=int, default=16, metavar="D", help="dimensions of the head, at most")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    args = parser.parse_args()
    if args.jacobian_tokens < 2 or args.jacobian_dims < 1:
        parser.error("the Jacobian needs at least two tokens (--jacobian-tokens) and one dimension (--jacobian-dims)")
    return args


@report_usage_errors
def main() -> None:
    args = parse_args()
    for checkpoint in (*args.checkpoints, *(args.twin or [])[1:]):
        require_checkpoint(checkpoint)
    if args.work_dir and not args.work_dir.is_dir():
        raise UsageError(f"There is no folder {args.work_dir}.")
    cfg, twin_cfg = read_config(args.config, args.cfg_options), read_config(args.twin[0]) if args.twin else None

    from mmspectral.analysis import JacobianSettings, Subject, collect_report, render_report

    set_loading(args)
    subject = Subject(args.config, cfg, args.checkpoints, args.work_dir)
    twin = Subject(args.twin[0], twin_cfg, args.twin[1:]) if args.twin else None
    jacobian = None
    if args.jacobian_layer != "none":
        jacobian = JacobianSettings(args.jacobian_layer or "", args.jacobian_tokens, args.jacobian_dims)
    report = render_report(collect_report(subject, twin, jacobian, args.seed))
    out = args.out or (subject.run_folder() or Path()) / "conditioning_report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(report, encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
