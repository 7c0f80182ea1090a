"""Paths of the checkout, commands in processes of their own, and small data sets, for tests in any folder."""

import contextlib
import json
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, TOOLS, DATA = ROOT / "configs", ROOT / "tools", ROOT / "tests" / "data"
QUICKSTART = CONFIGS / "quickstart" / "mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py"
# A classifier that trains in a second; it needs its folder on the path.
TOY = DATA / "toy_classification"
# ``--cfg-options`` that make one epoch of two iterations of the quick start, in the main process.
TINY = (
    "train_cfg.max_epochs=1",
    "train_cfg.val_interval=1",
    "train_dataloader.batch_size=2",
    "train_dataloader.dataset.num_images=5",
    "val_dataloader.dataset.num_images=4",
    "test_dataloader.dataset.num_images=4",
    *(f"{part}_dataloader.num_workers=0" for part in ("train", "val", "test")),
    *(f"{part}_dataloader.persistent_workers=False" for part in ("train", "val", "test")),
    "param_scheduler=[]",
)
# What an earlier test, a launcher or a set-up script may have set.
_LEFT_OVER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "PORT", "GPUS"}
_LEFT_OVER |= {"SRUN_ARGS", "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "VIRTUAL_ENV"}
_LEFT_OVER |= {"CONDA_PREFIX", "MMSPECTRAL_STACK", "MMSPECTRAL_VENV", "MMSPECTRAL_SETUP_SECONDS"}


def environment(path: Iterable[os.PathLike | str] = (ROOT,), **changes: object) -> dict[str, str]:
    """Return the variables of a command that finds ``path`` first, sees no GPU and takes one thread."""
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT_OVER}
    kept |= dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="-1", MMSPECTRAL_PYTHON=sys.executable)
    kept["PYTHONPATH"] = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {name: str(value) for name, value in changes.items()}


def run(
    *command: object, path: Iterable[os.PathLike | str] = (ROOT,), cwd=None, timeout=290, **changes: object
) -> subprocess.CompletedProcess:
    """Run a command and return it with what it printed; ``path`` and ``changes`` are those of :func:`environment`."""
    return subprocess.run(
        list(map(str, command)),
        env=environment(path, **changes),
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def output_of(*command: object, **options: object) -> str:
    """Run a command as :func:`run` does and return what it printed; fail the test if the command fails."""
    return printed(run(*command, **options))


def printed(done: subprocess.CompletedProcess) -> str:
    """Return what a command printed; fail the test if it failed."""
    assert done.returncode == 0, f"{done.args}:\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout + done.stderr


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [f"{name}.{part}" for name in ("mmspectral", "mmpretrain", "mmdet") for part in ("apis", "datasets")]
)


def fork(
    function: Callable, *arguments: object, path=(ROOT,), cwd=None, timeout=290, ranks=1, **changes: object
) -> subprocess.CompletedProcess:
    """Call a function in a process that is forked from one which has imported mmdet; else as :func:`run`.

    A process that lives longer than ``timeout`` is killed. With several ``ranks`` there are so many processes, with
    what torchrun tells its own.
    """
    with mock.patch.dict(os.environ, environment(), clear=True):
        multiprocessing.forkserver.ensure_running()
    if ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            changes.update(WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=server.getsockname()[1])
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(2))
        processes = []
        for rank in range(ranks):
            own = changes if ranks == 1 else dict(changes, RANK=rank, LOCAL_RANK=rank)
            task = (environment(path, **own), cwd, [str(entry) for entry in path], (out.name, err.name))
            processes.append(_FORKS.Process(target=_forked, args=(*task, function, *map(str, arguments))))
            processes[-1].start()
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()
        status = next((process.exitcode for process in processes if process.exitcode), 0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def _forked(variables, cwd, path, outputs, function, *arguments):
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = path
    os.chdir(cwd or os.getcwd())
    for number, name in enumerate(outputs, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    function(*arguments)


def run_tool(name: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    """Run a script of ``tools/`` by :func:`fork`."""
    return fork(run_script, TOOLS / name, *arguments, **options)


def run_script(path: str, *arguments: str) -> None:
    """Run a script with these arguments in this process."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def tool_output(name: str, *arguments: object, **options: object) -> str:
    """Run a script as :func:`run_tool` does and return what it printed; fail the test if it fails."""
    return printed(run_tool(name, *arguments, **options))


def run_python(code: str, *flags: str, **options: object) -> subprocess.CompletedProcess:
    """Run code in a new interpreter, as :func:`run` does."""
    return run(sys.executable, *flags, "-c", code, **options)


def class_folders(folder: Path, classes: Iterable[str], images: int = 2, size: tuple[int, int] = (32, 32)) -> Path:
    """Write ``folder/CLASS/N.png`` with noise of [H, W] = ``size`` pixels, and return ``folder``."""
    import cv2
    import numpy as np

    noise = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(images):
            pixels = noise.integers(0, 256, (*size, 3), dtype=np.uint8)
            assert cv2.imwrite(str(folder / name / f"{number}.png"), pixels)
    return folder


def coco_set(folder: Path, classes: Iterable[str], images: int = 2, size: tuple[int, int] = (64, 64)) -> Path:
    """Write noisy images with one box and mask each, and return the annotation file ``folder/annotations.json``."""
    height, width = size
    class_folders(folder, ["images"], images, size)
    categories = [dict(id=number, name=name) for number, name in enumerate(classes, 1)]
    x, y, w, h = width // 4, height // 4, width // 2, height // 2
    box = dict(bbox=[x, y, w, h], area=w * h, iscrowd=0, segmentation=[[x, y, x + w, y, x + w, y + h, x, y + h]])
    content = dict(
        categories=categories,
        images=[dict(id=i, file_name=f"{i}.png", height=height, width=width) for i in range(images)],
        annotations=[
            dict(box, id=i + 1, image_id=i, category_id=categories[i % len(categories)]["id"]) for i in range(images)
        ],
    )
    (folder / "annotations.json").write_text(json.dumps(content))
    return folder / "annotations.json"


def log_lines(work_dir: Path, having: str = "") -> list[dict]:
    """Return the lines with that text which the newest run in a folder logged, of losses and of metrics."""
    lines = max(Path(work_dir).glob("*/vis_data/scalars.json")).read_text().splitlines()
    return [json.loads(line, parse_constant=int) for line in lines if having in line]  # NaN is no JSON


class Call:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def assert_rounded_once(actual, exact, slack: float = 1e-6) -> None:
    """Assert that a half-precision tensor is a float64 one rounded once, but for the error of float32 arithmetic."""
    import torch

    error = (actual.double().cpu() - exact).abs()
    assert (error <= torch.finfo(actual.dtype).eps / 2 * exact.abs() + slack).all()
