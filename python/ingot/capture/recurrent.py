"""nn.LSTM, nn.GRU and nn.RNN stay whole, and PyTorch's: traced as they are, they would come apart
into the operators of each time step. `ingot::recurrent` stands for them in a captured graph. It is
never run on real tensors.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ingot.capture.captured import CaptureError
from ingot.capture.nodes import RECURRENT

_SCHEMA = (
    "(str kind, Tensor x, Tensor[] state, Tensor[] weights, bool has_biases, int layers, "
    "float dropout, bool training, bool bidirectional, bool batch_first, ScalarType dtype) "
    "-> Tensor[]"
)
_KINDS = {getattr(torch, name): name for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


# Between its layers it may drop. PyTorch 2.6 takes no tags; nodes.is_random() knows it by name.
_TAGS = {"tags": (torch.Tag.nondeterministic_seeded,)}
_TAKES_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters


@torch.library.custom_op(
    RECURRENT, mutates_args=(), schema=_SCHEMA, **(_TAGS if _TAKES_TAGS else {})
)
def recurrent(kind, x, state, weights, biases, layers, dropout, training, both, first, dtype):
    raise RuntimeError("ingot::recurrent exists for captures only")


@recurrent.register_fake
def _(kind, x, state, weights, biases, layers, dropout, training, both, first, dtype):
    # With projections the first state is as wide as they are. In memory the sequence comes first.
    width = state[0].shape[-1] * (2 if both else 1)
    lengths = x.shape[1::-1] if first else x.shape[:2]
    output = x.new_empty((*lengths, width), dtype=dtype)
    output = output.transpose(0, 1) if first else output
    return [output, *(s.new_empty(s.shape, dtype=dtype) for s in state)]


def stand_in(graph: torch.fx.Graph) -> None:
    """Puts it into a graph of Dynamo's. Raises CaptureError for sequences of several lengths, and
    under autocast."""
    for node in list(graph.nodes):
        kind = _KINDS.get(node.target) if node.op == "call_function" else None
        if kind is None:
            continue
        x, state, weights, *rest = node.args
        if node.kwargs or len(rest) != 6 or not isinstance(weights, (list, tuple)):
            raise CaptureError(f"{kind} of packed sequences")
        if torch.is_autocast_enabled(node.meta["example_value"][0].device.type):
            # Which dtype comes out is known where it runs alone.
            raise CaptureError(f"{kind} under autocast")
        states = list(state) if isinstance(state, (list, tuple)) else [state]
        dtype = node.meta["example_value"][0].dtype
        with graph.inserting_before(node):
            made = graph.call_function(
                torch.ops.ingot.recurrent.default,
                (kind, x, states, list(weights), *rest, dtype),
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def run_recurrent(kind: str, x: Any, state: Any, *arguments: Any) -> Any:
    """What PyTorch does with these arguments."""
    *arguments, _ = arguments
    return getattr(torch, kind)(x, state if kind == "lstm" else state[0], *arguments)
