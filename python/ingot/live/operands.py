"""What only a product of a backward pass reads, computed just before it.

dW = dYᵀ·f(h) wants f(h) as a tensor of its own, which a region would hold beside all its other
results. Computed by itself, and multiplied as early as can be, it is gone before those are made:
that matches eager, which kept f(h), in peak memory.
"""

from __future__ import annotations

from dataclasses import replace

from ingot.capture.captured import Captured, Region, Slot, TorchStep, slots_read
from ingot.capture.nodes import reached
from ingot.capture.table import HALVES
from ingot.live.products import transposed_product
from ingot.live.widened import transposed_product_in_fp32
from ingot.runtime.layouts import JoinedLayout
from ingot.runtime.signature import BATCH

_OVER_ROWS = (transposed_product, transposed_product_in_fp32)
_LEAVES = ("input", "parameter", "buffer")
_ELEMENTWISE = {"approximate", "min", "max", "alpha", "beta", "threshold", "negative_slope"}


def apart(captured: Captured, device_type: str) -> Captured:
    """The same with such operands in regions of their own. On a CPU only where another result is as
    large: what is computed twice costs more there than a pass over memory."""
    steps = list(captured.steps)
    outputs = {o.index for o in captured.outputs if isinstance(o, Slot)}
    for region in captured.regions:
        if any(isinstance(layout, JoinedLayout) for layout in region.result_layouts):
            continue  # places of its results are none of its graph's
        for slot in region.results:
            readers = [step for step in steps if slot in slots_read(step)]
            if slot in outputs or len(readers) != 1 or len(region.results) == 1:
                continue
            place, (reader,) = region.results.index(slot), readers
            is_product = isinstance(reader, TorchStep) and reader.target in _OVER_ROWS
            if device_type == "cpu" and not _has_another_batch(region, place):
                continue
            if is_product and _is_elementwise(region, place) and not _is_read_anyway(region, place):
                region = _moved(steps, region, place, reader)
    return replace(captured, steps=steps)


def _moved(steps: list, region: Region, place: int, product: TorchStep) -> Region:
    """Changes the steps; what is left of the region."""
    alone, rest = _alone(region, place), _without(region, place)
    steps.remove(product)
    at = steps.index(region)
    steps[at] = rest
    made_here = {*rest.results, *(s.result for s in steps[at + 1 :] if isinstance(s, TorchStep))}
    made_here.update(slot for s in steps[at + 1 :] if isinstance(s, Region) for slot in s.results)
    waits = made_here.intersection(slots_read(product))
    # Behind the region where its other operand is made there: before what it itself feeds.
    position = at if not waits else _behind(steps, waits)
    steps[position:position] = [alone, product]
    return rest


def _behind(steps: list, slots: set[int]) -> int:
    makers = [
        at
        for at, step in enumerate(steps)
        if slots.intersection(step.results if isinstance(step, Region) else [step.result])
    ]
    return max(makers) + 1


def _has_another_batch(region: Region, place: int) -> bool:
    others = (layout for at, layout in enumerate(region.result_layouts) if at != place)
    return any(BATCH in layout.shape for layout in others)


def _needed(region: Region, place: int) -> list[int]:
    """Values that a result follows from, in order."""
    values = region.graph["values"]
    result = region.graph["results"][place]["value"]
    return sorted(reached([result], lambda at: values[at].get("args", ()), lambda at: at >= 0))


def _is_elementwise(region: Region, place: int) -> bool:
    """Then it costs little to compute again what the rest of the region computes, too."""
    values = [region.graph["values"][at] for at in _needed(region, place)]
    computed = [value for value in values if "args" in value]
    return bool(computed) and all(
        value["op"] != "matmul"
        and set(value.get("attributes", {})) <= {*_ELEMENTWISE, "shape", "dtype"}
        for value in computed
    )


def _is_read_anyway(region: Region, place: int) -> bool:
    """Whether the operand is computed from several tensors that another result is computed from,
    too, in a region after whose only product there is nothing that it would be held for."""
    values = region.graph["values"]
    products = sum(value["op"] == "matmul" for value in values)
    if products != 1 or region.result_layouts[place].dtype not in HALVES:
        return False

    def read(at: int) -> set[int]:
        return {
            leaf
            for leaf in _needed(region, at)
            if values[leaf]["op"] in _LEAVES and values[leaf]["shape"] == shape
        }

    shape = _shape_of(region, place)
    own = read(place)
    others = (at for at in range(len(region.results)) if at != place)
    return len(own) > 1 and any(own <= read(at) for at in others)


def _shape_of(region: Region, place: int) -> list:
    """As the graph writes a leaf's."""
    layout = region.result_layouts[place]
    return ["B" if extent == BATCH else extent for extent in layout.written or layout.extents]


def _alone(region: Region, place: int) -> Region:
    values, needed = region.graph["values"], _needed(region, place)
    renamed = {old: new for new, old in enumerate(needed)}
    renamed[-1] = -1
    kept = [dict(values[at]) for at in needed]
    for value in kept:
        if "args" in value:
            value["args"] = [renamed[at] for at in value["args"]]
    ordinals = {at: n for n, at in enumerate(_leaves(region))}
    leaves = [ordinals[at] for at in needed if at in ordinals]
    result = region.graph["results"][place]
    graph = {
        **region.graph,
        "name": f"{region.graph['name']}_operand",
        "values": kept,
        "results": [{**result, "value": renamed[result["value"]]}],
    }
    return replace(
        region,
        graph=graph,
        leaves=[region.leaves[n] for n in leaves],
        leaf_layouts=[region.leaf_layouts[n] for n in leaves],
        results=[region.results[place]],
        result_layouts=[region.result_layouts[place]],
        same={},
    )


def _without(region: Region, place: int) -> Region:
    def rest(items: list) -> list:
        return [*items[:place], *items[place + 1 :]]

    return replace(
        region,
        graph={**region.graph, "results": rest(region.graph["results"])},
        results=rest(region.results),
        result_layouts=rest(region.result_layouts),
        same={},
    )


def _leaves(region: Region) -> list[int]:
    return [at for at, value in enumerate(region.graph["values"]) if value["op"] in _LEAVES]
