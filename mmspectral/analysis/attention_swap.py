"""What becomes of a trained softmax ViT whose attention is replaced: at once, after an epoch, after fine-tuning."""

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from mmspectral.analysis.dark_calibration import Fit, calibrate_geometry
from mmspectral.analysis.image_training import ImageSet, accuracy, train
from mmspectral.registry import MODELS

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
# What calibrate_geometry chooses from: all, M fitted longer than by default, or t I alone.
CALIBRATED = {
    "dark calibrated": dict(fit=Fit(steps=1000, lr=0.002)),
    "temperature": dict(strengths=(0.0,), fit=Fit(steps=0)),
}
REGIMES = {"full": "all", "limited": "projections"}
SPIKE_WINDOW = 25


@dataclass(frozen=True)
class SwapRow:
    """One fine-tuning.

    Args:
        study: Name of the grid that the run belongs to.
        kernel: Name in :data:`KERNELS`.
        num_features: m; None for exact attention.
        regime: ``"full"``, or ``"limited"`` to q, k, v projections and kernels.
        lr: Peak learning rate.
        seed: Of the draws of the features, and of order and augmentation.
        replaced: Accuracy on the test images before any training.
        first_epoch: Accuracy after one epoch; None if training diverged before.
        final: Accuracy after the last epoch, likewise.
        last_loss: Median training loss of the last 25 steps.
        spikes: See :func:`count_spikes`.
        diverged: See :func:`diverged`.
    """

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

    @property
    def key(self) -> tuple:
        """What a run is found again by: study, kernel, m, regime, learning rate and seed."""
        return self.study, self.kernel, self.num_features, self.regime, self.lr, self.seed


class Classifier(nn.Module):
    """A ViT and a linear head on its class token.

    Args:
        settings: ``backbone``, the arguments of :class:`mmspectral.models.DarkViT`,
            and ``num_classes``.
        kernel: As in DarkViT; None is exact attention.
        trainable: ``"all"``, or ``"projections"``: q, k, v and kernels; then the head is frozen too.
    """

    def __init__(self, settings: dict, kernel: dict | None = None, trainable: str = "all") -> None:
        super().__init__()
        self.backbone = MODELS.build(
            dict(type="mmspectral.DarkViT", **settings["backbone"], kernel=kernel, trainable=trainable)
        )
        self.head = nn.Linear(self.backbone.embed_dims, settings["num_classes"])
        self.head.requires_grad_(trainable == "all")

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, num_classes]."""
        return self.head(self.backbone(images)[-1])


def load_softmax(checkpoint: dict, kernel: dict | None = None, trainable: str = "all") -> Classifier:
    """Build a classifier with ``kernel`` on the weights of one with exact attention.

    Args:
        checkpoint: ``settings`` of :class:`Classifier`, and ``state_dict``.
        kernel: As in :class:`Classifier`; so the next.
        trainable: See there.

    Raises:
        ValueError: Weights other than those of kernels are missing or left over.
    """
    model = Classifier(checkpoint["settings"], kernel, trainable)
    found = model.load_state_dict(checkpoint["state_dict"], strict=False)
    wrong = [name for name in found.missing_keys if ".kernel." not in name] + found.unexpected_keys
    if wrong:
        raise ValueError(f"the checkpoint is not of this model: {', '.join(wrong)} missing or left over.")
    return model


@torch.no_grad()
def attention_inputs(model: Classifier, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return q, k, v [B, h, N, d] of each layer for images [B, 3, H, W], in evaluation mode."""
    found = []

    def keep(_: nn.Module, args: tuple, output: Tensor) -> None:
        found.append(output)

    handles = [layer.attn.qkv.register_forward_hook(keep) for layer in model.backbone.layers]
    model.eval()(images)
    for handle in handles:
        handle.remove()
    heads = model.backbone.layers[0].attn.num_heads
    return [qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0) for qkv in found]


def count_spikes(losses: Sequence[float], window: int = SPIKE_WINDOW, factor: float = 5.0, least: float = 0.5) -> int:
    """Count loss spikes: runs of steps far above the loss that training had just before.

    A step is in a spike when its loss exceeds the median of the last ``window`` losses
    outside spikes by more than ``factor`` times their median absolute deviation, and by more
    than ``least``. Consecutive such steps are one spike; a loss that is
    not finite is one.
    """
    calm: list[float] = []
    spikes, inside = 0, False
    for loss in losses:
        recent = calm[-window:]
        above = not math.isfinite(loss)
        if len(recent) == window and not above:
            median = statistics.median(recent)
            deviation = statistics.median(abs(each - median) for each in recent)
            above = loss > median + max(factor * deviation, least)
        spikes += above and not inside
        inside = above
        if not above:
            calm.append(loss)
    return spikes


def diverged(losses: Sequence[float], num_classes: int, window: int = SPIKE_WINDOW) -> bool:
    """Tell whether training ended in a loss that is not finite, or (median of the last steps) worse than guessing."""
    return not math.isfinite(losses[-1]) or statistics.median(losses[-window:]) > math.log(num_classes)


def prepare(
    checkpoint: dict, kernel: str, num_features: int | None, seed: int, data: ImageSet, num_images: int = 256
) -> Classifier:
    """Replace the attention of a trained classifier, and calibrate it where the kernel is of that kind.

    Args:
        checkpoint: See :func:`load_softmax`.
        kernel: Name in :data:`KERNELS`.
        num_features: m; None for exact attention.
        seed: Of the draws, and of the images that calibration sees.
        data: Training images.
        num_images: Augmented training images to calibrate on.
    """
    model = load_softmax(checkpoint, kernel_config(kernel, num_features, seed))
    if kernel in CALIBRATED:
        images, _ = next(data.batches(num_images, torch.Generator().manual_seed(seed)))
        inputs = attention_inputs(load_softmax(checkpoint), images)
        for layer, (q, k, v) in zip(model.backbone.layers, inputs, strict=True):
            found = calibrate_geometry(q, k, v, num_features, seed=seed, **CALIBRATED[kernel])
            M = found.M[:, 0, 0] if kernel == "temperature" else found.M  # t of t I
            layer.attn.kernel.set_geometry(M, found.proposal, found.shift)
    return model


def kernel_config(kernel: str, num_features: int | None, seed: int) -> dict | None:
    """Return the ``kernel`` of DarkViT that a name in :data:`KERNELS` stands for."""
    cfg = KERNELS[kernel]
    return None if cfg is None else dict(cfg, num_features=num_features, seed=seed)


def swap_and_tune(
    checkpoint: dict,
    train_data: ImageSet,
    test_data: ImageSet,
    kernel: str,
    num_features: int | None,
    seed: int,
    runs: Sequence[tuple[str, float]],
    *,
    study: str,
    epochs: int,
    **kwargs,
) -> Iterator[SwapRow]:
    """Replace the attention once, and fine-tune from there once per run.

    Args:
        checkpoint: See :func:`load_softmax`.
        train_data: Images to calibrate on and to train on.
        test_data: Images that accuracy is measured on.
        kernel: Name in :data:`KERNELS`.
        num_features: m; None for exact attention.
        seed: See :class:`SwapRow`.
        runs: Regime and peak learning rate of each.
        study: See :class:`SwapRow`.
        epochs: Passes of fine-tuning.
        **kwargs: Other arguments of :func:`mmspectral.analysis.image_training.train`.
    """
    prepared = prepare(checkpoint, kernel, num_features, seed, train_data)
    replaced = accuracy(prepared, test_data)
    for regime, lr in runs:
        model = load_softmax(checkpoint, kernel_config(kernel, num_features, seed), REGIMES[regime])
        model.load_state_dict(prepared.state_dict())
        losses, reached = _tune(model, train_data, test_data, epochs, lr=lr, seed=seed, **kwargs)
        yield SwapRow(
            study,
            kernel,
            num_features,
            regime,
            lr,
            seed,
            replaced,
            reached.get(1),
            reached.get(epochs),
            statistics.median(losses[-SPIKE_WINDOW:]),
            count_spikes(losses),
            diverged(losses, checkpoint["settings"]["num_classes"]),
        )


def append_row(row: SwapRow, path: Path) -> None:
    """Add one line to a CSV file, which is begun where it does not exist."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SwapRow)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def read_rows(path: Path) -> list[SwapRow]:
    """Read what :func:`append_row` wrote; no file is no rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            SwapRow(
                line["study"],
                line["kernel"],
                _number(int, line["num_features"]),
                line["regime"],
                float(line["lr"]),
                int(line["seed"]),
                float(line["replaced"]),
                _number(float, line["first_epoch"]),
                _number(float, line["final"]),
                float(line["last_loss"]),
                int(line["spikes"]),
                line["diverged"] == "True",
            )
            for line in csv.DictReader(file)
        ]


def _tune(
    model: Classifier, train_data: ImageSet, test_data: ImageSet, epochs: int, seed: int, **kwargs
) -> tuple[list[float], dict[int, float]]:
    """Train, and return the losses and the accuracy after the first and the last epoch."""
    reached = {}

    def evaluate(epoch: int) -> None:
        if epoch in (1, epochs):
            reached[epoch] = accuracy(model, test_data)

    generator = torch.Generator().manual_seed(seed)
    losses = train(model, train_data, epochs=epochs, generator=generator, after_epoch=evaluate, **kwargs)
    return losses, reached


def _number(kind: type, text: str) -> float | None:
    return kind(text) if text else None
