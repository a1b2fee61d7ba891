"""nn.MultiheadAttention of one tensor with itself, without the copies of PyTorch's way.

PyTorch turns the batch behind the sequence, copies the three parts of the first product apart and
the heads together again: four passes over activations in front of and behind what multiplies. Its
fast path for inference has none of them, but is not there for what is traced. Here the batch stays
where it is, the parts are views, and `scaled_dot_product_attention` reads and leaves them as they
lie.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional

_original = functional.multi_head_attention_forward
_signature = inspect.signature(_original)
# Given, any of these asks for PyTorch's own way.
_UNUSUAL = """
    bias_k bias_v add_zero_attn key_padding_mask need_weights use_separate_proj_weight static_k
    static_v
""".split()


def stand_in(graph: torch.fx.Graph) -> None:
    """Puts `attention` in the place of PyTorch's function where the batch comes first (the module
    turns it), in a graph of TorchDynamo's."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not _original or not node.args:
            continue
        query = node.args[0]
        if query.op == "call_method" and query.target == "transpose" and query.args[1:] == (1, 0):
            node.target = attention


def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `torch.nn.functional.multi_head_attention_forward`."""
    bound = _signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not _is_usual(given):
        return _original(*args, **kwargs)
    names = "num_heads in_proj_weight in_proj_bias out_proj_weight out_proj_bias".split()
    x, mask = given["query"].transpose(0, 1), given["attn_mask"]
    if given["is_causal"]:  # says of the mask that it need not be read
        mask = None
    elif mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, float("-inf"))
    made = self_attention(x, *(given[name] for name in names), mask, given["is_causal"])
    return made.transpose(0, 1), None


def self_attention(
    x: torch.Tensor,
    heads: int,
    in_weight: torch.Tensor,
    in_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """x and the result: [batch, length, width]; weights as nn.MultiheadAttention keeps them; mask:
    [length, length], added to the scores."""
    parts = functional.linear(x, in_weight, in_bias)
    parts = parts.unflatten(-1, (3, heads, x.shape[-1] // heads))
    q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
    made = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
    return functional.linear(made.transpose(1, 2).flatten(2), out_weight, out_bias)


def _is_usual(given: dict[str, Any]) -> bool:
    x = given["query"]
    alone = x is given["key"] and x is given["value"] and x.dim() == 3 and not x.is_nested
    drops = given["training"] and given["dropout_p"] > 0  # would draw for other places in memory
    whole = given["embed_dim_to_check"] == x.shape[-1] and x.shape[-1] % given["num_heads"] == 0
    unusual = any(given[name] is not None and given[name] is not False for name in _UNUSUAL)
    mask = given["attn_mask"]
    masked = not given["is_causal"] if mask is None else mask.dim() == 2
    known = masked and not unusual and given["in_proj_weight"] is not None
    return alone and whole and not drops and known
