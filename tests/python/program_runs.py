"""Runs a random program by PyTorch alone and through Ingot, and says where the two differ."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import linecache
import warnings
from collections.abc import Callable
from typing import Any

import torch
from programs import Program
from random_agreement import by_compile, by_optimize
from torch import nn
from torch._dynamo.exc import TorchRuntimeError
from torch.utils import _pytree as pytree

_serial = itertools.count()
# Sums that cancel, as the gradient of a bias before a norm, leave the rounding of their terms.
TOLERANCE = 1e-4
# What an error of rounding may grow to, in units of what a change of the inputs by rounding does.
SENSITIVE = 30.0
# Eager keeps tensors that Ingot computes again: it may notice that one was written.
ONLY_EAGERS = ("modified by an inplace operation", "backward through the graph a second time")


@dataclasses.dataclass
class Seen:
    """What a statement of the script left behind. raised: the error; exact: what must be equal;
    tensors: what must be close."""

    statement: str
    raised: Exception | None = None
    exact: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def by_eager(module: nn.Module) -> Callable:
    return module


class Run:
    """One run of a program. noise: how far weights and inputs are changed, for its sensitivity."""

    def __init__(self, program: Program, wrap: Callable, noise: float = 0.0):
        self.program, self.wrap, self.noise = program, wrap, noise
        name = f"<random program {next(_serial)}>"
        text = program.module()
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        self.names: dict[str, Any] = {"__name__": "random_program"}
        exec(compile(text, name, "exec"), self.names)
        for tool in (
            "call",
            "step",
            "load",
            "in_place",
            "double",
            "copied",
            "hook",
            "unhook",
            "doubled",
        ):
            self.names[tool] = getattr(self, tool)
        self.handles: list = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.optimiser: tuple | None = None

    def seen(self) -> list[Seen]:
        """Of each statement, up to one that raises."""
        found: list[Seen] = []
        default = torch.get_default_dtype()
        try:
            torch.manual_seed(0)
            self._have(self.names["Model"]())
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.copy_(self._noisy(parameter))
            for statement in self.program.script:
                self.now = Seen(statement)
                found.append(self.now)
                try:
                    exec(statement, self.names)
                except Exception as error:
                    self.now.raised = error
                    break
                self._look_at_module()
        finally:
            torch.set_default_dtype(default)
        return found

    def _have(self, module: nn.Module) -> None:
        self.module, self.called = module, self.wrap(module)
        self.names["m"] = self.module

    def _noisy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.noise:
            return tensor
        return tensor * (1 + self.noise * torch.randn(tensor.shape, dtype=tensor.dtype))

    # What scripts call ----------------------------------------------------------------------------

    def call(
        self,
        batch,
        seed,
        mode="grad",
        needs=False,
        layout="dense",
        second=False,
        wrong=False,
        **rest,
    ):
        torch.manual_seed(seed)
        dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
        kind = self.program.kind
        kind = (*kind[:-1], kind[-1] + 1) if wrong else kind
        inputs = [self._input(batch, kind, layout, dtype, needs and mode == "grad")]
        signature = self.program.signature
        if "y" in signature or signature in ("items", "named"):
            inputs.append(
                inputs[0] if seed % 10 == 0 else self._input(batch, kind, "dense", dtype, False)
            )
        bases = [base for base, _ in inputs]
        tensors = [tensor for _, tensor in inputs]
        args, keywords = _passed(signature, tensors)
        torch.manual_seed(seed)
        around = {
            "grad": torch.enable_grad,
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
        }
        with around[mode]():
            result = self.called(*args, **keywords, **rest)
        self._look_at_results(result, tensors)
        if mode == "grad":
            self._differentiate(result, bases, second)

    def _input(self, batch, kind, layout, dtype, needs) -> tuple[torch.Tensor, torch.Tensor]:
        """A leaf and the tensor that is passed, which may be a view of it."""
        shape = (batch, *kind)
        if layout == "transposed":
            base = torch.randn(shape[::-1], dtype=dtype)
        elif layout == "strided":
            base = torch.randn((*shape[:-1], 2 * shape[-1]), dtype=dtype)
        elif layout == "expanded":
            base = torch.randn((1, *kind), dtype=dtype)
        elif layout == "offset":
            base = torch.randn((batch + 1, *kind), dtype=dtype)
        else:
            base = torch.randn(shape, dtype=dtype)
        if layout == "channels_last" and len(shape) == 4:
            base = base.contiguous(memory_format=torch.channels_last)
        base = self._noisy(base).requires_grad_(needs)
        views = {
            "transposed": lambda: base.permute(*range(len(shape))[::-1]),
            "strided": lambda: base[..., ::2],
            "expanded": lambda: base.expand(shape),
            "offset": lambda: base[1:],
        }
        return base, views[layout]() if layout in views else base

    def step(self) -> None:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if any(p.grad is not None for p in parameters):
            torch.optim.SGD(parameters, lr=0.01, momentum=0.5).step()

    def load(self, module: nn.Module) -> None:
        torch.manual_seed(7)
        made = {}
        for name, tensor in module.state_dict().items():
            drawn = (
                torch.rand(tensor.shape) if tensor.is_floating_point() else torch.ones(tensor.shape)
            )
            made[name] = drawn.to(tensor.dtype)
        module.load_state_dict(made)

    def in_place(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.5).add_(0.01)

    def double(self, module: nn.Module) -> None:
        module.double()

    def copied(self) -> None:
        self.unhook()
        self._have(copy.deepcopy(self.called if self.wrap is by_optimize else self.module))

    def hook(self, handle) -> None:
        self.handles.append(handle)

    @staticmethod
    def doubled(module: nn.Module, gradients: tuple, _) -> tuple | None:
        return (gradients[0] * 2,) if gradients[0] is not None else None

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    # What is seen ---------------------------------------------------------------------------------

    def _look_at_results(self, result: Any, inputs: list[torch.Tensor]) -> None:
        leaves, spec = pytree.tree_flatten(result)
        exact, tensors = self.now.exact, self.now.tensors
        exact["structure"] = str(spec)
        given = {f"input {at}": t for at, t in enumerate(inputs)} | dict(
            self.module.named_parameters()
        )
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                exact[f"result {at}"] = leaf
                continue
            exact[f"result {at}"] = {
                "type": type(leaf),
                "dtype": leaf.dtype,
                "shape": tuple(leaf.shape),
                "order": _order(leaf),
                "requires_grad": leaf.requires_grad,
                "is_inference": leaf.is_inference(),
                "is": [name for name, tensor in given.items() if tensor is leaf],
                "shares memory with": [n for n, t in given.items() if _shares(t, leaf)]
                + [
                    n
                    for n, t in enumerate(leaves[:at])
                    if isinstance(t, torch.Tensor) and _shares(t, leaf)
                ],
            }
            tensors[f"result {at}"] = leaf.detach().clone()
        for at, tensor in enumerate(inputs):
            tensors[f"input {at}"] = tensor.detach().clone()

    def _differentiate(self, result: Any, bases: list[torch.Tensor], second: bool) -> None:
        leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        needing = [t for t in leaves if t.requires_grad and t.is_floating_point()]
        if not needing:
            return
        drawn = torch.Generator().manual_seed(1)
        loss = 0.0
        for t in needing:
            loss = loss + (t * torch.rand(t.shape, generator=drawn, dtype=t.dtype)).sum()
        keep = "self.state" in str(self.program) or "self.kept" in str(self.program)
        if second:
            wanted = [t for t in [*bases, *self.module.parameters()] if t.requires_grad]
            wanted = list(dict.fromkeys(wanted))
            found = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            loss = loss + sum(g.square().sum() for g in found if g is not None and g.requires_grad)
        loss.backward(retain_graph=keep)
        for at, base in enumerate(bases):
            self.now.exact[f"has gradient {at}"] = base.grad is not None
            if base.grad is not None:
                self.now.tensors[f"gradient of input {at}"] = base.grad.clone()

    def _look_at_module(self) -> None:
        exact, tensors, module = self.now.exact, self.now.tensors, self.module
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            exact[name] = (
                tensor.dtype,
                tuple(tensor.shape),
                tensor.requires_grad,
                tensor.grad is None,
            )
            tensors[name] = tensor.detach().clone()
            if tensor.grad is not None:
                tensors[f"gradient of {name}"] = tensor.grad.clone()
        for name in ("calls", "gain", "table", "log"):
            exact[name] = copy.deepcopy(getattr(module, name))
        tensors["state"] = module.state.detach().clone()
        for name, tensor in module.kept.items():
            tensors[f"kept {name}"] = tensor.detach().clone()
            exact[f"kept {name}"] = tensor.requires_grad
        exact["state"] = module.state.requires_grad
        exact["training"] = [part.training for part in module.modules()]
        # Tensors that were replaced by others.
        now = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        exact["same"] = [name for name in now if now[name] is self.tensors.get(name)]
        self.tensors = now


def _passed(signature: str, tensors: list) -> tuple[tuple, dict]:
    if signature == "items":
        return (list(tensors),), {}
    if signature == "named":
        return (dict(zip("xy", tensors)),), {}
    if "*" in signature:
        return (tensors[0],), {"y": tensors[1]}
    return tuple(tensors), {}


def _order(tensor: torch.Tensor) -> list[int]:
    """Of the dimensions in memory: it decides which views can be taken."""
    if tensor.numel() == 0:
        return []
    varying = [at for at, size in enumerate(tensor.shape) if size > 1]
    return sorted(varying, key=lambda at: -tensor.stride(at))


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# Comparing ---------------------------------------------------------------------------------------


def difference(program: Program, wrap: Callable) -> str | None:
    """Where the program's run through Ingot differs from PyTorch's own; None where it does not."""
    torch._dynamo.reset()
    if wrap is by_compile:
        # By its own defaults, torch.compile overlooks hooks that are put on a module later.
        script = [line for line in program.script if not line.startswith("hook")]
        program = dataclasses.replace(program, script=script)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = Run(program, by_eager).seen()
        found = Run(program, wrap).seen()
        noisy: list = []

        def sensitivity() -> list[list[Seen]]:
            if not noisy:
                noisy.extend(Run(program, by_eager, noise=1e-6).seen() for _ in range(3))
            return noisy

        for at, (ours, theirs) in enumerate(itertools.zip_longest(found, expected)):
            problem = _differs(ours, theirs, at, sensitivity)
            if problem is not None:
                return f"statement {at} ({(ours or theirs).statement}): {problem}"
            if theirs.raised:
                return None
    return None


def _differs(ours: Seen | None, theirs: Seen | None, at: int, sensitivity: Callable) -> str | None:
    if ours is None or theirs is None:
        return "one of the two ends"
    if theirs.raised is not None and ours.raised is None:
        if any(text in str(theirs.raised) for text in ONLY_EAGERS):
            return None
        return f"only eager raises {theirs.raised!r}"
    if ours.raised is not None:
        if theirs.raised is None:
            return f"only Ingot raises {ours.raised!r}"
        if not isinstance(ours.raised, (type(theirs.raised), TorchRuntimeError)):
            return f"Ingot raises {ours.raised!r}, eager {theirs.raised!r}"
        return None
    for name in dict.fromkeys([*theirs.exact, *ours.exact]):
        if ours.exact.get(name) != theirs.exact.get(name):
            return f"{name} is {ours.exact.get(name)}, not {theirs.exact.get(name)}"
    for name, tensor in theirs.tensors.items():
        problem = _far(
            ours.tensors[name], tensor, lambda n=name: [s[at].tensors[n] for s in sensitivity()]
        )
        if problem:
            return f"{name}: {problem}"
    return None


def _far(ours: torch.Tensor, theirs: torch.Tensor, noisy: Callable) -> str | None:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
    if torch.equal(ours, theirs) or not theirs.numel():
        return None
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf")).max().item()
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    if error <= TOLERANCE * max(scale, 1.0):
        return None
    try:
        moved = max((n.double() - b).abs().nan_to_num(float("inf")).max().item() for n in noisy())
    except (IndexError, KeyError, RuntimeError):
        moved = float("inf")
    if error <= SENSITIVE * moved and (theirs.is_floating_point() or moved > 0):
        return None
    return f"differs by {error:.3g} of {scale:.3g} (by {moved:.3g} where inputs change by 1e-6)"
