"""What a training step's host time leaves worth taking.

In 16 bits a product takes a tenth of fp32's time, in TF32 a seventh, and a training step of a
network is then often the host's: there what the GPU saves is not seen, and what a region costs the
host must be less than what PyTorch's operators in its place do. Where the host is the slower of the
two by this estimate, a region in 16 bits is taken from a few operators on, fewer around a layer
norm, which under autocast brings casts along, and none in TF32. (Of steps that are the host's by
it, on H100s in 16 bits: a BERT's with 14 regions of twelve operators each took 0.78 of eager's
time, a GPT-2's with 13 of seventeen 0.79, a DeiT's with 13 of eleven 0.70, a Swin's with 16 of nine
0.80, a translator's with 17 of ten 0.93, a mixer's with 24 of six 0.93, a gMLP's with 61 of four
0.92, by an interval from 0.89 to 1.14. In TF32, on H200s: a translator's with 35 of five 1.22, a
gMLP's with 61 of four 1.05. A BERT's with dropout and 23 regions of five around layer norms, in 16
bits: 0.74. With weights of 16 bits, where nothing is cast, on H100s: a BERT's with regions of five
0.79 to 0.94, a mixer's with 24 of four 1.10 to 1.15, a translator's with 17 of four 1.03 to 1.07.
Of one that nears the host, on an H200: a convolutional VAE's with a region of three, one of five
and one of two 1.06, by an interval from 1.00 to 1.10.)

On a CPU PyTorch's operators find their operands in its caches, and a region's two passes cost the
host five times an operator's: there a region with gradients is taken where its operators cost more.
(79 models of tests/models as they are and at 37, 512 and 4096 rows, 2 cores with AVX-512: a
training step took 1.00 of eager's time in geometric mean with every region taken, 159 of 316 more
than 1.02; 0.925 by this estimate, 7 of 75 that are taken more than 1.02, none more than 1.09.)

Whatever is taken of a network, TorchDynamo's guards are asked at each call. A GoogLeNet's cost the
host 0.8 to 1 ms, since no cache holds what they read; its chains saved the GPU a third of that.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from ingot.capture import token_chains
from ingot.capture.gains import bytes_saved
from ingot.capture.kept_by_eager import is_view
from ingot.capture.layout import elements, hint, result_bytes, size_in_bytes
from ingot.capture.nodes import is_convolution, is_row_norm, named_arguments, schema_name
from ingot.capture.products import PRODUCTS
from ingot.capture.table import (
    CASTS,
    CHANGES_NOTHING,
    SHAPE_OPERATORS,
    has_uneven_rows,
    is_half,
)
from ingot.capture.token_chains import BYTES_A_SECOND, OPERATOR_SECONDS

if TYPE_CHECKING:
    from ingot.capture.cutting import Cut

# Over an operator's result, forward and backward, by PyTorch and by a region.
_PASSES, _REGION_PASSES = 5, 2
# Forward, and both operands' gradients.
_PRODUCTS = 3
_FLOPS, _TF32_FLOPS = 6e14, 3e14  # a second
# Of TF32's accuracy, by Ingot; and what a region of products alone must gain of a training step.
_SCALED_FLOPS, _LONE_SECONDS = 5e14, 250e-6
# Of PyTorch's products in 16 bits with rows that do not start at multiples of 16 bytes, of even and
# of odd lengths; and what a copy of such rows takes, in passes.
_UNEVEN_FLOPS, _COPIES = (1.8e14, 9.5e13), 5
_FP32_FLOPS = {"eager": 5e13, "ingot": 2.5e14}
# Of what its products reach, what convolutions do.
_CONVOLUTIONS_PART = 0.5
# Of a module: on H200s 2.3 to 4 µs, of which a part is hidden behind the GPU's work.
_GUARD_SECONDS, _FEWEST_MODULES = 1.5e-6, 32
# Where nothing hides them.
_GUARD_SECONDS_SEEN = 4.5e-6
# Of a network of images, a training step: what an operator takes the host and the GPU, and the GPU
# a FLOP of a convolution in TF32 and in fp32, a byte of its result, of a grouped one's, and of
# another operator's. Fitted to the kernels' and the host's time of 17 networks on H200s, whose
# hosts vary by half (host over GPU in TF32 by it, and as it was: ResNet-50 1.16 and 0.86 to 1.3,
# ResNeXt-50 0.78 and 0.73, MobileNetV2 0.74 and 0.70, EfficientNet-B0 1.8 and 1.7, DenseNet-121
# 1.9 and 2.1, a U-Net 0.31 and 0.42). From what part on the host may be the slower: regions cost it
# time (ResNeXt-50's 23 made 1.12, RegNet's 24 1.06 of eager's time there, MobileNetV2's 11 0.79).
_IMAGES_HOST, _IMAGES_OPERATOR, _NEAR = 120e-6, 27e-6, 0.76
_IMAGES_FLOP = {True: 14e-15, False: 100e-15}
_IMAGES_RESULT, _IMAGES_GROUPED, _IMAGES_BYTE = 2.4e-12, 18e-12, 3.2e-12
# Operators a convolution, at most, of such a network.
_OPERATORS_OF_IMAGES = 8
_WITHOUT_PASS = {*PRODUCTS, *CASTS}
# Of a region in 16 bits, where a step is the host's; around a norm, which autocast wraps in casts.
_FEWEST_OPERATORS, _FEWEST_WITH_NORM, _FEWEST_WITH_CASTS = 6, 5, 4

# Tokens that a sweep reads or writes with their channels apart take it four times their bytes.
# (H200, an MLP-Mixer's step with TF32, whose blocks turn them twice: 24 regions of five and six
# operators took the GPU 22.7 ms for eager's 21.1, and the host 2 to 5 ms more: 1.0 to 1.22 of
# eager's time. A ViT turns them once.) From what number on a network does so again and again, and
# of how many operators a time a region gains all the same.
_MANY_TURNS, _OPERATORS_A_TURN = 4, 8

# Without gradients, of a 16-bit product's result: of fewer bytes a pass over it is less than what a
# region's call takes of the host beyond PyTorch's two operators (16384×45→60 with a sigmoid: 1.06
# and 1.17 of eager's time on an H200).
_LEAST_RESULT = 4e6

# On a CPU, forward and backward: seconds of an operator, of one that normalises in several steps or
# in one, and of a region, with those for each byte of its largest tensor; and by how much a region
# must gain more than it takes. Fitted to the steps told of above.
_CPU_SECONDS = {
    "operator": (19e-6, 1.07e-10),
    "norm": (39e-6, 1.02e-9),
    "norm of one": (19e-6, 1.02e-9),
    "region": (125e-6, 2.9e-10),
}
_CPU_MARGIN = 1.05
_CPU_KINDS = {
    "aten::group_norm": "norm",
    "aten::instance_norm": "norm",
    "aten::var": "norm",
    "aten::std": "norm",
    "ingot::batch_norm": "norm of one",
    "aten::layer_norm": "norm of one",
    "aten::rms_norm": "norm of one",
    "aten::linalg_vector_norm": "norm of one",
}
# What Ingot's own product saves of PyTorch's where it runs instead (src/cpu/product/provider.cpp):
# never of a batch of products.
_CPU_SECONDS_PER_FLOP = 2e-12
_CPU_PRODUCTS = {"aten::linear", "aten::addmm", "aten::mm", "aten::matmul"}
# For tests, of which most take tiny models: everything on a CPU, too.
takes_small_steps = os.environ.get("INGOT_TAKE") == "all"


def pays_on_cpu(computing: Iterable[torch.fx.Node]) -> bool:
    """Whether a training step gains by a region of these nodes on a CPU."""
    if takes_small_steps:
        return True
    gain, largest = 0.0, 0
    for node in computing:
        name, size = schema_name(node.target), _largest(node)
        largest = max(largest, size)
        if name in PRODUCTS:
            own = _own_products() and name in _CPU_PRODUCTS
            gain += own * _product_flops(node) * _CPU_SECONDS_PER_FLOP
        elif name not in CASTS:
            each, byte = _CPU_SECONDS[_CPU_KINDS.get(name, "operator")]
            gain += (each + byte * size) / (1 if _is_floating(node) else 2)
    each, byte = _CPU_SECONDS["region"]
    return gain > _CPU_MARGIN * (each + byte * largest)


def _is_floating(node: torch.fx.Node) -> bool:
    """Else it has no gradient."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _largest(node: torch.fx.Node) -> int:
    """Bytes of the largest tensor that it reads or gives, the operands of products apart."""
    nodes = [node] if schema_name(node.target) in PRODUCTS else [node, *node.all_input_nodes]
    return max(map(result_bytes, nodes))


@functools.cache
def _own_products() -> bool:
    """Whether they run before PyTorch's: on processors that are not Intel's."""
    try:
        with open("/proc/cpuinfo") as told:
            return "GenuineIntel" not in told.read(4096)
    except OSError:
        return False


def pays_in_few_bits(cut: Cut, computing: list[torch.fx.Node]) -> bool:
    """Whether a region of these nodes, with a product of 16-bit operands or in TF32, is to be
    taken; any other region is. A product of 16-bit operands with a bias at most PyTorch runs by the
    same kernels, forward and backward."""
    products = _products(computing)
    halves = any(is_half(node.meta.get("val")) for node in products)
    if not halves and not (products and cut.feed.tf32):
        return True
    if cut.device_type == "cuda" and _gains_by_alignment(products):
        return True
    if halves:
        gains = bool(_behind(computing))
    else:
        gains = _gains_more_than_host(cut, computing) and not _turns_often(cut, computing)
    relieves_host = halves and _operators(computing) >= _fewest(cut, computing)
    is_hosts = cut.waits_for_host or (halves and cut.nears_host_in_16_bits)
    return gains and (relieves_host or not is_hosts)


def _turns_often(cut: Cut, computing: list[torch.fx.Node]) -> bool:
    """Whether a region of few operators for each time turns tokens in a network that does so again
    and again."""
    own = sum(cut.taken.get(node) == cut.taken[computing[0]] for node in cut.turning)
    return len(cut.turning) >= _MANY_TURNS and len(computing) < _OPERATORS_A_TURN * own


def turns_tokens(node: torch.fx.Node) -> bool:
    """Whether a tensor's channels lie apart and what reads it gives some that lie innermost: an
    operator, or a product whose samples it is."""
    return _lie_innermost(node) is False and any(
        _lie_innermost(user) and not (is_view(user) or _is_right_operand(user, node))
        for user in node.users
    )


def _lie_innermost(node: torch.fx.Node) -> bool | None:
    """Of tokens, whether their channels do, or the tokens themselves; None of anything else."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 3:
        return None
    strides = [hint(stride) for size, stride in zip(value.shape, value.stride()) if size != 1]
    if not strides or 1 not in strides:
        return None
    return strides[-1] == 1


def _is_right_operand(product: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Which lies either way."""
    name = schema_name(product.target)
    second = 2 if name in ("aten::addmm", "aten::baddbmm") else 1
    return name in PRODUCTS and len(product.args) > second and product.args[second] is node


def pays_without_gradients(cut: Cut, computing: list[torch.fx.Node]) -> bool:
    """Whether a region of these nodes, with a product, is to be taken where no gradients are
    needed: any is but a small product of 16-bit operands with one operator behind it."""
    products = _products(computing)
    if cut.device_type != "cuda" or takes_small_steps or len(products) != 1:
        return True
    value = products[0].meta.get("val")
    if len(_behind(computing)) > 1 or not is_half(value) or size_in_bytes(value) >= _LEAST_RESULT:
        return True
    return _product_flops(products[0]) / _FLOPS >= _LEAST_RESULT / BYTES_A_SECOND


def _products(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    return [node for node in nodes if schema_name(node.target) in PRODUCTS]


def _behind(computing: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """What makes a pass of its own in PyTorch, beside the products."""
    return [node for node in computing if schema_name(node.target) not in _WITHOUT_PASS]


def _operators(computing: list[torch.fx.Node]) -> int:
    """Those that PyTorch runs in a region's place, casts apart."""
    names = map(schema_name, (node.target for node in computing))
    return sum(name not in CASTS and name not in CHANGES_NOTHING for name in names)


def _fewest(cut: Cut, computing: list[torch.fx.Node]) -> int:
    if not any(map(is_row_norm, computing)):
        return _FEWEST_OPERATORS
    return _FEWEST_WITH_CASTS if cut.autocast else _FEWEST_WITH_NORM


def _gains_by_alignment(products: list[torch.fx.Node]) -> bool:
    """Whether 16-bit products whose rows do not start at multiples of 16 bytes gain what a region
    takes of the host (live/padded.py)."""
    saved = 0.0
    for node in products:
        value = node.meta.get("val")
        if has_uneven_rows(value):
            slow = _UNEVEN_FLOPS[value.shape[-1] % 2]
            saved += _PRODUCTS * _product_flops(node) * (1 / slow - 1 / _FLOPS)
            saved -= _COPIES * size_in_bytes(value) / BYTES_A_SECOND
    return saved > _LONE_SECONDS


def _gains_more_than_host(cut: Cut, computing: list[torch.fx.Node]) -> bool:
    """Whether products in TF32, and what is around them, gain the GPU what their region takes of
    the host beyond PyTorch's operators. (A causal encoder's last layer, 4096×512→10000, all that
    was taken of its step: 1.06 of eager's time. A TimeSformer's step, of whose 72 regions 60 were
    a product and one operator: kernels 45.7 for eager's 46.8 ms, the host 14 ms more. A GPT-2's 25
    regions, of which 11 are a sum, a norm and a product: 0.84, without those 0.91.)"""
    products, behind = _products(computing), _behind(computing)
    saved = 1 / _TF32_FLOPS - 1 / _SCALED_FLOPS
    gain = _PRODUCTS * sum(map(_product_flops, products)) * saved
    if not behind:
        return gain > _LONE_SECONDS
    if cut.device_type != "cuda":
        return True
    passes = (_PASSES - _REGION_PASSES) * sum(map(result_bytes, behind))
    gain += (passes - sum(map(_packed_bytes, products))) / BYTES_A_SECOND
    lost = -token_chains.host_seconds(cut, computing)
    return gain > lost if lost > 0 or cut.feed.is_replayed else True


def _packed_bytes(product: torch.fx.Node) -> float:
    """What is read and written before a product in TF32 and before its samples' gradient."""
    samples, *_ = product.all_input_nodes
    return 1.5 * (result_bytes(samples) + result_bytes(product))


def is_of_the_host(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether a training step of a graph takes the host longer than the GPU, where PyTorch's
    products of fp32 are TF32's."""
    host = device = 0.0
    for node in _launching(nodes):
        host += OPERATOR_SECONDS
        rate = _FLOPS if is_half(node.meta.get("val")) else _TF32_FLOPS
        if schema_name(node.target) in PRODUCTS:
            device += _PRODUCTS * _product_flops(node) / rate
            continue
        device += _PASSES * result_bytes(node) / BYTES_A_SECOND
        if is_convolution(node):
            device += _PRODUCTS * _convolution_flops(node) / (rate * _CONVOLUTIONS_PART)
    return host > device


def nears_the_host(nodes: Iterable[torch.fx.Node], tf32: bool) -> bool:
    """Whether a training step is one of a network of images that takes the host about as long as
    the GPU. tf32: whether convolutions are TF32's."""
    device, operators, convolutions = 0.0, 0, 0
    for node in _launching(nodes):
        operators += 1
        size = result_bytes(node)
        if is_convolution(node):
            convolutions += 1
            is_grouped = named_arguments(node)["groups"] != 1
            device += _IMAGES_FLOP[tf32] * _convolution_flops(node)
            device += (_IMAGES_GROUPED if is_grouped else _IMAGES_RESULT) * size
        elif schema_name(node.target) != "ingot::batch_norm":
            device += _IMAGES_BYTE * size
    device += operators * _IMAGES_OPERATOR
    of_images = _OPERATORS_OF_IMAGES * convolutions >= operators
    return of_images and operators * _IMAGES_HOST > _NEAR * device


def _launching(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """Operators that are more than another view of a tensor."""
    for node in nodes:
        if node.op == "call_function" and schema_name(node.target) not in SHAPE_OPERATORS:
            yield node


def pays_for_guards(cut: Cut) -> bool:
    """Whether the GPU gains as much of a training step as Dynamo's guards take of the host's time.
    Of fp32 products all count: those of no region are Ingot's, too."""
    if cut.device_type != "cuda":
        return True
    modules = _modules(cut.feed.graph.nodes)
    if modules < _FEWEST_MODULES:
        return True
    few_bits = cut.multiplies_in_few_bits
    nodes = cut.taken if few_bits else cut.feed.graph.nodes
    products = _products(nodes)
    if products and few_bits:
        return True  # by is_of_the_host()
    if not products and not cut.taken:
        return True
    flops = sum(map(_product_flops, products))
    gain = token_chains.host_seconds_saved(cut)
    gain += _PRODUCTS * flops * (1 / _FP32_FLOPS["eager"] - 1 / _FP32_FLOPS["ingot"])
    gain += bytes_saved(cut.taken) / BYTES_A_SECOND
    return gain > modules * (_GUARD_SECONDS_SEEN if cut.nears_host else _GUARD_SECONDS)


def _modules(nodes: Iterable[torch.fx.Node]) -> int:
    found: set[str] = set()
    for node in nodes:
        found.update(node.meta.get("nn_module_stack") or ())
    return len(found)


def _convolution_flops(node: torch.fx.Node) -> float:
    *_, weight = node.all_input_nodes[:2]  # one node, of a convolution of a tensor with itself
    weight = weight.meta["val"]
    return 2.0 * elements(node.meta.get("val")) * elements(weight) / weight.shape[0]


def _product_flops(node: torch.fx.Node) -> float:
    """2·M·N·K, of which the result and either operand hold two factors each."""
    sizes = [elements(node.meta.get("val"))]
    operands = [elements(given.meta.get("val")) for given in node.all_input_nodes]
    sizes += sorted(operands)[-2:]
    return 2 * math.prod(sizes) ** 0.5
