"""What ranks do in the tests of distributed training: classes that configs name, and two programs."""

import os
import signal
from pathlib import Path

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMFullyShardedDataParallel
from mmengine.registry import DATASETS, HOOKS, MODELS
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from mmspectral import condition
from mmspectral.layers import feature_kernels, fold, refresh_corrections
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
    settings = dict(FAMILIES[family], conditioning=IDENTITY, drop_path_rate=0.5, with_cp=with_cp)
    model = getattr(backbones, family)(**settings).train()
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


# Each family under each: stored activations, then recomputed ones with buffers that follow the weights.
VARIANTS = {
    "identity": dict(conditioning=IDENTITY),
    "svd": dict(conditioning=dict(type="SVDCorrection", interval=2), with_cp=True),
}


@DATASETS.register_module()
class NoiseImages(torch.utils.data.Dataset):
    """16 images of noise, each different."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return dict(inputs=torch.randn(3, 32, 32, dtype=torch.float64, generator=generator))


@MODELS.register_module()
class ManyBackbones(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbones = nn.ModuleDict(
            {
                f"{family}_{variant}": getattr(backbones, family)(**settings, **changes, drop_path_rate=0.0)
                for family, settings in FAMILIES.items()
                for variant, changes in VARIANTS.items()
            }
        )
        self.double()

    def init_weights(self):
        """Keep torch's draw: mmengine's initialisation writes a line for each of many parameters."""

    def train(self, mode=True):
        """Freeze the statistics of batch norms, which are those of each rank."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, inputs, mode="tensor"):
        losses = {}
        for name, backbone in self.backbones.items():
            for number, out in enumerate(tensors(backbone(inputs))):
                generator = torch.Generator().manual_seed(number)
                direction = torch.randn(out.shape[1:], dtype=out.dtype, generator=generator)
                losses[f"{name}_{number}_loss"] = (out * direction).mean()
        return losses


@HOOKS.register_module()
class WriteState(Hook):
    """Save each rank's parameters and buffers before and after training, and the rate of each iteration."""

    def before_train(self, runner):
        self.start, self.learning_rates = _state(runner.model), []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.learning_rates.extend(runner.optim_wrapper.get_lr()["lr"])

    def after_train(self, runner):
        result = dict(start=self.start, end=_state(runner.model), learning_rates=self.learning_rates)
        torch.save(result, Path(runner.work_dir, f"rank{get_rank()}.pth"))


def _state(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name.removeprefix("module."): tensor.detach().clone() for name, tensor in tensors}


@HOOKS.register_module()
class DyingRank(Hook):
    """In the second iteration rank 1 gets the signal of that name, or raises."""

    def __init__(self, how):
        self.how = how

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter != 1 or get_rank() != 1:
            return
        if self.how == "raise":
            raise ArithmeticError("rank 1 met something odd")
        os.kill(os.getpid(), signal.Signals[self.how])


@HOOKS.register_module()
class WriteKernels(Hook):
    """Give the second rank other images to calibrate on, and save the kernels after training."""

    priority = "HIGH"

    def before_train(self, runner):
        for hook in runner.hooks:
            if type(hook).__name__ == "DarkCalibrationHook":
                hook.images["seed"] += get_rank()

    def after_train(self, runner):
        kernels = {name: tensor for name, tensor in _state(runner.model).items() if "kernel" in name}
        torch.save(kernels, Path(runner.work_dir, f"kernels{get_rank()}.pth"))


CONDITIONINGS = {
    "identity": IDENTITY,
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
    """Take two steps on four images in total; C is recomputed before the first, w redrawn before the second."""
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


def recomputed():
    """Return {(family, with_cp, find_unused_parameters): gradients} of this rank."""
    switches = [(with_cp, find_unused) for with_cp in (False, True) for find_unused in (False, True)]
    return {(family, *switch): gradients(family, *switch) for family in FAMILIES for switch in switches}


def sharded():
    mesh = init_device_mesh("cpu", (2,))
    return {case: compare(case, mesh) for case in CASES}


def run_program(name, folder):
    """Save what this rank's program of that name, ``recomputed`` or ``sharded``, returns."""
    distributed.init_process_group("gloo")
    torch.save(globals()[name](), Path(folder, f"rank{get_rank()}.pth"))
    distributed.destroy_process_group()
