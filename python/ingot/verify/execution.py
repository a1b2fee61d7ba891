"""What parent and worker do alike: build a model, set its state, call it, look at its outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..model_file import arguments_of
from . import passing
from .families import lay_out
from .transport import bytes_of, can_be_sent

_LATE_CYCLES = 10_000_000  # about 6 ms
_FEWEST_STRETCHES = 16
# How new parameters arrive, where they are not simply written: by load_state_dict; in other memory.
LOADED, MOVED = "loaded", "moved"
_LONGEST_SHOWN = 200  # of what is returned and is no tensor


def generator_states(device: torch.device) -> list:
    """What the next random numbers depend on: PyTorch's, Python's, NumPy's where it is there."""
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if "numpy" in sys.modules:
        _, keys, *place = sys.modules["numpy"].random.get_state()
        states += [keys.tobytes(), *place]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy

        numpy.random.seed(seed % (1 << 32))
    except ImportError:
        pass


def construct(model_class: type, init_inputs: Any, seed: int) -> torch.nn.Module:
    """The model as its file's `get_init_inputs()` asks for it: a list of arguments, or a dict of
    keyword arguments, or a list that ends in such a dict under neither name."""
    seed_everything(seed)
    args, kwargs = arguments_of(init_inputs)
    module = model_class(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{model_class.__name__} is no torch.nn.Module")
    return module


def named_state(module: torch.nn.Module) -> dict:
    """All parameters ("p:name") and buffers ("b:name"), those outside the state_dict included."""
    state = {f"p:{n}": p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    state.update({f"b:{n}": b for n, b in module.named_buffers(remove_duplicate=False)})
    return state


def state_dict_of(module: torch.nn.Module) -> dict:
    """Of each name in the state_dict, whether what it gives is what the module holds under that
    name. (Of what is no tensor nobody can say otherwise.)"""
    held = {key[2:]: value for key, value in named_state(module).items()}
    return {name: _is_held(value, held.get(name)) for name, value in module.state_dict().items()}


def _is_held(value: Any, own: torch.Tensor | None) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    if own is None:
        return False
    same_place = value.data_ptr() == own.data_ptr() and value.stride() == own.stride()
    if same_place and value.shape == own.shape and value.dtype == own.dtype:
        return True  # which need not be read
    return same_bits(value, own)


def set_mode(module: torch.nn.Module, training: bool) -> bool:
    """As a user does. Whether that gives the module, which calls may be chained to."""
    return (module.train(True) if training else module.eval()) is module


def set_state(
    module: torch.nn.Module,
    values: dict,
    through_data: bool,
    converted: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> None:
    """Writes parameters and buffers in place; `through_data` leaves no trace in their versions.
    converted(value): what takes the place of a buffer that has another shape, or is None."""
    targets = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for key, value in values.items():
            kind, name = key.split(":", 1)
            target = targets[name] if kind == "p" else buffers.get(name)
            if target is None or target.shape != value.shape:
                place_buffer(module, name, converted(value))
                continue
            (target.data if through_data else target).copy_(value)


def place_buffer(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
    owner, _, own_name = name.rpartition(".")
    module.get_submodule(owner)._buffers[own_name] = value


def load_state(module: torch.nn.Module, values: dict) -> None:
    """As `set_state`, by load_state_dict as far as that reaches."""
    within = set(module.state_dict())
    loaded = {key[2:]: value for key, value in values.items() if key[2:] in within}
    set_state(module, {k: v for k, v in values.items() if k[2:] not in loaded}, False)
    module.load_state_dict(loaded, strict=False)


def move(module: torch.nn.Module) -> None:
    """Gives parameters and buffers other memory, as .to() does where the type or device changes."""
    module._apply(torch.clone)


@contextlib.contextmanager
def frozen(module: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Within it these parameters ask for no gradient."""
    parameters = dict(module.named_parameters())
    found = [parameters[name] for name in names if parameters[name].requires_grad]
    try:
        for parameter in found:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in found:
            parameter.requires_grad_(True)


def place_inputs(
    values: list, device: torch.device, layout: str, earlier: list | None, late: bool = False
) -> list:
    """Copies of the inputs on the device; written over `earlier` ones (the same tensors) where
    given. late: on a GPU the current stream writes them only after a delay; whoever reads them by
    another stream without waiting for this one reads `decoys`."""
    if late and device.type == "cuda":
        staged = on_device(values, device)
        placed = place_inputs(decoys(staged), device, layout, earlier)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_LATE_CYCLES)
        with torch.no_grad():
            for target, value in zip(passing.tensors_of(placed), passing.tensors_of(staged)):
                target.copy_(value)
        return placed
    old_tensors = iter(passing.tensors_of(earlier) if earlier is not None else ())

    def place(value: torch.Tensor) -> torch.Tensor:
        old = next(old_tensors, None)
        fits = old is not None and old.shape == value.shape and old.dtype == value.dtype
        if old is not None and fits and layout == "contiguous":
            with torch.no_grad():
                return old.copy_(value)
        return lay_out(value.to(device, copy=True), layout)

    return passing.map_tensors(values, place)


class InputChanger:
    """Before each call doubles or halves, in turn, one stretch of the inputs, chosen by the seed:
    no two calls then see the same values, at the cost of one small operation."""

    def __init__(self, input_sets: list, seed: int) -> None:
        self._random = random.Random(seed)
        self._targets = [
            next((t for t in passing.tensors_of(values) if _changeable(t)), None)
            for values in input_sets
        ]
        self._halved: set = set()

    def __call__(self, i: int) -> None:
        number = i % len(self._targets)
        target = self._targets[number]
        if target is None:
            return
        stretches = max(target.shape[0], _FEWEST_STRETCHES)
        length = max(1, target.numel() // stretches)
        start = self._random.randrange(target.numel() // length) * length
        place = (number, start)
        factor = 2.0 if place in self._halved else 0.5
        self._halved ^= {place}
        target.view(-1)[start : start + length].mul_(factor)


def _changeable(value: torch.Tensor) -> bool:
    return bool(
        value.is_floating_point() and value.dim() and value.is_contiguous() and value.numel()
    )


def decoys(values: list) -> list:
    """The inputs with their rows in reverse."""
    return passing.map_tensors(values, lambda v: v.flip(0) if v.dim() else v)


def poison_free_memory(sizes: list, device: torch.device) -> None:
    """Fills and frees blocks of these sizes (bytes), so that memory which the next call allocates
    and does not write holds NaN rather than an earlier result."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes for _ in "ab"]
    for block in blocks:
        block.fill_(255)


def on_device(values: list, device: torch.device) -> list:
    return passing.map_tensors(values, lambda v: v.to(device))


def at_places(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The elements at these places, numbers of any size, in row-major order."""
    if not tensor.numel():
        return tensor.new_empty(0)
    return torch.take(tensor, (places % tensor.numel()).to(tensor.device))


def require_gradients(values: list, only: int | None = None) -> None:
    """Of all tensors that can have one, or of the one with this number."""
    for number, tensor in enumerate(passing.tensors_of(values)):
        if only in (None, number) and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()


def backward(
    module: torch.nn.Module, inputs: list, calls: list, cotangents: list, twice: bool = False
) -> tuple[list, dict]:
    """(which outputs have a derivative, gradients of the sum of outputs times cotangents: of
    parameters "dp:name" and of inputs "di0"). calls: outputs of the call, and of others, which go
    backwards one after the other, so that gradients of parameters add up. twice: each of them twice
    over the same graph, which adds up too."""
    known = [bool(o.requires_grad) for o in calls[0]]
    leaves = {f"dp:{name}": p for name, p in module.named_parameters()}
    leaves |= {f"di{i}": t for i, t in enumerate(passing.tensors_of(inputs))}
    for leaf in leaves.values():
        leaf.grad = None
    for outputs in calls:
        pairs = zip(outputs, cotangents)
        roots = [(o, c) for o, c in pairs if o.requires_grad and c is not None]
        if roots:
            both = [list(part) for part in zip(*roots)]
            for keeps_graph in (True, False) if twice else (False,):
                torch.autograd.backward(*both, retain_graph=keeps_graph)
    found = {name: _dense(leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return known, found


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Of an embedding it may be sparse."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def copied_decoys(inputs: list) -> list:
    """Of the inputs as they are now, in memory of their own."""
    return passing.map_tensors(decoys(inputs), lambda t: t.detach().clone())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def outputs_of(result: Any) -> tuple:
    """(tensor leaves, description of the structure and of leaves that are no tensors, complaints
    about the leaves' types)."""
    leaves, spec = pytree.tree_flatten(opened(result))
    check_comparable([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], "an output")
    tensors, others, complaints = [], [], []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                complaints.append(f"an output is a {type(leaf).__name__}, not a plain tensor")
            tensors.append(leaf)
            others.append("tensor")
        else:
            if _hides_tensors(leaf) or type(leaf).__name__ == "ndarray":
                complaints.append(f"an output is a {type(leaf).__name__}, which nobody looks into")
            others.append(_short(repr(leaf)))
    return tensors, f"{_described(spec)} {others}", complaints


class NotComparableError(TypeError):
    """A tensor of a kind that verify has no means for."""


def check_comparable(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Raises NotComparableError. what: each of them is, e.g. "an output"."""
    for tensor in tensors:
        kind = ""
        if tensor.is_nested:
            kind = "a nested tensor"
        elif tensor.layout is not torch.strided:
            kind = f"a {str(tensor.layout).rpartition('.')[2]} tensor"
        elif not can_be_sent(tensor.dtype):
            kind = f"of type {tensor.dtype}"
        if kind:
            raise NotComparableError(f"{what} is {kind}, which verify does not compare")


# A float among the leaves that `outputs_of` describes.
_FLOAT = re.compile(r"(?<=')-?\d+(?:\.\d+(?:e[+-]\d+)?|e[+-]\d+)(?=')")
_NEAR = {"rel_tol": 1e-5, "abs_tol": 1e-6}  # of `.item()` of what was rounded another way


def without_numbers(structure: str) -> str:
    """What outputs_of() says of a result, whatever floats are in it."""
    return _FLOAT.sub("a float", structure)


def same_structure(found: str, wanted: str) -> bool:
    """Whether outputs_of() says the same of two results, but for the rounding of floats."""
    if without_numbers(found) != without_numbers(wanted):
        return False
    pairs = zip(_FLOAT.findall(found), _FLOAT.findall(wanted), strict=True)
    return all(math.isclose(float(a), float(b), **_NEAR) for a, b in pairs)


def _short(text: str) -> str:
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]}… {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def opened(result: Any, inside: tuple = ()) -> Any:
    """With the fields of data classes, and what else they hold, which a tree of values has as
    leaves. inside: those that are open."""

    def fields(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        again = [at for at, outer in enumerate(inside) if outer is leaf]
        if again:
            return f"what stands {len(inside) - again[0]} further out"
        names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
        values = {name: getattr(leaf, name) for name in names}
        others = {n: v for n, v in getattr(leaf, "__dict__", {}).items() if n not in values}
        # No dictionary of a model's has such a key.
        return {("data class", type(leaf).__name__): opened({**values, **others}, (*inside, leaf))}

    return pytree.tree_map(fields, result)


def _hides_tensors(leaf: Any) -> bool:
    held = pytree.tree_leaves(getattr(leaf, "__dict__", None))
    return any(isinstance(value, torch.Tensor) for value in held)


def _described(spec: pytree.TreeSpec) -> str:
    """Classes go by their names: those of the file itself have another module in each file."""
    names = re.sub(r"<class '(?:[^']*\.)?(\w+)'>", r"\1", str(spec))
    return names + "".join(f" {kind.__name__}{kind._fields}" for kind in _named_tuples(spec))


def _named_tuples(spec: pytree.TreeSpec) -> list[type]:
    parts = spec.children() if hasattr(spec, "children") else spec.children_specs
    own = [spec.context] if hasattr(spec.context, "_fields") else []
    return own + [kind for part in parts for kind in _named_tuples(part)]


def same_bits(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two tensors are alike in shape, type and every bit: NaN equals itself here."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    device = b.device if b.is_cuda else a.device
    a, b = _bytes(a.to(device)), _bytes(b.to(device))
    if a.numel() % 8 == a.data_ptr() % 8 == b.data_ptr() % 8 == 0:
        a, b = a.view(torch.int64), b.view(torch.int64)  # a matter of bandwidth
    return torch.equal(a, b)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return bytes_of(value.detach().resolve_conj().resolve_neg())


def storage_of(tensor: torch.Tensor) -> int | None:
    try:
        pointer = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return pointer or None


def aliases_of(tensors: list, inputs: list, module: torch.nn.Module) -> list:
    """Which outputs share memory with an input or with the module's state: e.g. ["0=input 1"]."""
    owners = {}
    for key, value in named_state(module).items():
        owners[storage_of(value)] = key[2:]
    for i, value in enumerate(passing.tensors_of(inputs)):
        owners[storage_of(value)] = f"input {i}"
    owners.pop(None, None)
    found = []
    for i, tensor in enumerate(tensors):
        owner = owners.get(storage_of(tensor))
        if owner is not None:
            found.append(f"{i}={owner}")
    return found
