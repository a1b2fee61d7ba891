"""Decides which operators of a graph join which region, and which stay PyTorch's.

Operators are visited in order. One that the table takes joins the region of its arguments; every
change of hands on the way to an operator raises its level by one, and what Ingot takes at one level
makes one region. So no region waits for a step that waits for the region.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

# For their rows of the table.
import ingot.capture.normalisations
import ingot.capture.pointwise
import ingot.capture.reductions
import ingot.capture.views  # noqa: F401
from ingot.capture.captured import CaptureError, Source, Unsupported
from ingot.capture.feed import Feed, differentiated, needing_gradients
from ingot.capture.folding import evaluated
from ingot.capture.host_time import is_of_the_host, nears_the_host, turns_tokens
from ingot.capture.layout import Joined, Leaf, UnfitError, Value, in_parts, in_samples, part_of
from ingot.capture.nodes import (
    ASIDE,
    BATCHED,
    IMPLIED,
    JOINED,
    PART,
    PER_SAMPLE,
    computes,
    counts_from_zero,
    hands_out_memory,
    is_batch_norm,
    is_made_from_nothing,
    is_random,
    moves_statistics,
    mutates,
    named_arguments,
    origin_or_name,
    schema_name,
    where,
)
from ingot.capture.products import PRODUCTS
from ingot.capture.region import RegionBuilder
from ingot.capture.stages import stages_of
from ingot.capture.table import FORWARD_ONLY, SHAPE_OPERATORS, TABLE, Call, is_half
from ingot.runtime.signature import DTYPE_NAMES

_LAST = 1 << 30
_MOVED = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class Entry:
    """What is known of a graph node. level: even where PyTorch makes it, odd where Ingot does."""

    level: int
    # Value, Leaf, Joined, number, tuple of these; None for what only PyTorch handles
    value: Any = None


class Cut:
    """A graph and who runs what of it.

    regions: by level; per_sample: by level, how many of a region's samples each of the graph's has;
    taken: the level of each node that is in a region, by_torch: of the others; updated: buffers
    that regions write; has_small_steps: whether a region was found too small for a training step on
    a CPU.
    """

    def __init__(self, feed: Feed, refused: dict[str, str], autocast: bool, gradients: bool):
        self.feed, self.refused, self.autocast = feed, refused, autocast
        self.gradients = gradients
        self.device_type = feed.device_type
        self.entries: dict[torch.fx.Node, Entry] = {}
        self.regions: dict[int, RegionBuilder] = {}
        self.per_sample: dict[int, int] = {}
        self.taken: dict[torch.fx.Node, int] = {}  # level of each node in a region
        self.by_torch: dict[torch.fx.Node, int] = {}
        self.unsupported: dict[torch.fx.Node, Unsupported] = {}
        self.roles: dict[torch.fx.Node, tuple[str, str]] = {}
        self.positions: set[torch.fx.Node] = set()
        self.sources: list[tuple[torch.fx.Node, Source]] = []
        self.updated: set[torch.fx.Node] = set()
        self.shared_statistics = _shared_statistics(feed.graph)
        self._looked_at: dict[torch.fx.Node, int] = {}
        self.delegate_batches = {0}
        self.last_random = 0
        self._waiting: set[torch.fx.Node] = set()  # casts, for what reads them
        self.has_small_steps = False
        self._stages = stages_of(feed.graph) if feed.staged else {}

        self._read()

    # Reading the graph -----------------------------------------------------------------------

    def _read(self) -> None:
        for node in self.feed.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node, attrgetter(node.target)(self.feed.attributes))
            elif node.op == "call_function":
                self._call(node)

    def _placeholder(self, node: torch.fx.Node) -> None:
        known = self.feed.placeholders[node]
        self.sources.append((node, known.source))
        self._outside(node, 0, known.role, batched=known.batched)
        if known.positions:
            self.positions.add(node)

    def _constant(self, node: torch.fx.Node, value: Any) -> None:
        self.sources.append((node, Source("constant", str(node.target), tensor=value)))
        if _is_literal(node, value):
            self.entries[node] = Entry(0, value.item())
        elif isinstance(value, torch.Tensor):
            self._outside(node, 0, ("buffer", str(node.target)))
        else:
            self.entries[node] = Entry(0)

    def _outside(self, node, level: int, role: tuple[str, str], batched: bool = False) -> None:
        """A tensor that reaches regions as a leaf."""
        tensor = node.meta.get("val")
        value = None
        # A number on the CPU beside tensors of a GPU is PyTorch's.
        here = isinstance(tensor, torch.Tensor) and tensor.device.type == self.device_type
        if here and tensor.dtype in DTYPE_NAMES:
            sizes = self._sizes(tensor.shape, batched, node.meta.get(PER_SAMPLE, 1))
            if sizes is not None and 0 not in sizes:
                value = Leaf(node, tuple(range(len(sizes))), sizes, tensor.dtype)
        self.roles[node] = role
        self.entries[node] = Entry(level, value)

    def _sizes(
        self, shape, leading_batch: bool = False, per_sample: int = 1
    ) -> tuple[int, ...] | None:
        """Sizes with -k for k times the batch; None where they depend on it otherwise. Where all
        are numbers, leading_batch: whether the first may be `per_sample` times the batch."""
        sizes = []
        for dimension, size in enumerate(shape):
            if isinstance(size, int):
                symbolic = self.feed.batch is None and leading_batch and dimension == 0
                kept = symbolic and self.feed.static_batch in (None, size / per_sample)
                sizes.append(-per_sample if kept else size)
                continue
            if self.feed.batch is None:
                return None
            factor = size.node.expr / self.feed.batch
            if not factor.is_Integer or factor <= 0:
                return None
            sizes.append(-int(factor))
        return tuple(sizes)

    # Deciding --------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem and self._getitem(node):
            return
        if is_made_from_nothing(node) and not hands_out_memory(node):
            self._constant(node, self._made(node))
            if counts_from_zero(node):
                self.positions.add(node)
            return
        if self._waits(node):
            return
        level = self._ingot_level(node)
        name = "ingot::joined" if JOINED in node.meta else schema_name(node.target)
        reason = None
        if node.name in self.refused:
            reason = self.refused[node.name]
        elif PART in node.meta and self._part(node, level):
            return
        elif name not in TABLE:
            reason = "Ingot has no such operator"
        elif name in FORWARD_ONLY and self.gradients and node in self.needing:
            reason = "its derivative is PyTorch's"
        else:
            region = self.regions.get(level)
            if region is None:
                region = self.regions[level] = RegionBuilder()
                region.roles, region.positions = self.roles, self.positions
            self.per_sample[level] = node.meta.get(PER_SAMPLE, 1)
            mark = region.mark()
            try:
                for cast in self._waited_for(node):
                    self._take(cast, schema_name(cast.target), level, region)
                self._take(node, name, level, region)
                self._waiting.difference_update(node.all_input_nodes)
                return
            except UnfitError as unfit:
                region.rewind(mark)
                reason = str(unfit)
                if not region.values:
                    del self.per_sample[level]
        for cast in self._waited_for(node):
            self.taken.pop(cast, None)
            self._leave_to_torch(cast, schema_name(cast.target), None)
        self._waiting.difference_update(node.all_input_nodes)
        self._leave_to_torch(node, schema_name(node.target), reason)

    def _waits(self, node: torch.fx.Node) -> bool:
        """Of a parameter's cast, whether it is left for the first operator that reads it: any
        region could have it, and that operator's is to."""
        if IMPLIED not in node.meta or node.name in self.refused:
            return False
        known = self.feed.placeholders.get(node.args[0])
        if known is None or known.source.kind != "parameter":
            return False
        self._waiting.add(node)
        self.entries[node] = Entry(0)
        return True

    def _waited_for(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        return [given for given in node.all_input_nodes if given in self._waiting]

    def _part(self, node: torch.fx.Node, level: int) -> bool:
        """Whether a part of a tensor is a leaf of the regions that read it, as a piece of what it
        is a part of."""
        whole, (dimension, start, end, _) = node.args[0], node.args[1:]
        value = self.entries[whole].value
        made_at = self._level_in_memory(whole)
        if isinstance(value, (Value, Joined)):
            value = self._stored(whole)
        if not isinstance(value, Leaf):
            return False
        try:
            value = part_of(value, dimension, start, end - start)
        except UnfitError:
            return False
        self.entries[node], self.taken[node] = Entry(made_at, value), level
        return True

    def _stored(self, node: torch.fx.Node) -> Leaf:
        """What a region computes, as a leaf of later ones."""
        value = self.entries[node].value
        sizes = in_samples(value.sizes, self.per_sample[self.entries[node].level])
        self.roles.setdefault(node, ("input", node.name))
        return Leaf(node, tuple(range(len(sizes))), sizes, value.dtype)

    def _level_in_memory(self, node: torch.fx.Node) -> int:
        """From which on its result may be read."""
        known = self.entries[node]
        return known.level + isinstance(known.value, (Value, Joined))

    def _made(self, node: torch.fx.Node) -> Any:
        if self.feed.only_planned:
            return evaluated(node, {}, "cpu")
        return node.target(*node.args, **node.kwargs)

    def _getitem(self, node: torch.fx.Node) -> bool:
        entry = self.entries[node.args[0]]
        if not isinstance(entry.value, tuple):
            return False
        value = entry.value[node.args[1]]
        if value is None:
            if node.users:
                raise CaptureError(f"it uses result {node.args[1]} of {node.args[0].name}")
            value = entry.value[0]
        self.entries[node] = Entry(entry.level, value)
        self.taken[node] = entry.level
        return True

    def _ingot_level(self, node: torch.fx.Node) -> int:
        level, per_sample = self._first_level(node) + 1, node.meta.get(PER_SAMPLE, 1)
        for argument in node.all_input_nodes:
            known = self.entries[argument].level
            if isinstance(self.entries[argument].value, Joined):
                known += 1  # in no other operator's registers
            level = max(level, known if known % 2 else known + 1)
        while self.per_sample.get(level, per_sample) != per_sample:
            level += 2
        return level

    def _first_level(self, node: torch.fx.Node) -> int:
        """Of the node's stage; there are no more levels in one than changes of hands."""
        return 2 * len(self.feed.graph.nodes) * self._stages.get(node, 0)

    def _take(self, node, name: str, level: int, region: RegionBuilder) -> None:
        arguments, per_sample = named_arguments(node), self.per_sample[level]
        arguments = {key: self._operand(value, level) for key, value in arguments.items()}
        arguments["name"] = name
        result = node.meta.get("val")
        dtype = result.dtype if isinstance(result, torch.Tensor) else None
        if dtype is not None and dtype not in DTYPE_NAMES:
            raise UnfitError(f"the dtype {dtype}")
        lead = next((v for v in arguments.values() if isinstance(v, (Value, Leaf))), None)
        leading_batch = lead is not None and bool(lead.sizes) and lead.sizes[0] == -1
        sizes = None
        if isinstance(result, torch.Tensor):
            sizes = self._sizes(result.shape, leading_batch, per_sample)
            if sizes is not None and 0 in sizes:
                raise UnfitError("an empty tensor")
            if sizes is not None:
                sizes = in_parts(sizes, per_sample)
        used = frozenset(
            user.args[1] for user in node.users if user.target is operator.getitem and user.users
        )
        region.set_origin(origin_or_name(node), where(node))
        call = Call(region, arguments, dtype, sizes, self.autocast, used, self.device_type)
        value = TABLE[name](call)
        self._check(value, sizes)
        if isinstance(value, Leaf):
            value = replace(value, sizes=in_samples(value.sizes, per_sample))
        if moves_statistics(node):
            self._note_statistics(node)
        self.entries[node] = Entry(level, value)
        self.taken[node] = level
        if isinstance(value, Leaf):
            # Only relabelled: any region may use it, at the level of what it relabels, or behind
            # the region that computes that.
            self.entries[node].level = self._level_in_memory(value.node)
        elif isinstance(value, (bool, int, float)):
            self.entries[node].level = 0

    def _check(self, value: Any, sizes: tuple[int, ...] | None) -> None:
        if not isinstance(value, (Value, Leaf, Joined)):
            return
        if sizes is not None and value.sizes != sizes:
            # The sum over a batch of one, kept as a dimension, has the size of the batch.
            plain, wanted = (tuple(map(abs, some)) for some in (value.sizes, sizes))
            if self.feed.static_batch != 1 or plain != wanted:
                raise UnfitError(f"its shape came out as {value.sizes}, not {sizes}")
        axes = [axis for run in value.dims for axis in run] if isinstance(value, Value) else []
        if len(set(axes)) < len(axes):
            raise UnfitError("two dimensions on one axis")

    def _operand(self, argument: Any, level: int) -> Any:
        if isinstance(argument, torch.fx.Node):
            entry = self.entries[argument]
            value = entry.value
            if value is None or isinstance(value, tuple):
                raise UnfitError(self._why_unfit(argument))
            if isinstance(value, (Value, Joined)) and entry.level != level:
                value = self._stored(argument)
            if isinstance(value, Leaf):
                return replace(value, sizes=in_parts(value.sizes, self.per_sample[level]))
            return value
        if isinstance(argument, (list, tuple)):
            return [self._item(item, level) for item in argument]
        return argument

    def _why_unfit(self, argument: torch.fx.Node) -> str:
        if self._sizes(getattr(argument.meta.get("val"), "shape", ())) is None:
            return "sizes that change from call to call, beside those that most of the work is on"
        return "an argument that is not a tensor of a supported dtype and shape"

    def _item(self, item: Any, level: int) -> Any:
        """A tensor, or what is no node of the graph."""
        if not isinstance(item, torch.fx.Node):
            return item
        known = isinstance(self.entries[item].value, (Value, Leaf, Joined))
        return self._operand(item, level) if known else None

    def _note_statistics(self, node: torch.fx.Node) -> None:
        moved = _moved_by(node)
        if moved is None:
            return
        self.updated.update(moved)
        if not is_batch_norm(node):
            return
        sizes = self._sizes(node.meta["val"].shape, True)
        others = [size for size in (sizes or ())[2:] if size != 1]
        if not others:
            self.delegate_batches.add(1)  # one value per channel: PyTorch's own error

    def _leave_to_torch(self, node, name: str, reason: str | None) -> None:
        level = self._first_level(node)
        for argument in node.all_input_nodes:
            known = self.entries[argument].level
            level = max(level, known + 1 if known % 2 else known)
        shared = self.shared_statistics.intersection(node.all_input_nodes)
        if shared:
            # In the order of the program, so that each finds them as moved as it would.
            level = max(level, *(self._looked_at.get(buffer, 0) for buffer in shared))
            self._looked_at.update(dict.fromkeys(shared, level))
        if is_random(node.target):
            # In the order of the program, so that each draws the numbers it would draw.
            level = self.last_random = max(level, self.last_random)
        if mutates(node):
            level = _LAST  # a graph's writes into its inputs come after all that reads those
        self.by_torch[node] = level
        told = ASIDE not in node.meta and name not in SHAPE_OPERATORS and computes(node)
        if reason and name and told:
            self.unsupported[node] = Unsupported(name.rpartition(":")[2], where(node), reason)
        self._outside(node, level, ("input", node.name), self._carries_batch(node))

    def _carries_batch(self, node: torch.fx.Node) -> bool:
        """Whether dimension 0 is the batch, for a graph of one batch size."""
        result = node.meta.get("val")
        if self.feed.batch is not None or not isinstance(result, torch.Tensor):
            return False
        if PER_SAMPLE in node.meta:
            return True
        return (
            result.dim() >= 1
            and result.shape[0] == self.feed.static_batch
            and (BATCHED in node.meta or any(map(self.leads_with_batch, node.all_input_nodes)))
        )

    def leads_with_batch(self, node: torch.fx.Node) -> bool:
        value = self.entries[node].value
        return isinstance(value, (Value, Leaf, Joined)) and value.sizes[:1] == (-1,)

    def has_product(self, level: int) -> bool:
        return any(value["op"] == "matmul" for value in self.regions[level].values)

    def is_moved_elsewhere(self, norm: torch.fx.Node) -> bool:
        """Whether the running statistics of a norm are read by what is not in its region, which
        would have to see them moved in order."""
        level = self.taken[norm]
        buffers = [named_arguments(norm).get(name) for name in _MOVED]
        return any(
            self.taken.get(reader) != level or reader.name in self.refused
            for buffer in buffers
            if isinstance(buffer, torch.fx.Node)
            for reader in buffer.users
        )

    @cached_property
    def needing(self) -> set[torch.fx.Node]:
        """Nodes with a gradient."""
        return needing_gradients(self.feed)

    @cached_property
    def differentiated(self) -> set[torch.fx.Node]:
        """Those with one that comes from a result."""
        return differentiated(self.feed.graph, self.needing)

    @cached_property
    def surely_differentiated(self) -> set[torch.fx.Node]:
        """The same of no input of which a gradient is only assumed."""
        return differentiated(self.feed.graph, needing_gradients(self.feed, assumed=False))

    @cached_property
    def waits_for_host(self) -> bool:
        """Whether a training step of the graph in few bits is not the GPU's time."""
        return self._has_host and is_of_the_host(self.feed.graph.nodes)

    @property
    def _has_host(self) -> bool:
        """Whether the host takes time beside the device."""
        return self.device_type == "cuda" and not self.feed.is_replayed

    @cached_property
    def turning(self) -> list[torch.fx.Node]:
        """What turns tokens for a sweep."""
        return list(filter(turns_tokens, self.feed.graph.nodes))

    @cached_property
    def nears_host(self) -> bool:
        """Whether that of a network of images takes the host about as long as the GPU."""
        few_bits = self.feed.tf32 or self.autocast  # convolutions of 16 bits take no longer
        return self._has_host and nears_the_host(self.feed.graph.nodes, few_bits)

    @cached_property
    def nears_host_in_16_bits(self) -> bool:
        """The same with convolutions that take the GPU as little as TF32's."""
        return self._has_host and nears_the_host(self.feed.graph.nodes, True)

    @cached_property
    def multiplies_in_few_bits(self) -> bool:
        """Whether products may be PyTorch's in a training step, which are as fast: in TF32, under
        autocast, and of 16-bit operands."""
        nodes = self.feed.graph.nodes
        products = (node for node in nodes if schema_name(node.target) in PRODUCTS)
        return self.feed.tf32 or self.autocast or any(is_half(n.meta.get("val")) for n in products)

    def computes(self, node: torch.fx.Node) -> bool:
        """Whether a node of a region is more than a view of a tensor, or a number."""
        return (
            schema_name(node.target) not in SHAPE_OPERATORS
            and node.target is not operator.getitem
            and isinstance(self.entries[node].value, (Value, Joined, tuple))
        )


def _moved_by(norm: torch.fx.Node) -> list[torch.fx.Node] | None:
    """Its running statistics; None where it does not move them."""
    arguments = named_arguments(norm)
    if not arguments.get("training", True):
        return None
    return [b for b in map(arguments.get, _MOVED) if isinstance(b, torch.fx.Node)]


def _shared_statistics(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Running statistics that one operator moves and another one moves or reads."""
    norms = (node for node in graph.nodes if moves_statistics(node))
    moved = (buffer for norm in norms for buffer in _moved_by(norm) or ())
    return {buffer for buffer in moved if len(buffer.users) > 1}


def _is_literal(node: torch.fx.Node, value: Any) -> bool:
    """`torch.tensor(0.5)` in a forward: the same number at every call."""
    made = node.op == "get_attr" and str(node.target).startswith("_tensor_constant")
    return made and isinstance(value, torch.Tensor) and value.dim() == 0
