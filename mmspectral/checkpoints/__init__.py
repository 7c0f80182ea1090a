"""Floor 3: checkpoint files, in four steps: read (files), rename (names), reconcile, load; convert writes others."""

from mmspectral.checkpoints.convert import TARGETS, convert, fold_file, publish, unfold_file
from mmspectral.checkpoints.files import Weights, find_weights, read_checkpoint, write_checkpoint
from mmspectral.checkpoints.load import LoadReport, fit_to_model, fit_whole, load_backbone
from mmspectral.checkpoints.names import FAMILIES
from mmspectral.checkpoints.reconcile import (
    GRID_KEY,
    find_grid,
    fit_pos_embed,
    folded_state_dict,
    reconcile,
    reconcile_while_loading,
)

__all__ = [
    "FAMILIES",
    "GRID_KEY",
    "TARGETS",
    "LoadReport",
    "Weights",
    "convert",
    "find_grid",
    "find_weights",
    "fit_pos_embed",
    "fit_to_model",
    "fit_whole",
    "fold_file",
    "folded_state_dict",
    "load_backbone",
    "publish",
    "read_checkpoint",
    "reconcile",
    "reconcile_while_loading",
    "unfold_file",
    "write_checkpoint",
]
