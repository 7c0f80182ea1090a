"""Establish by a run what the rows of an attention layer's projections hold.

A copy of the layer is run on probe tokens with weights drawn at random. Rows are
those of q, k and v of a layer of dot-product attention exactly if

1. where all tokens are the same nothing depends on q and k, and the output is affine in v;
2. without q nothing depends on k;
3. q of a token changes the output at that token alone, k of a token that at others;
4. (heads) without v of a head nothing depends on q and k of that head, and each
   of its q and k acts on each of its v.

No other rows pass, so the first layout that does is the one. What cannot be run,
or passes for no layout, is inconclusive.
"""

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from mmspectral.ops import ROW_ORDERS, ProjectionLayout

NOTHING, SOMETHING = 1e-4, 1e-3  # share of the effect of v up to which there is no effect, and from which there is one
MARKED = 1  # token that has the marked feature: not the first, which may be a class token, and seen by causal ones
CONTEXT = ("context", "memory", "encoder_hidden_states", "key_value_states", "key", "value", "k", "v")
GRID = (
    "hw",
    "hw_shape",
    "size",
    "feat_size",
    "grid_size",
    "spatial_shape",
    "resolution",
    "patch_resolution",
    "input_size",
    "in_size",
)
WINDOWS = ("window_size", "ws")  # a layer pads other grids by tokens of zero
ROTARY = ("rotary_ndims", "rotary_dim", "head_dim", "head_size")  # channels that are rotated
SIDES = (4, 7, 8, 14, 16)  # of the grid of tokens, where the layer does not say
FORMS = ("flat", "grid", "rotary", "class token", "channels first", "windows")  # of the tokens, or what goes with them
Rows = dict[str, Tensor]  # indices of rows by child


class Inconclusive(Exception):
    """The probe cannot tell; the message is a reason that follows "since"."""


def establish(
    owner: nn.Module, group: Mapping[str, str], heads: Mapping[str, int | None]
) -> dict[str, tuple[tuple[str, ...], int | None, str]]:
    """Return roles, number of heads and row order of the projections of an attention layer.

    The layer, its gradients and the global generator stay as they are.

    Args:
        owner: The layer, whose ``forward`` takes tokens.
        group: Its projections, each an ``nn.Linear``, and the letters of their roles, in any order.
        heads: What is said about the heads of each projection, or None.

    Returns:
        By projection; heads that were not confirmed are None.

    Raises:
        Inconclusive: Not certain, or not runnable.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        layer = _Layer(owner, tuple(group))
        layouts = layer.find_layouts(group, heads)
        certain = all(heads.values()) and layer.heads_are(layouts)
    if not certain and any(len(layout.roles) > 1 and layout.heads_first for layout in layouts.values()):
        raise Inconclusive("its rows alternate between q, k and v, but not by the heads that it says it has")
    return {
        child: (layout.roles, layout.num_heads if certain else None, layout.row_order)
        for child, layout in layouts.items()
    }


def _layouts(roles: str, heads: int | None) -> Iterator[ProjectionLayout]:
    orders = ROW_ORDERS if len(roles) > 1 and heads is not None and heads > 1 else ROW_ORDERS[:1]
    for order, arranged in itertools.product(orders, itertools.permutations(roles)):
        yield ProjectionLayout(arranged, heads or 1, order)


class _Layer:
    """A copy of an attention layer with random weights, and a way to call it."""

    def __init__(self, owner: nn.Module, children: tuple[str, ...]) -> None:
        if any(t.is_meta for t in itertools.chain(owner.parameters(), owner.buffers())):
            raise Inconclusive("its weights are on the meta device, so that it cannot be run")
        try:
            self.module = copy.deepcopy(owner)
            self.module.to("cpu", torch.float32)
            self.module.eval()
            self.module.requires_grad_(False)
        except Exception as error:
            raise Inconclusive(f"it cannot be copied ({_first_line(error)})") from error
        for module in self.module.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.clear()
        torch.manual_seed(0)
        for module in self.module.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if "bias" in name and parameter.dim() == 1:
                    parameter.zero_()
                elif isinstance(module, nn.Linear) or not parameter.any():
                    parameter.normal_(std=max(parameter[0].numel(), 1) ** -0.5 if parameter.dim() else 1.0)
        for child in children:  # new ones, each with a weight of its own: some share it
            old = self.module.get_submodule(child)
            setattr(self.module, child, nn.Linear(old.in_features, old.out_features, old.bias is not None).eval())
        self.linears = {child: self.module.get_submodule(child).requires_grad_(False) for child in children}
        for linear in self.linears.values():
            if linear.bias is not None:
                linear.bias.zero_()
        self.width = self.linears[children[0]].in_features
        self.base = {child: 1.5 * self._draw(child) for child in children}

    def _draw(self, child: str) -> Tensor:
        weight = torch.randn_like(self.linears[child].weight) / self.linears[child].in_features ** 0.5
        weight[:, 0] = 0  # the marked feature
        return weight

    def find_layouts(self, group: Mapping[str, str], heads: Mapping[str, int | None]) -> dict[str, ProjectionLayout]:
        """Return the layouts that explain what the layer computes, on the first tokens that it takes."""
        reasons = []
        for grid, form in itertools.product(_grids(self.module), FORMS):
            self.form = form
            self.arguments, self.same = (
                _arguments(self.module, self.linears, grid, form, same) for same in (False, True)
            )
            try:
                expected = self.run({})
            except Exception as error:
                shape = list(self.arguments[0].shape)
                reasons.append(f"it does not run on tokens {shape} ({_first_line(error)})")
                continue
            if len(expected) not in (2, self.arguments[0].numel() // self.width):
                reasons.insert(0, "its output has another number of tokens than its input")
            elif not torch.equal(expected, self.run({})):
                raise Inconclusive("it gives other outputs when it is run again")
            else:
                self.idle = False
                for layouts in itertools.product(*(_layouts(roles, heads[child]) for child, roles in group.items())):
                    layouts = dict(zip(group, layouts, strict=True))
                    if self.are_q_k_v(layouts):
                        return layouts
                reasons.insert(0, "no layout that is known here explains what it computes")
                if not self.idle:  # a stride that merges all tokens into one tells nothing; more of them may
                    break
        raise Inconclusive(reasons[0])

    def run(self, weights: Mapping[str, Tensor], arguments: list | None = None) -> Tensor:
        """Return the output [tokens, channels] with other weights of some projections."""
        for child, linear in self.linears.items():
            linear.weight.copy_(weights.get(child, self.base[child]))
        out = self.module(*(arguments or self.arguments))
        while isinstance(out, (tuple, list)):
            out = out[0]
        return (out.movedim(1, -1) if self.form == "channels first" else out).flatten(0, -2).float()

    def rows(self, layouts: Mapping[str, ProjectionLayout], scope: str = "full") -> dict[str, Rows]:
        """Return the rows of each role by child: [D], or for scope ``head`` [h, d]."""
        found: dict[str, Rows] = {}
        for child, layout in layouts.items():
            blocks = layout.split(torch.arange(self.linears[child].out_features)[:, None], scope)[..., 0]
            for role, indices in zip(layout.roles, blocks, strict=True):
                found.setdefault(role, {})[child] = indices
        if set(found) != set("qkv"):
            raise Inconclusive("it has not all of q, k and v")
        return found

    def effect(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
        """Return, per token, how much the output changes from one set of weights to another."""
        return (self.run(second) - self.run(first)).abs().amax(-1)

    def changed(self, what: str, *parts: Rows, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return weights with some rows ``"zero"``, ``"new"`` or ``"marked"``: changed at one token alone."""
        weights = {child: weight.clone() for child, weight in {**self.base, **(weights or {})}.items()}
        for child, indices in (entry for part in parts for entry in part.items()):
            if what == "marked":
                weights[child][indices, 0] = torch.randn(len(indices))
            else:
                weights[child][indices] = 1.5 * self._draw(child)[indices] if what == "new" else 0.0
        return weights

    def none(self, effect: Tensor) -> bool:
        return bool(effect.max() <= NOTHING * self.whole)

    def some(self, effect: Tensor) -> bool:
        return bool(effect.max() >= SOMETHING * self.whole)

    def are_q_k_v(self, layouts: Mapping[str, ProjectionLayout]) -> bool:
        try:
            rows = self.rows(layouts)
        except ValueError:  # another number of rows
            return False
        q, k, v = (rows[role] for role in "qkv")
        other = self.changed("new", v)
        self.whole = self.effect({}, other).max()
        if not self.whole.isfinite() or not self.whole > 0:
            return False
        none, some = self.none, self.some
        if not none((self.run({}, self.same) - self.run(self.changed("new", q, k), self.same)).abs()):
            return False
        middle = {child: (weight + self.base[child]) / 2 for child, weight in other.items()}
        if not none((self.run({}) + self.run(other) - 2 * self.run(middle)).abs()):
            return False
        without_q = self.changed("zero", q)
        if not none(self.effect(without_q, self.changed("new", k, weights=without_q))):
            return False
        here, elsewhere = (self.effect({}, self.changed("marked", part)) for part in (q, k))
        if len(here) == 2:  # the class tokens alone have queries, and the marked one is none
            return some(self.effect({}, self.changed("new", q))) and none(here) and some(elsewhere)
        self.idle = self.idle or not some(here)
        others = torch.arange(len(here)) != MARKED
        return some(here) and none(here[others]) and some(elsewhere[others])

    def heads_are(self, layouts: Mapping[str, ProjectionLayout]) -> bool:
        """Return whether heads are as the layouts say; :meth:`are_q_k_v` holds for these."""
        rows = self.rows(layouts, "head")
        (q_child, q), (k_child, k), (v_child, v) = (next(iter(rows[role].items())) for role in "qkv")
        h, H = len(q), len(k)
        if len(v) != H or h % H:
            return False
        for head in {0, H // 2, H - 1}:
            own = q[head * (h // H) : (head + 1) * (h // H)]
            without = self.changed("zero", {v_child: v[head]})
            change = self.changed("new", {q_child: own.flatten()}, {k_child: k[head]}, weights=without)
            if not self.none(self.effect(without, change)):
                return False
            last_only = self.changed("zero", {v_child: v.flatten()[v.flatten() != v[head, -1]]})
            for child, row in ((q_child, own[-1, :1]), (k_child, k[head, :1])):
                if not self.effect(last_only, self.changed("new", {child: row}, weights=last_only)).max() > 0:
                    return False
        return True


def _grids(module: nn.Module) -> list[tuple[int, int]]:
    """Return sides of grids of tokens to try: what the layer's attributes and tables may mean, and usual ones."""
    windows = [tuple(value) for value in vars(module).values() if isinstance(value, (tuple, list)) and len(value) == 2]
    windows = [window for window in windows if all(isinstance(side, int) for side in window)]
    windows += [(side, side) for key in WINDOWS if isinstance(side := getattr(module, key, None), int)]
    for length in (b.shape[-1] for b in module.buffers() if b.dim() > 1 and b.shape[-1] == b.shape[-2]):
        side = round(length**0.5)
        windows.append((side, side) if side * side == length else (1, length))
    sides = [n for n in vars(module).values() if isinstance(n, int) and not isinstance(n, bool) and 2 <= n <= 32]
    return [g for g in dict.fromkeys([*windows, *((n, n) for n in (*SIDES, *sides))]) if 2 < g[0] * g[1] <= 1024]


def _arguments(
    module: nn.Module, linears: Mapping[str, nn.Linear], grid: tuple[int, int], form: str, same: bool
) -> list[object]:
    """Return what to call the layer with: tokens, and whatever else it asks for that has no default."""
    widths = [linear.in_features for linear in linears.values()]
    arguments: list[object] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        name, needed = parameter.name, parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            break
        if not arguments:
            arguments.append(_tokens(widths[0], grid, form, same))
        elif name in CONTEXT and (needed or widths[-1] != widths[0]):
            arguments.append(_tokens(widths[-1], grid, form, same))
        elif name == "position_embeddings" and form == "rotary":  # cosines and sines of no rotation
            d = next((d for name in ROTARY if isinstance(d := getattr(module, name, None), int)), 2)
            angles = torch.zeros(2, grid[0] * grid[1], d)
            arguments.append((angles.cos(), angles.sin()))
        elif name == "position_ids" and form == "rotary":
            arguments.append(torch.arange(grid[0] * grid[1])[None])
        elif not needed:
            arguments.append(parameter.default)
        elif name in ("H", "W", "h", "w", "height", "width"):
            arguments.append(grid[name[0].lower() == "w"])
        elif name in GRID:
            arguments.append(grid)
        elif any(part in name for part in ("mask", "past", "cache", "bias", "position")):
            arguments.append(None)
        else:
            raise Inconclusive(f"its forward needs {name!r}, which the probe does not know")
    if not arguments:
        raise Inconclusive("its forward takes no tokens")
    return arguments


def _tokens(width: int, grid: tuple[int, int], form: str, same: bool) -> Tensor:
    """Return tokens of two samples: of mean 0 with feature 0 in one token alone, as norms leave it, or all the same."""
    shape = grid if form in ("grid", "channels first") else (grid[0] * grid[1] + (form == "class token"),)
    shape = (2, *shape) if form == "windows" else shape
    tokens = torch.randn(2 * torch.Size(shape).numel(), width, generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 0
    if same:
        tokens = tokens[:1].expand_as(tokens)
    else:
        tokens[MARKED, 0] = 2.0
        tokens[:, 1:] -= tokens.sum(-1, keepdim=True) / (width - 1)
    tokens = tokens.reshape(2, *shape, width)
    return tokens.movedim(-1, 1) if form == "channels first" else tokens


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
