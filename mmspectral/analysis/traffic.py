"""Bytes, launches and FLOPs of a forward pass or a train step: what a GPU will pay, counted without one.

Every operator that torch dispatches is one launch, reads its tensors once and
writes its results once; views and allocations are free. So counted, an operator
that torch runs in several kernels is one launch, and a compiler that fuses
operators moves less. Operators of this package are counted by what they call.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from mmspectral.ops.random_features import op

aten = torch.ops.aten
_FREE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_}  # their first argument is written, not read
_OURS = {
    torch.ops.mmspectral.linear_attention.default: op.forward,
    torch.ops.mmspectral.linear_attention_backward.default: op.backward,
}


@dataclass(frozen=True)
class Device:
    """Peak rates of a device, without sparsity, as its maker states them.

    Args:
        bandwidth: Of its memory, in bytes per second.
        tensor: Products in float16 and bfloat16, in FLOPs per second.
        float32: Everything else, in FLOPs per second.
    """

    bandwidth: float
    tensor: float
    float32: float


DEVICES = {
    "A100": Device(2.039e12, 312e12, 19.5e12),  # SXM, 80 GB
    "H100": Device(3.35e12, 989e12, 67e12),  # SXM
    "H200": Device(4.8e12, 989e12, 67e12),  # SXM
}
LAUNCH_SECONDS = 4e-6


@dataclass(frozen=True)
class Traffic:
    """What was counted.

    Args:
        read: Bytes read by operators.
        written: Bytes written by operators.
        launches: Operators, views and allocations aside.
        flops: Of products and convolutions, a multiply-add being two.
        seconds: Estimate by device: the sum over operators of the longest of
            launch, memory and arithmetic at peak rates.
    """

    read: int
    written: int
    launches: int
    flops: int
    seconds: dict[str, float]

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


class TrafficCounter(TorchDispatchMode):
    """Counts what runs while it is entered; ``traffic()`` returns the sums.

    Attributes:
        operators: Launches by name of operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._flops = 0
        self._seconds = dict.fromkeys(DEVICES, 0.0)

    def traffic(self) -> Traffic:
        """Return what was counted so far."""
        return Traffic(
            self._bytes["read"], self._bytes["written"], self.operators.total(), self._flops, dict(self._seconds)
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _OURS:
            with self:
                return _OURS[func](*args, **kwargs)
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if func.is_view or func.namespace == "prim" or packet in _FREE:
            return out
        inputs = args[1:] if packet in _OVERWRITES else args
        read, written = _size((inputs, kwargs)), _size(out)
        flops = _flops_of(func, args, kwargs, out)
        self.operators[str(packet)] += 1
        self._bytes.update(read=read, written=written)
        self._flops += flops
        half = any(isinstance(t, Tensor) and t.dtype.itemsize == 2 for t in tree_leaves(args))
        for name, device in DEVICES.items():
            arithmetic = flops / (device.tensor if half else device.float32)
            self._seconds[name] += max(LAUNCH_SECONDS, (read + written) / device.bandwidth, arithmetic)
        return out


def count_traffic(step: Callable[[], object]) -> Traffic:
    """Run ``step`` once and count; run it before where the first run differs from the others."""
    with TrafficCounter() as counter:
        step()
    return counter.traffic()


def backbone_traffic(model: nn.Module, shape: tuple[int, ...], precision: str, train: bool = True) -> Traffic:
    """Count for a backbone that returns maps; nothing is computed, tensors have shapes alone.

    Autocast casts by its rules for the CPU, which keep fewer operators in float32
    than those for CUDA.

    Args:
        model: On the CPU; left in the mode that was counted.
        shape: Of the images [B, 3, H, W].
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast in it.
        train: Count forward and backward in training mode, up to the gradients:
            the optimizer costs the same with and without conditioning. Otherwise
            a forward pass in evaluation mode.
    """
    dtype = dict(fp32=None, bf16=torch.bfloat16, fp16=torch.float16)[precision]
    model.train(train)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            maps = model(images)
        if train:
            loss = sum(out.float().square().mean() for out in maps)
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(train):
        images = torch.empty(shape)
        return count_traffic(step)


def ratios(traffic: Traffic, baseline: Traffic) -> dict[str, float]:
    """Return bytes and launches over those of the baseline."""
    return dict(bytes=traffic.bytes / baseline.bytes, launches=traffic.launches / baseline.launches)


def _size(tree: object) -> int:
    """Bytes of the distinct tensors; an expanded tensor is as large as what it repeats."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum(
        t.itemsize * torch.Size(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride).numel()
        for t in tensors.values()
    )


def _flops_of(func, args: tuple, kwargs: dict, out: object) -> int:
    if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    count = flop_registry.get(func.overloadpacket)
    return count(*args, **kwargs, out_val=out) if count else 0
