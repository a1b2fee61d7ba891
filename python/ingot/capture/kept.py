"""What a region stores for its backward pass: no product is computed again, and what is kept is
meant to take no more memory than what eager PyTorch keeps in its place."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ingot.capture.backward_operators import BY_RESULT
from ingot.capture.cutting import Cut
from ingot.capture.decisions import (
    compared_with,
    computes_alike,
    decides,
    is_exact,
    is_repeated,
)
from ingot.capture.kept_by_eager import (
    MASKS,
    is_eagers_too,
    is_view,
    keeps_operand,
    multiplies_what_needs,
)
from ingot.capture.layout import UnfitError, Value, size_in_bytes
from ingot.capture.nodes import (
    hands_out_memory,
    is_extremum_with_place,
    is_group_norm,
    is_mean_of_rows,
    is_row_norm,
    named_arguments,
    reached,
    schema_name,
)
from ingot.capture.normalisations import batch_statistics, group_statistics, row_statistics
from ingot.capture.products import (
    KEEPING_OPERANDS,
    PASSING_ON,
    PRODUCTS,
    REGROUPED_OR_SUMMED,
)
from ingot.capture.reductions import place_of_extremum
from ingot.capture.table import CASTS, CHANGES_NOTHING, HALVES, SHAPE_OPERATORS, is_half
from ingot.runtime.layouts import ResultLayout, TensorLayout

_MOST_OF_STATE = 1 << 16  # numbers
# Whose derivatives read no operand.
_READING_NOTHING = (PASSING_ON, SHAPE_OPERATORS, REGROUPED_OR_SUMMED, CHANGES_NOTHING)


class Kept:
    """Adds to a region's results what backward reads.

    given: nodes that something outside the region reads; results, layouts, names: of these, to
    which the further ones are added. values: nodes of products, of their operands, of sums and of
    decisions, with their place among the results; statistics: of batch norms in training, with
    those of "mean" and "variance", or of what follows from it; written, written_leaves: places of
    results, and of leaves, that the caller may write into before backward, since eager keeps
    something else; written_inputs: of leaves of which it does where they have no gradient, tables:
    of such that are too large to be copied for that.
    """

    def __init__(
        self,
        cut: Cut,
        level: int,
        given: list[torch.fx.Node],
        results: list[int | tuple[int, ...]],
        layouts: list[TensorLayout],
        names: list[str],
    ):
        self.cut, self.level, self.region = cut, level, cut.regions[level]
        self.given, self.results, self.layouts, self.names = given, results, layouts, names
        self.values: dict[torch.fx.Node, int] = {}
        self.statistics: dict[torch.fx.Node, dict[str, int]] = {}
        self.nodes: dict[torch.fx.Node, None] = {}  # whose derivative there is
        if cut.gradients and given:
            self.nodes = dict.fromkeys(node for node, own in cut.taken.items() if own == level)
            self._results()
            self._totals()
            self._sums()
            self._extrema()
            self._products()
            self._decisions()
            self._statistics()
        self.written = frozenset(
            at
            for node, at in self.values.items()
            if at < len(self.given)
            and hands_out_memory(self.given[at])
            and not is_eagers_too(node, self.cut.differentiated)
        )
        sources = {
            at: source_of(node)
            for at, (node, _) in enumerate(self.region.leaves if cut.gradients else ())
            if self._may_be_written(source_of(node))
        }
        self.written_leaves = frozenset(
            at
            for at, source in sources.items()
            if source in self.cut.needing
            and self._is_read(self.region.leaves[at][0])
            and not is_eagers_too(source, self.cut.differentiated)
        )
        self.written_inputs = frozenset(at for at, s in sources.items() if self._is_lent(s))
        self.tables = frozenset(
            at
            for at, source in sources.items()
            if self._is_table(source) and not is_eagers_too(source, self.cut.surely_differentiated)
        )

    def _may_be_written(self, source: torch.fx.Node) -> bool:
        """Whether a leaf is a tensor of the caller's, `h += block(h)`, or a module's state."""
        if not isinstance(source.meta.get("val"), torch.Tensor):
            return False  # a size, which a view in front of the leaf takes
        known = self.cut.feed.placeholders.get(source)
        return hands_out_memory(source) if known is None else known.source.kind != "parameter"

    def _is_lent(self, source: torch.fx.Node) -> bool:
        """Whether eager keeps something else of it where it has no gradient: of what carries the
        batch, and of state, but for masks and tables, which nobody writes between a forward and its
        backward."""
        surely = self.cut.surely_differentiated
        return not self._is_table(source) and not is_eagers_too(source, surely)

    def _is_table(self, source: torch.fx.Node) -> bool:
        if source not in self.cut.feed.placeholders or self.cut.leads_with_batch(source):
            return False
        shape = source.meta["val"].shape
        return all(isinstance(n, int) for n in shape) and shape.numel() > _MOST_OF_STATE

    def _store(self, node: torch.fx.Node) -> None:
        value = self.cut.entries[node].value
        if node in self.given:
            self.values[node] = self.given.index(node)
        elif (place := self._place(value)) is not None:
            self.values[node] = place
        elif isinstance(value, Value) and value.id not in self.results:
            with contextlib.suppress(UnfitError):
                layout = self.region.result_layout(value, value)
                self.values[node] = self._add(value.id, layout, node.name)

    def _is_written(self, node: torch.fx.Node) -> bool:
        """Whether it is among the results, if under other dimensions, as those of an image that
        were merged in front of it."""
        return node in self.given or self._place(self.cut.entries[node].value) is not None

    def _place(self, value: Any) -> int | None:
        """Of a result that has the value's elements in their order: not turned."""
        if not isinstance(value, Value):
            return None
        places = (at for at, each in enumerate(self.results) if each == value.id)
        return next((at for at in places if _in_order(self.layouts[at], value)), None)

    def _add(self, identity: int, layout: ResultLayout, name: str) -> int:
        self.results.append(identity)
        self.layouts.append(layout)
        self.names.append(name)
        return len(self.results) - 1

    def _results(self) -> None:
        """Those of activations that are there anyway, where something beneath need not be kept
        then: the derivative reads the result, as PyTorch's does. They are handed out, or multiplied
        next, where the gradient of the other operand reads them, too."""
        for node in reversed(self.nodes):
            if node.target not in BY_RESULT or self._is_off(node):
                continue
            is_written = self._is_written(node)
            if is_written or self._is_multiplied(node):
                stored = {**self.values, node: -1}
                beneath = [below for below in self._beneath(node) if self._is_read(below)]
                fewer = not all(self._is_read(below, stored) for below in beneath)
                written = 0 if is_written else _bytes(node)
                if fewer or self._let_go_for(node) > written:
                    self._store(node)

    def _totals(self) -> None:
        """Of losses, numbers of a row: without them backward would read the rows once more."""
        for node in self.nodes:
            if schema_name(node.target) in ("ingot::largest", "ingot::log_total"):
                self._store(node)

    def _is_off(self, node: torch.fx.Node) -> bool:
        """Whether a result may have been put together from what was rounded to 16 bits and what was
        not: those of reductions behind a product. Backward rather computes it again than takes it
        at its word."""
        reduces = len(node.args) > 1 and node.meta["val"].dtype in HALVES
        return reduces and self.cut.has_product(self.level)

    def _is_multiplied(self, node: torch.fx.Node) -> bool:
        return any(
            user in self.nodes and schema_name(user.target) in PRODUCTS for user in node.users
        )

    def _sums(self) -> None:
        """Those in whose place nothing that they are made of need be kept, and those that PyTorch
        keeps too and that would follow from one another, layer by layer, through all of a network.
        One that is handed out may be written by whoever gets it, unless eager keeps it, too."""
        for node in reversed(self.nodes):
            if schema_name(node.target) not in PASSING_ON or not self._is_read(node):
                continue
            wanted = kept = self._is_kept_by_eager(node)
            if not self._is_written(node):
                wanted = self._replaces_products(node) or (kept and _is_of_a_chain(node))
                wanted = wanted or self._let_go_for(node) > _bytes(node)
            if wanted:
                self._store(node)

    def _is_kept_by_eager(self, node: torch.fx.Node) -> bool:
        return any(keeps_operand(user) for user in node.users if user in self.nodes)

    def _replaces_products(self, node: torch.fx.Node) -> bool:
        """Whether they take as much memory, and nothing else reads them backwards."""
        stored = {**self.values, node: -1}
        products = {p for p in self._beneath(node) if not self._is_read(p, stored)}
        return sum(map(_bytes, products)) >= _bytes(node)

    def _let_go_for(self, node: torch.fx.Node) -> int:
        """Bytes of what comes in that backward need not keep where it reads this node in its place,
        as eager does, which has let go of what a sum was made of. Backward reads no operand of a
        frozen matrix, whatever a product's derivative could. (Of a result that is handed out its
        own derivative may be the only reader.)"""
        readers = list(self._readers(node, self.values))
        if readers and all(self._is_beside_frozen(*reader) for reader in readers):
            return 0
        stored = {**self.values, node: -1}
        read = {leaf for leaf in self._kept_by_us_alone if self._is_read(leaf)}
        still = {source_of(leaf) for leaf in read if self._is_read(leaf, stored)}
        return sum(map(_bytes, {source_of(leaf) for leaf in read} - still))

    def _is_beside_frozen(self, user: torch.fx.Node, operand: torch.fx.Node) -> bool:
        is_product = schema_name(user.target) in PRODUCTS
        return is_product and not multiplies_what_needs(user, operand, self.cut.needing)

    @functools.cached_property
    def _kept_by_us_alone(self) -> list[torch.fx.Node]:
        """Leaves that are no state, and that eager keeps none of."""
        state = self.cut.feed.placeholders
        return [
            leaf
            for leaf in dict.fromkeys(leaf for leaf, _ in self.region.leaves)
            if (source := source_of(leaf)).op != "get_attr"
            and (source not in state or state[source].source.kind == "input")
            and not is_eagers_too(source, self.cut.differentiated)
        ]

    def _beneath(self, node: torch.fx.Node) -> set[torch.fx.Node]:
        """Products of the region from which a sum, or an activation of one, is put together."""

        def is_product(below: torch.fx.Node) -> bool:
            return schema_name(below.target) in PRODUCTS

        def further(below: torch.fx.Node) -> Iterator[torch.fx.Node]:
            passing = () if is_product(below) else below.all_input_nodes
            return (of for of in passing if self._passes(below, of))

        found = reached(node.all_input_nodes, further, self.nodes.__contains__)
        return set(filter(is_product, found))

    def _passes(self, node: torch.fx.Node, operand: torch.fx.Node) -> bool:
        """Whether its derivative does not read this operand: of a sum, of a choice by a mask, or of
        a product with what has no gradient."""
        name = schema_name(node.target)
        if any(name in names for names in _READING_NOTHING):
            return True
        if name in CASTS:
            return node.meta["val"].dtype == operand.meta["val"].dtype
        if name in MASKS:
            return len(node.args) > MASKS[name] and operand is not node.args[MASKS[name]]
        scaled = {"aten::mul": node.all_input_nodes, "aten::div": node.args[:1]}
        once = operand in scaled.get(name, ()) and not node.kwargs
        others = (argument for argument in node.args if argument is not operand)
        return once and node.args.count(operand) == 1 and self.cut.needing.isdisjoint(others)

    def _extrema(self) -> None:
        """Those along a dimension, of which there is one number for many: without them backward
        would read what they are of once more."""
        for node in filter(is_extremum_with_place, self.nodes):
            for value in node.users:
                if value in self.nodes and value.args[1:] == (0,) and self._is_read(value):
                    self._store(value)

    def _products(self) -> None:
        for node in self.nodes:
            if schema_name(node.target) not in PRODUCTS:
                continue
            readers = self._readers(node, self.values)
            is_read = not all(self._is_beside_frozen(*reader) for reader in readers)
            for kept in (*([node] if is_read else ()), *self._operands(node)):
                self._store(kept)

    def _is_read(self, node: torch.fx.Node, stored: dict | None = None) -> bool:
        return any(self._readers(node, self.values if stored is None else stored))

    def _readers(
        self, node: torch.fx.Node, stored: dict
    ) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
        """What in the region has a derivative that reads the node's value, with the operand through
        which it does: not sums of it, nor what reads a sum of it, or its own result, which is
        stored."""
        seen, ahead = set(), [node]
        while ahead:
            below = ahead.pop()
            for user in below.users:
                passes = self._passes(user, below)
                known = user in stored and (passes or user.target in BY_RESULT)
                if known or user in seen or user not in self.nodes:
                    continue
                if not passes:
                    yield user, below
                else:
                    seen.add(user)
                    ahead.append(user)

    def _operands(self, product: torch.fx.Node) -> list[torch.fx.Node]:
        """Operands that forward writes for the product alone and PyTorch keeps for backward, beside
        what they are computed from: kept, they need not be computed again, in no more memory. Casts
        of weights, of which autocast keeps one each, where backward reads them. A
        norm of a sum that is stored is written by backward, which reads the sum anyway. So are
        those of an input without a gradient, which PyTorch does not keep."""
        return [
            operand
            for operand in product.all_input_nodes
            if operand in self.nodes
            and self._is_worth_keeping(operand, product)
            and isinstance(self.cut.entries[operand].value, Value)
            and not self._is_norm_of_stored_sum(operand)
        ]

    def _is_worth_keeping(self, operand: torch.fx.Node, product: torch.fx.Node) -> bool:
        if schema_name(operand.target) in KEEPING_OPERANDS or self._is_of_lent(operand):
            return True
        if schema_name(operand.target) not in CASTS:
            return False
        known = self.cut.feed.placeholders.get(operand.args[0])
        is_weight = known is not None and known.source.kind == "parameter"
        return is_weight and multiplies_what_needs(product, operand, self.cut.surely_differentiated)

    def _is_of_lent(self, operand: torch.fx.Node) -> bool:
        ahead, seen = [operand], {operand}
        while ahead:
            node = ahead.pop()
            if node in self.cut.needing:
                return False
            if node in self.nodes:
                ahead += set(node.all_input_nodes) - seen
                seen.update(node.all_input_nodes)
            elif self._may_be_written(source_of(node)) and self._is_lent(source_of(node)):
                return True
        return False

    def _is_norm_of_stored_sum(self, operand: torch.fx.Node) -> bool:
        of = operand.args[0]
        return (
            of in self.values and _is_sum(of) and schema_name(operand.target) == "aten::layer_norm"
        )

    def _decisions(self) -> None:
        inside, stored = self.nodes.__contains__, self.values.__contains__
        for node in filter(decides, self.nodes):
            if not is_repeated(node, inside, stored) and self._is_read(node):
                self._store(node)
        if computes_alike(self.cut.device_type):
            return
        for kept in map(compared_with, self.nodes):
            if kept in self.nodes and not is_exact(kept, inside, stored):
                self._store(kept)

    def _statistics(self) -> None:
        """Of norms, what backward reads: mean and variance, or what follows from it. The norm's own
        sweep makes them: behind a product from what is then rounded where a 16-bit result is
        stored, but x̂ must come from one and the same. Of extrema, where they lie."""
        behind_product = self.cut.has_product(self.level)
        rounded = behind_product and any(layout.dtype in HALVES for layout in self.layouts)
        for node in self.nodes:
            of_rows = is_row_norm(node) or is_mean_of_rows(node)
            from_unrounded = of_rows and not is_half(node.args[0].meta["val"])
            if rounded and not (from_unrounded or is_extremum_with_place(node)):
                continue
            for kind, (identity, layout) in self._statistics_of(node, behind_product).items():
                at = self._add(identity, layout, f"{node.name}_{kind}")
                self.statistics.setdefault(node, {})[kind] = at

    def _statistics_of(
        self, node: torch.fx.Node, behind_product: bool
    ) -> dict[str, tuple[int, ResultLayout]]:
        value = self.cut.entries[node].value
        if node.target is torch.ops.ingot.batch_norm.default and node.args[6]:
            return batch_statistics(self.region, value, not behind_product)
        if is_group_norm(node) and not behind_product:
            return group_statistics(self.region, value)
        if is_row_norm(node):
            count = len(named_arguments(node)["normalized_shape"])
            return row_statistics(self.region, value, count)
        if is_extremum_with_place(node) and node in self.cut.needing:
            found = place_of_extremum(self.region, value[0])
            return {} if found is None else {"place": found}
        if is_mean_of_rows(node) and self._is_read(node):
            self._store(node)
        return {}


def _in_order(layout: ResultLayout, value: Value) -> bool:
    """Whether a result's elements follow one another as the value's, whatever dimensions they are
    cut into."""
    own = _runs(value.extents, value.dims)
    return isinstance(layout, ResultLayout) and _runs(layout.extents, layout.axes) == own


def _runs(extents: Sequence[int], dims: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Sizes and strides of dense memory in the order of a tensor's dimensions, those put together
    that lie as one."""
    found: list[tuple[int, int]] = []
    for axis in (axis for run in dims for axis in run if extents[axis] != 1):
        size, stride = extents[axis], math.prod(extents[axis + 1 :])
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def source_of(node: torch.fx.Node) -> torch.fx.Node:
    """What a view is of."""
    while is_view(node):
        node = node.args[0]
    return node


def _is_sum(node: torch.fx.Node) -> bool:
    return schema_name(node.target) in PASSING_ON and len(node.all_input_nodes) > 1


def _is_of_a_chain(node: torch.fx.Node) -> bool:
    """Whether it is a term of another sum, or has one."""
    return _is_sum(node) and any(map(_is_sum, (*node.all_input_nodes, *node.users)))


def _bytes(node: torch.fx.Node) -> int:
    return size_in_bytes(node.meta["val"])
