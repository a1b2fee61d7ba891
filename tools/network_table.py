"""The tables of whole networks in docs/results.md."""

from __future__ import annotations

from statistics import geometric_mean

from markdown_tables import folded, line, number

_MODES = {"eval": "eval", "training": "step"}
_SETTINGS = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "bf16_weights": "bf16 weights"}


def network_tables(rows: list) -> list:
    """Calls and training steps as they are, and those that CUDA graphs replay: lines."""
    timed = [row for row in rows if "ratio" in row and not row["wrong"]]
    replayed = [row for row in timed if row.get("replayed")]
    reduced = [row for row in timed if row.get("reduced")]
    usual = [r for r in timed if r.get("times", 1) == 1 and r not in replayed and r not in reduced]
    found = _by_setting(usual) if usual else []
    beside = [row for row in usual if row["compile_ms"]]
    if beside:
        found += _beside_compile(beside, "Beside `torch.compile`, in the same rounds")
    if reduced:
        found += _beside_compile(reduced, 'With `mode="reduce-overhead"`')
    if replayed:
        found += _beside_compile(replayed, "Captured by the user in CUDA graphs, all three")
    return found


def _by_setting(rows: list) -> list:
    """How many times eager's speed each network has, by mode and setting."""
    found = {(row["network"], row["mode"], row["setting"]): row for row in rows}
    columns = [
        (mode, setting)
        for mode in _MODES
        for setting in _SETTINGS
        if any((row["mode"], row["setting"]) == (mode, setting) for row in rows)
    ]
    cells = [
        line([f"`{name}`", *(_speed(found.get((name, *column))) for column in columns)])
        for name in sorted({row["network"] for row in rows})
    ]
    means = [
        geometric_mean([1 / r["ratio"] for r in rows if (r["mode"], r["setting"]) == column])
        for column in columns
    ]
    cells.append(line(["geometric mean", *(f"**{mean:.2f}**" for mean in means)]))
    dates = sorted({row["date"][:10] for row in rows})
    states = len({row["source_hash"] for row in rows})
    small = " at small sizes" if any(row["small"] for row in rows) else ""
    summary = (
        f"{len({row['network'] for row in rows})} whole networks{small}, × eager: "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, sources of {states} commits"
    )
    headings = ["network", *(f"{_MODES[mode]} {_SETTINGS[setting]}" for mode, setting in columns)]
    return folded(summary, headings, 1, cells)


def _speed(row: dict | None) -> str:
    """With its interval where that does not show which is faster."""
    if row is None:
        return "–"
    lower, upper = 1 / row["ratio_upper"], 1 / row["ratio_lower"]
    speed = f"{1 / row['ratio']:.2f}"
    return speed if lower >= 1 else f"{speed} ({lower:.2f}–{upper:.2f})"


def _beside_compile(rows: list, what: str) -> list:
    headings = ["network", "inputs", "mode", "setting", "eager", "torch.compile", "Ingot"]
    headings += ["× eager", "× torch.compile"]
    cells = [
        line(
            [
                f"`{row['network']}`",
                row["shape"],
                _MODES[row["mode"]],
                _SETTINGS[row["setting"]],
                f"{row['eager_ms']:.2f}",
                number(row["compile_ms"], ".2f"),
                f"{row['ingot_ms']:.2f}",
                f"{row['eager_ms'] / row['ingot_ms']:.2f}",
                number(row["compile_ms"] and row["compile_ms"] / row["ingot_ms"], ".2f"),
            ]
        )
        for row in sorted(rows, key=lambda row: (row["mode"], row["setting"], row["network"]))
    ]
    mean = geometric_mean([row["eager_ms"] / row["ingot_ms"] for row in rows])
    summary = f"{what}: {len(rows)} rows, {mean:.2f} × eager"
    pairs = [row for row in rows if row["compile_ms"]]
    if pairs:
        beside = geometric_mean([row["compile_ms"] / row["ingot_ms"] for row in pairs])
        summary += f", {beside:.2f} × `torch.compile`"
    return folded(summary, headings, 4, cells)
