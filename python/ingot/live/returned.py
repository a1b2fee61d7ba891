"""What a forward returns and computes other results from, as `return h, head(h)` does.

Whoever gets h may ask for the gradient of the others by it (Grad-CAM), keep it (`retain_grad()`) or
put a hook on it. Autograd counts as h's what comes through the tensor that was handed out: of what
one region gives, none is computed from another. So the others are of regions behind the one that
gives h, and read what the caller gets.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from ingot.capture.feed import Feed, differentiated, needing_gradients
from ingot.capture.nodes import LEFT_ALONE, RETURNED

# In the meta of a part of a graph: places of its results that only other parts read.
INNER = "ingot_inner"


def readers_of_results(feed: Feed, inner: Container[int] = ()) -> list[str]:
    """Nodes that PyTorch must run: each stands for a result of the graph's, put in front of what
    reads that and gives other results a gradient. inner: places of results that no user gets."""
    (output,) = (node for node in feed.graph.nodes if node.op == "output")
    needing = needing_gradients(feed)
    leading = differentiated(feed.graph, needing)
    handed_out = (node for at, node in enumerate(output.args[0]) if at not in inner)
    found = []
    for node in dict.fromkeys(handed_out):
        if node not in needing or node.op != "call_function":
            continue
        readers = [user for user in node.users if user in leading]
        if not readers:
            continue
        with feed.graph.inserting_after(node):
            returned = feed.graph.call_function(torch.ops.aten.alias.default, (node,))
        returned.meta = dict(node.meta) | {LEFT_ALONE: True, RETURNED: True}
        for reader in readers:
            reader.replace_input_with(node, returned)
        found.append(returned.name)
    return found
