"""Training a classifier on images held in memory, in a plain loop: what studies of small models need."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

PADDING = 4


@dataclass(frozen=True)
class ImageSet:
    """Images of one size and their labels, in memory.

    Args:
        images: [n, 3, H, W], uint8.
        labels: [n], int64.
        classes: Names, by label.
    """

    images: Tensor
    labels: Tensor
    classes: list[str]

    def batches(self, size: int, generator: torch.Generator | None = None, limit: int | None = None) -> Iterator[tuple]:
        """Yield (images [B, 3, H, W] in -1 .. 1, labels [B]).

        Args:
            size: B; the last batch may be smaller.
            generator: If given, the images come shuffled, randomly flipped and
                cropped after padding with 4 pixels of zeros; else plain, in order.
            limit: Images to take; None is all.
        """
        n = len(self.labels)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        for index in order[:limit].split(size):
            images = self.images[index]
            if generator is not None:
                images = crop_and_flip(images, generator)
            yield images.float() / 127.5 - 1, self.labels[index]


def load_images(folder: str | Path) -> ImageSet:
    """Read a folder with one subfolder of RGB images per class, all of one size."""
    found = ImageFolder(folder)
    images, labels = zip(*((pil_to_tensor(image), label) for image, label in found), strict=True)
    return ImageSet(torch.stack(images), torch.tensor(labels), found.classes)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image [B, 3, H, W] flipped at random and shifted by up to 4 pixels, zeros coming in."""
    B, _, H, W = images.shape
    shift = torch.randint(2 * PADDING + 1, (2, B, 1), generator=generator)
    rows, columns = shift[0] + torch.arange(H), shift[1] + torch.arange(W)
    columns = torch.where(torch.rand(B, 1, generator=generator) < 0.5, columns, columns.flip(1))
    padded = F.pad(images, (PADDING,) * 4)
    return padded[torch.arange(B)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def train(
    model: nn.Module,
    data: ImageSet,
    *,
    epochs: int,
    lr: float,
    generator: torch.Generator,
    images_per_epoch: int | None = None,
    batch_size: int = 64,
    warmup: float = 0.1,
    weight_decay: float = 0.05,
    max_norm: float | None = 1.0,
    after_epoch: Callable[[int], None] | None = None,
) -> list[float]:
    """Train what requires a gradient, with AdamW, warm-up and a cosine, in bfloat16 outside float32 islands.

    Args:
        model: Maps images to logits.
        data: Training images.
        epochs: Passes.
        lr: Peak learning rate.
        generator: Of order and augmentation.
        images_per_epoch: Images of one pass; None is all.
        batch_size: Images of a step.
        warmup: Share of the steps over which the learning rate rises linearly.
        weight_decay: Of parameters with two dimensions or more, those of kernels excepted.
        max_norm: Gradients are clipped to it; None clips nothing.
        after_epoch: Called with the number of epochs done.

    Returns:
        The loss of each step, up to the first that is not finite.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = {name for name, parameter in named.items() if parameter.ndim > 1 and ".kernel." not in name}
    groups = [
        dict(params=[named[name] for name in named if name in decayed], weight_decay=weight_decay),
        dict(params=[named[name] for name in named if name not in decayed], weight_decay=0.0),
    ]
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
        if after_epoch is not None:
            after_epoch(epoch)
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet, batch_size: int = 250) -> float:
    """Return the share of images classified correctly, in evaluation mode."""
    model.eval()
    correct = 0
    for images, labels in data.batches(batch_size):
        with torch.autocast(images.device.type, torch.bfloat16):
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(data.labels)
