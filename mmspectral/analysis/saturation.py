"""How one-hot the attention of a backbone starts, over the scale of the correction.

Each attention layer is fed by itself with layer-normalised Gaussian probe tokens
(:func:`mmspectral.layers.probe_tokens`), since the tokens of a real network at
initialisation depend on all layers before.
"""

import copy
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmspectral.analysis.projections import attention_projections, spread
from mmspectral.analysis.tables import markdown_table
from mmspectral.layers import attention_layers, build_conditioning, condition_linear, probe_tokens, saturation
from mmspectral.registry import MODELS


class Start(NamedTuple):
    """One attention layer on probe tokens, at initialisation; entropy is relative to that of uniform attention.

    Gradients are Frobenius norms for W_q, W_k and W_v, by role, of the inner product of the output
    with a fixed Gaussian tensor.
    """

    relative_entropy: float
    largest_logit: float
    gradients: dict[str, float]


@dataclass(frozen=True)
class SaturationRow:
    """A backbone under one correction of scale lambda, on tokens of one correlation.

    Entropy and gradients (over those at lambda = 0) are means over the layers. ``preserve_norm`` is
    that of :class:`mmspectral.layers.IdentityCorrection`; None is plain W + C.
    """

    model: str
    scale: float
    preserve_norm: float | None
    correlation: float
    relative_entropy: float
    largest_logit: float
    gradient_q: float
    gradient_k: float


class ProbedLayer(NamedTuple):
    """A copy of an unconditioned attention layer, in float64 and eval mode, and the tokens that one attention sees."""

    module: nn.Module
    num_tokens: int


class ProbedBackbone(NamedTuple):
    """Attention layers of one kind of a backbone, by module name; its name says the size and the kind."""

    name: str
    layers: dict[str, ProbedLayer]


def probe_backbone(
    type_name: str, arch: str | dict, max_layers: int = 4, image_size: int = 224, seed: int = 0
) -> list[ProbedBackbone]:
    """Build and initialise a backbone without conditioning and take some of its attention layers.

    Args:
        type_name: Type registered here, such as ``"SpectralXCiT"``, or with the prefix of another scope.
        arch: Its size.
        max_layers: Layers taken of each class, evenly spaced.
        image_size: Side of the image that says how many tokens each layer sees.
        seed: Of the initialisation; the global generator is put back after.

    Returns:
        One entry per class of attention layer: window and channel attention of DaViT start differently.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # With its prefix, since inside a run the default scope is the host's.
        prefixed = type_name if "." in type_name else f"mmspectral.{type_name}"
        backbone = MODELS.build(dict(type=prefixed, arch=arch, conditioning=None))
        backbone.init_weights()
    found = attention_layers(backbone)
    lengths = _sequence_lengths(backbone.eval(), found, image_size)
    kinds: dict[str, list[str]] = {}
    for each, layer in found.items():
        kinds.setdefault(type(layer).__name__, []).append(each)
    name = f"{type_name} {arch if isinstance(arch, str) else 'custom'}"
    probed = []
    for kind, names in kinds.items():
        chosen = spread(names, max_layers)
        layers = {each: ProbedLayer(copy.deepcopy(found[each]).double(), lengths[each]) for each in chosen}
        probed.append(ProbedBackbone(f"{name} ({kind})" if len(kinds) > 1 else name, layers))
    return probed


def measure_start(layer: ProbedLayer, conditioning: dict | None, correlation: float) -> Start:
    """Measure a copy of a layer with its projections conditioned, on tokens of this correlation."""
    module, tokens = _conditioned(layer, conditioning, correlation)
    with torch.no_grad():
        found = saturation(module.attention_logits(tokens))
    output = module(tokens)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    output.backward(cotangent)
    gradients = {}
    for projection in attention_projections(module).values():
        gradients.update(projection.gradient_norms())
    return Start(found.relative_entropy, found.largest_logit, gradients)


def saturation_rows(
    backbone: ProbedBackbone,
    scales: Sequence[float],
    correlations: Sequence[float],
    preserve_norms: Sequence[float | None] = (None,),
) -> list[SaturationRow]:
    """Measure a backbone with ``IdentityCorrection`` at every scale, form and correlation.

    Scale 0 is no correction, and measured once; ``preserve_norms`` holds None for the plain form, and
    standard deviations of the initial weights for the norm-preserving one.
    """
    layers = backbone.layers.values()
    rows = []
    for correlation in correlations:
        reference = [measure_start(layer, None, correlation) for layer in layers]
        for form, scale in itertools.product(preserve_norms, scales):
            if scale == 0 and form != preserve_norms[0]:
                continue
            starts = [measure_start(layer, identity(scale, form), correlation) for layer in layers]
            entropy = statistics.fmean(start.relative_entropy for start in starts)
            logit = max(start.largest_logit for start in starts)
            gradients = (
                statistics.fmean(a.gradients[role] / b.gradients[role] for a, b in zip(starts, reference, strict=True))
                for role in "qk"
            )
            case = (backbone.name, scale, form if scale else None, correlation)
            rows.append(SaturationRow(*case, entropy, logit, *gradients))
    return rows


def identity(scale: float, preserve_norm: float | None = None) -> dict | None:
    """Return the conditioning dict of ``IdentityCorrection``; None at scale 0."""
    if scale == 0:
        return None
    form = {} if preserve_norm is None else dict(preserve_norm=preserve_norm)
    return dict(type="IdentityCorrection", scale=scale, **form)


def largest_scale(
    backbone: ProbedBackbone,
    min_entropy: float = 0.5,
    correlation: float = 0.5,
    preserve_norm: float | None = None,
    upper: float = 100.0,
) -> float:
    """Return the largest lambda that keeps the share ``min_entropy`` of uniform attention's in every layer.

    By bisection to 1 %, rounded down to two digits; entropy is taken to fall with lambda. ``upper``
    if even that keeps the share, 0 if nothing does.
    """

    def keeps(scale: float) -> bool:
        for layer in backbone.layers.values():
            module, tokens = _conditioned(layer, identity(scale, preserve_norm), correlation)
            with torch.no_grad():
                if saturation(module.attention_logits(tokens)).relative_entropy < min_entropy:
                    return False
        return True

    low, high = 1e-3, upper
    if keeps(high):
        return high
    if not keeps(low):
        return 0.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    digits = f"{low:.6e}"
    return float(digits[:3] + digits[digits.index("e") :])


def saturation_table(rows: Sequence[SaturationRow]) -> str:
    """Return a table with one line per backbone, lambda and form, and the correlations side by side."""
    correlations = list(dict.fromkeys(row.correlation for row in rows))
    at = "at correlation " + " / ".join(f"{c:g}" for c in correlations)
    header = ("backbone", "lambda", f"entropy share {at}", "largest logit", "W_q gradient", "W_k gradient")
    styles = dict(relative_entropy=".2f", largest_logit=".3g", gradient_q=".2g", gradient_k=".2g")
    groups: dict[tuple, dict[float, SaturationRow]] = {}
    for row in rows:
        label = f"{row.scale:g}" if row.preserve_norm is None else f"{row.scale:g}, norm kept"
        groups.setdefault((row.model, label), {})[row.correlation] = row
    lines = [
        names + tuple(" / ".join(f"{getattr(group[c], name):{styles[name]}}" for c in correlations) for name in styles)
        for names, group in groups.items()
    ]
    return markdown_table(header, lines)


def _sequence_lengths(backbone: nn.Module, layers: dict[str, nn.Module], image_size: int) -> dict[str, int]:
    lengths = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: lengths.update({name: args[0].shape[1]}))
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        backbone(torch.zeros(1, 3, image_size, image_size))
    for handle in handles:
        handle.remove()
    return lengths


def _conditioned(layer: ProbedLayer, conditioning: dict | None, correlation: float) -> tuple[nn.Module, Tensor]:
    """Return a conditioned copy of the layer and its probe tokens [1, N, D]."""
    module = copy.deepcopy(layer.module)
    projections = attention_projections(module)
    correction = build_conditioning(conditioning)
    for name, projection in projections.items():
        layout = projection.layout
        condition_linear(module, name, correction, layout.roles, layout.num_heads, layout.row_order)
    dim = next(iter(projections.values())).module.in_features
    return module, probe_tokens(layer.num_tokens, dim, correlation).double()
