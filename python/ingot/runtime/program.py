"""Compiled graphs that run on PyTorch tensors.

A call costs a few microseconds of Python: what depends only on a batch size and on the tensors'
layouts is worked out once and kept in a `Binding`; a call fills in addresses.
"""

from __future__ import annotations

import ctypes
import json
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.runtime import library as _library
from ingot.runtime.frozen import FrozenWeights, check_counted
from ingot.runtime.layouts import LeafLayout, TensorLayout, fill, memory_holds, resolved
from ingot.runtime.library import IngotError, library
from ingot.runtime.signature import Signature

# 64-bit words of an ingot_tensor (data, 4 sizes, 4 strides, dtype and device) and of an ingot_call.
_WORDS = ctypes.sizeof(_library.Tensor) // 8
_CALL_WORDS = ctypes.sizeof(_library.Call) // 8
_WORKSPACE, _WORKSPACE_BYTES, _FROZEN, _FROZEN_BYTES, _STREAM = (
    getattr(_library.Call, field).offset // 8
    for field in ("workspace", "workspace_bytes", "frozen", "frozen_bytes", "stream")
)

_empty_strided = torch.empty_strided
# The same on the current device, in half the time.
_empty_on_host = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
_empty_on_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
# A tensor in another one's memory, which is no view of it to autograd.
_seen_as = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None)

# Compares a call's tensors with those of another, all of them at once.
_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
# Of one binding: for modes (autocast, inference) and gradients in turn.
_MOST_GUARDS = 8

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Bindings kept per program: layouts and batch sizes (rows, of sequences of any length) seen last.
_MAX_BINDINGS = 256
# Bits from one address to the next, of tensors that hold nothing.
_FAR_APART = 40
_ALIGNMENT = 256  # bytes, of workspaces and packed weights


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Slot:
    """Arguments of one call in flight: an ingot_call, its tensors behind it."""

    __slots__ = ("address", "array", "words")

    def __init__(self, template: bytes):
        self.array = (ctypes.c_int64 * (len(template) // 8)).from_buffer_copy(template)
        self.words = memoryview(self.array).cast("B").cast("q")
        self.address = ctypes.addressof(self.array)
        call = _library.Call.from_buffer(self.array)
        call.tensors = self.address + ctypes.sizeof(call)


class Binding:
    """Everything about a call that its tensors' layouts decide: sizes, strides, workspace.

    outputs: sizes, strides and dtype of each tensor that a call gives, offsets: where in it, in
    bytes, the graph's results lie that it holds; starts: leaves that lie behind their tensors'
    first elements, and by how many bytes."""

    __slots__ = (
        "allocate",
        "batch",
        "count",
        "device",
        "device_index",
        "expected",
        "guards",
        "guards_made",
        "is_elsewhere",
        "offsets",
        "on_cuda",
        "outputs",
        "slots",
        "starts",
        "template",
        "workspace_bytes",
    )

    def __init__(self) -> None:
        self.guards: Any = None
        self.guards_made = 0

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        if self.guards and self.guards.check(*tensors):
            return True
        if not are_like(tensors, self.expected):
            return False
        # Guards tell modes apart, too, and whether gradients are required.
        if self.guards_made < _MOST_GUARDS:
            self.guards_made += 1
            self.guards = tensor_guards(tensors)
        return True


def description(tensors: Sequence[torch.Tensor]) -> tuple:
    """What decides how tensors are read, beside their addresses."""
    return tuple(
        (t.shape, t.stride(), t.dtype, t.device, type(t), memory_holds(t)) for t in tensors
    )


def are_like(tensors: Sequence[torch.Tensor], expected: tuple) -> bool:
    """description(tensors) == expected, in a third of the time."""
    for tensor, (shape, strides, dtype, device, kind, holds) in zip(tensors, expected):
        if (
            tensor.shape != shape
            or tensor.stride() != strides
            or tensor.dtype is not dtype
            or tensor.device != device
            or type(tensor) is not kind
            or memory_holds(tensor) is not holds
        ):
            return False
    return True


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Any:
    """For tensors like these, in a tenth of the time of are_like(); None in other releases."""
    try:
        return _TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        )
    except (TypeError, RuntimeError):
        return None


class Program:
    """A graph compiled for one device type and precision.

    graph: the JSON object of docs/graph-format.md. leaf_layouts, result_layouts: how tensors lie
    on the graph's axes; without them tensors must have four dimensions. same_results: places of
    results that lie in the memory of an earlier one, where both are dense. Raises IngotError with
    the library's message.
    """

    def __init__(
        self,
        graph: dict,
        *,
        device: str = "cpu",
        precision: str = "fp32",
        leaf_layouts: Sequence[LeafLayout] | None = None,
        result_layouts: Sequence[TensorLayout] | None = None,
        options: dict | None = None,
        same_results: dict[int, int] | None = None,
    ):
        self.graph = graph
        self.device, self.precision = device, precision
        self.options = dict(options or {})
        self.on_cuda = device == "cuda"
        self.result_layouts = list(result_layouts or [])
        self._same_results = same_results or {}
        if self.on_cuda:
            _library.make_cuda_libraries_visible()
        self._library = library()
        text = json.dumps(graph, allow_nan=False).encode()
        settings = {
            "device": device,
            "precision": precision,
            "scratch_results": not self._same_results,  # else each has memory of its own
            **self.options,
        }
        handle = ctypes.c_void_p()
        self._library.check(
            self._library.ingot_program_create(
                text, json.dumps(settings).encode(), ctypes.byref(handle)
            )
        )
        self._handle = handle
        self._finalizer = weakref.finalize(
            self, self._library.ingot_program_destroy, ctypes.c_void_p(handle.value)
        )
        self._run = self._library.ingot_program_call
        self.signature = self._read_signature()
        leaves = self.signature.leaves
        self.leaf_names = [leaf.name for leaf in leaves]
        identity = LeafLayout(axes=(0, 1, 2, 3))
        self._leaf_layouts = list(leaf_layouts or [identity] * len(leaves))
        self._parameters = [i for i, leaf in enumerate(leaves) if leaf.role == "parameter"]
        self._keeps_weights = False
        self._frozen: FrozenWeights | None = None
        self._bindings: dict[Any, Binding] = {}
        # By the shape of a leaf that has the batch: the one that was bound last.
        self._of_shape: dict[torch.Size, Binding] = {}
        batched = (i for i, leaf in enumerate(leaves) if leaf.is_batched)
        self._varying = next(batched, 0)
        self.last_binding: Binding | None = None
        self._workspaces: deque[torch.Tensor] = deque()
        self._lock = threading.Lock()

    def _read_signature(self) -> Signature:
        text = ctypes.c_void_p()
        self._library.check(self._library.ingot_program_signature(self._handle, ctypes.byref(text)))
        return Signature.from_json(self._library.take_json(text))

    def compile(self, batch: int) -> None:
        """Compiles what a call with this batch size and dense tensors needs, and touches no device:
        on any thread."""
        self._library.check(self._library.ingot_program_compile(self._handle, batch, None, 0))

    def compile_for(self, tensors: Sequence[torch.Tensor]) -> None:
        """The same for a call with tensors laid out like these, which may hold nothing, and be on
        the device "meta"."""
        array, batch, *_ = self._laid_out(tensors)
        for at, entry in enumerate(array):
            entry.data = (entry.data or 0) + ((1 + at) << _FAR_APART)
            entry.device = 0 if self.on_cuda else -1
        self._library.check(
            self._library.ingot_program_compile(self._handle, batch, array, len(array))
        )

    def compile_another(self, batch: int) -> bool:
        """Compiles one more kernel, of those that other batch sizes need; False where all are
        there."""
        compiled = ctypes.c_int()
        self._library.check(
            self._library.ingot_program_compile_another(self._handle, batch, ctypes.byref(compiled))
        )
        return bool(compiled.value)

    def prepare(self, batch: int, device_index: int = -1) -> None:
        """Compiles and loads what a call with this batch size needs."""
        self._library.check(self._library.ingot_program_prepare(self._handle, batch, device_index))

    def workspace_size(self, batch: int) -> int:
        """Bytes of scratch memory of a call with dense tensors."""
        return self._size(self._library.ingot_program_workspace_size, batch)

    def _call_size(self, batch: int, tensors: int, count: int) -> int:
        """The same of a call with tensors that lie like those described at an address."""
        return self._size(self._library.ingot_program_prepare_call, batch, tensors, count)

    def _size(self, function: Callable, *arguments: int) -> int:
        size = ctypes.c_size_t()
        self._library.check(function(self._handle, *arguments, ctypes.byref(size)))
        return size.value

    def explain(self, batch: int) -> dict:
        """docs/explain-format.md."""
        text = ctypes.c_void_p()
        self._library.check(
            self._library.ingot_program_explain(self._handle, batch, ctypes.byref(text))
        )
        return self._library.take_json(text)

    def freeze(self) -> None:
        """Keeps packed weights from the next run on, made anew when a parameter changed (or when
        this is called again); nothing where the library has nothing to keep."""
        self._frozen_size, self._frozen = self._size(self._library.ingot_program_frozen_size), None
        self._keeps_weights = self._frozen_size > 0

    def unfreeze(self) -> None:
        self._keeps_weights, self._frozen = False, None

    @property
    def frozen_bytes(self) -> int:
        """Memory of the program's device that packed weights take now."""
        frozen = self._frozen
        return 0 if frozen is None else frozen.bytes

    def _frozen_weights(self, binding: Binding, slot: _Slot, tensors) -> FrozenWeights | None:
        """Up to date; None inside the capture of a CUDA graph that would have to make them."""
        frozen = self._frozen
        if frozen is not None and frozen.holds(tensors, binding.expected):
            return frozen
        if _is_capturing(binding.device):
            return None
        with self._lock:
            frozen = self._frozen
            if frozen is not None and frozen.holds(tensors, binding.expected):
                return frozen
            parameters = [(i, tensors[i]) for i in self._parameters]
            for index, tensor in parameters:
                check_counted(self.leaf_names[index], tensor)
            # Rare, so plainly safe: no other stream may still read what is replaced, nor read too
            # early what is made here.
            if self.on_cuda:
                torch.cuda.synchronize(binding.device)
            buffer = _aligned_bytes(self._frozen_size, device=binding.device)
            frozen = FrozenWeights(buffer, parameters, binding.expected)
            status = self._library.ingot_program_freeze(
                self._handle,
                binding.batch,
                slot.address + ctypes.sizeof(_library.Call),
                binding.count,
                frozen.address,
                frozen.bytes,
                _current_stream(binding.device_index) if self.on_cuda else None,
            )
            self._library.check(status)
            if self.on_cuda:
                torch.cuda.synchronize(binding.device)
            self._frozen = frozen
            return frozen

    @property
    def last_batch(self) -> int | None:
        return None if self.last_binding is None else self.last_binding.batch

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs on the graph's leaves, in order, on the current stream; returns new tensors."""
        return self.run_bound(self.bind(tensors), tensors)

    def run_bound(self, binding: Binding, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`run` for tensors that are known to match the binding."""
        if binding.is_elsewhere:
            return self.run([resolved(tensor) for tensor in tensors])
        try:
            slot = binding.slots.pop()
        except IndexError:
            slot = _Slot(binding.template)
        words, at = slot.words, _CALL_WORDS
        for tensor in tensors:
            words[at] = tensor.data_ptr()
            at += _WORDS
        for leaf, offset in binding.starts:
            words[_CALL_WORDS + leaf * _WORDS] += offset
        allocate = binding.allocate
        results = []
        for (sizes, strides, dtype, other), offsets in zip(binding.outputs, binding.offsets):
            if other is None:
                result = allocate(sizes, strides, dtype)
            else:
                result = _seen_as(results[other], sizes, strides, 0)
            address = result.data_ptr()
            for offset in offsets:
                words[at] = address + offset
                at += _WORDS
            results.append(result)
        workspace_bytes = binding.workspace_bytes
        if binding.on_cuda:
            # From PyTorch's allocator at every call: that is what makes it safe on several
            # streams and inside a CUDA graph's capture.
            workspace = allocate((workspace_bytes,), (1,), torch.uint8) if workspace_bytes else None
            words[_STREAM] = _current_stream(binding.device_index)
        else:
            workspace = self._host_workspace(workspace_bytes)
        words[_WORKSPACE] = 0 if workspace is None else workspace.data_ptr()
        words[_WORKSPACE_BYTES] = workspace_bytes
        frozen = self._frozen_weights(binding, slot, tensors) if self._keeps_weights else None
        if frozen is None:
            words[_FROZEN] = 0
        else:
            words[_FROZEN], words[_FROZEN_BYTES] = frozen.address, frozen.bytes
        status = self._run(slot.address)
        if workspace is not None and not binding.on_cuda:
            self._workspaces.append(workspace)
        if status:
            error = self._library.error(status)
            if status != _library.STATUS_INVALID_ARGUMENT or not self._takes_more(binding, slot):
                raise error
            return self.run_bound(binding, tensors)
        binding.slots.append(slot)
        return results

    def _takes_more(self, binding: Binding, slot: _Slot) -> bool:
        """Whether the call in this slot wants more memory than the binding says, from now on no
        longer: tensors at other addresses, which are packed or copied, or for which the library has
        another algorithm; kept weights, beside which another product may be the fastest."""
        tensors = slot.address + ctypes.sizeof(_library.Call)
        size = self._call_size(binding.batch, tensors, binding.count)
        if self._keeps_weights:
            size = max(size, self.workspace_size(binding.batch))
        grows = size > binding.workspace_bytes
        if grows:
            binding.workspace_bytes = size
        return grows

    def _host_workspace(self, size: int) -> torch.Tensor | None:
        """Kept from call to call (one for each call in flight): fresh pages cost more than the
        sweeps that write them."""
        if not size:
            return None
        try:
            workspace = self._workspaces.pop()
        except IndexError:
            return _aligned_bytes(size)
        return workspace if workspace.numel() >= size else _aligned_bytes(size)

    def bind(self, tensors: Sequence[torch.Tensor]) -> Binding:
        """What a call with tensors like these needs, worked out or remembered."""
        binding = self.last_binding
        if binding is not None and binding.matches(tensors):
            return binding
        shape = tensors[self._varying].shape
        binding = self._of_shape.get(shape)
        if binding is not None and binding.matches(tensors):
            self.last_binding = binding
            return binding
        key = description(tensors)
        binding = self._bindings.get(key)
        if binding is None:
            with self._lock:
                binding = self._make_binding(tensors, key)
                if len(self._bindings) >= _MAX_BINDINGS:
                    self._bindings.pop(next(iter(self._bindings)), None)
                self._bindings[key] = binding
        if len(self._of_shape) >= _MAX_BINDINGS:
            self._of_shape.clear()
        self._of_shape[shape] = self.last_binding = binding
        return binding

    def _laid_out(self, tensors: Sequence[torch.Tensor]) -> tuple:
        """How a call's tensors and results lie, for the library, with bytes from a tensor's start
        in the place of addresses; the batch size; the results as they are allocated; where in these
        the graph's lie."""
        if len(tensors) != len(self._leaf_layouts):
            raise IngotError(
                f"{self.signature.name} takes {len(self._leaf_layouts)} tensors, "
                f"got {len(tensors)}",
                _library.STATUS_INVALID_ARGUMENT,
            )
        places = sum(len(layout.in_graph(1)) for layout in self.result_layouts)
        array = (_library.Tensor * (len(tensors) + places))()
        batch = 1
        for index, tensor in enumerate(tensors):
            sizes, strides = self._leaf_layouts[index].sizes_and_strides(tensor)
            if self.signature.leaves[index].is_batched:
                batch = sizes[0]
            fill(array[index], sizes, strides, tensor.dtype, tensor.get_device())
            array[index].data = self._leaf_layouts[index].offset(tensor)
        outputs, offsets, at = [], [], len(tensors)
        device_index = tensors[0].get_device()
        for layout in self.result_layouts:
            outputs.append(self._output(outputs, *layout.allocation(batch), layout.dtype))
            offsets.append(())
            for extents, along, offset in layout.in_graph(batch):
                fill(array[at], extents, along, layout.dtype, device_index)
                array[at].data = offset
                offsets[-1] += (offset,)
                at += 1
        return array, batch, outputs, offsets

    def _output(self, before: list, sizes: tuple, strides: tuple, dtype: torch.dtype) -> tuple:
        """The next result after those before: how it is allocated, or which one it is, too."""
        other = self._same_results.get(len(before))
        if other is not None:
            sizes_there, strides_there, dtype_there, _ = before[other]
            same = dtype == dtype_there and math.prod(sizes) == math.prod(sizes_there)
            both = (sizes, strides), (sizes_there, strides_there)
            same &= all(_empty_strided(*at, device="meta").is_contiguous() for at in both)
            if not same or _seen_as is None:
                other = None
        return sizes, strides, dtype, other

    def _make_binding(self, tensors: Sequence[torch.Tensor], key: tuple) -> Binding:
        for index, tensor in enumerate(tensors[: len(self._leaf_layouts)]):
            self._check_leaf(index, tensor)
        array, batch, outputs, offsets = self._laid_out(tensors)
        binding = Binding()
        binding.outputs, binding.offsets = outputs, offsets
        binding.starts = [(at, array[at].data) for at in range(len(tensors)) if array[at].data]
        binding.batch = batch
        binding.expected = key
        binding.is_elsewhere = not all(memory_holds(tensor) for tensor in tensors)
        binding.on_cuda = self.on_cuda
        binding.device = tensors[0].device
        binding.count = len(array)
        binding.device_index = tensors[0].get_device()
        # What lies otherwise than a product reads it is packed or copied, and only then: any layout
        # whatever would take several times as much.
        for at, entry in enumerate(array):
            known = tensors[at].data_ptr() if at < len(tensors) else 0
            entry.data = (entry.data or 0) + (known or (1 + at) << _FAR_APART)
        binding.workspace_bytes = self._call_size(batch, ctypes.addressof(array), len(array))
        binding.allocate = _allocator(binding.device)
        call = _library.Call(
            program=self._handle.value,
            batch=batch,
            count=len(array),
        )
        binding.template = bytes(call) + bytes(array)
        binding.slots = deque()
        return binding

    def _check_leaf(self, index: int, tensor: torch.Tensor) -> None:
        leaf = self.signature.leaves[index]
        if tensor.dtype != leaf.dtype:
            raise IngotError(
                f"{leaf.name} has dtype {tensor.dtype}, but was compiled as {leaf.dtype}",
                _library.STATUS_INVALID_ARGUMENT,
            )
        if tensor.is_cuda != self.on_cuda:
            raise IngotError(
                f"{leaf.name} is on {tensor.device}, but was compiled for {self.device}",
                _library.STATUS_INVALID_ARGUMENT,
            )


def _allocator(device: torch.device):
    """A function (sizes, strides, dtype) that makes a tensor on a device."""
    if device.type == "cpu" and _empty_on_host is not None:
        return _empty_on_host
    # On the current device only: the one there is.
    if device.type == "cuda" and _empty_on_cuda is not None and torch.cuda.device_count() == 1:
        return _empty_on_cuda
    return lambda sizes, strides, dtype: _empty_strided(sizes, strides, dtype=dtype, device=device)


def _aligned_bytes(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Not on the default device, which may be another one."""
    raw = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    offset = -raw.data_ptr() % _ALIGNMENT
    return raw[offset : offset + size]
