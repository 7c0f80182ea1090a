#!/usr/bin/env python
"""Print parameters, FLOPs and activations of a classifier or detector by part, the products inside attention counted.

One FLOP is one multiply-add, as in mmdet's and mmpretrain's figures. The model
is untrained and the image noise: heads that take proposals cost what those make of it.
"""

import argparse

from mmspectral.arguments import add_config_arguments, host_package, read_config, report_usage_errors

DEFAULT_SHAPES = {"mmpretrain": (224, 224), "mmdet": (800, 1280)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument(
        "--shape", type=int, nargs="+", metavar="H W", help="of the image (default: 224 224, of a detector 800 1280)"
    )
    args = parser.parse_args()
    if args.shape and (len(args.shape) > 2 or min(args.shape) < 1):
        parser.error(f"--shape takes one side of a square or H and W, at least 1, got {args.shape}.")
    return args


def counts(cost) -> list[str]:
    return [f"{count:.3f}" for count in (cost.parameters / 1e6, cost.multiply_adds / 1e9, cost.activations / 1e6)]


@report_usage_errors
def main() -> None:
    args = parse_args()
    cfg = read_config(args.config, args.cfg_options)

    from mmengine.logging import MMLogger

    from mmspectral.analysis import count_config, markdown_table

    MMLogger.get_instance("get_flops", log_level="WARNING")  # a data preprocessor reports its settings
    host = host_package(cfg)
    shape = (args.shape[0], args.shape[-1]) if args.shape else DEFAULT_SHAPES[host]
    counted = count_config(cfg, shape)
    print(f"Input {' x '.join(map(str, counted.input_shape))}, from an image of {shape[0]} x {shape[1]}\n")
    header = ("part", "parameters (M)", "FLOPs (G multiply-adds)", "activations (M)")
    parts = {**counted.parts, "total": counted.total}
    print(markdown_table(header, [[name, *counts(cost)] for name, cost in parts.items()]))
    operators = ", ".join(f"{name} {count / 1e9:.3f}" for name, count in counted.operators.most_common())
    print(f"\nG multiply-adds by operator: {operators}.")
    print(f"Counted as 0: {', '.join(sorted(counted.uncounted))}.")


if __name__ == "__main__":
    main()
