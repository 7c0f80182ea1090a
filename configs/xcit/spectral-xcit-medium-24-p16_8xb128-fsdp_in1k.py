"""The medium-24 recipe with parameters, gradients and optimizer state sharded over the GPUs. Never run: it needs GPUs.

mmengine's FlexibleRunner and FSDPStrategy; each block is one unit. Without the recipe's averaged weights: EMAHook
copies the model, which cannot be copied in shards. Corrections with an interval are refused in shards of this kind.
Run: bash tools/dist_train.sh configs/xcit/spectral-xcit-medium-24-p16_8xb128-fsdp_in1k.py 8
"""

_base_ = "./spectral-xcit-medium-24-p16_8xb128_in1k.py"

runner_type = "FlexibleRunner"
strategy = dict(
    type="FSDPStrategy",
    model_wrapper=dict(
        type="MMFullyShardedDataParallel",
        use_orig_params=True,
        # A block has 3.2 M parameters, its MLP 2.1 M.
        auto_wrap_policy=dict(type="torch.distributed.fsdp.wrap.size_based_auto_wrap_policy", min_num_params=2_500_000),
    ),
    state_dict_cfg="full",  # checkpoints as without sharding
)
custom_hooks = []
# The strategy writes the checkpoints; without exact resume.
default_hooks = dict(
    _delete_=True,
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=100),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=1),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="VisualizationHook", enable=False),
)
