#!/usr/bin/env python
"""Error of attention over random features against exact softmax and against its own kernel, by estimator and m.

Estimators that are calibrated are so on some sequences, and measured on others
over other draws. Quartiles are over the heads of all layers. Rows are written
as they are measured; with the same ``--out`` a stopped run goes on. ``learned``
features have no entry: they exist only after training.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mmspectral.analysis import (
    Fit,
    Geometry,
    approximation_error,
    calibrate_geometry,
    kernel_attention,
    markdown_table,
    query_key_moments,
)
from mmspectral.ops import (
    constant_attention,
    draw_projection,
    linear_attention,
    softmax_attention,
    theorem_3_2_proposal,
    uniform_attention,
)

CALIBRATED = {
    "temperature": dict(strengths=(0,), fit=None, sharp=False, shift=False),
    "temperature+sharp+shift": dict(strengths=(0,), fit=None),
    "family+sharp+shift": dict(fit=None),
    "dark": dict(sharp=False, shift=False, fit=Fit()),
    "dark+sharp": dict(shift=False, fit=Fit()),
    "dark+shift": dict(sharp=False, fit=Fit(shift=False)),
    "dark+sharp+shift": dict(fit=Fit(shift=False)),
    "dark+sharp+fitted-shift": dict(fit=Fit()),
}
CONTROLS = ("uniform", "constant", "performer", "performer+sharp+shift", "whitening", "theorem-3.2")
ESTIMATORS = (*CONTROLS, *CALIBRATED)
KEY = ("data", "estimator", "m", "seeds")
COLUMNS = (*KEY, "heads", "error_q1", "error_softmax", "error_q3", "error_own", "bias", "ratio_to_performer")


class Layer(NamedTuple):
    """Queries, keys and values [B, h, N, d] of one layer, to calibrate with and to measure on."""

    calibration: list
    test: list


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--npz",
        type=Path,
        nargs="+",
        default=[],
        help="q0, k0, v0, q1, ... [B, h, N, d], unscaled; the first half of the sequences calibrates",
    )
    parser.add_argument(
        "--checkpoint",
        nargs=2,
        action="append",
        default=[],
        metavar=("CONFIG", "FILE"),
        help="softmax weights of a config whose backbone has a kernel; the first half of the images calibrates",
    )
    parser.add_argument("--images", type=int, default=16, help="training images of the config to take")
    parser.add_argument(
        "--synthetic",
        type=float,
        nargs=2,
        action="append",
        default=[],
        metavar=("CONDITION", "ENERGY"),
        help="q, k ~ N(0, Lambda) with this condition number of Lambda and mean |q|^2 (scale of the logits included)",
    )
    parser.add_argument("--shape", type=int, nargs=4, default=[16, 4, 256, 64], metavar=("B", "H", "N", "D"))
    parser.add_argument("--features", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024], help="m")
    parser.add_argument("--seeds", type=int, default=20, help="number of draws")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=ESTIMATORS)
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--out", type=Path, required=True, help="CSV, continued if it exists")
    args = parser.parse_args()
    if not args.npz and not args.synthetic and not args.checkpoint:
        parser.error("nothing to measure on: give --npz, --checkpoint or --synthetic.")
    if args.images < 2:
        parser.error("--images must be at least 2: some to calibrate on and some to measure on.")
    for path in (*args.npz, *(Path(name) for pair in args.checkpoint for name in pair if ":" not in name)):
        if not path.expanduser().is_file():
            parser.error(f"there is no file {path}.")
    return args


def load(path: Path) -> list[Layer]:
    with np.load(path) as arrays:
        layers = []
        while f"q{len(layers)}" in arrays:
            qkv = [torch.from_numpy(arrays[f"{name}{len(layers)}"]).float() for name in "qkv"]
            half = -(-len(qkv[0]) // 2)
            layers.append(Layer([t[:half] for t in qkv], [t[half:] for t in qkv]))
    if not layers or not len(layers[0].test[0]):
        raise SystemExit(f"{path} must hold arrays q0, k0, v0, q1, ... of two sequences or more.")
    return layers


def from_checkpoint(config: str, file: str, num_images: int) -> list[Layer]:
    from mmspectral.analysis import checkpoint_inputs
    from mmspectral.arguments import read_config

    inputs = checkpoint_inputs(read_config(config), file, num_batches=num_images, batch_size=1).values()
    half = num_images // 2
    return [Layer([t[:half] for t in qkv], [t[half:] for t in qkv]) for qkv in inputs]


def synthesise(condition: float, energy: float, shape: tuple[int, int, int, int]) -> list[Layer]:
    B, h, N, d = shape
    generator = torch.Generator().manual_seed(0)
    lambda_ = torch.logspace(0, -1, d, base=condition)
    lambda_ *= energy / lambda_.sum() * d**0.5  # of q itself: the logits are scaled by d^(-1/2)
    V = torch.linalg.qr(torch.randn(h, d, d, generator=generator)).Q
    q, k, v = torch.randn(3, B, h, N, d, generator=generator)
    q, k = (x * lambda_.sqrt() @ V.mT for x in (q, k))
    return [Layer([t[: B // 2] for t in (q, k, v)], [t[B // 2 :] for t in (q, k, v)])]


def data_sets(args: argparse.Namespace) -> Iterator[tuple[str, list[Layer]]]:
    for path in args.npz:
        yield f"{path.parent.name}/{path.stem}", load(path)
    for config, file in args.checkpoint:
        yield Path(config).stem, from_checkpoint(config, file, args.images)
    for condition, energy in args.synthetic:
        name = f"synthetic {'x'.join(map(str, args.shape))}, condition {condition:g}, energy {energy:g}"
        yield name, synthesise(condition, energy, args.shape)


def geometry_of(name: str, layer: Layer, m: int):
    q, k, v = layer.calibration
    if name in CALIBRATED:
        return calibrate_geometry(q, k, v, m, **CALIBRATED[name])
    h, d = q.shape[1], q.shape[-1]
    M, moments, scale = torch.eye(d).repeat(h, 1, 1), query_key_moments(q, k), d**-0.5
    if name == "performer+sharp+shift":
        shift = moments.shift.float()
        return Geometry(M, moments.proposal(M, shift, scale), shift)
    if name == "whitening":  # q^T Sigma k scaled by d^(-1/2) whitens to d^(-1/4) Lambda^(-1/2) q
        lambda_, V = torch.linalg.eigh(moments.covariance)
        return Geometry((V * lambda_[:, None].rsqrt() @ V.mT).float())
    return Geometry(M, theorem_3_2_proposal(scale * moments.covariance) if name == "theorem-3.2" else None)


def measure(name: str, layer: Layer, m: int, seeds: int):
    """Return the ApproximationError of one estimator."""
    q, k, v = layer.test
    N, d = q.shape[2:]
    exact, draws = softmax_attention(q, k, v), range(seeds)
    if name == "uniform":
        return approximation_error(lambda seed: uniform_attention(v, N), exact, draws)
    if name == "constant":
        return approximation_error(partial(constant_attention, v, N, m, d), exact, draws)
    geometry = geometry_of(name, layer, m)

    def attention(seed: int):
        return linear_attention(q, k, v, geometry.features(draw_projection(m, d, seed)))

    return approximation_error(attention, exact, draws, kernel_attention(q, k, v, geometry.M))


def measure_rows(names: list[str], layers: list[Layer], m: int, seeds: int) -> Iterator[tuple[str, dict]]:
    """Yield the errors of each estimator, leaving out those that exist for no head."""

    performer = [measure("performer", layer, m, seeds) for layer in layers]
    to_compare = torch.cat([e.softmax for e in performer])
    for name in names:
        heads = torch.ones_like(to_compare, dtype=torch.bool)
        measured = layers
        if name == "theorem-3.2":  # it applies to the heads whose covariance has eigenvalues below 1/2
            covariances = [query_key_moments(*layer.calibration[:2]).covariance for layer in layers]
            holds = [torch.linalg.eigvalsh(c * c.shape[-1] ** -0.5).amax(-1) < 0.5 for c in covariances]
            heads = torch.cat(holds)
            measured = [Layer(*([t[:, x] for t in part] for part in y)) for y, x in zip(layers, holds, strict=True)]
            measured = [layer for layer in measured if layer.test[0].shape[1]]
        if not measured:
            print(f"{name} exists for no head", file=sys.stderr)
            continue
        errors = performer if name == "performer" else [measure(name, layer, m, seeds) for layer in measured]
        softmax, bias = (torch.cat([getattr(e, field) for e in errors]) for field in ("softmax", "bias"))
        own = None if errors[0].own is None else torch.cat([e.own for e in errors]).quantile(0.5).item()
        quartiles = softmax.quantile(softmax.new_tensor([0.25, 0.5, 0.75])).tolist()
        values = (*quartiles, own, bias.quantile(0.5).item(), (softmax / to_compare[heads]).quantile(0.5).item())
        rounded = ("" if value is None else f"{value:.4f}" for value in values)
        yield name, dict(heads=len(softmax), **dict(zip(COLUMNS[5:], rounded, strict=True)))


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(rows: list[dict]) -> str:
    """Return one table per data set; per number of features the error, its ratio to Performer's, own error and bias."""
    shown = ("error_softmax", "ratio_to_performer", "error_own", "bias")

    def cell(row: dict) -> str:
        return " / ".join(f"{float(row[x]):.3f}" if row[x] else "-" for x in shown if row)

    parts = ["Cells: error against softmax / ratio to Performer / error against the own kernel / bias."]
    for data in dict.fromkeys(row["data"] for row in rows):
        cells = {(row["estimator"], int(row["m"])): row for row in rows if row["data"] == data}
        sizes = sorted({m for _, m in cells})
        lines = []
        for name in ESTIMATORS:
            measured = [cells.get((name, m), {}) for m in sizes]
            if any(measured):
                heads = next(row["heads"] for row in measured if row)
                lines.append([f"{name} ({heads} heads)", *map(cell, measured)])
        parts.append(markdown_table([data, *(f"m = {m}" for m in sizes)], lines))
    return "\n\n".join(parts)


def main() -> None:
    args = parse_args()

    torch.set_num_threads(args.threads or torch.get_num_threads())
    done = {tuple(row[name] for name in KEY) for row in read(args.out)}
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        for data, layers in data_sets(args):
            for m in args.features:
                keys = {name: dict(data=data, estimator=name, m=m, seeds=args.seeds) for name in args.estimators}
                names = [name for name, key in keys.items() if tuple(map(str, key.values())) not in done]
                for name, row in measure_rows(names, layers, m, args.seeds) if names else ():
                    writer.writerow(keys[name] | row)
                    file.flush()
    print(markdown(read(args.out)))


if __name__ == "__main__":
    main()
