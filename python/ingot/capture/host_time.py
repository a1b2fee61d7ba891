"""Which products in 16 bits are worth a region where gradients are needed.

In 16 bits a product takes a tenth of fp32's time, and a training step of a network is often the
host's: there whatever costs the host more than PyTorch's operators slows it down, and what the GPU
saves is not seen. A region with such a product is taken where the GPU is the slower of the two by
this estimate. (Of steps that are the host's by it, on H200s: a BERT's with 23 regions of five
operators each took 1.08 of eager's time, a ViT's with 12 of ten 1.12 and 1.19, a GPT-2's with 13 of
seventeen 1.03 and 1.10.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ingot.capture.layout import elements, size_in_bytes
from ingot.capture.nodes import schema_name
from ingot.capture.products import PRODUCTS
from ingot.capture.table import SHAPE_OPERATORS, is_half

if TYPE_CHECKING:
    from ingot.capture.cutting import Cut

# Forward and backward of an operator: seconds of an H200's host, and passes over its result. (A
# BERT's step under autocast: some 340 operators, 21 ms of which the GPU is busy for 10.)
_HOST_SECONDS, _PASSES = 40e-6, 5
# Forward, and both operands' gradients.
_PRODUCTS = 3
_FLOPS, _BYTES = 6e14, 4e12  # a second
_WITHOUT_PASS = {*PRODUCTS, "aten::to", "aten::_to_copy"}


def pays_in_halves(cut: Cut, computing: list[torch.fx.Node]) -> bool:
    """Whether a region of these nodes, with a product of 16-bit operands, is to be taken; any other
    region is. A product with a bias at most PyTorch runs by the same kernels, forward and
    backward."""
    products = [node for node in computing if schema_name(node.target) in PRODUCTS]
    if not any(is_half(node.meta.get("val")) for node in products):
        return True
    behind = [node for node in computing if schema_name(node.target) not in _WITHOUT_PASS]
    return bool(behind) and not (cut.device_type == "cuda" and cut.is_of_the_host)


def is_of_the_host(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether a training step of a graph takes the host longer than the GPU."""
    host = device = 0.0
    for node in nodes:
        if node.op != "call_function" or schema_name(node.target) in SHAPE_OPERATORS:
            continue
        host += _HOST_SECONDS
        if schema_name(node.target) in PRODUCTS:
            device += _PRODUCTS * _product_flops(node) / _FLOPS
        else:
            device += _PASSES * size_in_bytes(node.meta.get("val")) / _BYTES
    return host > device


def _product_flops(node: torch.fx.Node) -> float:
    """2·M·N·K, of which the result and either operand hold two factors each."""
    sizes = [elements(node.meta.get("val"))]
    operands = [elements(given.meta.get("val")) for given in node.all_input_nodes]
    sizes += sorted(operands)[-2:]
    count = 1.0
    for size in sizes:
        count *= size
    return 2 * count**0.5
