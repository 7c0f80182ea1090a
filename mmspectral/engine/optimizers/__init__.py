"""Optimizer wrapper constructors."""

from mmspectral.engine.optimizers.layer_decay import LayerDecayOptimWrapperConstructor

__all__ = ["LayerDecayOptimWrapperConstructor"]
