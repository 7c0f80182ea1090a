"""Names of ViT's and DeiT's weights: facebookresearch/deit, timm and mmsegmentation."""

from mmspectral.checkpoints.names.naming import Family, Naming, Rules, begins

_BLOCKS: Rules = (
    ("layers.{i}.ln1", "blocks.{i}.norm1"),
    ("layers.{i}.ln2", "blocks.{i}.norm2"),
    ("layers.{i}.ffn.layers.0.0", "blocks.{i}.mlp.fc1"),
    ("layers.{i}.ffn.layers.1", "blocks.{i}.mlp.fc2"),
    ("layers.{i}", "blocks.{i}"),
    ("ln1", "norm"),
    ("ln2", "fc_norm"),  # of averaged tokens
    ("pre_norm", "norm_pre"),
    ("patch_embed.projection", "patch_embed.proj"),
    ("head.layers.head_dist", "head_dist"),
    ("head.layers.head", "head"),
)
_TIMM: Rules = (
    ("layers.{i}.attn.gamma1.weight", "blocks.{i}.ls1.gamma"),
    ("layers.{i}.ffn.gamma2.weight", "blocks.{i}.ls2.gamma"),
    *_BLOCKS,
)
_OFFICIAL: Rules = (
    ("layers.{i}.attn.gamma1.weight", "blocks.{i}.gamma_1"),
    ("layers.{i}.ffn.gamma2.weight", "blocks.{i}.gamma_2"),
    *_BLOCKS,
)
_MMSEG: Rules = (
    ("layers.{i}.attn.qkv.weight", "layers.{i}.attn.attn.in_proj_weight"),
    ("layers.{i}.attn.qkv.bias", "layers.{i}.attn.attn.in_proj_bias"),
    ("layers.{i}.attn.proj", "layers.{i}.attn.attn.out_proj"),
)
_is_timm = begins("blocks.0.attn.qkv.")

FAMILY = Family(
    "vit",
    recognise=begins("layers.0.attn.qkv."),
    namings=(
        # Without layer scale DeiT's names are timm's, and either naming may be given for an export.
        Naming(
            "official",
            recognise=lambda names: _is_timm(names) and "blocks.0.gamma_1" in names,
            rules=lambda names: _OFFICIAL,
            entry="model",
        ),
        Naming(
            "timm",
            # XCiT and DaViT also have a list of blocks.
            recognise=lambda names: (
                _is_timm(names) and "patch_embed.proj.weight" in names and not begins("blocks.0.local_mp.")(names)
            ),
            rules=lambda names: _TIMM,
        ),
        Naming("mmseg", recognise=begins("layers.0.attn.attn.in_proj_"), rules=lambda names: _MMSEG),
    ),
)
