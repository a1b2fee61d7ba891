"""What a call does, step by step, as tables show it: `program` of docs/explain-format.md."""

from __future__ import annotations


def launch_rows(program: dict) -> list[dict]:
    return [
        {
            "step": step["kind"],
            "sweep": step["sweep"],
            "what": _what(step),
            "grid": _grid(step),
            "memory": ", ".join(step["memory"]),
        }
        for step in program["steps"]
    ]


def _what(step: dict) -> str:
    words = []
    if "m" in step:
        words.append(step.get("kernel", "cuBLASLt's"))
        words.append(" × ".join(str(step[axis]) for axis in "mnk"))
        if step["batches"] > 1:
            words.append(f"{step['batches']} times")
    elif "kernel" in step:
        words.append(step["kernel"])
    if step.get("beside"):
        words.append("while the kernel before runs")
    if "with" in step:
        words.append(f"{step['with']} {step['how']}")
    if "part" in step:
        words.append(f"{step['part']} in tiles of {_extents(step['tile'])}")
    if "chunks" in step:
        words.append(f"{step['elements']} elements of {step['chunks']} chunks")
    if "sizes" in step:
        words += [_extents(step["sizes"]), step["why"]]
    return "; ".join(words)


def _grid(step: dict) -> str:
    if "tasks" in step:
        return f"{step['tasks']} tasks"
    if "blocks" not in step:
        return ""
    clusters = f" in clusters of {step['cluster']}" if step["cluster"] > 1 else ""
    return f"{step['blocks']} × {step['threads']}{clusters}"


def _extents(extents: list[int]) -> str:
    return "×".join(str(extent) for extent in extents)
