#!/usr/bin/env python
"""Replace the attention of a ViT trained with softmax, and fine-tune it: one thread, row by row into a CSV file.

    attention_swap.py train --data IMAGES --checkpoint softmax.pth
    attention_swap.py grid  --data IMAGES --checkpoint softmax.pth --csv swap.csv
    attention_swap.py sweep --data IMAGES --checkpoint softmax.pth --csv swap.csv
    attention_swap.py report --csv swap.csv --plot swap.svg

IMAGES holds train/ and test/, each with a folder of square images per class. Runs
that the file already has are skipped, so that a stopped study resumes. ``sweep``
varies the learning rate, which rises over half of the steps (else a tenth), and
does not clip gradients.
"""

import argparse
import csv
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmengine.logging import MMLogger
from torch import Tensor, nn
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from mmspectral.analysis import Fit, calibrate_model, markdown_table
from mmspectral.checkpoints import write_checkpoint
from mmspectral.registry import MODELS

ARCH = dict(embed_dims=128, num_layers=4, num_heads=2, feedforward_channels=256)
REDUCED = dict(proposal="sharp", shift="fixed")
KERNELS = {
    "exact": None,
    "dark calibrated": dict(type="dark", **REDUCED),
    "dark identity": dict(type="dark"),
    "temperature": dict(type="temperature", **REDUCED),
    "performer": dict(type="performer"),
    "learned": dict(type="learned"),
    "constant": dict(type="constant"),
}
# How M of a calibrated kernel is fitted: longer than by default, or not, which leaves the best t of t I.
FITS = {"dark calibrated": Fit(steps=1000, lr=0.002), "temperature": None}
REGIMES = {"full": "all", "limited": "projections"}
STAGES = {"replaced": "replaced, not trained", "first_epoch": "after 1 epoch", "final": "after fine-tuning"}
SWEPT = ["exact", "dark calibrated", "dark identity", "performer"]
SPIKE_WINDOW = 25
PADDING = 4


class ImageSet(NamedTuple):
    """Images [n, 3, H, W], uint8, and labels [n] in memory."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int, generator: torch.Generator | None = None, limit: int | None = None) -> Iterator[tuple]:
        """Yield (images in -1 .. 1, labels); with a generator shuffled, flipped and cropped at random."""
        n = len(self.labels)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        for index in order[:limit].split(size):
            images = self.images[index]
            if generator is not None:
                images = crop_and_flip(images, generator)
            yield images.float() / 127.5 - 1, self.labels[index]


def load_images(args: argparse.Namespace) -> list[ImageSet]:
    """Return the images of train/ and of test/."""
    parts = (zip(*ImageFolder(args.data / part, pil_to_tensor), strict=True) for part in ("train", "test"))
    return [ImageSet(torch.stack(images), torch.tensor(labels)) for images, labels in parts]


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image [B, 3, H, W] flipped at random and shifted by up to 4 pixels, zeros coming in."""
    B, _, H, W = images.shape
    shift = torch.randint(2 * PADDING + 1, (2, B, 1), generator=generator)
    rows, columns = shift[0] + torch.arange(H), shift[1] + torch.arange(W)
    columns = torch.where(torch.rand(B, 1, generator=generator) < 0.5, columns, columns.flip(1))
    padded = F.pad(images, (PADDING,) * 4)
    return padded[torch.arange(B)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Classifier(nn.Module):
    """A DarkViT (``kernel=None``: exact attention) and a linear head on its class token."""

    def __init__(self, settings: dict, kernel: dict | None = None, trainable: str = "all") -> None:
        super().__init__()
        self.backbone = MODELS.build(
            dict(type="mmspectral.DarkViT", **settings["backbone"], kernel=kernel, trainable=trainable)
        )
        self.head = nn.Linear(self.backbone.embed_dims, settings["num_classes"])
        self.head.requires_grad_(trainable == "all")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images)[-1])


def load_softmax(checkpoint: dict, kernel: dict | None = None, trainable: str = "all") -> Classifier:
    """Build a classifier with ``kernel`` on the weights of one with exact attention."""
    model = Classifier(checkpoint["settings"], kernel, trainable)
    found = model.load_state_dict(checkpoint["state_dict"], strict=False)
    wrong = [name for name in found.missing_keys if ".kernel." not in name] + found.unexpected_keys
    if wrong:
        raise ValueError(f"the checkpoint is not of this model: {', '.join(wrong)} missing or left over.")
    return model


def train(
    model: nn.Module,
    data: ImageSet,
    *,
    epochs: int,
    lr: float,
    generator: torch.Generator,
    batch_size: int,
    after_epoch: Callable[[int], None],
    images_per_epoch: int | None = None,
    warmup: float = 0.1,
    max_norm: float | None = 1.0,
) -> list[float]:
    """Train with AdamW, warm-up and a cosine, in bfloat16; return the losses up to the first that is not finite."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [dict(params=[], weight_decay=0.05), dict(params=[], weight_decay=0.0)]
    for name, parameter in named.items():
        groups[parameter.ndim < 2 or ".kernel." in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr, fused=True)
    steps = epochs * math.ceil(len(data.labels[:images_per_epoch]) / batch_size)
    rise = max(1, round(warmup * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / rise, (1 + math.cos(math.pi * max(i - rise, 0) / max(steps - rise, 1))) / 2)
    )
    losses: list[float] = []
    for epoch in range(1, epochs + 1):
        model.train()
        for images, labels in data.batches(batch_size, generator, images_per_epoch):
            with torch.autocast(images.device.type, torch.bfloat16):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                return losses
            optimizer.zero_grad()
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(named.values(), max_norm)
            optimizer.step()
            schedule.step()
        after_epoch(epoch)
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet) -> float:
    model.eval()
    correct = 0
    for images, labels in data.batches(250):
        with torch.autocast(images.device.type, torch.bfloat16):
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(data.labels)


class SwapRow(NamedTuple):
    """One fine-tuning: what it was (the first six), accuracies (None where it diverged before) and how it went."""

    study: str
    kernel: str
    num_features: int | None
    regime: str
    lr: float
    seed: int
    replaced: float
    first_epoch: float | None
    final: float | None
    last_loss: float
    spikes: int
    diverged: bool


def count_spikes(losses: Sequence[float]) -> int:
    """Count runs of steps whose loss is far above the loss just before.

    A step is in a spike when its loss exceeds the median of the last ``SPIKE_WINDOW`` losses outside spikes by more
    than 5 times their median absolute deviation and by more than 0.5, or when it is not finite.
    """
    calm: list[float] = []
    spikes, inside = 0, False
    for loss in losses:
        recent = calm[-SPIKE_WINDOW:]
        above = not math.isfinite(loss)
        if len(recent) == SPIKE_WINDOW and not above:
            median = statistics.median(recent)
            deviation = statistics.median(abs(each - median) for each in recent)
            above = loss > median + max(5 * deviation, 0.5)
        spikes += above and not inside
        inside = above
        if not above:
            calm.append(loss)
    return spikes


def swap_and_tune(
    args: argparse.Namespace, data: list[ImageSet], kernel: str, num_features: int | None, seed: int, runs: list[tuple]
) -> Iterator[SwapRow]:
    """Replace the attention once, and fine-tune from there for each regime and peak learning rate of ``runs``.

    It is calibrated on augmented images where the kernel allows. A run has diverged when it ends in a loss that is not
    finite, or (median of the last steps) worse than guessing.
    """
    checkpoint, (train_data, test_data) = torch.load(args.checkpoint, weights_only=True), data
    options = dict(epochs=args.epochs, images_per_epoch=args.images, batch_size=args.batch_size)
    if args.command == "sweep":
        # A spike needs 25 steps to be compared with: the rate rises long enough for it to come after them.
        options |= dict(max_norm=None, warmup=0.5)
    cfg = KERNELS[kernel] and dict(KERNELS[kernel], num_features=num_features, seed=seed)
    prepared = load_softmax(checkpoint, cfg)
    if kernel in FITS:
        images, _ = next(train_data.batches(256, torch.Generator().manual_seed(seed)))
        calibrate_model(prepared, [images], fit=FITS[kernel], seed=seed)
    replaced = accuracy(prepared, test_data)
    for regime, lr in runs:
        model = load_softmax(checkpoint, cfg, REGIMES[regime])
        model.load_state_dict(prepared.state_dict())
        reached = {}

        def evaluate(epoch: int, model=model, reached=reached) -> None:
            if epoch in (1, args.epochs):
                reached[epoch] = accuracy(model, test_data)

        generator = torch.Generator().manual_seed(seed)
        losses = train(model, train_data, lr=lr, generator=generator, after_epoch=evaluate, **options)
        last = statistics.median(losses[-SPIKE_WINDOW:])
        ends = (replaced, reached.get(1), reached.get(args.epochs), last, count_spikes(losses))
        lost = not math.isfinite(losses[-1]) or last > math.log(checkpoint["settings"]["num_classes"])
        yield SwapRow(args.command, kernel, num_features, regime, lr, seed, *ends, lost)


def read_rows(path: Path) -> list[SwapRow]:
    """Read what :func:`run_study` wrote; no file is no rows."""
    if not path.exists():
        return []
    read = dict(num_features=int, lr=float, seed=int, replaced=float, first_epoch=float, final=float)
    read |= dict(last_loss=float, spikes=int, diverged="True".__eq__)
    with path.open(newline="") as file:
        return [
            SwapRow(**{name: read.get(name, str)(text) if text else None for name, text in line.items()})
            for line in csv.DictReader(file)
        ]


def markdown_tables(rows: Sequence[SwapRow]) -> str:
    """Return one table per regime of the grid, and one of the sweep: accuracy in percent, mean and range over seeds."""
    parts = []
    for regime in REGIMES:
        found = [row for row in rows if row.study == "grid" and row.regime == regime]
        lines = [
            [kernel, m or "-", *(_spread([getattr(row, stage) for row in group]) for stage in STAGES), len(group)]
            for (kernel, m), group in _grouped(found, "kernel", "num_features")
        ]
        parts.append(markdown_table([f"kernel ({regime})", "m", *STAGES.values(), "seeds"], lines))
    lines = [
        [kernel, f"{lr:g}", _spread([row.final for row in group])]
        + [sum(row.spikes for row in group), sum(row.diverged for row in group), len(group)]
        for (kernel, lr), group in _grouped([row for row in rows if row.study == "sweep"], "kernel", "lr")
    ]
    header = ("kernel (sweep)", "learning rate", "after fine-tuning", "spikes", "diverged", "runs")
    return "\n\n".join([*parts, markdown_table(header, lines)])


def plot_rows(rows: Sequence[SwapRow], path: Path) -> None:
    """Draw mean accuracy over m by regime and stage, and over the learning rate, with the range over seeds."""
    from matplotlib.figure import Figure

    panels = [("grid", "full", "num_features", "replaced")]
    panels += [("grid", regime, "num_features", stage) for regime in REGIMES for stage in ("first_epoch", "final")]
    panels += [("sweep", "full", "lr", "final")]
    figure = Figure(figsize=(10.5, 6.5), layout="constrained")
    for axis, (study, regime, name, stage) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        for i, kernel in enumerate(KERNELS):
            chosen = [r for r in rows if (r.study, r.regime, r.kernel) == (study, regime, kernel)]
            for (position,), group in _grouped([r for r in chosen if getattr(r, stage) is not None], name):
                values = [100 * getattr(row, stage) for row in group]
                mean = statistics.fmean(values)
                if position is None:
                    axis.axhline(mean, color=f"C{i}", label=kernel, ls="--")
                else:
                    reach = [[mean - min(values)], [max(values) - mean]]
                    axis.errorbar([position], [mean], reach, color=f"C{i}", label=kernel, marker="o", capsize=2)
        axis.set(title=f"{study}, {regime}: {STAGES[stage]}", xscale="log", xlabel=name, ylabel="accuracy, %")
    handles = {}
    for axis in figure.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(KERNELS))
    figure.savefig(path)


def _grouped(rows: Sequence[SwapRow], *names: str) -> list[tuple[tuple, list[SwapRow]]]:
    """Return the rows that agree in ``names`` together, in the order of KERNELS and then of the values."""
    groups: dict[tuple, list[SwapRow]] = {}
    for row in sorted(rows, key=lambda row: (list(KERNELS).index(row.kernel), row.num_features or 0, row.lr)):
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(groups.items())


def _spread(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{statistics.fmean(known):.1f} ({min(known):.1f} to {max(known):.1f})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} lost"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = argparse.ArgumentParser(add_help=False)
    data.add_argument("--data", type=Path, required=True, metavar="IMAGES")
    data.add_argument("--checkpoint", type=Path, required=True)
    data.add_argument("--batch-size", type=int, default=32)
    table = argparse.ArgumentParser(add_help=False)
    table.add_argument("--csv", type=Path, required=True)

    first = commands.add_parser("train", parents=[data], help="train the ViT with softmax attention")
    first.add_argument("--epochs", type=int, default=44)
    first.add_argument("--lr", type=float, default=1e-3)
    first.add_argument("--arch", type=int, nargs=4, default=list(ARCH.values()), metavar=tuple(ARCH))
    first.add_argument("--patch-size", type=int, default=4)
    first.set_defaults(batch_size=128)

    # Tables and plot compare what has the same learning rate, or the same number of features.
    studies = (
        ("grid", "kernels x features x regimes x seeds", list(KERNELS), ("+", [32, 64, 128]), 3, (1, [3e-4])),
        ("sweep", "learning rates, without clipping", SWEPT, (1, [64]), 2, ("+", [1e-4, 3e-4, 1e-3, 3e-3, 1e-2])),
    )
    for name, text, kernels, (nargs, features), seeds, (nargs_of_lrs, lrs) in studies:
        command = commands.add_parser(name, parents=[data, table], help=text)
        command.add_argument("--epochs", type=int, default=3)
        command.add_argument("--images", type=int, default=1500, help="training images of an epoch, others in the next")
        command.add_argument("--kernels", nargs="+", default=kernels, choices=KERNELS)
        command.add_argument("--features", type=int, nargs=nargs, default=features, metavar="M")
        command.add_argument("--seeds", type=int, default=seeds)
        command.add_argument("--lrs", type=float, nargs=nargs_of_lrs, default=lrs, metavar="LR")
        regimes = list(REGIMES) if name == "grid" else ["full"]
        command.add_argument("--regimes", nargs="+", default=regimes, choices=regimes)

    report = commands.add_parser("report", parents=[table], help="tables to the output, plot to a file")
    report.add_argument("--plot", type=Path)
    return parser.parse_args()


def train_softmax(args: argparse.Namespace) -> None:
    train_data, test_data = load_images(args)
    arch, size = dict(zip(ARCH, args.arch, strict=True)), train_data.images.shape[-1]
    backbone = dict(arch=arch, img_size=size, patch_size=args.patch_size, out_type="cls_token")
    settings = dict(backbone=backbone, num_classes=1 + int(train_data.labels.max()))
    torch.manual_seed(0)
    model = Classifier(settings)
    model.backbone.init_weights()

    def save(epoch: int) -> None:
        reached = accuracy(model, test_data)
        print(f"epoch {epoch}: accuracy {reached:.4f}", flush=True)
        checkpoint = dict(settings=settings, epoch=epoch, accuracy=reached, state_dict=model.state_dict())
        write_checkpoint(checkpoint, args.checkpoint, force=True)

    options = dict(epochs=args.epochs, lr=args.lr, batch_size=args.batch_size, after_epoch=save)
    train(model, train_data, generator=torch.Generator().manual_seed(0), **options)


def run_study(args: argparse.Namespace) -> None:
    data, done = load_images(args), {row[:6] for row in read_rows(args.csv)}
    for seed, kernel in itertools.product(range(args.seeds), args.kernels):
        for m in [None] if kernel == "exact" else args.features:
            todo = [
                (regime, lr)
                for regime, lr in itertools.product(args.regimes, args.lrs)
                if (args.command, kernel, m, regime, lr, seed) not in done
            ]
            if todo:
                for row in swap_and_tune(args, data, kernel, m, seed, todo):
                    header = [] if args.csv.exists() else [SwapRow._fields]
                    with args.csv.open("a", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerows([*header, row])
                    print(row, flush=True)


def main() -> None:
    args = parse_args()
    MMLogger.get_instance("attention_swap", log_level="WARNING")  # initialisation logs every parameter
    torch.set_num_threads(1)
    if args.command == "train":
        train_softmax(args)
    elif args.command == "report":
        rows = read_rows(args.csv)
        print(markdown_tables(rows))
        if args.plot:
            plot_rows(rows, args.plot)
    else:
        run_study(args)


if __name__ == "__main__":
    main()
