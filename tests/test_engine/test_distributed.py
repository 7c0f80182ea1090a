"""Two CPU processes train one model: gloo, equal parameters, every gradient, one evaluation each."""

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmspectral.engine.runner.cpu_ddp import init_cpu_process_group
from mmspectral.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "data" / "toy_classification"
CHECKPOINTED_RANKS = ROOT / "tests" / "data" / "checkpointed_ranks" / "checkpointed_ranks.py"
ONE_MACHINE = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def start(work_dir, *launcher, arguments=()):
    """Start torchrun on train.py."""
    command = [str(ROOT / "tools" / "train.py"), str(TOY / "config.py"), "--launcher", "pytorch"]
    return torchrun(work_dir, *launcher, *command, "--work-dir", str(work_dir), *arguments)


def torchrun(work_dir, *arguments):
    """Start torchrun."""
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    path = os.pathsep.join([str(ROOT), str(TOY), os.environ.get("PYTHONPATH", "")])
    environment.update(PYTHONPATH=path, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="-1")
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    # mmengine gathers results through a folder in the current one.
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, cwd=work_dir, **pipes)


def finish(process):
    output = process.communicate(timeout=200)[0]
    return process.returncode, output


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def check_ranks(work_dir):
    first, second = (torch.load(work_dir / f"rank{rank}.pth", weights_only=True) for rank in (0, 1))
    for rank in (first, second):
        assert rank["wrapper"] == "MMDistributedDataParallel"
        assert rank["evaluations"] == 1
        assert rank["with_gradient"] == sorted(rank["parameters"])
    assert first["parameters"].keys() == second["parameters"].keys()
    for name, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][name]), name
    return first


def test_two_ranks_end_with_equal_parameters(tmp_path):
    options = ["--auto-scale-lr", "--cfg-options", "auto_scale_lr.base_batch_size=4"]
    status, output = finish(start(tmp_path, *ONE_MACHINE, "2", arguments=options))
    assert status == 0, output
    rank = check_ranks(tmp_path)
    # 0.01 in the config, doubled for two ranks of 4 images; two of ten warm-up steps from a tenth are done.
    assert rank["learning_rates"] == pytest.approx([0.02 * 0.3])
    assert output.count("accuracy/top1") == 1
    assert "destroy_process_group" not in output
    checkpoint = torch.load(tmp_path / "iter_2.pth", weights_only=False)["state_dict"]
    for name, value in rank["parameters"].items():
        assert torch.equal(value, checkpoint[name.removeprefix("module.")])


def test_recomputed_blocks_on_two_ranks(tmp_path):
    """Each gradient is ready once, averaged over the ranks, and the one of stored activations."""
    status, output = finish(torchrun(tmp_path, *ONE_MACHINE, "2", str(CHECKPOINTED_RANKS), str(tmp_path)))
    assert status == 0, output
    first, second = (torch.load(tmp_path / f"rank{rank}.pth", weights_only=True) for rank in (0, 1))
    families = {family for family, _, _ in first}
    assert families == {
        *(f"Spectral{name}" for name in ("XCiT", "Swin", "DaViT", "ViT", "DeiT")),
        "DarkViT",
        "DarkSwin",
    }
    for family in families:
        expected = first[family, False, False]
        assert all(any(iteration[name].any() for iteration in expected) for name in expected[0]), family
        for rank in (first, second):
            for recomputed, find_unused in itertools.product((False, True), repeat=2):
                for ours, stored in zip(rank[family, recomputed, find_unused], expected, strict=True):
                    assert ours.keys() == stored.keys()
                    assert all(torch.equal(ours[name], stored[name]) for name in stored), (family, find_unused)


@pytest.mark.slow
def test_two_machines_with_one_rank_each(tmp_path):
    port = free_port()
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    machines = [start(tmp_path, *common, "--node-rank", str(node)) for node in (0, 1)]
    for status, output in map(finish, machines):
        assert status == 0, output
    check_ranks(tmp_path)


def test_a_rank_that_fails_names_the_mistake(tmp_path):
    status, output = finish(start(tmp_path, *ONE_MACHINE, "1", arguments=["--resume", "nowhere.pth"]))
    assert status != 0
    assert "train.py: error: There is no checkpoint nowhere.pth." in output


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
def test_other_launchers_are_translated_for_torch(joined, monkeypatch, launcher, variables):
    for name, value in zip(variables, ("3", "4", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    init_cpu_process_group(launcher, dict(backend="nccl", timeout=60))
    (arguments, settings) = joined.pop()
    assert arguments == ("gloo",)
    assert settings["timeout"].total_seconds() == 60
    assert [os.environ[name] for name in LAUNCHER_VARIABLES] == ["3", "4", "1", "node-a", "29500"]


def test_first_slurm_machine_is_the_master(joined, monkeypatch, tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "node-[7-8]" ] && printf "node-7\\nnode-8\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in dict(PROCID="0", NTASKS="1", LOCALID="0", NODELIST="node-[7-8]").items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    init_cpu_process_group("slurm")
    assert os.environ["MASTER_ADDR"] == "node-7"
    assert joined == [(("gloo",), dict(timeout=None))]


def test_what_a_launcher_did_not_set_is_named(joined, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="WORLD_SIZE, LOCAL_RANK is not set"):
        init_cpu_process_group("pytorch")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        init_cpu_process_group("pytorch")
    assert joined == []
