"""Write a report on what conditioning does to a model: one HTML file with plots and tables that needs no network.

usage: python tools/analysis_tools/conditioning_report.py CONFIG [CHECKPOINT ...] [--out report.html]

Shows condition numbers and spectra of the q, k and v projections without and with their correction, at initialisation
and for each checkpoint, how they moved in training (where the ConditioningHook logged it), how close attention is to
one-hot, the same of the stock twin, and the parameter Jacobian of one attention head beside the bound of the paper.
"""

import argparse
from pathlib import Path

from mmspectral.analysis.conditioning_report import Subject, collect_report
from mmspectral.analysis.jacobian import JacobianSettings
from mmspectral.analysis.report_html import render_report
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
    parser = argparse.ArgumentParser(description="Write a report on what conditioning does to a model")
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="checkpoint files or URLs, oldest first")
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="folder of the run, for its log (default: that of the checkpoint)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="HTML file to write (default: conditioning_report.html in the folder of the run)",
    )
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
    set_loading(args)
    twin = None
    if args.twin:
        name, *checkpoints = args.twin
        twin = Subject(name, read_config(name), checkpoints)
    subject = Subject(args.config, read_config(args.config, args.cfg_options), args.checkpoints, args.work_dir)
    for checkpoint in (*subject.checkpoints, *(twin.checkpoints if twin else ())):
        require_checkpoint(checkpoint)
    if args.work_dir and not args.work_dir.is_dir():
        raise UsageError(f"There is no folder {args.work_dir}.")
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
