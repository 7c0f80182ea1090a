"""Projections whose attention layer reads their ``weight`` instead of calling them.

torchvision's Swin, timm's BEiT, EVA and Swin V2, mmpretrain's BEiT and Swin V2
and CLIP's attention pooling compute ``F.linear(x, self.qkv.weight, ...)``. What
is put in the place of ``qkv`` is then never called, and a correction in its
``forward`` would be silently ignored. :class:`WeightReadLinear` shows W + C to
these readers while the attention layer runs, and W to everybody else.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

import torch
from torch import Tensor, nn

from mmspectral.layers.projection import ConditionedLinear

HARMLESS = ("bias", "in_features", "out_features")
NOT_FORWARD = ("init", "reset", "load")  # in the name of a method: it writes weights, and W is what it must see


class WeightReadLinear(ConditionedLinear, nn.Linear):
    """Conditioned projection that reads as W + C inside its attention layer.

    ``weight`` is the parameter W, but while ``forward`` of the module that owns
    it runs (see :meth:`shown_to`) it is W + C. The reader multiplies by W + C as
    one matrix, so in half precision, and under autocast, what was learned on the
    diagonal is rounded beside lambda; a projection that is called does better.
    """

    # nn.Linear is named as a base once more for mmengine's initialisers, which look at direct bases only.

    def forward(self, x: Tensor) -> Tensor:
        return self.conditioning.linear(x, self._parameters["weight"], self.bias, self.layout)

    def corrected_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        weight = self._parameters["weight"]
        return self.conditioning.corrected(weight if dtype is None else weight.to(dtype), self.layout)

    @staticmethod
    def shown_to(owner: nn.Module, name: str) -> None:
        """Let ``owner`` read W + C from its child ``name`` during its forward pass.

        The hooks find the child by name when they run: copies of the owner
        (EMA) use their own, and nothing happens when the child was folded.
        """
        owner.register_forward_pre_hook(functools.partial(_show, name=name))
        owner.register_forward_hook(functools.partial(_hide, name=name), always_call=True)


def forget_readers(model: nn.Module) -> None:
    """Take the hooks of :meth:`WeightReadLinear.shown_to` off where the projection was folded."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                ours = isinstance(hook, functools.partial) and hook.func in (_show, _hide)
                if ours and not isinstance(getattr(module, hook.keywords["name"]), WeightReadLinear):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)


@functools.cache
def reads_attribute(owner: type[nn.Module], child: str, attribute: str) -> bool:
    """Whether the methods of a class take ``self.<child>.<attribute>``, or hand ``self.<child>`` on.

    Looks at the source of the class and of its bases outside torch, except at
    methods that initialise or load. A class without source counts as a reader:
    showing W + C to one that only calls the projection does no harm.

    Args:
        owner: Class of the attention layer.
        child: Name of the projection.
        attribute: ``"weight"``, or a parameter of an ``nn.MultiheadAttention``.
    """
    harmless = {*HARMLESS, "weight"} - {attribute}
    for base in owner.__mro__[:-1]:
        if base.__module__.partition(".")[0] == "torch":
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return True
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        if any(
            _uses(method, child, harmless) for method in methods if not any(word in method.name for word in NOT_FORWARD)
        ):
            return True
    return False


def _uses(method: ast.FunctionDef, child: str, harmless: set[str]) -> bool:
    """Whether a method does more with ``self.<child>`` than call it, compare it or take a harmless attribute."""
    uses, calls = 0, 0
    for node in ast.walk(method):
        uses += _is_child(node, child)
        if isinstance(node, ast.Call):
            calls += _is_child(node.func, child)
        elif isinstance(node, ast.Attribute):
            calls += node.attr in harmless and _is_child(node.value, child)
        elif isinstance(node, ast.Compare):
            calls += sum(_is_child(operand, child) for operand in (node.left, *node.comparators))
    return uses > calls


def _is_child(node: ast.AST, child: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == child
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _show(owner: nn.Module, inputs: tuple, name: str) -> None:
    projection = getattr(owner, name)
    if isinstance(projection, WeightReadLinear):
        # An instance attribute hides the parameter, which nn.Module finds only where there is none.
        projection.__dict__["weight"] = projection.corrected_weight()


def _hide(owner: nn.Module, inputs: tuple, outputs: torch.Tensor, name: str) -> None:
    getattr(owner, name).__dict__.pop("weight", None)
