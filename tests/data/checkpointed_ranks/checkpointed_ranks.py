"""One of several ranks that train every backbone for two iterations, with and without recomputed blocks.

Started by torchrun with the folder to write gradients to.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mmspectral.models import backbones

IDENTITY = dict(type="IdentityCorrection", scale=0.5)
STAGES = dict(arch=dict(embed_dims=16, depths=[2, 1], num_heads=[1, 2]), out_indices=(0, 1))
BLOCKS = dict(arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32), img_size=32)
DARK = dict(kernel=dict(type="dark", num_features=16, proposal="sharp", shift="learned"))
FAMILIES = dict(
    SpectralXCiT=dict(arch=dict(embed_dims=16, depth=2, num_heads=2), patch_size=8, out_type="featmap"),
    SpectralSwin=dict(STAGES, window_size=4),
    SpectralDaViT=STAGES,
    SpectralViT=dict(BLOCKS, out_type="featmap", out_indices=(0, 1)),
    SpectralDeiT=dict(BLOCKS, distillation=True),
    DarkViT=dict(BLOCKS, **DARK, out_type="featmap", out_indices=(0, 1)),
    DarkSwin=dict(STAGES, **DARK),
)


def tensors(outputs):
    """Flatten what a backbone returns."""
    return [tensor for out in outputs for tensor in (out if isinstance(out, tuple) else (out,))]


def gradients(family, with_cp, find_unused_parameters):
    """Return the averaged gradients of each of two iterations."""
    torch.manual_seed(0)
    model = getattr(backbones, family)(
        **FAMILIES[family], conditioning=IDENTITY, drop_path_rate=0.5, with_cp=with_cp
    ).train()
    parallel = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterations = []
    for iteration in range(2):
        torch.manual_seed(10 * iteration + distributed.get_rank())  # images and dropped paths differ between ranks
        sum(out.square().mean() for out in tensors(parallel(torch.randn(2, 3, 32, 32)))).backward()
        iterations.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return iterations


def main(folder):
    """Save {(family, with_cp, find_unused_parameters): gradients} of this rank."""
    distributed.init_process_group("gloo")
    result = {
        (family, with_cp, find_unused): gradients(family, with_cp, find_unused)
        for family in FAMILIES
        for with_cp in (False, True)
        for find_unused in (False, True)
    }
    torch.save(result, Path(folder, f"rank{distributed.get_rank()}.pth"))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
