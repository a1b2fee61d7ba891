"""Blocks that a model marks to be compiled once (`torch.compiler.nested_compile_region`): written
out at each place, since PyTorch runs their calls under its own compilers alone, and equal regions
are compiled once anyway."""

from __future__ import annotations

import torch

_CALL = getattr(torch.ops.higher_order, "invoke_subgraph", None)


def write_out(gm: torch.fx.GraphModule) -> None:
    """Of a graph of TorchDynamo's."""
    changed = False
    while calls := [node for node in gm.graph.nodes if node.target is _CALL]:
        for call in calls:
            _write_out(gm, call)
        changed = True
    if changed:
        gm.recompile()


def _write_out(gm: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    block, _, *given = call.args
    path = block.target
    body = gm.get_submodule(path)
    operands, copies = iter(given), {}
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(operands)
            elif node.op != "output":
                copies[node] = made = gm.graph.node_copy(node, copies.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    made.target = f"{path}.{node.target}"
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    results = torch.fx.node.map_arg(output.args[0], copies.__getitem__)
    if not isinstance(results, (tuple, list)):
        call.replace_all_uses_with(results)
    for part in list(call.users):
        part.replace_all_uses_with(results[part.args[1]])
        gm.graph.erase_node(part)
    gm.graph.erase_node(call)
    if not block.users:
        gm.graph.erase_node(block)
