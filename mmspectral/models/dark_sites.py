"""What DARK backbones have in common: the kernel of their attention, and which parameters are trained."""

from torch import nn

from mmspectral.layers.random_feature_kernel import RandomFeatureKernel, share_geometry

TRAINABLE = ("all", "projections")


class DarkBackbone:
    """Mix-in of backbones with DARK attention; put it before the backbone's class.

    ``trainable="projections"`` is the limited regime of arXiv 2603.04127: only the
    q, k and v projections and what softmax weights do not have are trained. What
    is not the backbone's, such as a head, is trained all the same.
    """

    trained_parts = (".qkv.", ".kernel.")  # of names, under trainable="projections"

    def __init__(self, *args, kernel: dict | None, trainable: str = "all", **kwargs) -> None:
        if trainable not in TRAINABLE:
            raise ValueError(f"trainable must be one of {', '.join(map(repr, TRAINABLE))}, got {trainable!r}.")
        self.kernel, self.trainable = kernel, trainable  # the backbone's constructor needs them
        super().__init__(*args, **kwargs)
        share_geometry(self)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that the published recipes do not decay, and all of the kernels."""
        return super().no_weight_decay() | {name for name, _ in self.named_parameters() if ".kernel." in name}

    def _freeze_stages(self) -> None:
        super()._freeze_stages()
        if self.trainable == "projections":
            for name, parameter in self.named_parameters():
                if not any(part in name for part in self.trained_parts):
                    parameter.requires_grad = False


def feature_kernels(model: nn.Module) -> dict[str, RandomFeatureKernel]:
    """Return the random-feature kernels of ``model`` by name, in module order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RandomFeatureKernel)}
