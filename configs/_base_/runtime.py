"""Exact resume and atomic checkpoints: hooks that join those of any config of mmdet or mmpretrain.

mmengine refuses two bases that set the same key, and each of the hosts' configs sets ``default_hooks``; so these stand
under a name of their own, and the config that inherits this file says where they belong:

    _base_ = ["mmdet::...", "mmspectral::_base_/runtime.py"]
    default_hooks = _base_.exact_resume

``default_hooks`` is a dict, into which a child's merges; ``custom_hooks`` is a list, which a child replaces.
"""

exact_resume = dict(
    # Written by the file backend "atomic". tolerated_failures=N lets training outlive N failed saves in a row.
    checkpoint=dict(type="mmspectral.CheckpointHook"),
    checkpoint_fitting=dict(type="mmspectral.CheckpointFittingHook"),
    resume_check=dict(type="mmspectral.ResumeCheckHook"),
    epoch_seed=dict(type="mmspectral.EpochSeedHook"),
    pending_gradients=dict(type="mmspectral.PendingGradientsHook"),
    due_validation=dict(type="mmspectral.DueValidationHook"),
)
# Names the image that cannot be read; skip_unreadable=True takes another one in its place.
image_loader = dict(type="mmspectral.LoadImageFromFile")
