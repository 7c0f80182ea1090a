"""One of two ranks that hold conditioned and DARK models in shards and train them for two steps, in float64.

Started by torchrun with the file that rank 0 writes.
"""

import sys

import torch
from checkpointed_ranks import FAMILIES, tensors
from mmengine.model import MMFullyShardedDataParallel
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from mmspectral import condition
from mmspectral.layers import feature_kernels, fold, refresh_corrections
from mmspectral.models import backbones

CONDITIONINGS = {
    "identity": dict(type="IdentityCorrection", scale=0.5),
    "identity per head": dict(type="IdentityCorrection", scale=0.5, scope="head"),
    "identity, norm kept": dict(type="IdentityCorrection", scale=0.5, preserve_norm=0.02),
    "svd": dict(type="SVDCorrection"),
    "stored svd": dict(type="SVDCorrection", interval=2),
    "polar": dict(type="PolarCorrection"),
    "stored polar": dict(type="PolarCorrection", interval=2),
    "spectral norm": dict(type="SpectralNorm"),
    "sigma reparam": dict(type="SigmaReparam", gamma=None),
    "qk norm": dict(type="QKNorm"),
    "orthogonal init": dict(type="OrthogonalInit"),
}
FULLY_SHARD, OLDER = "fully_shard", "FullyShardedDataParallel"
# All families, on one of them all conditionings, DARK also in the older way, and a layer of torch's own.
CASES = {
    **{(family, name, FULLY_SHARD): CONDITIONINGS[name] for family in FAMILIES for name in ("identity", "stored svd")},
    **{("SpectralViT", name, FULLY_SHARD): conditioning for name, conditioning in CONDITIONINGS.items()},
    **{("SpectralViT", name, OLDER): conditioning for name, conditioning in CONDITIONINGS.items()},
    ("DarkViT", "identity", OLDER): CONDITIONINGS["identity"],
    ("nn.MultiheadAttention", "identity", FULLY_SHARD): CONDITIONINGS["identity"],
}


class TorchEncoder(nn.Sequential):
    """A layer of torch's own, whose packed projections are read and not called."""

    def __init__(self):
        super().__init__(nn.Linear(32, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))

    def forward(self, images):
        return super().forward(images.flatten(1, 2))  # rows of pixels as tokens


def build(family, conditioning):
    torch.manual_seed(0)
    if family == "nn.MultiheadAttention":
        model = TorchEncoder().double()
        condition(model, conditioning)
    else:
        model = getattr(backbones, family)(**FAMILIES[family], conditioning=conditioning, drop_path_rate=0.0).double()
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    return model


def shard(model, how, mesh):
    """Shard each block by itself, and what is left with the root."""
    if how == OLDER:  # with the settings of the shipped config; mmengine's strategy itself wants a GPU
        policy = dict(type="torch.distributed.fsdp.wrap.size_based_auto_wrap_policy", min_num_params=2000)
        return MMFullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)
    for module in list(model.modules()):
        if hasattr(module, "attn") or isinstance(module, nn.TransformerEncoderLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, images_of_rank):
    """Take two steps on the same four images in total; C is found anew before the first, w drawn before the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        refresh_corrections(model, updates=step)
        for kernel in feature_kernels(model).values():
            kernel.redraw(step)
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        outputs = model(images[images_of_rank])
        sum(out.square().mean() for out in tensors(outputs if isinstance(outputs, tuple) else (outputs,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def refusal(model):
    """Return what ``fold`` says to a model in shards."""
    try:
        fold(model)
    except ValueError as error:
        return str(error)


def compare(case, mesh):
    """Train the model of a case whole and in shards."""
    family, _, how = case
    plain = build(family, CASES[case])
    start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    train(plain, slice(None))
    sharded = shard(build(family, CASES[case]), how, mesh)
    try:
        train(sharded, slice(mesh.get_rank(), None, 2))
    except ValueError as error:
        return dict(error=str(error))
    gathered = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    build(family, CASES[case]).load_state_dict(gathered, strict=True)
    return dict(
        start=start,
        plain=dict(plain.state_dict()),
        gathered=dict(gathered),
        numbers=sum(p.numel() for p in plain.parameters()),
        numbers_of_rank=sum((p.to_local() if how == FULLY_SHARD else p).numel() for p in sharded.parameters()),
        refusal=refusal(sharded),
    )


def main(path):
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    result = {case: compare(case, mesh) for case in CASES}
    if mesh.get_rank() == 0:
        torch.save(result, path)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
