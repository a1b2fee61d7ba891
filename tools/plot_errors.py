#!/usr/bin/env python3
"""Draws the measured error curves of bench/results/error-curves/GPU.json.

    tools/plot_errors.py [bench/results/error-curves/nvidia-h200.json]

Writes docs/pictures/error-against-length.svg, error-against-spread.svg and
error-against-outlier.svg. Colours, lines and text are readable on a light and on a dark ground.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
CURVES = {
    "length": "K, the length of the sums",
    "spread": "elements of x scaled by random powers of two from 2⁻ʳ to 2ʳ: r",
    "outlier": "one element of each row of x is 2ʳ and meets a zero weight: r",
}
# Mid tones: contrast of at least 3 to 1 on white and on GitHub's dark ground alike.
STYLES = {
    "Ingot fp32": ("#1f8fd6", "o", "-"),
    "cuBLAS fp32": ("#3d9a50", "s", "--"),
    "TF32": ("#d4651f", "^", "-."),
    "naive split": ("#b5569c", "D", ":"),
}
NEUTRAL = "#7d858c"


def draw(result: dict, curve: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "svg.hashsalt": "ingot",  # the same picture from the same data
            "svg.fonttype": "none",
            "font.size": 11,
            "text.color": NEUTRAL,
            "axes.labelcolor": NEUTRAL,
            "axes.edgecolor": NEUTRAL,
            "xtick.color": NEUTRAL,
            "ytick.color": NEUTRAL,
        }
    )
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    points = result["curves"][curve]
    for name, (colour, marker, line) in STYLES.items():
        axes.plot(
            [p["at"] for p in points],
            [p["frobenius"][name] for p in points],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            label=name,
        )
    axes.set_yscale("log")
    if curve == "length":
        axes.set_xscale("log", base=2)
    shape = f"{result['rows']}×{'K' if curve == 'length' else result['range_k']}"
    axes.set_title(f"{shape}→{result['columns']}, {result['machine']}", fontsize=10, pad=26)
    axes.set_xlabel(CURVES[curve])
    axes.set_ylabel("relative Frobenius error")
    axes.grid(True, color=NEUTRAL, alpha=0.25, linewidth=0.6)
    axes.legend(
        frameon=False, ncols=len(STYLES), fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 0.99)
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "data",
        nargs="?",
        type=Path,
        default=ROOT / "bench" / "results" / "error-curves" / "nvidia-h200.json",
    )
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        print(
            f"plot_errors: {arguments.data} is not here; tools/gpu_checks/error_curves.py measures "
            "it on a GPU",
            file=sys.stderr,
        )
        return 2
    result = json.loads(arguments.data.read_text(encoding="utf-8"))
    for curve in CURVES:
        path = arguments.pictures / f"error-against-{curve}.svg"
        draw(result, curve, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
