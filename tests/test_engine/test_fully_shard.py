"""Conditioned and DARK models in shards: torch's fully_shard on two gloo ranks, and a config for FSDPStrategy."""

import re
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import FUNCTIONS, MODELS
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from mmspectral.engine.runner.launch import launch_run
from mmspectral.models.backbones.xcit import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
HELPERS = [ROOT / "tests" / "test_engine", ROOT / "tests" / "data" / "checkpointed_ranks"]
CONFIG = ROOT / "configs" / "xcit" / "spectral-xcit-medium-24-p16_8xb128-fsdp_in1k.py"


@pytest.fixture(scope="module")
def cases(run_command, tmp_path_factory):
    """What rank 0 of two ranks saved, by (family, conditioning, how it was sharded)."""
    folder = tmp_path_factory.mktemp("sharded")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = ROOT / "tests" / "test_engine" / "sharded_ranks.py"
    run_command(*launcher, "--nproc-per-node", 2, script, folder / "cases.pth", cwd=folder, path=HELPERS)
    return torch.load(folder / "cases.pth", weights_only=True)


@pytest.mark.slow
def test_training_in_shards_is_that_of_the_whole_model(cases):
    """The gathered state dict, which a plain model took strictly, has its parameters and buffers after two steps."""
    trained = {case: found for case, found in cases.items() if "error" not in found}
    for case, found in trained.items():
        assert found["gathered"].keys() == found["plain"].keys(), case
        for name, tensor in found["plain"].items():
            torch.testing.assert_close(found["gathered"][name], tensor, rtol=1e-9, atol=1e-11, msg=f"{case}, {name}")
        assert found["numbers_of_rank"] < 0.6 * found["numbers"], "a rank holds about half"


@pytest.mark.slow
def test_stored_corrections_were_found_anew(cases):
    for case, found in cases.items():
        stored = [name for name in found.get("plain", ()) if name.endswith("correction")]
        assert bool(stored) == ("stored" in case[1] and "error" not in found)
        assert not any(torch.equal(found["gathered"][name], found["start"][name]) for name in stored)


@pytest.mark.slow
def test_random_features_were_drawn_anew(cases):
    drawn = {case: found["gathered"] for case, found in cases.items() if case[0].startswith("Dark")}
    assert len(drawn) == 5
    for case, gathered in drawn.items():
        draws = [name for name in gathered if name.endswith("kernel.w")]
        assert draws and not any(torch.equal(gathered[name], cases[case]["start"][name]) for name in draws)
        assert all(counter == 1 for name, counter in gathered.items() if name.endswith("redraws"))


@pytest.mark.slow
def test_fold_refuses_shards_and_says_what_to_do(cases):
    for case, found in cases.items():
        if case[2] == "fully_shard":
            assert re.search("kept in parts by several ranks.*get_model_state_dict", found["refusal"]), case


@pytest.mark.slow
def test_older_wrapper_refuses_stored_corrections(cases):
    """torch writes parts into ``weight`` under it, at moments that no interval is about."""
    refused = {case: found["error"] for case, found in cases.items() if "error" in found}
    assert refused.keys() == {
        ("SpectralViT", f"stored {name}", "FullyShardedDataParallel") for name in ("svd", "polar")
    }
    assert all("shard by fully_shard" in error and "interval=1" in error for error in refused.values())


@pytest.fixture
def fsdp_config(tmp_path):
    cfg = Config.fromfile(CONFIG)
    cfg.update(launcher="none", work_dir=str(tmp_path))
    return cfg


def test_fsdp_config_builds_its_runner_and_strategy(fsdp_config):
    """It was never run: mmengine's strategy wants a GPU."""
    runner = launch_run(fsdp_config, lambda runner: runner)
    assert type(runner).__name__ == "FlexibleRunner"
    assert type(runner.strategy).__name__ == "FSDPStrategy"
    assert runner.strategy.state_dict_type is StateDictType.FULL_STATE_DICT
    assert not any("EMA" in type(hook).__name__ for hook in runner.hooks)


def test_fsdp_config_takes_each_block_as_one_unit(fsdp_config):
    policy = fsdp_config.strategy.model_wrapper.auto_wrap_policy
    with FUNCTIONS.switch_scope_and_registry(None):  # as mmengine finds it
        assert FUNCTIONS.get(policy.type) is size_based_auto_wrap_policy
    settings = fsdp_config.model.backbone
    backbone = MODELS.build(dict(settings, arch=dict(ARCHITECTURES[settings.arch], depth=1)))
    for block in (*backbone.xca_layers, *backbone.ca_layers):
        numbers = [sum(p.numel() for p in child.parameters()) for child in block.children()]
        assert max(numbers) < policy.min_num_params <= sum(numbers)
