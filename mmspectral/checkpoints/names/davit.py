"""Names of DaViT's weights: dingmyu/davit and timm."""

from collections.abc import Collection

from mmspectral.checkpoints.names.naming import Family, Naming, Rules, begins, final_norm, number_of


def _blocks(block: str, cpe1: str, cpe2: str) -> Rules:
    rules = []
    for kind, index in (("spatial_block", 0), ("channel_block", 1)):
        ours, theirs = f"stages.{{i}}.blocks.{{j}}.{kind}", f"{block}.{index}"
        rules += [
            (f"{ours}.attn.w_msa", f"{theirs}.attn") if index == 0 else (f"{ours}.attn", f"{theirs}.attn"),
            (f"{ours}.ffn.layers.0.0", f"{theirs}.mlp.fc1"),
            (f"{ours}.ffn.layers.1", f"{theirs}.mlp.fc2"),
            (f"{ours}.cpe1", f"{theirs}.{cpe1}"),
            (f"{ours}.cpe2", f"{theirs}.{cpe2}"),
            (ours, theirs),
        ]
    return tuple(rules)


def _timm(names: Collection[str]) -> Rules:
    return (
        *_blocks("stages.{i}.blocks.{j}", "cpe1", "cpe2"),
        ("patch_embed.projection", "stem.conv"),
        ("patch_embed.norm", "stem.norm"),
        # Downsampling ends a stage in mmpretrain and begins the next one elsewhere.
        ("stages.{i}.downsample.projection", "stages.{i+1}.downsample.conv"),
        ("stages.{i}.downsample", "stages.{i+1}.downsample"),
        *final_norm(number_of("stages", names), names, "head.norm"),
    )


def _official(names: Collection[str]) -> Rules:
    stages = max(number_of("stages", names), number_of("main_blocks", names))
    return (
        *_blocks("main_blocks.{i}.{j}", "cpe.0", "cpe.1"),
        ("patch_embed.projection", "patch_embeds.0.proj"),
        ("patch_embed.norm", "patch_embeds.0.norm"),
        ("stages.{i}.downsample.projection", "patch_embeds.{i+1}.proj"),
        ("stages.{i}.downsample", "patch_embeds.{i+1}"),
        *final_norm(stages, names, "norms"),
        ("head.fc", "head"),
    )


FAMILY = Family(
    "davit",
    recognise=begins("stages.0.blocks.0.spatial_block."),
    namings=(
        Naming("official", recognise=begins("main_blocks.0.0.0."), rules=_official),
        Naming("timm", recognise=begins("stages.0.blocks.0.0."), rules=_timm),
    ),
)
