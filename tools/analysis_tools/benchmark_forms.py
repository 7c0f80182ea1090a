#!/usr/bin/env python
"""Time the two ways to add lambda * I to a projection, forward and backward: on the weight, or on the output.

Interleaved with the plain projection at the same weights; prints the median of the paired ratios and its quartiles.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
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
    return parser.parse_args()


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

    def step(form: Callable[[], Tensor], low: bool) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = form()
        y.backward(grad.to(y.dtype))
        x.grad = weight.grad = bias.grad = None
        return time.perf_counter() - start

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, N {args.tokens}, D {D}, {args.pairs} pairs")
    for low in (False, True):
        for form in forms.values():
            step(form, low)  # warm-up
        times = {name: [] for name in forms}
        for _ in range(args.pairs):
            for name, form in forms.items():
                times[name].append(step(form, low))
        print("bfloat16 autocast" if low else "float32")
        for name, seconds in times.items():
            ratios = [a / b for a, b in zip(seconds, times["plain"], strict=True)]
            low_q, median, high_q = statistics.quantiles(ratios, n=4)
            print(
                f"  {name:24} {1e3 * statistics.median(seconds):7.2f} ms  ratio {median:.3f} ({low_q:.3f}-{high_q:.3f})"
            )


if __name__ == "__main__":
    main()
