"""Parameters, multiply-adds and activations of a model, the products inside its attention included.

mmengine's analysis, which gives mmdet's and mmpretrain's figures, counts 0 for
torch's scaled_dot_product_attention and for operators that it does not know.
Here it is given what those multiply. As there, one multiply-add counts as one
FLOP; norms count a few per element, softmax, exponentials, activation functions
and sums none; activations are the elements that convolutions and products put out.

Shape legend: B batch, h query heads, H key heads, g = h / H, N queries, L keys,
d and e channels of keys and values, m features, R rows of the folded features.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import ceil, prod

import torch
from mmengine.analysis import ActivationAnalyzer, FlopAnalyzer
from mmengine.analysis.jit_handles import generic_activation_jit, get_shape
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmspectral.ops.random_features.causal import chunk_size, spans


@dataclass(frozen=True)
class Complexity:
    """Elements of the parameters, multiply-adds of a forward pass, elements that convolutions and products put out."""

    parameters: int
    multiply_adds: int
    activations: int


@dataclass(frozen=True)
class ModelComplexity:
    """What a model costs for one input [B, C, H, W], as a whole and by child module.

    Under ``"rest"`` stands what the model does outside of calls of its children. ``operators`` are
    multiply-adds by operator, ``uncounted`` says how often each operator ran that counts 0.
    """

    input_shape: tuple[int, ...]
    total: Complexity
    parts: dict[str, Complexity]
    operators: Counter[str]
    uncounted: Counter[str]


def matrix_product(inputs: list, outputs: list, first: int = 0) -> int:
    """Return the multiply-adds of a product; mmengine's own miss the batch if only the second factor has one."""
    return prod(get_shape(outputs[0])) * get_shape(inputs[first])[-1]


def scaled_dot_product_attention(inputs: list, outputs: list) -> int:
    """Return B h N L (d + e), those of q k^T and of the weights with v; keys that a mask hides are counted too.

    Args:
        inputs: Of ``aten::scaled_dot_product_attention``: q [..., h, N, d], k [..., H, L, d], v and so on.
        outputs: [..., h, N, e].
    """
    *batch, e = get_shape(outputs[0])
    L, d = get_shape(inputs[1])[-2:]
    return prod(batch) * L * (d + e)


def linear_attention(inputs: list, outputs: list) -> int:
    """Return B H (L (R d + m e) + g N m (d + e)), or for causal attention those of its scan.

    The first term summarises the keys, the second reads the queries. The scan
    does so chunk by chunk, the values padded, and adds C (C (m + e) + m) inside a chunk of
    C tokens and (S + 1)^2 m e where S chunks are joined; that of logits too far
    apart, which costs more, is not counted.

    Args:
        inputs: Of ``mmspectral::linear_attention``.
        outputs: The first is [B, H, g, N, e].
    """
    B, H, g, N, d = get_shape(inputs[0])
    L, R, m = get_shape(inputs[1])[2], get_shape(inputs[3])[1], get_shape(inputs[5])[-1]
    e, causal = get_shape(outputs[0])[-1], inputs[8].toIValue()
    logits = L * R * d
    if not causal:
        return B * H * (logits + L * m * e + g * N * m * (d + e))
    C = chunk_size(N)
    chunk = C * (2 * m * e + m) + C * C * (m + e)
    joined = [ceil((t.stop - t.start) / C) for t in spans(0, N, C, B * H * g, m, torch.device("cpu"))]
    return B * H * (logits + g * N * m * d + g * sum(S * chunk + (S + 1) ** 2 * m * e for S in joined))


_PRODUCTS = {
    "aten::matmul": matrix_product,
    "aten::baddbmm": partial(matrix_product, first=1),
    "aten::scaled_dot_product_attention": scaled_dot_product_attention,
    "mmspectral::linear_attention": linear_attention,
}


def count_complexity(model: nn.Module, inputs: Tensor) -> ModelComplexity:
    """Run a model once, in its mode and without gradient, and count.

    Where the cost depends on the data, as in a head that takes proposals, the
    count is that of these inputs.

    Args:
        model: Anything that takes one tensor.
        inputs: What it takes, such as [B, C, H, W].
    """
    # Torch's multi-head attention must not run as one operator, of which nothing would be counted.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return _count(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@torch.no_grad()
def _count(model: nn.Module, inputs: Tensor) -> ModelComplexity:
    flops = FlopAnalyzer(model, inputs).set_op_handle(**_PRODUCTS)
    activations = ActivationAnalyzer(model, inputs)
    activations.set_op_handle(**dict.fromkeys(("aten::mm", *_PRODUCTS), generic_activation_jit()))
    for analyzer in (flops, activations):
        analyzer.unsupported_ops_warnings(False).uncalled_modules_warnings(False)

    def cost(name: str) -> Complexity:
        parameters = sum(p.numel() for p in model.get_submodule(name).parameters())
        return Complexity(parameters, flops.total(name), activations.total(name))

    total, parts = cost(""), {name: cost(name) for name, _ in model.named_children()}
    fields = Complexity.__dataclass_fields__
    parts["rest"] = Complexity(*(getattr(total, f) - sum(getattr(part, f) for part in parts.values()) for f in fields))
    parts = {name: part for name, part in parts.items() if part != Complexity(0, 0, 0)}
    return ModelComplexity(tuple(inputs.shape), total, parts, flops.by_operator(), flops.unsupported_ops())


def count_config(cfg: Config, shape: tuple[int, int], seed: int = 0) -> ModelComplexity:
    """Count for the model of a classifier's or detector's config, untrained, on an image of noise.

    Args:
        cfg: Its pretrained weights are not read.
        shape: (H, W) of the image, before the padding of the model's data preprocessor.
        seed: Of the weights and the image, on which proposals depend.
    """
    torch.manual_seed(seed)
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        model = MODELS.build(cfg.model)
    model.eval()  # some models' train() returns nothing
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    sample = BaseDataElement(metainfo=dict(img_shape=shape, ori_shape=shape, scale_factor=(1.0, 1.0)))
    data = model.data_preprocessor(dict(inputs=[image], data_samples=[sample]))
    model.forward = partial(model.forward, data_samples=data["data_samples"])
    return count_complexity(model, data["inputs"])
