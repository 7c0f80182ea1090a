"""The packages that mmspectral needs, and checks of what the running interpreter has of them.

The top of this file imports the standard library alone, and nothing of mmspectral: ``setup.py`` and
``tools/check_env.py`` load it by its path, before anything is installed or when what is installed is broken.
"""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from typing import NamedTuple

FRAMEWORKS = ("torch>=2.4", "torchvision>=0.19")
# The two families hold the same import packages, so an environment has one of them.
FAMILIES = {
    "onedl": ("onedl-mmengine>=0.10.12", "onedl-mmcv>=2.3.6", "onedl-mmdetection>=3.5.1", "onedl-mmpretrain>=1.3.6"),
    # mmengine 0.10 asks pkg_resources where a package lies; setuptools 82 took it out.
    "openmmlab": ("mmengine>=0.10.7,<1", "mmcv-lite>=2.0,<2.2", "mmdet>=3.3,<4", "mmpretrain>=1.2,<2", "setuptools<82"),
}
EXPORT = ("onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.5")
LANGUAGE = ("transformers>=5.20,<6", "tokenizers>=0.22", "scipy")
EXTRAS = {
    "onedl": (FRAMEWORKS[1], *FAMILIES["onedl"], "faster-coco-eval>=1.6"),
    "openmmlab": (FRAMEWORKS[1], *FAMILIES["openmmlab"], "faster-coco-eval>=1.6"),
    "export": EXPORT,
    "language": LANGUAGE,
    "tests": (
        *(*EXPORT, *LANGUAGE, "safetensors", "timm>=1.0"),
        *("codespell", "hypothesis", "pre-commit", "pytest>=8", "pytest-timeout", "pytest-xdist", "ruff"),
    ),
}
# Import package -> position in a family's tuple.
_IMPORTS = {"mmengine": 0, "mmcv": 1, "mmdet": 2, "mmpretrain": 3}
# mmcv-lite is mmcv without its compiled operators; either satisfies the requirement.
_ALTERNATIVES = {"mmcv-lite": ("mmcv", "mmcv-lite")}


class Finding(NamedTuple):
    """One line of the report; its level is "ok", "note", "warning" or, for what stops Mask R-CNN, "error"."""

    level: str
    subject: str
    detail: str
    remedy: str = ""


def distribution_name(requirement: str) -> str:
    """Return the distribution that a requirement such as ``"torch>=2.4"`` is about."""
    return re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", requirement).group()


def find_distribution(name: str) -> tuple[str, str] | None:
    """Return name and version of the distribution ``name``, or of one that does as well, or None."""
    for candidate in _ALTERNATIVES.get(name, (name,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return candidate, importlib.metadata.version(candidate)
    return None


def installed_families() -> dict[str, list[str]]:
    """Return, for each family, which of its four distributions are installed."""
    found = {
        family: [find_distribution(distribution_name(requirement)) for requirement in requirements[: len(_IMPORTS)]]
        for family, requirements in FAMILIES.items()
    }
    return {family: [name for name, _ in filter(None, names)] for family, names in found.items()}


def family_in_use() -> str:
    """Return the family with the most distributions installed; ``"onedl"`` where they are level."""
    installed = installed_families()
    return max(installed, key=lambda family: len(installed[family]))


def pip_command(requirements: Iterable[str], *options: str) -> str:
    """Return the shell command that installs ``requirements`` for this interpreter.

    torchvision is asked for together with the torch that is installed, which may be the one that fits the CUDA here.
    """
    requirements = list(requirements)
    torch = find_distribution("torch")
    if torch and any(distribution_name(requirement) == "torchvision" for requirement in requirements):
        requirements.append(f"torch=={torch[1]}")
    return shlex.join([sys.executable, "-m", "pip", "install", *options, *requirements])


def check_versions(tests: bool = False, family: str | None = None) -> list[Finding]:
    """Compare the installed distributions with what ``family`` (default: the one in use) and the tests need."""
    family = family or family_in_use()
    requirements = FRAMEWORKS + FAMILIES[family] + (EXTRAS["tests"] if tests else ())
    findings = [_check_requirement(requirement) for requirement in requirements]
    first, second = installed_families().values()
    if first and second:
        detail = f"{', '.join(first)} and {', '.join(second)} write into the same import packages"
        remove = shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", *first, *second])
        findings.append(Finding("warning", "families", detail, f"{remove} && {pip_command(FAMILIES['onedl'])}"))
    return findings


def _check_requirement(requirement: str) -> Finding:
    name = distribution_name(requirement)
    remedy = pip_command([requirement])
    found = find_distribution(name)
    if found is None:
        return Finding("error", name, f"not installed; {requirement} is needed", remedy)
    name, version = found
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return Finding("error", name, f"{version}; not compared: packaging is missing", pip_command(["packaging"]))
    if not Requirement(requirement).specifier.contains(version, prereleases=True):
        return Finding("error", name, f"{version} is installed; {requirement} is needed", remedy)
    return Finding("ok", name, version)


def check_environment() -> list[Finding]:
    """Try everything that mmdet's Mask R-CNN needs, from the versions to a call of its operators.

    Imports what it checks; a part that cannot be imported becomes a finding and not an exception.
    """
    families = " and ".join(family for family, names in installed_families().items() if names)
    needed = {module: FAMILIES[family_in_use()][position] for module, position in _IMPORTS.items()}
    findings = [
        Finding("ok", "python", f"{platform.python_version()} at {sys.executable}"),
        Finding("ok", "family", families or "none"),
        *check_versions(),
    ]
    torch_findings = _check_import("torch", FRAMEWORKS[0])
    findings += torch_findings
    if torch_findings:
        return [*findings, Finding("note", "mmcv.ops", "not tried: torch cannot be imported")]
    findings += _check_devices()
    needed |= dict(torchvision=FRAMEWORKS[1], cv2="opencv-python-headless", mmspectral="")
    for module in ("torchvision", "cv2", "mmengine", "mmcv", "mmspectral"):
        findings += _check_import(module, needed[module])
    if any(finding.level == "error" for finding in findings):
        return [*findings, Finding("note", "mmcv.ops", "not tried: resolve the errors above first")]
    findings += _check_operators(needed["mmcv"])
    findings += _check_multimodal()
    if all(finding.level != "error" for finding in findings):
        for module in ("mmpretrain.models", "mmdet.models", "mmdet.datasets", "mmdet.evaluation"):
            findings += _check_import(module, needed[module.partition(".")[0]])
    if find_distribution("faster-coco-eval") is None:
        detail = "not installed; COCO evaluation uses the slower pycocotools"
        findings.append(Finding("note", "faster-coco-eval", detail, pip_command(["faster-coco-eval"])))
    return findings


def _check_import(module: str, requirement: str) -> list[Finding]:
    """Return an error finding when ``module`` cannot be imported, else nothing."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return [Finding("error", f"import {module}", _reason(error), _import_remedy(error, module, requirement))]
    return []


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _import_remedy(error: Exception, module: str, requirement: str) -> str:
    at_fault, options = _package_at_fault(error)
    if at_fault == "transformers" != module:
        # One that mmpretrain's multimodal models do not fit; beside transformers 5 compat switches these models off.
        return pip_command([LANGUAGE[0]]) + "  # or uninstall transformers"
    if at_fault not in ("", module.partition(".")[0]):
        return pip_command([at_fault], *options)
    if module == "mmspectral":
        return "start this script from a complete checkout of mmspectral"
    if module == "cv2":
        return pip_command([requirement], "--force-reinstall", "--no-deps") + "  # needs no libGL"
    if module == "torchvision" and "torchvision::" in str(error):
        return "install the torchvision release that belongs to this torch: " + pip_command(["torchvision"])
    options = () if isinstance(error, ModuleNotFoundError) else ("--force-reinstall", "--no-deps")
    return pip_command([requirement], *options)


def _package_at_fault(error: BaseException | None) -> tuple[str, list[str]]:
    """Return the package that an import failed in, as far as the error or its cause says, and how pip mends it."""
    while error is not None:
        lazy = re.match(r"Failed to import (\w+)", str(error))  # transformers' own wording
        name = lazy[1] if lazy else isinstance(error, ImportError) and error.name
        if name:
            missing = isinstance(error, ModuleNotFoundError) and "." not in name
            return name.partition(".")[0], [] if missing else ["--upgrade"]
        error = error.__cause__ or error.__context__
    return "", []


def _check_devices() -> list[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        findings = [Finding("ok", "CUDA", f"{torch.version.cuda}, {len(names)} device(s): {', '.join(names)}")]
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            return [*findings, Finding("ok", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))]
        return [*findings, Finding("warning", "NCCL", "absent: training on several GPUs needs a torch that has it")]
    if shutil.which("nvidia-smi"):
        detail = f"this machine has an NVIDIA driver, but torch {torch.__version__} cannot use it"
        return [Finding("warning", "CUDA", detail, "install the torch build that fits the driver (see `nvidia-smi`)")]
    return [Finding("note", "CUDA", f"no device; {os.cpu_count()} CPU cores are used")]


def _check_multimodal() -> list[Finding]:
    from mmspectral.compat import multimodal

    detail = "mmpretrain's multimodal models need transformers 4 and are off; mmpretrain would not import with them"
    found = find_distribution("transformers")
    remedy = shlex.join([sys.executable, "-m", "mmspectral.compat", "install"])
    remedy += "  # for processes that import mmpretrain without mmspectral"
    return [Finding("note", " ".join(found), detail, remedy)] if multimodal.is_needed() else []


def _check_operators(requirement: str) -> list[Finding]:
    import torch

    from mmspectral.compat import mmcv_ops_backend

    backend = mmcv_ops_backend()
    without_extension = pip_command([requirement], "--force-reinstall", "--no-deps", "--no-cache-dir")
    if backend == "missing":
        detail = "mmcv._ext is absent and torchvision, which can stand in for it, is missing"
        return [Finding("error", "mmcv.ops", detail, pip_command([FRAMEWORKS[1]]))]
    if backend.startswith("broken"):
        detail = f"{backend}; mmcv's compiled extension does not fit this torch"
        return [Finding("error", "mmcv.ops", detail, without_extension)]
    detail = "torchvision stands in for mmcv._ext; operators that it lacks raise when they are called"
    served = Finding("ok", "mmcv.ops", detail if backend == "torchvision" else "mmcv's compiled extension")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [served, *(_try_operators(device, without_extension) for device in devices)]


def _try_operators(device: str, remedy: str) -> Finding:
    """Call RoIAlign and NMS on inputs whose results are known."""
    import torch

    subject = f"mmcv.ops on {device}"
    try:
        from mmcv.ops import RoIAlign, nms

        boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0], [0.0, 0.0, 8.0, 7.0], [20.0, 20.0, 24.0, 24.0]], device=device)
        kept = nms(boxes, torch.tensor([0.9, 0.8, 0.7], device=device), iou_threshold=0.5)[1].tolist()
        ramp = torch.arange(16.0, device=device).expand(1, 1, 16, 16)
        rois = torch.tensor([[0.0, 2.0, 2.0, 10.0, 10.0]], device=device)
        pooled = RoIAlign(output_size=2, spatial_scale=1.0, sampling_ratio=2, aligned=True)(ramp, rois)
        columns = pooled[0, 0, 0].tolist()
    except Exception as error:
        return Finding("error", subject, _reason(error), remedy)
    # On a ramp, each bin's average is the ramp at its centre: 4 - 0.5 and 8 - 0.5.
    if kept != [0, 2] or columns != [3.5, 7.5]:
        return Finding("error", subject, f"wrong results: nms kept {kept}, RoIAlign gave {columns}", remedy)
    return Finding("ok", subject, "RoIAlign and NMS give the expected values")


def print_report(findings: Iterable[Finding]) -> None:
    """Print one line for each finding, and its remedy below it."""
    for level, subject, detail, remedy in findings:
        print(f"{level:8}{subject}: {detail}")
        if remedy:
            print(f"{'':8}remedy: {remedy}")
