#!/usr/bin/env python
"""Does conditioning help small transformers on CIFAR-10: a grid of runs, a CSV row for each, and a report.

    conditioning_study.py plan   [--parts a b]
    conditioning_study.py run    --work-dir DIR [--parts a] [--limit N] [--threads 1]
    conditioning_study.py report [--folder configs/cifar]

``run`` trains by ``tools/train.py`` in a process of its own, run after run in the
order of ``plan``, and appends a row to DIR/study.csv as each ends. Stopped runs
go on from their last epoch. Several ``run`` with one DIR share the work, one for
each core or, by CUDA_VISIBLE_DEVICES, each GPU. ``report`` makes tables and plots
from study.csv alone. MMSPECTRAL_CIFAR names the folder of the images.
"""

import argparse
import csv
import fcntl
import itertools
import json
import math
import os
import pprint
import resource
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from mmspectral.analysis import markdown_table
from mmspectral.arguments import report_usage_errors
from mmspectral.errors import UsageError

if TYPE_CHECKING:
    from mmengine.config import Config
    from torch import nn

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "xcit": "xcit-d96-p8_1xb64_cifar10.py",
    "swin": "swin-d48-p4-w4_1xb64_cifar10.py",
    "davit": "davit-d48-p4-w4_1xb64_cifar10.py",
    "vit": "vit-d96-p4_1xb64_cifar10.py",
    "deit": "deit-d96-p4-distilled_1xb64_cifar10.py",
}
FORMS = {
    "none": None,
    "lambda 1": dict(type="IdentityCorrection", scale=1.0, scope="full"),
    "lambda 10": dict(type="IdentityCorrection", scale=10.0, scope="full"),
    "lambda 10 norm kept": dict(type="IdentityCorrection", scale=10.0, scope="full", preserve_norm=0.02),
    "lambda 10 v": dict(type="IdentityCorrection", scale=10.0, scope="full", targets=["v"]),
    "QKNorm": dict(type="QKNorm"),
}
SHIFTED = "start and decay at lambda 1"  # without conditioning: shifted_start.py
FORMS[SHIFTED] = None
PRIMARY = ("lambda 10", "lambda 1")
NUM_IMAGES = 20_000
NUM_TEST = 3_000
LOG_INTERVAL = 20  # updates, as the configs have it
HELD_OUT = 10  # of the training images, one in so many is for tuning


@dataclass(frozen=True)
class Run:
    """Settings of one run; None stands for the config's value.

    Args:
        part: Of the study.
        family: Key of ``CONFIGS``.
        form: Key of ``FORMS``.
        seed: Of weights and order of the images.
        optimizer: ``"AdamW"`` or ``"SGD"`` (momentum .9).
        lr: Peak learning rate.
        epochs: Passes over the images.
        images: Training images, evenly spaced over the classes.
        depth: Blocks of a ViT.
        warmup: Whether the learning rate rises over the first 200 updates.
        tuning: Whether the run is evaluated on held-out training images instead of the test images.
    """

    part: str
    family: str
    form: str
    seed: int
    optimizer: str = "AdamW"
    lr: float | None = None
    epochs: int | None = None
    images: int = NUM_IMAGES
    depth: int | None = None
    warmup: bool = True
    tuning: bool = False

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        plain = Run(self.part, self.family, self.form, self.seed)
        differing = [f.name for f in fields(Run) if getattr(self, f.name) != getattr(plain, f.name)]
        settings = [f"{name}-{getattr(self, name)}" for name in differing]
        return "_".join([self.part, self.family, self.form, *settings, f"seed-{self.seed}"]).replace(" ", "-")


@dataclass(frozen=True)
class Row(Run):
    """Result of one run, of which lists hold one value per epoch.

    Args:
        config: Trained config.
        accuracy: On the test images, after each epoch.
        train_loss: Mean of each epoch.
        diverged: Whether a loss or gradient was not finite, which ended the run.
        kappa_w_start: Condition number of W before training, median over layers and q, k, v.
        kappa_wc_start: Of W + C likewise.
        kappa_w: Of W after training.
        kappa_wc: Of W + C after training.
        jacobian_start: Condition number of the Jacobian of one attention head with respect to W_q, W_k and W_v, on
            probe tokens, before training, median over layers.
        jacobian: The same after training.
        entropy_start: Of attention on test images before training, over that of uniform attention, mean over layers.
        entropy: The same after training.
        largest_logit: After training, over the layers.
        grad_start: Norm of the gradient of all parameters, mean over the first tenth of the updates.
        grad_median: Median of the values logged every 20 updates.
        grad_max: The largest of them.
        seconds: Of training, wall clock.
        cpu_seconds: Of the processes that trained, without those that were killed together with the study.
    """

    config: str = ""
    accuracy: tuple[float, ...] = ()
    train_loss: tuple[float, ...] = ()
    diverged: bool = False
    kappa_w_start: float = math.nan
    kappa_wc_start: float = math.nan
    kappa_w: float = math.nan
    kappa_wc: float = math.nan
    jacobian_start: float = math.nan
    jacobian: float = math.nan
    entropy_start: float = math.nan
    entropy: float = math.nan
    largest_logit: float = math.nan
    grad_start: float = math.nan
    grad_median: float = math.nan
    grad_max: float = math.nan
    seconds: float = math.nan
    cpu_seconds: float = math.nan


def tuning_runs() -> Iterator[Run]:
    """Learning rates for the unconditioned models, short, on a tenth of the training images."""
    for lr, family in itertools.product((1e-3, 2e-3, 4e-3), CONFIGS):
        yield Run("tune", family, "none", 100, lr=lr, epochs=2, tuning=True)


def primary_runs() -> Iterator[Run]:
    for seed, family, form in itertools.product(range(5), CONFIGS, ("none", "lambda 1", "lambda 10")):
        yield Run("a", family, form, seed)
    for seed, family, form in itertools.product(range(3), ("vit", "xcit"), list(FORMS)[3:-1]):
        if (family, form) != ("xcit", "QKNorm"):  # normalises q and k already
            yield Run("a", family, form, seed)


def rate_runs() -> Iterator[Run]:
    rates = dict(AdamW=(5e-4, 2e-3, 8e-3, 3.2e-2), SGD=(0.01, 0.04, 0.16, 0.64))
    for seed, (optimizer, lrs) in itertools.product(range(2), rates.items()):
        for lr, form in itertools.product(lrs, ("none", "lambda 10")):
            yield Run("b", "vit", form, seed, optimizer, lr)


def depth_runs(lr: float) -> Iterator[Run]:
    for seed, warmup, form in itertools.product(range(3), (False, True), ("none", "lambda 1")):
        yield Run("c", "vit", form, seed, lr=lr, depth=12, warmup=warmup)


def data_runs(epochs: int) -> Iterator[Run]:
    for seed, form in itertools.product(range(5), ("none", "lambda 1")):
        yield Run("d", "vit", form, seed, images=NUM_IMAGES // 10, epochs=10 * epochs)
    for seed, form in itertools.product(range(3), ("none", "lambda 1")):
        yield Run("d", "vit", form, seed, epochs=3 * epochs)


def control_runs() -> Iterator[Run]:
    for seed in range(3):
        yield Run("a", "vit", SHIFTED, seed)  # beside the runs that it is compared with


# A part is run for all families and forms at one seed before the next seed, so that a study stopped early is balanced.
PARTS: dict[str, Callable[[], Iterable[Run]]] = {
    "tune": tuning_runs,
    "a": primary_runs,
    "b": rate_runs,
    "c": lambda: depth_runs(lr=8e-3),
    "d": lambda: data_runs(epochs=5),
    "e": control_runs,
}


def planned(parts: Sequence[str]) -> list[Run]:
    return [run for part in parts for run in PARTS[part]()]


def settings(run: Run) -> dict:
    """Return what the run sets in its config.

    Raises:
        FileNotFoundError: The config is missing.
    """
    from mmengine.config import Config

    cfg = Config.fromfile(ROOT / "configs/cifar" / CONFIGS[run.family])
    optimizer = dict(cfg.optim_wrapper.optimizer)
    epochs = run.epochs or cfg.train_cfg.max_epochs
    if run.optimizer == "SGD":
        optimizer = dict(_delete_=True, type="SGD", lr=0.1, momentum=0.9, weight_decay=5e-4)
    if run.lr is not None:
        optimizer["lr"] = run.lr
    warmup, cosine = cfg.param_scheduler
    backbone = dict(conditioning=FORMS[run.form] and dict(FORMS[run.form], _delete_=True))
    if run.depth:
        backbone["arch"] = dict(num_layers=run.depth)
    changed = dict(
        model=dict(backbone=backbone),
        optim_wrapper=dict(optimizer=optimizer),
        param_scheduler=[*([warmup] if run.warmup else []), dict(cosine, end=epochs)],
        train_cfg=dict(max_epochs=epochs, val_interval=max(1, epochs // 20)),
        default_hooks=dict(checkpoint=dict(max_keep_ckpts=1)),
        custom_hooks=[dict(type="mmspectral.NonFiniteGuardHook")],
        randomness=dict(seed=run.seed),
        check_dataset=False,
    )
    if run.form == SHIFTED:
        changed["custom_imports"] = dict(imports=["shifted_start"])
        changed["custom_hooks"].append(dict(type="ShiftedStartHook", conditioning=FORMS["lambda 1"]))
    if run.tuning:
        kept = [i for i in range(NUM_IMAGES) if i % HELD_OUT]
        held_out = dict(data_prefix="train", indices=list(range(0, NUM_IMAGES, HELD_OUT)))
        changed |= dict(train_dataloader=dict(dataset=dict(indices=kept)), val_dataloader=dict(dataset=held_out))
    elif run.images < NUM_IMAGES:
        chosen = list(range(0, NUM_IMAGES, NUM_IMAGES // run.images))
        changed |= dict(train_dataloader=dict(dataset=dict(indices=chosen)))
    return changed


def write_config(run: Run, folder: Path) -> Path:
    """Write the run's config into its folder, as a child of the shipped one."""
    lines = [f"_base_ = {str(ROOT / 'configs/cifar' / CONFIGS[run.family])!r}"]
    lines += [f"{name} = {pprint.pformat(value, width=116, compact=True)}" for name, value in settings(run).items()]
    path = folder / "config.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def train(run: Run, folder: Path, threads: int) -> bool:
    """Train, or go on, and return whether the loss stayed finite.

    Raises:
        UsageError: Training failed for another reason.
    """
    command = [sys.executable, "-W", "ignore", ROOT / "tools/train.py", write_config(run, folder)]
    command += ["--work-dir", folder, "--resume"]
    paths = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONPATH=os.pathsep.join(paths))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "output.txt").open("a") as output:
        status = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "cpu_seconds.txt").open("a") as file:
        file.write(f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.1f}\n")
    said = (folder / "output.txt").read_text(errors="replace")[-4000:]
    if status and "FloatingPointError" not in said:
        raise UsageError(f"{run.name}: training failed with status {status}; {folder / 'output.txt'} ends in\n{said}")
    return not status


def logged(folder: Path) -> list[dict]:
    """Return the records of all logs of a run, of which the newer count where they overlap."""
    records = {}
    for path in sorted(folder.glob("*/vis_data/scalars.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            records["accuracy/top1" in record, record["step"]] = record
    return [records[key] for key in sorted(records)]


def measure(run: Run, folder: Path, diverged: bool) -> tuple[Row, str]:
    """Return the row of a trained run, and which test images it got right, as hexadecimal digits."""
    import torch
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    from mmengine.runner import Runner

    from mmspectral.analysis import build_model
    from mmspectral.checkpoints import read_checkpoint

    init_default_scope("mmpretrain")
    cfg = Config.fromfile(folder / "config.py")
    records = logged(folder)
    losses, grads = defaultdict(list), []
    for record in records:
        if "loss" in record:
            losses[record["epoch"]].append(record["loss"])
            grads.append(record["grad_norm"])
    accuracy = [record["accuracy/top1"] / 100 for record in records if "accuracy/top1" in record]
    model = build_model(cfg, run.seed)
    batches = list(Runner.build_dataloader(cfg.val_dataloader))
    start = _spectra(cfg, model) | _attention(model, batches[0])
    checkpoints = sorted(folder.glob("epoch_*.pth"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        model.load_state_dict(read_checkpoint(str(checkpoints[-1]))["state_dict"])
    with torch.no_grad():
        right = [s.pred_label.item() == s.gt_label.item() for b in batches for s in model.test_step(b)]
    if not diverged and abs(np.mean(right) - accuracy[-1]) > 1e-6:
        raise RuntimeError(
            f"{run.name}: {np.mean(right):.4f} of the images are right, but the log has {accuracy[-1]:.4f}"
        )
    end = _spectra(cfg, model) | _attention(model, batches[0])
    cpu = [float(line) for line in (folder / "cpu_seconds.txt").read_text().split()]
    row = Row(
        **asdict(run),
        config=CONFIGS[run.family],
        accuracy=tuple(accuracy) or (0.1,),
        train_loss=tuple(round(statistics.fmean(losses[epoch]), 4) for epoch in sorted(losses)),
        diverged=diverged,
        **{f"{name}_start": start[name] for name in ("kappa_w", "kappa_wc", "jacobian", "entropy")},
        **end,
        grad_start=_short(statistics.fmean(grads[: max(1, len(grads) // 10)])) if grads else math.nan,
        grad_median=_short(statistics.median(grads)) if grads else math.nan,
        grad_max=_short(max(grads)) if grads else math.nan,
        seconds=_seconds(folder),
        cpu_seconds=round(sum(cpu), 1),
    )
    return row, np.packbits(right).tobytes().hex()


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _seconds(folder: Path) -> float:
    """Return the time of all iterations, also of those that were repeated after a stop."""
    lines = (line for path in folder.glob("*/vis_data/scalars.json") for line in path.read_text("utf-8").splitlines())
    return round(sum(LOG_INTERVAL * json.loads(line)["time"] for line in lines if '"loss"' in line), 1)


def _spectra(cfg: "Config", model: "nn.Module") -> dict[str, float]:
    """Return medians over the layers whose projections the conditioned form of the config conditions."""
    from mmspectral.analysis import JacobianSettings, attention_projections
    from mmspectral.analysis import measure as measure_state

    names = _conditioned_names(cfg)
    projections = {name: each for name, each in attention_projections(model).items() if name in names}
    pairs = [pair for each in projections.values() for pair in each.spectra().values()]
    without, with_ = zip(*((a.kappa, b.kappa) for a, b in pairs), strict=True)
    jacobians = []
    for name in sorted(names):
        one = {name: projections[name]}
        found = measure_state(model, "", one, JacobianSettings(name.rpartition(".")[0])).jacobians
        head = found.get("W + C") or found["W"]
        jacobians.append((head.cross_covariance or head.condition).kappa)
    medians = dict(kappa_w=without, kappa_wc=with_, jacobian=jacobians)
    return {name: _short(statistics.median(values)) for name, values in medians.items()}


def _conditioned_names(cfg: "Config") -> set[str]:
    import copy

    from mmspectral.analysis import build_model
    from mmspectral.layers import conditioned_projections

    conditioned = copy.deepcopy(cfg)
    conditioned.model.backbone.conditioning = FORMS["lambda 1"]
    return set(dict(conditioned_projections(build_model(conditioned, 0))))


def _attention(model: "nn.Module", batch: dict) -> dict[str, float]:
    """Return entropy over that of uniform attention and the largest logit, of attention on a batch of images."""
    import torch

    from mmspectral.layers import attention_layers, saturation

    found = []

    def see(layer: "nn.Module", inputs: tuple) -> None:
        found.append(saturation(layer.attention_logits(inputs[0])))

    handles = [layer.register_forward_pre_hook(see) for layer in attention_layers(model).values()]
    with torch.no_grad():
        model.test_step(batch)
    for handle in handles:
        handle.remove()
    return dict(
        entropy=_short(statistics.fmean(one.relative_entropy for one in found)),
        largest_logit=_short(max(one.largest_logit for one in found)),
    )


def write_row(path: Path, row: Row) -> None:
    """Append a row; lists are separated by spaces."""
    values = {k: " ".join(f"{x:.6g}" for x in v) if isinstance(v, tuple) else v for k, v in asdict(row).items()}
    with locked(path.with_suffix(".lock")), path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(values)


def read_rows(path: Path) -> list[Row]:
    """Read what :func:`write_row` wrote; a run that is there twice counts once."""
    kinds = {
        "int": int,
        "int | None": lambda text: int(text) if text else None,
        "float": float,
        "float | None": lambda text: float(text) if text else None,
        "bool": lambda text: text == "True",
        "str": str,
        "tuple[float, ...]": lambda text: tuple(map(float, text.split())),
    }
    read = {
        f.name: kinds[getattr(f.type, "__name__", None) if isinstance(f.type, type) else str(f.type)]
        for f in fields(Row)
    }
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [Row(**{name: read[name](text) for name, text in record.items()}) for record in csv.DictReader(file)]
    return list({row.name: row for row in rows}.values())


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a file lock, which ends with the process; without ``wait``, yield whether it was free."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def carry_out(runs: Sequence[Run], work_dir: Path, limit: int | None, threads: int) -> None:
    """Do the runs of the plan that no row tells of and no other process is at."""
    import torch

    torch.set_num_threads(threads)
    work_dir.mkdir(parents=True, exist_ok=True)
    table, count = work_dir / "study.csv", 0
    for run in runs:
        if count == limit:
            break
        folder = work_dir / run.name
        folder.mkdir(exist_ok=True)
        with locked(folder / "lock", wait=False) as free:
            if not free or run.name in {row.name for row in read_rows(table)}:
                continue
            finite = train(run, folder, threads)
            row, right = measure(run, folder, not finite)
            with (work_dir / "correct.csv").open("a", encoding="utf-8") as file:
                file.write(f"{run.name},{right}\n")
            write_row(table, row)
        count += 1
        print(f"{run.name}: {row.accuracy[-1]:.4f}, {row.cpu_seconds:.0f} s of CPU", flush=True)


@dataclass(frozen=True)
class Comparison:
    """A form against the unconditioned model, in accuracy.

    Args:
        mean: Of the differences; pooled, of the means of the families.
        low: Lower end of the 95 % interval.
        high: Upper end.
        pairs: Number of pairs.
    """

    mean: float
    low: float
    high: float
    pairs: int


def paired_differences(rows: Sequence[Row], form: str) -> dict[str, dict[int, float]]:
    """Return, by family and seed, the last accuracy of a form less that without conditioning; other settings agree."""
    last = {(row.family, row.form, row.seed): row.accuracy[-1] for row in rows}
    found: dict[str, dict[int, float]] = {}
    for (family, other, seed), accuracy in sorted(last.items()):
        if other == form and (family, "none", seed) in last:
            found.setdefault(family, {})[seed] = accuracy - last[family, "none", seed]
    return found


def paired_interval(differences: Sequence[float], level: float = 0.95) -> Comparison:
    """Return mean and t interval; infinite for a single pair."""
    n, mean = len(differences), statistics.fmean(differences)
    half = math.inf
    if n > 1:
        half = float(stats.t.ppf((1 + level) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Comparison(mean, mean - half, mean + half, n)


def pooled_interval(by_family: Sequence[Sequence[float]], level: float = 0.95) -> Comparison:
    """Return the mean of the families' means, families fixed, and a t interval (Satterthwaite)."""
    count = len(by_family)
    mean = statistics.fmean(map(statistics.fmean, by_family))
    parts = [statistics.variance(one) / len(one) / count**2 for one in by_family if len(one) > 1]
    half = math.inf
    if len(parts) == count and sum(parts):
        df = sum(parts) ** 2 / sum(v**2 / (len(one) - 1) for v, one in zip(parts, by_family, strict=True))
        half = float(stats.t.ppf((1 + level) / 2, df)) * math.sqrt(sum(parts))
    return Comparison(mean, mean - half, mean + half, sum(map(len, by_family)))


def sign_flip_p(by_family: Sequence[Sequence[float]]) -> float:
    """Return the exact two-sided p of the mean of the families' means under all flips of the signs of the pairs.

    2^n flips of n pairs are counted from the sums of two halves, sorted: n up to 40 is quick.
    """
    weighted = np.array([d / len(one) for one in by_family for d in one])
    observed = abs(weighted.sum())
    first, second = (_signed_sums(half) for half in np.array_split(weighted, 2))
    second.sort()
    tolerance = 1e-9 * max(1e-12, np.abs(weighted).sum())
    above = len(second) - np.searchsorted(second, observed - tolerance - first, side="left")
    below = np.searchsorted(second, -observed + tolerance - first, side="right")
    return float(min(1.0, (above.sum() + below.sum()) / (len(first) * len(second))))


def _signed_sums(values: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values adjusted by Holm's method."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def resampled_interval(gains: dict[str, dict[int, np.ndarray]], draws: int = 4000) -> tuple[float, float]:
    """Return the 95 % interval of the pooled mean when test images and, within families, seeds are resampled.

    Args:
        gains: By family and seed, for each test image 1, 0 or -1: right under the form less right without it.
        draws: Number of bootstrap samples.
    """
    generator = np.random.default_rng(0)
    families = [np.stack([found[seed] for seed in sorted(found)]).astype(np.float64) for found in gains.values()]
    num_images = families[0].shape[1]
    means = np.empty(draws)
    for i in range(draws):
        weights = np.bincount(generator.integers(num_images, size=num_images), minlength=num_images) / num_images
        means[i] = np.mean([(one @ weights)[generator.integers(len(one), size=len(one))].mean() for one in families])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def read_correct(path: Path) -> dict[str, np.ndarray]:
    """Return, by name of the run, whether each test image was classified right."""
    if not path.is_file():
        return {}
    lines = (line.split(",") for line in path.read_text(encoding="utf-8").split())
    return {name: np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8))[:NUM_TEST] for name, digits in lines}


def image_gains(rows: Sequence[Row], form: str, correct: dict[str, np.ndarray]) -> dict[str, dict[int, np.ndarray]]:
    """Return what :func:`resampled_interval` takes, of the pairs of which predictions are kept."""
    names = {(row.family, row.form, row.seed): row.name for row in rows if row.name in correct}
    found: dict[str, dict[int, np.ndarray]] = {}
    for (family, other, seed), name in sorted(names.items()):
        if other == form and (family, "none", seed) in names:
            gain = correct[name].astype(np.int8) - correct[names[family, "none", seed]]
            found.setdefault(family, {})[seed] = gain
    return found


def points(value: float) -> str:
    """Return a difference of accuracies in percentage points."""
    return f"{100 * value:+.2f}" if math.isfinite(value) else "-"


def interval(found: Comparison) -> str:
    ends = f" ({points(found.low)} to {points(found.high)})" if math.isfinite(found.low) else ""
    return points(found.mean) + ends


def primary_table(rows: Sequence[Row], correct: dict[str, np.ndarray]) -> str:
    """Accuracy without conditioning and the paired differences of both forms, by family and pooled."""
    differences = {form: paired_differences(rows, form) for form in PRIMARY}
    body = []
    for family in CONFIGS:
        stock = [row.accuracy[-1] for row in rows if (row.family, row.form) == (family, "none")]
        if stock:
            cells = [differences[form].get(family, {}).values() for form in PRIMARY]
            body.append(
                [family, f"{100 * statistics.fmean(stock):.1f}", str(len(stock))]
                + [interval(paired_interval(list(cell))) if cell else "-" for cell in cells]
            )
    pooled, ps, images = [], [], []
    for form in PRIMARY:
        by_family = [list(found.values()) for found in differences[form].values()]
        if not by_family:
            raise UsageError(f"There is no pair of {form} and none with one seed yet.")
        pooled.append(interval(pooled_interval(by_family)))
        ps.append(sign_flip_p(by_family))
        gains = image_gains(rows, form, correct)
        images.append(" to ".join(map(points, resampled_interval(gains))) if gains else "-")
    body += [
        ["mean of the families", "", "", *pooled],
        ["the same, test images and seeds resampled", "", "", *images],
        ["p, sign flips, exact", "", "", *(f"{p:.2g}" for p in ps)],
        ["p, Holm over the two", "", "", *(f"{p:.2g}" for p in holm(ps))],
    ]
    return markdown_table(["Family", "Accuracy without, %", "Seeds", *(f"{form}, points" for form in PRIMARY)], body)


def groups(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    """Return rows that differ in form and seed alone, in the order of the table."""
    found = defaultdict(list)
    for row in rows:
        found[row.part, row.family, row.optimizer, row.lr, row.epochs, row.images, row.depth, row.warmup].append(row)
    return found


def exploratory_table(rows: Sequence[Row]) -> str:
    """Every form under every setting: accuracy, the paired difference, runs that diverged."""
    body = []
    for found in groups(rows).values():
        first = found[0]
        settings = [
            first.optimizer,
            *(f"{name} {getattr(first, name):g}" for name in ("lr", "epochs", "depth") if getattr(first, name)),
        ]
        settings += ["no warm-up"] * (not first.warmup) + [f"{first.images:,} images"] * (first.images < NUM_IMAGES)
        for form in FORMS:
            runs = [row for row in found if row.form == form]
            if runs:
                gains = list(paired_differences(found, form).get(first.family, {}).values())
                body.append(
                    [
                        first.part,
                        first.family,
                        ", ".join(settings),
                        form,
                        str(len(runs)),
                        f"{100 * statistics.fmean(row.accuracy[-1] for row in runs):.1f}",
                        interval(paired_interval(gains)) if gains and form != "none" else "",
                        str(sum(row.diverged for row in runs)),
                    ]
                )
    return markdown_table(
        ["Part", "Family", "Setting", "Form", "Seeds", "Accuracy, %", "Difference, points", "Diverged"], body
    )


MEASURES = (
    "kappa_w_start",
    "kappa_wc_start",
    "kappa_w",
    "kappa_wc",
    "jacobian_start",
    "jacobian",
    "entropy_start",
    "entropy",
    "largest_logit",
    "grad_start",
    "grad_median",
    "grad_max",
)


def mechanism_table(rows: Sequence[Row]) -> str:
    """Medians over the seeds of what was measured of each family and form."""
    body = []
    for family, form in itertools.product(CONFIGS, FORMS):
        runs = [row for row in rows if (row.family, row.form) == (family, form)]
        if runs:
            values = [statistics.median(getattr(row, name) for row in runs) for name in MEASURES]
            body.append([family, form, *(f"{value:.3g}" for value in values)])
    return markdown_table(["Family", "Form", *(name.replace("_", " ") for name in MEASURES)], body)


def prediction_table(rows: Sequence[Row]) -> str:
    """Spearman's correlation of the change of each measure by the form, as a ratio, with the gain, over pairs."""
    pairs = {(row.part, row.family, row.form, row.seed): row for row in rows}
    body = []
    for name in MEASURES:
        changes, gains = [], []
        for (part, family, form, seed), row in pairs.items():
            stock = pairs.get((part, family, "none", seed))
            values = [getattr(r, name) for r in (row, stock) if r]
            if form != "none" and stock and all(v > 0 and math.isfinite(v) for v in values):
                changes.append(math.log(values[0] / values[1]))
                gains.append(row.accuracy[-1] - stock.accuracy[-1])
        if len(changes) > 3 and len(set(changes)) > 1:
            rho = stats.spearmanr(changes, gains).statistic
            body.append([name.replace("_", " "), f"{rho:+.2f}", str(len(changes))])
    return markdown_table(["Change under conditioning of", "Correlation with the gain", "Pairs"], body)


def plot(rows: Sequence[Row], key: Callable[[Row], object], x: Callable[[Row], float], xlabel: str, path: Path) -> None:
    """Plot last accuracies against ``x``, a line of means for each ``key``, with every run as a point."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "conditioning study", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axis = figure.subplots()
        for name in dict.fromkeys(map(key, rows)):
            runs = defaultdict(list)
            for row in rows:
                if key(row) == name:
                    runs[x(row)].append(100 * row.accuracy[-1])
            xs = sorted(runs)
            (line,) = axis.plot(xs, [statistics.fmean(runs[one]) for one in xs], label=str(name))
            axis.plot(
                [one for one in xs for _ in runs[one]],
                [y for one in xs for y in runs[one]],
                ".",
                color=line.get_color(),
            )
        axis.set_xlabel(xlabel)
        axis.set_ylabel("accuracy, %")
        axis.legend()
        axis.set_xscale("symlog", linthresh=min(x(row) for row in rows if x(row)))
        figure.savefig(path, metadata={"Date": None, "Creator": None})


BEGIN, END = "<!-- report: begin -->\n", "<!-- report: end -->\n"


def report(folder: Path) -> None:
    """Write tables into the marked part of README.md, and plots beside it, from study.csv and correct.csv."""
    rows = sorted(read_rows(folder / "study.csv"), key=_in_order_of_plan())
    correct = read_correct(folder / "correct.csv")
    main = [row for row in rows if row.part == "a"]
    if not main:
        raise UsageError(f"{folder / 'study.csv'} has no run of part a.")
    hours = sum(row.cpu_seconds for row in rows) / 3600
    sections = [
        f"{len(rows)} runs, {hours:.1f} CPU hours; accuracy on {NUM_TEST:,} test images after the last epoch.",
        "### Primary comparisons\n\n" + primary_table(main, correct),
        "![accuracy against lambda](accuracy_lambda.svg)",
        "### Mechanism\n\n" + mechanism_table([row for row in rows if row.part == "a"]),
        prediction_table(main),
        "### Everything else is exploratory\n\n" + exploratory_table([row for row in rows if row.part != "tune"]),
        "### Learning rates tried for the unconditioned models, on held-out training images\n\n"
        + exploratory_table([row for row in rows if row.part == "tune"]),
    ]
    scales = {"none": 0, "lambda 1": 1, "lambda 10": 10}
    plain = [row for row in main if row.form in scales]
    plot(plain, lambda row: row.family, lambda row: scales[row.form], "lambda", folder / "accuracy_lambda.svg")
    rates = [row for row in rows if row.part == "b"]
    if rates:
        plot(
            rates,
            lambda row: f"{row.optimizer}, {row.form}",
            lambda row: row.lr,
            "learning rate",
            folder / "accuracy_rate.svg",
        )
        sections.insert(6, "![accuracy against the learning rate](accuracy_rate.svg)")
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n" + "\n\n".join(sections) + "\n\n" + END + after, encoding="utf-8")


def _in_order_of_plan() -> Callable[[Row], tuple]:
    parts, families, forms = list(PARTS), list(CONFIGS), list(FORMS)
    return lambda row: (
        [*parts, row.part].index(row.part),
        families.index(row.family),
        row.optimizer,
        row.lr or 0,
        row.images,
        row.epochs or 0,
        row.warmup,
        forms.index(row.form),
        row.seed,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parts = argparse.ArgumentParser(add_help=False)
    parts.add_argument("--parts", nargs="+", choices=list(PARTS), default=["a"], help="of the plan, in this order")
    commands.add_parser("plan", parents=[parts], help="list the runs in their order")
    run = commands.add_parser("run", parents=[parts], help="train what is missing")
    run.add_argument("--work-dir", type=Path, required=True)
    run.add_argument("--limit", type=int, metavar="N", help="stop after N runs")
    run.add_argument("--threads", type=int, default=1, help="of each run")
    result = commands.add_parser("report", help="write tables and plots from study.csv and correct.csv")
    result.add_argument("--folder", type=Path, default=ROOT / "configs/cifar")
    return parser.parse_args()


@report_usage_errors
def main() -> None:
    args = parse_args()
    if args.command == "report":
        report(args.folder)
        return
    runs = planned(args.parts)
    if args.command == "plan":
        print("\n".join(run.name for run in runs))
        print(f"{len(runs)} runs")
    elif args.command == "run":
        carry_out(runs, args.work_dir, args.limit, args.threads)


if __name__ == "__main__":
    main()
