"""Names of XCiT's weights: facebookresearch/xcit and timm."""

import torch

from mmspectral.checkpoints.names.naming import Family, Naming, Rules, State, begins

_BLOCKS: Rules = (
    ("xca_layers.{i}.ffn.layers.0.0", "blocks.{i}.mlp.fc1"),
    ("xca_layers.{i}.ffn.layers.1", "blocks.{i}.mlp.fc2"),
    ("xca_layers.{i}.local_mp.conv1.conv", "blocks.{i}.local_mp.conv1"),
    ("xca_layers.{i}.local_mp.conv1.bn", "blocks.{i}.local_mp.bn"),
    ("xca_layers.{i}.local_mp.conv2.conv", "blocks.{i}.local_mp.conv2"),
    ("xca_layers.{i}", "blocks.{i}"),
    ("ca_layers.{i}.ffn.layers.0.0", "cls_attn_blocks.{i}.mlp.fc1"),
    ("ca_layers.{i}.ffn.layers.1", "cls_attn_blocks.{i}.mlp.fc2"),
    ("ca_layers.{i}", "cls_attn_blocks.{i}"),
    ("patch_embed.proj.{i}.conv", "patch_embed.proj.{2i}.0"),
    ("patch_embed.proj.{i}.bn", "patch_embed.proj.{2i}.1"),
    ("head.fc", "head"),
)
_TIMM: Rules = (("pos_embed.token_projection.conv", "pos_embed.token_projection"), *_BLOCKS)
_OFFICIAL: Rules = (("pos_embed.token_projection.conv", "pos_embeder.token_projection"), *_BLOCKS)
_FUSED = "attn.qkv."


def _split_class_attention(state: State) -> State:
    """Split the fused projection of the official class attention, rows [3][heads][d], into q, k and v."""
    split = {}
    for name, tensor in state.items():
        if name.startswith("cls_attn_blocks.") and f".{_FUSED}" in name:
            for role, part in zip("qkv", tensor.chunk(3), strict=True):
                split[name.replace(_FUSED, f"attn.{role}.")] = part.clone()
        else:
            split[name] = tensor
    return split


def _fuse_class_attention(state: State) -> State:
    fused = {}
    for name, tensor in state.items():
        in_class_attention = name.startswith("cls_attn_blocks.")
        if in_class_attention and ".attn.q." in name:
            parts = [state[name.replace(".attn.q.", f".attn.{role}.")] for role in "qkv"]
            fused[name.replace(".attn.q.", f".{_FUSED}")] = torch.cat(parts)
        elif not (in_class_attention and (".attn.k." in name or ".attn.v." in name)):
            fused[name] = tensor
    return fused


FAMILY = Family(
    "xcit",
    recognise=begins("xca_layers.0."),
    namings=(
        # The official dense form has no class attention; the name of its position encoding tells it from timm's.
        Naming(
            "official",
            recognise=lambda names: (
                begins("blocks.0.local_mp.")(names)
                and (begins("pos_embeder.")(names) or begins("cls_attn_blocks.0.attn.qkv.")(names))
            ),
            rules=lambda names: _OFFICIAL,
            on_import=_split_class_attention,
            on_export=_fuse_class_attention,
            entry="model",
        ),
        Naming("timm", recognise=begins("blocks.0.local_mp."), rules=lambda names: _TIMM),
    ),
)
