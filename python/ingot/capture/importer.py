"""Cuts an ATen graph into regions that Ingot runs and steps that PyTorch runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ingot.capture.assembly import NotStoredError, assembled
from ingot.capture.captured import Captured, CaptureError, Source
from ingot.capture.cutting import Cut
from ingot.capture.decompose import decompose
from ingot.capture.exporting import Exported, export_module
from ingot.capture.feed import Feed, Placeholder, device_type_of
from ingot.capture.leading_axes import merge_leading_axes
from ingot.capture.nodes import mutates, own_path


def capture(
    module: nn.Module,
    example_inputs: tuple,
    example_kwargs: dict | None = None,
    *,
    forward: Callable | None = None,
    refused: dict[str, str] | None = None,
    autocast: bool = False,
    gradients: bool = False,
) -> Captured:
    """Captures a module's forward with its training flags as they are.

    example_inputs: tensors on the module's device; only their shapes, dtypes and strides matter,
    and of the batch size only whether it is there. forward: stands for the class's own. refused:
    graph nodes that PyTorch must run (`node` among a region's operators), with the reason.
    autocast: whether it is on around the call. gradients: as import_graph has it. Raises
    CaptureError with the reason where PyTorch must run the whole module.
    """
    exported = export_module(module, example_inputs, example_kwargs, forward)
    if any(mutates(node) for node in exported.program.graph.nodes):
        exported.program = exported.program.run_decompositions({})
    _check_signature(exported.program)
    return import_graph(
        _fed_by_export(exported), refused=refused, autocast=autocast, gradients=gradients
    )


def import_graph(
    feed: Feed,
    *,
    refused: dict[str, str] | None = None,
    autocast: bool = False,
    gradients: bool = False,
) -> Captured:
    """Regions and steps of an ATen graph, which is rewritten on the way.

    gradients: of what is taken, a backward pass is to follow: regions store what it reads, and what
    is too cheap to gain from a region of its own stays PyTorch's with its derivative. For the rest
    see `capture`.
    """
    if not feed.rewritten:
        decompose(feed.graph)
        merge_leading_axes(feed.graph)
        feed.rewritten = True
    refused = dict(refused or {})
    while True:
        cut = Cut(feed, refused, autocast, gradients)
        alone = cut.weak_nodes()
        if not alone:
            try:
                return assembled(cut)
            except NotStoredError as error:
                alone = {error.node.name}
        refused.update(dict.fromkeys(alone, ""))


def _check_signature(program) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            raise CaptureError(f"its forward writes into {own_path(spec.target)}")
        if spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError("its forward writes into its input")
        if spec.kind.name != "USER_OUTPUT":
            raise CaptureError(f"its outputs have the kind {spec.kind.name}")


def _fed_by_export(exported: Exported) -> Feed:
    program = exported.program
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders: dict[torch.fx.Node, Placeholder] = {}
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec = specs[node.name]
        kind, path = spec.kind.name, own_path(spec.target)
        if kind == "USER_INPUT":
            index = sum(1 for p in placeholders.values() if p.source.kind == "input")
            source = Source("input", f"input {index}", index)
            found = Placeholder(source, ("input", f"input_{index}"), exported.batched[index])
        elif kind in ("PARAMETER", "BUFFER"):
            role = (kind.lower(), path)
            found = Placeholder(Source(*role), role)
        elif kind in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            source = Source("constant", path, tensor=program.constants[spec.target])
            found = Placeholder(source, ("buffer", path))
        else:
            raise CaptureError(f"its graph has an input of kind {kind}")
        placeholders[node] = found
    values = [n.meta["val"] for n, p in placeholders.items() if p.source.kind == "input"]
    return Feed(
        program.graph,
        program.graph_module,
        placeholders,
        device_type_of(values),
        exported.batch,
        exported.static_batch,
        exported.out_spec,
        exported.constant_outputs,
    )
