"""Places for the boxes of a directed graph: layers from top to bottom, few crossings, short edges.

The usual layered method (Sugiyama, Tagawa, Toda 1981): longest-path layers, a waypoint wherever an
edge passes a layer, order by barycentres, then places that keep to the neighbours' middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BOX_HEIGHT = 38.0
LAYER_STEP = 60.0
_GAP = 14.0
_WAYPOINT_WIDTH = 8.0
_MARGIN = 4.0
_ROUNDS = 12


@dataclass(frozen=True)
class Drawing:
    """centres: middle of each box. paths: SVG path data of each edge, in the order given."""

    width: float
    height: float
    centres: dict
    paths: list


def lay_out(widths: Mapping[str, float], edges: Sequence[tuple[str, str]]) -> Drawing:
    """widths: of the boxes, by key, in topological order. edges: (upper, lower)."""
    if not widths:
        return Drawing(0.0, 0.0, {}, [])
    layers_of = _layers(widths, edges)
    width_of = dict(widths)
    routes = _routes(edges, layers_of, width_of)
    rows: list[list[str]] = [[] for _ in range(max(layers_of.values()) + 1)]
    for key, layer in layers_of.items():
        rows[layer].append(key)
    links = [pair for route in routes for pair in zip(route, route[1:])]
    above: dict[str, list] = {key: [] for key in width_of}
    below: dict[str, list] = {key: [] for key in width_of}
    for upper, lower in links:
        above[lower].append(upper)
        below[upper].append(lower)
    _order(rows, above, below)
    xs = _places(rows, width_of, above, below)
    left = min(xs[k] - width_of[k] / 2 for k in xs) - _MARGIN
    centres = {k: (xs[k] - left, layers_of[k] * LAYER_STEP + BOX_HEIGHT / 2 + _MARGIN) for k in xs}
    right = max(centres[k][0] + width_of[k] / 2 for k in xs) + _MARGIN
    height = (len(rows) - 1) * LAYER_STEP + BOX_HEIGHT + 2 * _MARGIN
    paths = [_path([centres[key] for key in route]) for route in routes]
    return Drawing(right, height, {k: centres[k] for k in widths}, paths)


def _layers(keys: Mapping[str, float], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    layer = dict.fromkeys(keys, 0)
    order = {key: position for position, key in enumerate(keys)}
    for upper, lower in sorted(edges, key=lambda e: order[e[1]]):
        layer[lower] = max(layer[lower], layer[upper] + 1)
    # Boxes with nothing above them stand right above their first reader.
    fed = {lower for _, lower in edges}
    for key in keys:
        readers = [layer[lower] for upper, lower in edges if upper == key]
        if key not in fed and readers:
            layer[key] = min(readers) - 1
    return layer


def _routes(edges: Sequence, layers_of: dict, width_of: dict) -> list[list[str]]:
    """Each edge as a chain through one waypoint a layer; edges from one box share their waypoints,
    so that a value read three times is one line that branches."""
    routes = []
    for upper, lower in edges:
        route = [upper]
        for layer in range(layers_of[upper] + 1, layers_of[lower]):
            point = f"{upper}@{layer}"
            layers_of[point] = layer
            width_of[point] = _WAYPOINT_WIDTH
            route.append(point)
        routes.append([*route, lower])
    return routes


def _order(rows: list, above: dict, below: dict) -> None:
    for turn in range(_ROUNDS):
        down = turn % 2 == 0
        neighbours = above if down else below
        indices = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        for index in indices:
            fixed = {k: i for i, k in enumerate(rows[index - 1 if down else index + 1])}

            def middle(key: str, fixed=fixed, neighbours=neighbours, row=rows[index]) -> float:
                near = [fixed[n] for n in neighbours[key] if n in fixed]
                return sum(near) / len(near) if near else float(row.index(key))

            weights = {key: middle(key) for key in rows[index]}
            rows[index].sort(key=weights.__getitem__)


def _places(rows: list, width_of: dict, above: dict, below: dict) -> dict[str, float]:
    xs: dict[str, float] = {}
    for row in rows:
        x = 0.0
        for key in row:
            xs[key] = x + width_of[key] / 2
            x += width_of[key] + _GAP
    for turn in range(2 * _ROUNDS + 1):
        neighbours = above if turn % 2 == 0 else below
        ordered = rows if turn % 2 == 0 else rows[::-1]
        for row in ordered:
            wanted = [
                sum(xs[n] for n in neighbours[k]) / len(neighbours[k]) if neighbours[k] else xs[k]
                for k in row
            ]
            for key, x in zip(row, _spread(wanted, [width_of[k] for k in row])):
                xs[key] = x
    return xs


def _spread(wanted: list[float], widths: list[float]) -> list[float]:
    """Places as near to the wanted ones as no overlap allows: the mean of packing from the left
    and from the right, both of which keep the distances."""
    distances = [(a + b) / 2 + _GAP for a, b in zip(widths, widths[1:])]
    from_left, from_right = list(wanted), list(wanted)
    for i, distance in enumerate(distances):
        from_left[i + 1] = max(from_left[i + 1], from_left[i] + distance)
    for i in range(len(distances) - 1, -1, -1):
        from_right[i] = min(from_right[i], from_right[i + 1] - distances[i])
    return [(a + b) / 2 for a, b in zip(from_left, from_right)]


def _path(points: list[tuple[float, float]]) -> str:
    """From the lower border of the first box to the upper border of the last."""
    half = BOX_HEIGHT / 2
    (x, y), *rest = points
    text = f"M{x:.1f} {y + half:.1f}"
    for position, (to_x, to_y) in enumerate(rest):
        last = position == len(rest) - 1
        top = to_y - half
        bend = (top - (y + half)) * 0.55
        text += f"C{x:.1f} {y + half + bend:.1f} {to_x:.1f} {top - bend:.1f} {to_x:.1f} {top:.1f}"
        if not last:
            text += f"V{to_y + half:.1f}"
        x, y = to_x, to_y
    return text
