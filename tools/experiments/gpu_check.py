"""Everything of this project that needs a GPU, in one run of about eight minutes, offline.

Each command is a process with a deadline, so that one which fails, hangs or
runs out of memory is a row of the result. Sections, in this order:

    tests         those marked ``gpu``: loss scaling, compiled operators, memory
    attention     DARK and others against exact attention, by length, in bfloat16 and float32
    conditioning  conditioned and stock train steps of the five families under autocast at 800 x 1344
    detector      an epoch of the quick start's Mask R-CNN with loss scaling
    ranks         the same on all GPUs, where there are several (NCCL, SyncBN)
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmspectral.analysis import markdown_table

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("tests", "attention", "conditioning", "detector", "ranks")
FAMILIES = ("xcit", "swin", "vit", "deit", "davit")
QUICKSTART = "configs/quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"


@dataclass
class Row:
    """What became of one command.

    Args:
        section: One of ``SECTIONS``.
        name: Of the command within it.
        status: ``"done"``, ``"failed"``, ``"out of memory"`` or ``"past its deadline"``.
        seconds: It took.
        table: What it measured, if it is done.
    """

    section: str
    name: str
    status: str
    seconds: float
    table: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    heads: tuple[int, int, int] = (6, 64, 128)  # h, d, m
    image: tuple[int, int] = (800, 1344)
    rounds: int = 7
    families: tuple[str, ...] = FAMILIES
    images: int | None = None  # of an epoch of the quick start; None is all


SIZES = {"cuda": Sizes(), "cpu": Sizes((65,), (2, 8, 16), (64, 96), 2, ("vit",), 2)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; made if it is missing")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    parser.add_argument("--device", choices=SIZES, help="default: cuda where there is one, else cpu")
    parser.add_argument("--deadline", type=float, default=120, help="seconds of each command")
    return parser.parse_args()


def commands(device: str, gpus: int, out: Path) -> Iterator[tuple[str, str, list[str], Path]]:
    """Yield section, name, arguments of Python, and the file that holds what was measured."""
    sizes = SIZES[device]
    benchmark = "tools/analysis_tools/benchmark.py"
    common = ["--device", device, "--rounds", str(sizes.rounds), "--out"]
    file = out / "tests.xml"
    pytest = ["-m", "pytest", "-c", "tests/pytest.ini", "tests", "-q", "-m", "gpu", f"--junitxml={file}"]
    yield "tests", "gpu", pytest if device == "cuda" else [*pytest, "--collect-only"], file
    h, d, m = map(str, sizes.heads)
    for dtype in ("bfloat16", "float32"):
        for n in map(str, sizes.lengths):
            file = out / f"attention-{dtype}-{n}.csv"
            shape = ["--lengths", n, "--softmax-up-to", n, "--heads", h, "--head-dim", d, "--features", m]
            step = [benchmark, "attention", *shape, "--dtype", dtype, *common, str(file)]
            yield "attention", f"{dtype} {n}", step, file
    for family in sizes.families:
        file = out / f"conditioning-{family}.csv"
        shape = ["--family", family, "--size", *map(str, sizes.image), "--autocast"]
        yield "conditioning", family, [benchmark, "conditioning", *shape, *common, str(file)], file
    options = ["--amp", "--cfg-options", "train_cfg.max_epochs=1"]
    if sizes.images:
        options += [f"{part}_dataloader.dataset.num_images={sizes.images}" for part in ("train", "val", "test")]
    train = ["tools/train.py", QUICKSTART, "--work-dir"]
    yield "detector", "quick start", [*train, str(out / "detector"), *options], out / "detector"
    if gpus > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), *train]
        step = [*launch, str(out / "ranks"), "--launcher", "pytorch", *options]
        yield "ranks", f"{gpus} GPUs", step, out / "ranks"


def run(section: str, name: str, arguments: list[str], measured: Path, out: Path, deadline: float) -> Row:
    started = time.monotonic()
    log = out / f"{section}-{name.replace(' ', '-')}.log"
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    with log.open("w") as file:
        try:
            status = subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=deadline
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    seconds = round(time.monotonic() - started, 1)
    if status is None:
        return Row(section, name, "past its deadline", seconds)
    table = read(measured)
    if status == 0:
        return Row(section, name, "done", seconds, table)
    reason = "out of memory" if "out of memory" in log.read_text(errors="replace") else "failed"
    return Row(section, name, reason, seconds, table)


def read(measured: Path) -> list[dict]:
    """Return the rows of a CSV file, the counts of a JUnit file, or the last metrics of a work folder."""
    if measured.suffix == ".csv" and measured.is_file():
        with measured.open() as file:
            return list(csv.DictReader(file))
    if measured.suffix == ".xml" and measured.is_file():
        suite = ElementTree.parse(measured).getroot().find("testsuite")
        return [{key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}]
    logs = sorted(measured.glob("*/vis_data/scalars.json"))
    lines = [json.loads(line) for line in logs[-1].read_text().splitlines()] if logs else []
    kept = [{key: value for key, value in line.items() if key in ("loss", "coco/bbox_mAP", "coco/segm_mAP", "memory")}
            for line in lines]  # fmt: skip
    return [{key: value for line in kept for key, value in line.items()}] if kept else []


def report(machine: str, rows: list[Row]) -> str:
    """Return a Markdown page."""
    results = [(row.section, row.name, row.status, row.seconds) for row in rows]
    parts = [f"# {machine}", markdown_table(["section", "command", "result", "seconds"], results)]
    for row in rows:
        if row.table:
            entries = [[entry.get(key, "") for key in row.table[0]] for entry in row.table]
            parts += [f"## {row.section}, {row.name}", markdown_table(list(row.table[0]), entries)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    args = parse_args()

    import torch

    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    device = args.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise SystemExit("gpu_check.py: error: torch sees no GPU; pass --device cpu for the reduced form.")
    names = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "no GPU: the reduced form, which measures nothing"
    machine = f"torch {torch.__version__}, {names}"
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for section, name, arguments, measured in commands(device, gpus, out):
        if section not in args.only:
            continue
        rows.append(run(section, name, arguments, measured, out, args.deadline))
        print(f"{section}, {name}: {rows[-1].status} after {rows[-1].seconds} s", flush=True)
        (out / "results.json").write_text(json.dumps(dict(machine=machine, rows=list(map(asdict, rows))), indent=1))
        (out / "results.md").write_text(report(machine, rows))
    raise SystemExit(any(row.status != "done" for row in rows))


if __name__ == "__main__":
    main()
