"""Export a backbone or a classifier as ONNX or as a program of torch.export, checked against eager mode."""

import contextlib
import copy
import functools
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import AdaptivePadding
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmpretrain.models.utils import ShiftWindowMSA
from torch import Tensor, nn
from torch.fx.experimental import _config as sizes
from torch.utils._pytree import tree_leaves

from mmspectral.arguments import host_package
from mmspectral.checkpoints import fit_to_model, fit_whole, read_checkpoint
from mmspectral.compat.atomic_write import write_atomically
from mmspectral.errors import UsageError
from mmspectral.layers import fold
from mmspectral.models.backbones import SpectralViT
from mmspectral.ops.random_features import PLAIN_OPERATORS

SUFFIXES = {"onnx": ".onnx", "exported-program": ".pt2"}
TOLERANCE = 1e-4  # of the greatest output, or of 1


@dataclass(frozen=True)
class ExportReport:
    """What :func:`export` wrote."""

    file: Path
    outputs: list[tuple[int, ...]]  # shape of each for two images of the size asked for
    differences: dict[tuple[int, ...], float]  # greatest absolute difference from eager mode by input shape

    def __str__(self) -> str:
        checks = "; ".join(f"{list(shape)}: {value:.1e}" for shape, value in self.differences.items())
        return f"{self.file}: outputs {', '.join(map(str, self.outputs))}; greatest difference from eager: {checks}"


@torch.no_grad()
def export(
    cfg: Config,
    checkpoint: str,
    target: Path,
    file_format: str,
    part: str = "model",
    size: tuple[int, int] = (224, 224),
    fixed_size: bool = False,
    force: bool = False,
) -> ExportReport:
    """Export a model with its corrections folded in, and compare the file with the model in eager mode.

    The input is a float32 batch of images [B, 3, H, W], normalised as the config's ``data_preprocessor`` does it; the
    outputs are logits, or what the backbone returns. B is free, and so are H and W unless ``fixed_size`` is set.

    Args:
        cfg: Config with the model.
        checkpoint: Path or URL; it must have every weight that is exported.
        target: File to write; its folder is made.
        file_format: A key of :data:`SUFFIXES`.
        part: ``"model"``, a whole classifier, or ``"backbone"``, also of a detector.
        size: H, W at which the file is checked; without ``fixed_size`` also at a larger size of other shape.
        fixed_size: Whether the file takes images of ``size`` only.
        force: Whether ``target`` is replaced.

    Raises:
        UsageError: The model is a whole detector, a weight or package is missing, ``target`` is there, the model cannot
            be traced, or the file differs from eager mode. Nothing is written then.
    """
    _require_possible(cfg, target, file_format, part, force)
    exported = _load(cfg, checkpoint, part)
    eager = copy.deepcopy(exported)
    with contextlib.suppress(ValueError):  # QKNorm: no weight does what it does, and it is traced as it is
        fold(exported, keep=False)
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    shapes = [(2, 3, *size), (1, 3, *size)]
    if not fixed_size:
        shapes.append((2, 3, size[0] + 70, size[1] + 90))
    program = _trace(exported, draw(2, *shapes[-1][1:]), fixed_size)
    outputs, differences = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, target.name)
        run = _write_onnx(program, file) if file_format == "onnx" else _write_program(program, file)
        for shape in shapes:
            images = draw(shape)
            outputs[shape] = run(images)
            differences[shape] = _compare(outputs[shape], tree_leaves(eager(images)), shape)
        try:
            write_atomically(file.read_bytes(), target, overwrite=force)
        except OSError as error:
            raise UsageError(str(error)) from error
    return ExportReport(target, [tuple(output.shape) for output in outputs[shapes[0]]], differences)


def _require_possible(cfg: Config, target: Path, file_format: str, part: str, force: bool) -> None:
    if part == "model" and host_package(cfg) == "mmdet":
        raise UsageError(
            "A whole detector cannot be exported: mmdet's heads branch on the values of tensors (the first is `if not "
            "valid_mask.all()` in RPNHead._bbox_post_process), which torch.export, and ONNX export on top of it, "
            "refuse. Pass --part backbone."
        )
    if target.suffix != SUFFIXES[file_format]:
        raise UsageError(f"{target} must end in {SUFFIXES[file_format]} for the format {file_format}.")
    if target.exists() and not force:
        raise UsageError(f"{target} is there already; choose another name or pass --force.")
    needed = ("onnx", "onnxruntime", "onnxscript") if file_format == "onnx" else ()
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(
            f"The format onnx needs {', '.join(missing)}: pip install {' '.join(missing)}, or pass "
            "--format exported-program."
        )


def _load(cfg: Config, checkpoint: str, part: str) -> nn.Module:
    with DefaultScope.overwrite_default_scope(host_package(cfg)):
        model = MODELS.build(copy.deepcopy(cfg.model)).eval()
    fit = fit_whole if part == "model" else fit_to_model
    try:
        weights, report = fit(model, read_checkpoint(checkpoint), checkpoint)
    except ValueError as error:
        raise UsageError(str(error)) from error
    missing = [name for name in report.missing if not name.endswith(".correction")]  # found from W
    if missing:
        raise UsageError(f"{checkpoint} lacks {len(missing)} weights, such as {missing[0]}, which would stay random.")
    model.load_state_dict(weights.state_dict(), strict=False)
    return model.backbone if part == "backbone" else model


def _trace(model: nn.Module, images: Tensor, fixed_size: bool) -> torch.export.ExportedProgram:
    free = (0,) if fixed_size else (0, 2, 3)
    _remove_branches(model)
    try:
        # torch would take a map of one window for a case of its own. Without windows it is right as it is, and this
        # setting would make a single image such a case (XCiT).
        windows = any(isinstance(module, _ShiftedWindows) for module in model.modules())
        with sizes.patch(backed_size_oblivious=windows):
            return torch.export.export(
                model, (images,), dynamic_shapes=(dict.fromkeys(free, torch.export.Dim.DYNAMIC),), strict=False
            )
    except Exception as error:  # torch.export has no base class for its refusals
        remedy = "" if fixed_size else " Pass --fixed-size to export it for the images of one --size."
        reason = next(line for line in str(error).splitlines() if line.strip())
        raise UsageError(f"torch.export cannot trace this {type(model).__name__}: {reason}{remedy}") from error


def _write_program(program: torch.export.ExportedProgram, file: Path):
    torch.export.save(program, file)
    written = torch.export.load(file).module()
    return lambda images: tree_leaves(written(images))


def _write_onnx(program: torch.export.ExportedProgram, file: Path):
    import onnxruntime  # an optional dependency

    try:
        program = program.run_decompositions(PLAIN_OPERATORS)
        torch.onnx.export(program, dynamo=True, verbose=False).save(file)
    except NotImplementedError as error:
        raise UsageError(f"ONNX cannot hold this model: {error} Pass --format exported-program.") from error
    except torch.onnx.errors.OnnxExporterError as error:
        reason = next(line for line in str(error.__cause__ or error).splitlines() if line.strip())
        raise UsageError(f"ONNX cannot hold this model: {reason} Pass --format exported-program.") from error
    if len(list(file.parent.iterdir())) > 1:
        raise UsageError("The weights do not fit into one ONNX file (2 GB); pass --format exported-program.")
    session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: [torch.from_numpy(output) for output in session.run(None, {name: images.numpy()})]


def _compare(outputs: list[Tensor], expected: list[Tensor], shape: tuple[int, ...]) -> float:
    """Return the greatest difference, or raise if it is more than rounding."""
    if [output.shape for output in outputs] != [tensor.shape for tensor in expected]:
        raise UsageError(
            f"For input {shape} the file gives {[tuple(output.shape) for output in outputs]}, the model "
            f"{[tuple(tensor.shape) for tensor in expected]}. Nothing was written."
        )
    difference = max(float((a - b).abs().max()) for a, b in zip(outputs, expected, strict=True))
    allowed = TOLERANCE * max(1.0, *(float(tensor.abs().max()) for tensor in expected))
    if not difference <= allowed:  # also a NaN
        raise UsageError(
            f"For input {shape} the file differs by {difference:.1e} from the model in eager mode, where {allowed:.1e} "
            "is allowed. Nothing was written."
        )
    return difference


def _remove_branches(model: nn.Module) -> None:
    """Put layers without Python branches on sizes in the place of stock ones, in place; they compute the same.

    torch.export keeps only the branch that the traced images take.
    """
    replacements = {AdaptivePadding: _Padding, ShiftWindowMSA: _ShiftedWindows}
    for name, module in list(model.named_modules()):
        for stock, replacement in replacements.items():
            if isinstance(module, stock):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, replacement(module))
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(_contiguous)
        if isinstance(module, SpectralViT):
            module.patch_resolution = tuple(map(_Length, module.patch_resolution))


class _Length(int):
    """An int that equals no other: mmpretrain skips interpolation to the model's own grid, where it changes nothing."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False


class _Padding(nn.Module):
    """mmcv's ``AdaptivePadding`` for kernels not smaller than their stride; pads by zero rows where none are needed."""

    def __init__(self, stock: AdaptivePadding) -> None:
        super().__init__()
        self.strides = stock.stride
        self.reaches = [(k - 1) * d + 1 for k, d in zip(stock.kernel_size, stock.dilation, strict=True)]
        self.centred = stock.padding == "same"

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for length, stride, reach in zip(x.shape[-2:], self.strides, self.reaches, strict=True):
            total = (length + stride - 1) // stride * stride - stride + reach - length
            before = total // 2 if self.centred else 0
            pads = [before, total - before, *pads]
        return F.pad(x, pads)


class _ShiftedWindows(nn.Module):
    """mmpretrain's ``ShiftWindowMSA``, and ours for maps smaller than a window, with computed positions."""

    def __init__(self, stock: ShiftWindowMSA) -> None:
        super().__init__()
        self.w_msa, self.drop = stock.w_msa, stock.drop
        self.window_size, self.shift_size, self.pad_small_map = stock.window_size, stock.shift_size, stock.pad_small_map

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Map tokens [B, H * W, D] of a map H x W to [B, H * W, D]."""
        (H, W), S = hw_shape, self.window_size
        B, _, D = query.shape
        rows, columns = (H + S - 1) // S, (W + S - 1) // S  # of windows
        x = F.pad(query.unflatten(1, (H, W)), (0, 0, 0, columns * S - W, 0, rows * S - H))
        shift = self._shift(H, W, query.device) if self.shift_size else 0
        mask = None
        if self.shift_size:
            i, j = (torch.arange(n * S, device=query.device) for n in (rows, columns))
            x = x.index_select(1, _wrapped(i + shift, rows * S)).index_select(2, _wrapped(j + shift, columns * S))
            region = 3 * self._region(i, rows * S, shift)[:, None] + self._region(j, columns * S, shift)
            region = _transposed(region.view(rows, S, columns, S), 1, 2).view(rows * columns, S * S)
            mask = (region[:, None] != region[:, :, None]) * -100.0
        x = _transposed(x.view(B, rows, S, columns, S, D), 2, 3).view(B * rows * columns, S * S, D)
        x = self.w_msa(x, mask=mask).view(B, rows, columns, S, S, D)
        x = _transposed(x, 2, 3).view(B, rows * S, columns * S, D)
        i, j = (torch.arange(n, device=query.device) for n in (H, W))
        x = x.index_select(1, _wrapped(i - shift, rows * S)).index_select(2, _wrapped(j - shift, columns * S))
        return self.drop(x.view(B, H * W, D))

    def _shift(self, H: int, W: int, device: torch.device) -> Tensor | int:
        if self.pad_small_map:
            return self.shift_size
        shortest = torch.minimum(*(torch.scalar_tensor(n, dtype=torch.long, device=device) for n in (H, W)))
        return torch.where(shortest > self.window_size, self.shift_size, 0)

    def _region(self, positions: Tensor, length: int, shift: Tensor | int) -> Tensor:
        """Return which of three regions a shifted position is from: 0, or 1 and 2 in the last window."""
        return (positions >= length - self.window_size).long() + (positions >= length - shift).long()


def _wrapped(positions: Tensor, length: int) -> Tensor:
    """Return ``positions % length`` of positions in [-length, 2 * length); ONNX export has no such ``%``."""
    return positions + length * ((positions < 0).long() - (positions >= length).long())


def _transposed(x: Tensor, first: int, second: int) -> Tensor:
    """Return a copy; a reshape would ask whether it must copy, which depends on the sizes."""
    return x.transpose(first, second).clone(memory_format=torch.contiguous_format)


def _contiguous(module: nn.Conv2d, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Copy tokens that were made a map; torch would ask whether their layout is that of a single image."""
    return (inputs[0].clone(memory_format=torch.contiguous_format),)
