"""Writes the tables of results in docs/results.md and README.md from bench/results/*.json.

    tools/results_table.py            rewrites the parts between the two markers, and the pictures
    tools/results_table.py --check    fails if those parts are not what the records give

bench/results/<machine>.json holds a list of records of whole models; times are milliseconds, errors
are relative Frobenius errors against fp64. bench/results/products/<machine>.json, where it exists,
holds those of the matrix product alone by other libraries' emulations of fp32,
bench/results/ladder/<machine>.json those of a model under every policy,
bench/results/chains/<machine>.json those of other models, bench/results/halves/<machine>.json those
of the models of tests/models in 16 bits, bench/results/networks/<machine>.json those of whole
networks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import geometric_mean

from markdown_tables import folded, line, number
from network_table import network_tables

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "seed-models.svg"
LADDER = PICTURE.with_name("ladder.svg")
BEGIN = "<!-- results: written by tools/results_table.py from bench/results -->"
END = "<!-- end of results -->"
KEY_COLUMNS = 4
# The model of records of a product alone (`ingot bench --products`).
PRODUCT = "linear"
# A product by XLA, and the column that it stands in.
XLA = {
    "XLA TF32_TF32_F32_X3": "XLA tf32×3 †",
    "XLA BF16_BF16_F32_X3": "XLA bf16×3 †",
    "XLA BF16_BF16_F32_X6": "XLA bf16×6 †",
}


def arithmetic(record: dict) -> str:
    """The model's own type, and the policy where it is another."""
    dtype, precision = record["dtype"], record["precision"]
    return dtype if dtype == precision else f"{dtype}, {precision}"


def cells(record: dict, products: dict) -> dict:
    """Heading: text, in the order of the columns."""
    eager, ingot = record.get("eager_ms"), record.get("ingot_ms")
    row = {
        "model": f"`{record['model']}`",
        "shape": str(record["shape"]),
        "type": arithmetic(record),
        "mode": record["mode"],
        "eager": number(eager, ".3f"),
        "eager TF32": number(record.get("eager_tf32_ms"), ".3f"),
        "torch.compile": number(record.get("compile_ms"), ".3f"),
    }
    for method, heading in XLA.items():
        product = products.get((record["shape"], method)) if record["dtype"] == "fp32" else None
        row[heading] = number(product and product["ms"], ".3f")
    return row | {
        "Ingot": number(ingot, ".3f"),
        "× eager": number(eager / ingot if eager and ingot else None, ".2f"),
        "limit": number(record.get("limit_ms"), ".3f"),
        "error": number(record.get("error"), ".1e"),
        "eager's error": number(record.get("eager_error"), ".1e"),
    }


def footnote(products: dict) -> list:
    """What the columns of other libraries' products hold, and their errors."""
    if not products:
        return []
    versions = ", ".join(sorted({r["version"] for r in products.values()}))
    errors = []
    for method, heading in XLA.items():
        found = sorted(r["error"] for (_, m), r in products.items() if m == method)
        if found:
            ends = dict.fromkeys(f"{e:.1e}" for e in (found[0], found[-1]))
            errors.append(f"{heading.removesuffix(' †')} {' to '.join(ends)}")
    return [
        "",
        f"† The matrix product alone, by XLA's emulation of fp32 ({versions}); errors: "
        f"{', '.join(errors)}.",
    ]


def table(records: list, products: dict) -> list:
    """Lines. A column that no record fills is left out, unless it is Ingot's or eager's."""
    rows = [cells(record, products) for record in records]
    optional = {"eager TF32", *XLA.values()}
    headings = [h for h in rows[0] if h not in optional or any(row[h] != "–" for row in rows)]
    rule = "|" + " --- |" * KEY_COLUMNS + " ---: |" * (len(headings) - KEY_COLUMNS)
    return [line(headings), rule, *(line([row[h] for h in headings]) for row in rows)]


def product_row(record: dict) -> list:
    lower, upper = 1 / record["ratio_upper"], 1 / record["ratio_lower"]
    return [
        record["shape"],
        arithmetic(record),
        f"{record['eager_ms']:.4f}",
        f"{record['ingot_ms']:.4f}",
        f"{1 / record['ratio']:.2f} ({lower:.2f}–{upper:.2f})",
        number(record["error"], ".1e"),
        number(record["eager_error"], ".1e"),
    ]


def product_table(records: list) -> list:
    """A product alone, by work: lines."""

    def work(record: dict) -> tuple:
        rows, _, rest = record["shape"].partition("×")
        inner, _, columns = rest.partition("→")
        return record["dtype"], int(rows) * int(inner) * int(columns), int(rows)

    headings = ["shape", "type", "eager", "Ingot", "× eager (95 %)", "error", "eager's error"]
    rows = [line(product_row(record)) for record in sorted(records, key=work)]
    summary = f"A linear layer alone, {len(rows)} sizes (<code>ingot bench --products</code>)"
    return folded(summary, headings, 2, rows)


def chain_table(chains: list) -> list:
    """Other models: lines."""
    headings = ["model", "shape", "mode", "eager", "eager TF32", "Ingot", "× eager"]
    headings += ["limit", "Ingot / limit", "error", "eager's error"]
    rows = [
        line(
            [
                f"`{r['model']}`",
                r["shape"],
                r["mode"],
                f"{r['eager_ms']:.3f}",
                number(r["eager_tf32_ms"], ".3f"),
                f"{r['ingot_ms']:.3f}",
                f"{r['eager_ms'] / r['ingot_ms']:.2f}",
                f"{r['limit_ms']:.3f}",
                f"{r['ingot_ms'] / r['limit_ms']:.2f}",
                f"{r['error']:.1e}",
                f"{r['eager_error']:.1e}",
            ]
        )
        for r in chains
    ]
    summary = f"{len(rows)} other chains in fp32, models of tests/models"
    return folded(summary, headings, 3, rows)


def halves_table(rows: list) -> list:
    """Models in 16 bits beside the better of eager and torch.compile, slowest first: lines."""
    headings = ["model", "shape", "mode", "type", "eager", "torch.compile", "Ingot"]
    headings += ["Ingot / the better of both", "error", "eager's error"]
    timed = [row for row in rows if "best_ratio" in row]
    cells_of = [
        line(
            [
                f"`{r['model']}`",
                r["shape"],
                r["mode"],
                r["type"],
                f"{r['eager_ms']:.3f}",
                number(r["compile_ms"], ".3f"),
                f"{r['ingot_ms']:.3f}",
                f"{r['best_ratio']:.3f} ({r['best_lower']:.3f}–{r['best_upper']:.3f})",
                f"{r['error']:.1e}",
                f"{r['eager_error']:.1e}",
            ]
        )
        for r in sorted(timed, key=lambda row: -row["best_ratio"])
    ]
    beside = {
        "the better of eager and torch.compile": [1 / r["best_ratio"] for r in timed],
        "eager": [1 / r["ratio"] for r in timed],
    }
    means = [f"{geometric_mean(v):.2f} × {name}" for name, v in beside.items()]
    summary = f"{len(timed)} models of tests/models in 16 bits: {', '.join(means)}"
    return folded(summary, headings, 4, cells_of)


def ladder_table(ladders: list) -> list:
    """Models under every policy: lines."""
    headings = ["model, training mode", "by", "policy", "ms", "limit", "× eager fp32", "error"]
    headings += ["worst row"]
    rows = [
        line(
            [
                f"`{ladder['model']}` {ladder['shape']}",
                rung["by"],
                rung["policy"],
                f"{rung['ms']:.3f}",
                number(rung["limit_ms"], ".3f"),
                f"{1 / rung['ratio']:.2f}",
                f"{rung['error']:.1e}",
                f"{rung['worst_row_error']:.1e}",
            ]
        )
        for ladder in ladders
        for rung in ladder["rungs"]
    ]
    title = f"The ladder: {len(ladders)} models under every policy for their products"
    summary = f"{title} (<code>ingot bench --precision all</code>)"
    return folded(summary, headings, 3, rows)


def records_beside(folder: Path, kind: str, file: Path) -> list:
    beside = folder / kind / file.name
    return json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else []


def tables(folder: Path) -> str:
    parts = []
    for file in sorted(folder.glob("*.json")):
        records = json.loads(file.read_text(encoding="utf-8"))
        products = records_beside(folder, "products", file)
        products = {(r["shape"], r["method"]): r for r in products}
        chains = records_beside(folder, "chains", file)
        halves = records_beside(folder, "halves", file)
        ladders = records_beside(folder, "ladder", file)
        alone = [record for record in records if record["model"] == PRODUCT]
        records = [record for record in records if record["model"] != PRODUCT]
        dates = sorted({str(record["date"])[:10] for record in [*records, *alone]})
        period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        heading = f"**{file.stem}**, {period}, milliseconds"
        lines = [heading]
        if records:
            lines += ["", *table(records, products), *footnote(products)]
        if ladders:
            lines += ladder_table(ladders)
        if alone:
            lines += product_table(alone)
        if chains:
            lines += chain_table(chains)
        if halves:
            lines += halves_table(halves)
        lines += network_tables(records_beside(folder, "networks", file))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "No results have been recorded yet."


# The README's: the seed models as they are trained, in the default type, and one in 16 bits.
SHOWN = (
    ("gemm_scale_bn", "1024×8192→8192", "fp32"),
    ("gemm_scale_bn", "16384×4096→4096", "fp32"),
    ("gemm_bn_scale_softmax", "1024×8192→8192", "fp32"),
    ("gemm_scale_bn", "16384×4096→4096", "bf16"),
)
BARS = {
    "eager": "eager_ms",
    "torch.compile": "compile_ms",
    "eager, TF32 allowed": "eager_tf32_ms",
    "Ingot": "ingot_ms",
}


def shown(folder: Path) -> list:
    """Records of SHOWN on the GPU, in training mode."""
    records = json.loads((folder / "nvidia-h200.json").read_text(encoding="utf-8"))
    found = {(r["model"], r["shape"], r["dtype"]): r for r in records if r["mode"] == "training"}
    return [found[key] for key in SHOWN]


def short_table(folder: Path) -> str:
    headings = ["model, in training mode", "type", "eager", "torch.compile", "Ingot", "× eager"]
    headings += ["error", "eager's error"]
    rows = [
        line(
            [
                f"`{r['model']}` {r['shape']}",
                r["dtype"],
                f"{r['eager_ms']:.3f}",
                number(r["compile_ms"], ".3f"),
                f"{r['ingot_ms']:.3f}",
                f"**{r['eager_ms'] / r['ingot_ms']:.2f}**",
                f"{r['error']:.1e}",
                f"{r['eager_error']:.1e}",
            ]
        )
        for r in shown(folder)
    ]
    rule = "| --- | --- |" + " ---: |" * (len(headings) - 2)
    return "\n".join([line(headings), rule, *rows])


def draw(folder: Path) -> None:
    """Bars of time, each with its error, for the fp32 models of SHOWN."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ingot"
    from matplotlib import pyplot

    records = [r for r in shown(folder) if r["dtype"] == "fp32"]
    figure, axes = pyplot.subplots(1, len(records), figsize=(10, 2.4), layout="constrained")
    for axis, record in zip(axes, records):
        names = list(BARS)[::-1]
        times = [record.get(BARS[name]) or 0 for name in names]
        colours = ["#c2410c" if name == "Ingot" else "#94a3b8" for name in names]
        bars = axis.barh(names, times, color=colours)
        axis.bar_label(bars, [f"{t:.2f} ms" for t in times], padding=3, fontsize=8)
        axis.set_title(f"{record['model']}\n{record['shape']}", fontsize=9)
        axis.set_xlim(0, 1.3 * max(times))
        axis.set_xticks([])
        axis.tick_params(labelsize=8, left=False, labelleft=axis is axes[0])
        for side in axis.spines.values():
            side.set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None})


def draw_ladder_of(folder: Path) -> None:
    """The first of SHOWN under every policy, beside XLA's products."""
    sys.path.insert(0, str(ROOT / "python"))
    from ingot.report.ladder import draw_ladder

    file = folder / "nvidia-h200.json"
    model, shape, _ = SHOWN[0]
    ladders = records_beside(folder, "ladder", file)
    wanted = (model, shape, "training")
    found = [r for r in ladders if (r["model"], r["shape"], r["mode"]) == wanted]
    peers = [
        {"name": XLA[r["method"]].removesuffix(" †"), "ms": r["ms"], "error": r["error"]}
        for r in records_beside(folder, "products", file)
        if r["shape"] == shape
    ]
    for record in found:
        draw_ladder(record, "NVIDIA H200", LADDER, peers)


def expected(document: Path, part: str) -> str:
    """A document's text with the part between the markers made anew."""
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document.name} lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    folder = ROOT / "bench" / "results"
    parts = {"README.md": short_table(folder), "docs/results.md": tables(folder)}
    status = 0
    for name, part in parts.items():
        document = ROOT / name
        wanted = expected(document, part)
        if document.read_text(encoding="utf-8") == wanted:
            continue
        if arguments.check:
            print(
                f"{name}: its table is not what bench/results gives; run tools/results_table.py",
                file=sys.stderr,
            )
            status = 1
            continue
        temporary = document.with_suffix(".md.new")
        temporary.write_text(wanted, encoding="utf-8")
        os.replace(temporary, document)
    if not arguments.check:
        draw(folder)
        draw_ladder_of(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
