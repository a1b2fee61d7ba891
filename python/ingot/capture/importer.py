"""Cuts an ATen graph into regions that Ingot runs and steps that PyTorch runs."""

from __future__ import annotations

from ingot.capture.assembly import NotStoredError, StatisticsElsewhereError, assembled
from ingot.capture.captured import Captured, NothingToGainError
from ingot.capture.convolution_bias import separate_biases
from ingot.capture.cutting import Cut
from ingot.capture.decompose import decompose
from ingot.capture.feed import Feed, needing_gradients
from ingot.capture.host_time import pays_for_guards
from ingot.capture.joining import join_parts
from ingot.capture.leading_axes import merge_leading_axes, merge_lengths
from ingot.capture.losses import take_losses_apart
from ingot.capture.merged_axes import merge_axes
from ingot.capture.nodes import schema_name
from ingot.capture.plain_products import take_products_apart
from ingot.capture.products import PRODUCTS
from ingot.capture.reference import UnknownSizeError
from ingot.capture.sample_parts import tell_parts_of_samples
from ingot.capture.shared_masks import convert_shared_masks, lay_out_masks
from ingot.capture.sharing import is_repeatable, share
from ingot.capture.stages import compute_again
from ingot.capture.token_chains import cast_in_front
from ingot.capture.trial import chosen
from ingot.capture.unbinding import unbind_parts
from ingot.capture.weighing import weak_nodes
from ingot.capture.windows import open_windows
from ingot.capture.written_out import write_out_attentions


def import_graph(
    feed: Feed,
    *,
    refused: dict[str, str] | None = None,
    autocast: bool = False,
    gradients: bool = False,
    apart: int | None = None,
) -> Captured:
    """Regions and steps of an ATen graph, which is rewritten on the way.

    refused: graph nodes that PyTorch must run (`node` among a region's operators), with the reason.
    autocast: whether it is on around the call. gradients: of what is taken, a backward pass is to
    follow: regions store what it reads, and what is too cheap to gain from a region of its own
    stays PyTorch's with its derivative. apart: products that no region takes, of so many
    multiplications or more, are written as the plain ones (mm, bmm) that PyTorch makes of them.
    Raises CaptureError with the reason where PyTorch must run the whole graph, NothingToGainError
    where it had better.
    """
    refused = dict(refused or {})
    if not feed.rewritten:
        if feed.has_lengths:
            merge_lengths(feed, refused)
        share(feed.graph, lambda node: is_repeatable(node) and node.name not in refused)
        needing = needing_gradients(feed) if gradients else ()
        if feed.shares_masks:
            convert_shared_masks(feed.graph, needing)
            if not gradients:
                lay_out_masks(feed.graph)
            else:
                write_out_attentions(feed, needing)
        take_losses_apart(feed.graph, needing, autocast)
        decompose(feed.graph, needing)
        unbind_parts(feed.graph, needing)
        if feed.joins_parts:
            join_parts(feed.graph, refused)
        merge_leading_axes(feed.graph)
        if gradients:  # with them, most chains without a product are PyTorch's
            merge_axes(feed.graph, feed.device_type, *chosen(feed, dict(refused), autocast))
        else:
            if adds_biases_apart(feed.device_type) and not autocast:
                separate_biases(feed.graph)
            if not autocast:
                open_windows(feed, dict(refused), autocast)
            merge_axes(feed.graph, feed.device_type)
        if feed.staged:
            compute_again(feed.graph)
        else:
            tell_parts_of_samples(feed, refused, autocast, gradients)
        feed.rewritten = True
    small = False
    while True:
        cut = Cut(feed, refused, autocast, gradients)
        alone = weak_nodes(cut)
        small |= cut.has_small_steps
        if small and not cut.taken:
            raise NothingToGainError("a training step of this size gains less than regions cost")
        if gradients and not alone and not pays_for_guards(cut):
            raise NothingToGainError("it gains less than TorchDynamo's guards cost the host")
        if not alone and apart is not None:
            needing = needing_gradients(feed) if gradients else ()
            around = take_products_apart(feed.graph, cut.unsupported, apart, needing)
            if around is not None:
                refused.update(around)
                continue
        if not alone:
            try:
                return assembled(cut)
            except (NotStoredError, UnknownSizeError) as error:
                alone = {error.node.name}
            except StatisticsElsewhereError as error:
                why = "its running statistics are moved or read by another part of the forward"
                refused.update({node.name: why for node in error.nodes})
                continue
        if autocast and gradients:
            products = (n for n in cut.taken if schema_name(n.target) in PRODUCTS)
            cast_in_front([n for n in products if n.name in alone], cut.taken)
        refused.update(dict.fromkeys(alone, ""))


def adds_biases_apart(device_type: str) -> bool:
    """Whether PyTorch's convolutions add their bias in a pass of its own."""
    return device_type != "cpu"
