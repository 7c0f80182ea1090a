"""Several ranks on the CPU: equal ends, recomputed blocks, the batch of one rank, shards, and a rank that dies."""

import itertools
import os
import re
import shutil
from importlib import import_module

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import FUNCTIONS, MODELS
from mmengine.runner import Runner
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from mmspectral.engine import launch_run
from mmspectral.engine.launch import init_cpu_process_group
from mmspectral.errors import UsageError
from mmspectral.models.backbones.xcit import ARCHITECTURES
from tests.helpers import CONFIGS, DATA, ROOT, TOOLS, TOY, fork, output_of, printed, run

RANKS = DATA / "ranks"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
UPDATES = 4


@pytest.fixture(scope="module", autouse=True)
def ranks():
    """The module that configs name and that has the programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RANKS)
        yield import_module("ranks")


def run_program(ranks, name, folder):
    """Run a program on two ranks; return what each of them wrote."""
    printed(fork(ranks.run_program, name, folder, ranks=2, path=(ROOT, RANKS)))
    return [torch.load(folder / f"rank{rank}.pth", weights_only=True) for rank in (0, 1)]


def dist_train(folder, config, *arguments):
    """Return the command of two ranks on a config that is written to a folder."""
    (folder / "toy.py").write_text(config)
    return "bash", TOOLS / "dist_train.sh", folder / "toy.py", 2, "--work-dir", folder, *arguments


def test_recomputed_blocks_on_two_ranks(ranks, tmp_path):
    """Each gradient is ready once, averaged over the ranks, and the one of stored activations."""
    first, second = run_program(ranks, "recomputed", tmp_path)
    families = {family for family, _, _ in first}
    assert len(families) == 7
    for family in families:
        expected = first[family, False, False]
        assert all(any(iteration[name].any() for iteration in expected) for name in expected[0]), family
        for rank, *switches in itertools.product((first, second), (False, True), (False, True)):
            for ours, stored in zip(rank[(family, *switches)], expected, strict=True):
                assert ours.keys() == stored.keys()
                assert all(torch.equal(ours[name], stored[name]) for name in stored), (family, switches)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("SIGKILL", r"Signal 9 \(SIGKILL\) received by PID"),
        ("raise", r"ArithmeticError: rank 1 met something odd"),
        # A frozen machine: its process is there, so only the timeout of the other ranks tells (else 30 minutes).
        pytest.param("SIGSTOP", r"[Tt]imed out.*30000 ?ms", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_job(tmp_path, how, cause):
    config = (
        f"_base_ = {str(TOY / 'config.py')!r}\n"
        "custom_imports = dict(imports=['toy_classification', 'ranks'])\n"
        f"custom_hooks = [dict(type='DyingRank', how={how!r})]\n"
    )
    command = dist_train(tmp_path, config, "--cfg-options", "env_cfg.dist_cfg.timeout=30")
    # How long torchrun lets a rank that does not react live on is 30 seconds by default.
    done = run(*command, cwd=tmp_path, path=(TOY, RANKS), TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert re.search(cause, output), output
    assert how == "SIGSTOP" or re.search(r"rank +: 1 ", output), "torchrun's summary names the rank"
    assert not (tmp_path / "iter_2.pth").exists()


@pytest.fixture
def joined(monkeypatch):
    """Record how the process group would be made; start with an environment without launchers."""
    calls = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    for name in (*LAUNCHER_VARIABLES, "SLURM_NODELIST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return calls


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")),
        ("mpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
    ],
)
def test_other_launchers_are_translated_for_torch(joined, monkeypatch, tmp_path, launcher, variables):
    """The first of slurm's machines is the master; Open MPI has to be told."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "node-[7-8]" ] && printf "node-7\\nnode-8\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_NODELIST", "node-[7-8]")
    if launcher == "mpi":
        monkeypatch.setenv("MASTER_ADDR", "node-7")
    for name, value in zip(variables, ("3", "4", "1"), strict=True):
        monkeypatch.setenv(name, value)
    init_cpu_process_group(launcher, dict(backend="nccl", timeout=60))
    (arguments, settings) = joined.pop()
    assert arguments == ("gloo",) and settings["timeout"].total_seconds() == 60
    assert [os.environ[name] for name in LAUNCHER_VARIABLES] == ["3", "4", "1", "node-7", "29500"]


def test_what_a_launcher_did_not_set_is_named(joined, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for missing in ("WORLD_SIZE, LOCAL_RANK is not set", "MASTER_ADDR"):
        with pytest.raises(UsageError, match=missing):
            init_cpu_process_group("pytorch")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("LOCAL_RANK", "0")
    assert joined == []


def config(images_per_rank, accumulated):
    """Return the config of ``UPDATES`` updates of 4 images; ``--auto-scale-lr`` doubles the rate, which then falls."""
    iterations = UPDATES * accumulated
    return Config(
        dict(
            custom_imports=dict(imports=["ranks"]),
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
            custom_hooks=[
                dict(type="mmengine.WriteState"),
                dict(type="mmspectral.CorrectionRefreshHook"),
                dict(type="mmspectral.FeatureRedrawHook", interval=1),
            ],
            randomness=dict(seed=0),
        )
    )


def train_here(cfg, work_dir, load_from=None, scale_lr=True):
    """Train in this process; return what its only rank ends with."""
    cfg.update(launcher="none", work_dir=str(work_dir), load_from=load_from, resume=load_from is not None)
    cfg.auto_scale_lr.enable = scale_lr
    launch_run(cfg, Runner.train)
    return torch.load(work_dir / "rank0.pth", weights_only=True)


def assert_close(ours, others, where=""):
    assert ours.keys() == others.keys(), where
    for name in ours:
        torch.testing.assert_close(ours[name], others[name], rtol=1e-9, atol=1e-11, msg=f"{where} {name}")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Work folder of two ranks that took one image each and accumulated the gradients of two iterations."""
    folder = tmp_path_factory.mktemp("two_ranks")
    command = dist_train(folder, config(images_per_rank=1, accumulated=2).pretty_text, "--auto-scale-lr")
    output_of(*command, cwd=folder, path=(ROOT, RANKS))
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
    resumed = train_here(cfg, tmp_path, load_from=str(tmp_path / "iter_4.pth"), scale_lr=scale_lr)
    assert resumed["learning_rates"] == whole["learning_rates"][4:]
    if images == 2:
        assert_close(resumed["end"], whole["end"])


@pytest.mark.slow
def test_training_in_shards_is_that_of_the_whole_model(ranks, tmp_path):
    """The gathered state dict, which a plain model took strictly, has its parameters and buffers after two steps.

    Stored corrections were recomputed and random features redrawn; fold refuses shards and says what to do. torch's
    older wrapper writes parts into ``weight`` at moments that no interval is about: it refuses stored corrections.
    """
    cases, _ = run_program(ranks, "sharded", tmp_path)
    refused = {case: found.pop("error") for case, found in cases.items() if "error" in found}
    older = "FullyShardedDataParallel"
    assert refused.keys() == {("SpectralViT", f"stored {name}", older) for name in ("svd", "polar")}
    assert all("shard by fully_shard" in error and "interval=1" in error for error in refused.values())
    trained = {case: found for case, found in cases.items() if found}
    assert sum(family.startswith("Dark") for family, *_ in trained) == 5
    for case, found in trained.items():
        family, conditioning, how = case
        gathered, start = found["gathered"], found["start"]
        assert_close(gathered, found["plain"], case)
        assert found["numbers_of_rank"] < 0.6 * found["numbers"], "a rank holds about half"
        stored = [name for name in gathered if name.endswith("correction")]
        drawn = [name for name in gathered if name.endswith("kernel.w")]
        assert bool(stored) == ("stored" in conditioning) and bool(drawn) == family.startswith("Dark")
        assert not any(torch.equal(gathered[name], start[name]) for name in stored + drawn)
        assert all(counter == 1 for name, counter in gathered.items() if name.endswith("redraws"))
        if how == "fully_shard":
            assert re.search("kept in parts by several ranks.*get_model_state_dict", found["refusal"]), case


def test_fsdp_config_builds_and_takes_each_block_as_one_unit(tmp_path):
    """It was never run: mmengine's strategy wants a GPU."""
    cfg = Config.fromfile(CONFIGS / "xcit" / "spectral-xcit-medium-24-p16_8xb128-fsdp_in1k.py")
    cfg.update(launcher="none", work_dir=str(tmp_path))
    policy, settings = cfg.strategy.model_wrapper.auto_wrap_policy, cfg.model.backbone
    runner = launch_run(cfg, lambda runner: runner)
    assert type(runner).__name__ == "FlexibleRunner"
    assert type(runner.strategy).__name__ == "FSDPStrategy"
    assert runner.strategy.state_dict_type is StateDictType.FULL_STATE_DICT
    assert not any("EMA" in type(hook).__name__ for hook in runner.hooks)
    with FUNCTIONS.switch_scope_and_registry(None):  # as mmengine finds it
        assert FUNCTIONS.get(policy.type) is size_based_auto_wrap_policy
    backbone = MODELS.build(dict(settings, arch=dict(ARCHITECTURES[settings.arch], depth=1)))
    for block in (*backbone.xca_layers, *backbone.ca_layers):
        numbers = [sum(p.numel() for p in child.parameters()) for child in block.children()]
        assert max(numbers) < policy.min_num_params <= sum(numbers)
