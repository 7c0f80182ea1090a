#!/usr/bin/env python
"""Time the two ways to add lambda * I to a projection, forward and backward: on the weight, or on the output.

Interleaved with the plain projection at the same weights; prints the median of the paired ratios and its quartiles.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from mmspectral.analysis.paired_timing import compare_times, time_in_turn
from torch import Tensor

from mmspectral import ops
from mmspectral.ops import ProjectionLayout

SCALES = (10.0, 10.0, 10.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="N")
    parser.add_argument("--dim", type=int, default=384, help="D")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=51)
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("quartiles need at least 2 pairs.")
    return args


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    D = args.dim
    layout = ProjectionLayout(("q", "k", "v"), args.heads)
    x = torch.randn(1, args.tokens, D, requires_grad=True)
    weight = (0.02 * torch.randn(3 * D, D)).requires_grad_()
    bias = torch.zeros(3 * D, requires_grad=True)
    grad = torch.randn(1, args.tokens, 3 * D)

    def on_weight() -> Tensor:
        return F.linear(x, ops.add_identity(weight, SCALES, layout, "full"), bias)

    def on_output() -> Tensor:
        y = F.linear(x, weight, bias)
        return (y.float() + ops.identity_output(x.float(), 3 * D, SCALES, layout, "full")).to(y.dtype)

    forms = {
        "plain": lambda: F.linear(x, weight, bias),
        "lambda on the weight": on_weight,
        "lambda x on the output": on_output,
        "conditioned_linear": lambda: ops.conditioned_linear(x, weight, bias, SCALES, layout, "full"),
    }

    def step(form: Callable[[], Tensor], low: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = form()
        y.backward(grad.to(y.dtype))
        x.grad = weight.grad = bias.grad = None

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, N {args.tokens}, D {D}, {args.pairs} pairs")
    for low in (False, True):
        seconds = time_in_turn({name: partial(step, form, low) for name, form in forms.items()}, args.pairs)
        print("bfloat16 autocast" if low else "float32")
        for name, times in compare_times(seconds, "plain").items():
            print(
                f"  {name:24} {1e3 * times.seconds:7.2f} ms  "
                f"ratio {times.ratio:.3f} ({times.lower:.3f}-{times.upper:.3f})"
            )


if __name__ == "__main__":
    main()
