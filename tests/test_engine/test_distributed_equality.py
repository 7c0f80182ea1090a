"""Two ranks through tools/dist_train.sh end like one rank on the same total batch, also with accumulated gradients."""

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

from mmspectral.engine.runner.launch import enable_lr_scaling, launch_run, set_resume

ROOT = Path(__file__).resolve().parents[2]
HELPERS = [ROOT / "tests" / "test_engine", ROOT / "tests" / "data" / "checkpointed_ranks"]
REFRESHING_HOOKS = [
    dict(type="mmspectral.CorrectionRefreshHook"),
    dict(type="mmspectral.FeatureRedrawHook", interval=1),
]
UPDATES = 4


@pytest.fixture(scope="module", autouse=True)
def many_backbones():
    """Make known what the config names."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in HELPERS:
            patch.syspath_prepend(folder)
        import_module("many_backbones")
        yield


def config(images_per_rank, accumulated):
    """Return the config of ``UPDATES`` updates of 4 images; ``--auto-scale-lr`` doubles the rate, which then falls."""
    iterations = UPDATES * accumulated
    return Config(
        dict(
            custom_imports=dict(imports=["many_backbones"]),
            default_scope="mmpretrain",
            model=dict(type="mmengine.ManyBackbones"),
            train_dataloader=dict(
                batch_size=images_per_rank,
                num_workers=0,
                sampler=dict(type="DefaultSampler", shuffle=False),
                dataset=dict(type="mmengine.NoiseImages"),
                collate_fn=dict(type="default_collate"),
            ),
            train_cfg=dict(by_epoch=False, max_iters=iterations),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=accumulated),
            param_scheduler=dict(type="MultiStepLR", by_epoch=False, milestones=[3 * accumulated]),
            # mmengine compares with ranks times images, whatever accumulative_counts is.
            auto_scale_lr=dict(base_batch_size=2 // accumulated, enable=False),
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=iterations // 2)),
            custom_hooks=[dict(type="mmengine.WriteState"), *REFRESHING_HOOKS],
            randomness=dict(seed=0),
        )
    )


def train_here(cfg, work_dir, resume=None, scale_lr=True):
    """Train in this process; return what its only rank ends with."""
    cfg.update(launcher="none", work_dir=str(work_dir))
    if scale_lr:
        enable_lr_scaling(cfg)
    if resume is not None:
        set_resume(cfg, str(resume))
    launch_run(cfg, Runner.train)
    return torch.load(work_dir / "rank0.pth", weights_only=True)


def assert_close(ours, others):
    assert ours.keys() == others.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], others[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.fixture(scope="module")
def two_ranks(run_command, tmp_path_factory):
    """Work folder of two ranks that took one image each and accumulated the gradients of two iterations."""
    folder = tmp_path_factory.mktemp("two_ranks")
    config(images_per_rank=1, accumulated=2).dump(folder / "toy.py")
    command = ["bash", ROOT / "tools" / "dist_train.sh", folder / "toy.py", 2, "--work-dir", folder, "--auto-scale-lr"]
    run_command(*command, cwd=folder, path=HELPERS)
    return folder


def test_ranks_are_equal_bit_for_bit(two_ranks):
    first, second = (torch.load(two_ranks / f"rank{rank}.pth", weights_only=True) for rank in (0, 1))
    assert first["learning_rates"] == second["learning_rates"]
    for moment in ("start", "end"):
        assert first[moment].keys() == second[moment].keys()
        for name, tensor in first[moment].items():
            assert torch.equal(tensor, second[moment][name]), (moment, name)
    for ending in ("correction", "kernel.w"):
        buffers = [name for name in first["end"] if name.endswith(ending)]
        assert buffers and not any(torch.equal(first["start"][name], first["end"][name]) for name in buffers)
    redraws = [tensor for name, tensor in first["end"].items() if name.endswith("redraws")]
    assert redraws and all(counter == UPDATES - 1 for counter in redraws)


def test_two_ranks_end_like_one_that_takes_the_total_batch_at_once(two_ranks, tmp_path):
    ours = torch.load(two_ranks / "rank0.pth", weights_only=True)
    one = train_here(config(images_per_rank=4, accumulated=1), tmp_path)
    assert one["learning_rates"] == pytest.approx([0.2, 0.2, 0.2, 0.02])
    assert_close(ours["start"], one["start"])
    assert_close(ours["end"], one["end"])
    trained = [name for name in one["start"] if name.endswith(("weight", "kernel.M", "kernel.shift"))]
    moved = [(one["end"][name] - one["start"][name]).abs().max() for name in trained]
    assert min(moved) > 0 and max(moved) > 0.01, "the comparison would see a step of another size"


@pytest.mark.parametrize(("images", "scale_lr"), [(2, False), (1, True)])
def test_resumed_by_another_number_of_ranks(two_ranks, tmp_path, images, scale_lr):
    """The learning rates, scaled for two ranks, go on; on the same total batch, so do the weights."""
    whole = torch.load(two_ranks / "rank0.pth", weights_only=True)
    assert whole["learning_rates"] == pytest.approx([0.2] * 6 + [0.02] * 2)
    shutil.copy(two_ranks / "iter_4.pth", tmp_path)
    cfg = config(images_per_rank=images, accumulated=2)
    resumed = train_here(cfg, tmp_path, resume=tmp_path / "iter_4.pth", scale_lr=scale_lr)
    assert resumed["learning_rates"] == whole["learning_rates"][4:]
    if images == 2:
        assert_close(resumed["end"], whole["end"])
