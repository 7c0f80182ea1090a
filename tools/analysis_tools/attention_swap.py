#!/usr/bin/env python
"""Replace the attention of a ViT trained with softmax, and fine-tune it: one thread, row by row into a CSV file.

    attention_swap.py train --data IMAGES --checkpoint softmax.pth
    attention_swap.py grid  --data IMAGES --checkpoint softmax.pth --csv swap.csv
    attention_swap.py sweep --data IMAGES --checkpoint softmax.pth --csv swap.csv
    attention_swap.py report --csv swap.csv --plot swap.svg

IMAGES holds train/ and test/, each with a folder of square images per class. Runs
that the file already has are skipped, so that a stopped study goes on where
it was. ``sweep`` varies the learning rate, which rises over half of the steps
(else a tenth), and does not clip gradients.
"""

import argparse
import itertools
from pathlib import Path

import torch
from mmengine.logging import MMLogger

from mmspectral.analysis.attention_swap import KERNELS, REGIMES, Classifier, append_row, read_rows, swap_and_tune
from mmspectral.analysis.attention_swap_report import markdown_tables, plot_rows
from mmspectral.analysis.image_training import accuracy, load_images, train
from mmspectral.checkpoints.files import write_checkpoint

ARCH = dict(embed_dims=128, num_layers=4, num_heads=2, feedforward_channels=256)
WITHOUT_FEATURES = ("exact",)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = argparse.ArgumentParser(add_help=False)
    data.add_argument("--data", type=Path, required=True, metavar="IMAGES")
    data.add_argument("--checkpoint", type=Path, required=True)
    data.add_argument("--batch-size", type=int, default=32)
    table = argparse.ArgumentParser(add_help=False)
    table.add_argument("--csv", type=Path, required=True)
    study = argparse.ArgumentParser(add_help=False)
    study.add_argument("--epochs", type=int, default=3)
    study.add_argument("--images", type=int, default=1500, help="training images of an epoch, others in the next")

    first = commands.add_parser("train", parents=[data], help="train the ViT with softmax attention")
    first.add_argument("--epochs", type=int, default=44)
    first.add_argument("--lr", type=float, default=1e-3)
    first.add_argument("--arch", type=int, nargs=4, default=list(ARCH.values()), metavar=tuple(ARCH))
    first.add_argument("--patch-size", type=int, default=4)
    first.set_defaults(batch_size=128)

    grid = commands.add_parser("grid", parents=[data, table, study], help="kernels x features x regimes x seeds")
    grid.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    grid.add_argument("--features", type=int, nargs="+", default=[32, 64, 128], metavar="M")
    grid.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES)
    grid.add_argument("--seeds", type=int, default=3)
    grid.add_argument("--lrs", type=float, nargs=1, default=[3e-4], metavar="LR")

    sweep = commands.add_parser("sweep", parents=[data, table, study], help="learning rates, without clipping")
    sweep.add_argument("--kernels", nargs="+", choices=KERNELS)
    sweep.add_argument("--features", type=int, nargs=1, default=[64], metavar="M")
    sweep.add_argument("--seeds", type=int, default=2)
    sweep.add_argument("--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3, 1e-2], metavar="LR")
    sweep.set_defaults(kernels=["exact", "dark calibrated", "dark identity", "performer"], regimes=["full"])

    report = commands.add_parser("report", parents=[table], help="tables to the output, plot to a file")
    report.add_argument("--plot", type=Path)
    return parser.parse_args()


def train_softmax(args: argparse.Namespace) -> None:
    train_data, test_data = load_images(args.data / "train"), load_images(args.data / "test")
    settings = dict(
        backbone=dict(
            arch=dict(zip(ARCH, args.arch, strict=True)),
            img_size=train_data.images.shape[-1],
            patch_size=args.patch_size,
            out_type="cls_token",
        ),
        num_classes=len(train_data.classes),
    )
    torch.manual_seed(0)
    model = Classifier(settings)
    model.backbone.init_weights()

    def save(epoch: int) -> None:
        reached = accuracy(model, test_data)
        print(f"epoch {epoch}: accuracy {reached:.4f}", flush=True)
        checkpoint = dict(settings=settings, epoch=epoch, accuracy=reached, state_dict=model.state_dict())
        write_checkpoint(checkpoint, args.checkpoint, force=True)

    generator = torch.Generator().manual_seed(0)
    train(
        model,
        train_data,
        epochs=args.epochs,
        lr=args.lr,
        generator=generator,
        batch_size=args.batch_size,
        after_epoch=save,
    )


def run_study(args: argparse.Namespace) -> None:
    checkpoint = torch.load(args.checkpoint, weights_only=True)
    train_data, test_data = load_images(args.data / "train"), load_images(args.data / "test")
    done = {row.key for row in read_rows(args.csv)}
    options = dict(study=args.command, epochs=args.epochs, images_per_epoch=args.images, batch_size=args.batch_size)
    if args.command == "sweep":
        # A spike needs 25 steps to be compared with: the rate rises long enough for it to come after them.
        options |= dict(max_norm=None, warmup=0.5)
    for seed, kernel in itertools.product(range(args.seeds), args.kernels):
        for m in [None] if kernel in WITHOUT_FEATURES else args.features:
            todo = [
                (regime, lr)
                for regime, lr in itertools.product(args.regimes, args.lrs)
                if (args.command, kernel, m, regime, lr, seed) not in done
            ]
            if todo:
                for row in swap_and_tune(checkpoint, train_data, test_data, kernel, m, seed, todo, **options):
                    append_row(row, args.csv)
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
