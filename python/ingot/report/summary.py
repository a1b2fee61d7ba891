"""The report's first words: what was done, whether it is right, how fast it is."""

from __future__ import annotations

from . import text
from .accuracy import headline

COMPILE = "torch.compile"


def verdict(verification: dict | None) -> dict:
    """{state, words}: "good", "bad" or "none"."""
    if verification is None:
        return {"state": "none", "words": "Not verified: nothing was run"}
    passed = sum(c["outcome"] == "passed" for c in verification["checks"])
    count = f"{passed} of {text.plural(len(verification['checks']), 'check')} passed"
    if verification["verified"]:
        return {"state": "good", "words": f"Verified: {count}"}
    return {"state": "bad", "words": f"Not verified: {count}"}


def done(report: dict, mode: str, target: str) -> str:
    """What was made of the model."""
    replaced = report.get("operators_replaced", ())
    sweeps = _sweeps(report, mode)
    if not sweeps:
        return "Ingot took over nothing of this model: PyTorch runs all of it."
    words = (
        f"Ingot compiles {text.plural(len(replaced), 'operator')} of this model into "
        f"{text.plural(len(sweeps), 'pass', 'passes')} over memory ({mode} mode, planned for "
        f"{target})."
    )
    left = report.get("unsupported", ())
    if left:
        stays = "operator stays" if len(left) == 1 else "operators stay"
        words += f" {len(left)} {stays} with PyTorch, as named below."
    return words


def rightness(verification: dict) -> str:
    precision = verification["precision"]
    state = (
        "was compared with the original model, computed in double precision, on the model's own "
        "inputs and on hostile ones (huge and tiny values, NaN, odd batch sizes), in training and "
        "in eval mode"
    )
    failed = [c for c in verification["checks"] if c["outcome"] == "failed"]
    declined = [c for c in verification["checks"] if c["outcome"] == "declined"]
    words = f"The result {state}. "
    if verification["verified"]:
        words += f"It is the same function, as accurate as the policy “{precision}” promises."
    elif failed:
        words += f"It did not pass: {text.plural(len(failed), 'check')} failed, listed below."
    else:
        words += (
            f"It refuses {text.plural(len(declined), 'kind')} of input that the original takes."
        )
    own = headline(verification["accuracy"])
    if own and own["eager"]:
        words += (
            f" On the model's own inputs its error is "
            f"{text.scientific(own['candidate']['relative_error'])} of the result's size; "
            f"PyTorch's own is {text.scientific(own['eager']['relative_error'])}."
        )
    return words


def speed(subjects: dict | None, ours: str, missing: str) -> str:
    if not subjects or "eager" not in subjects:
        return missing
    mine = subjects[ours]["median_ms"]
    eager = subjects["eager"]["median_ms"]
    words = (
        f"A call takes {text.duration(mine)}; PyTorch's own takes {text.duration(eager)}: it is "
        f"{text.faster_or_slower(eager / mine)}."
    )
    if COMPILE in subjects:
        compiled = subjects[COMPILE]["median_ms"]
        words += (
            f" torch.compile takes {text.duration(compiled)}: beside it, "
            f"{text.faster_or_slower(compiled / mine)}."
        )
    return words


def tiles(
    verification: dict | None, subjects: dict | None, ours: str, report: dict, mode: str
) -> list[dict]:
    """The figures that stand large: {label, value, note, state}."""
    made = []
    if verification is not None:
        passed = sum(c["outcome"] == "passed" for c in verification["checks"])
        good = verification["verified"]
        made.append(
            {
                "label": "Is it right?",
                "value": "✓ Verified" if good else "✗ Not verified",
                "note": f"{passed} of {text.plural(len(verification['checks']), 'check')} passed",
                "state": "good" if good else "bad",
            }
        )
    if subjects and "eager" in subjects:
        made.append(_speed_tile(subjects, ours))
    own = headline(verification["accuracy"]) if verification else None
    if own and own["eager"]:
        made.append(_error_tile(own))
    sweeps = _sweeps(report, mode)
    if sweeps:
        made.append(
            {
                "label": "Passes over memory",
                "value": str(len(sweeps)),
                "note": f"for {text.plural(len(report['operators_replaced']), 'operator')}"
                if report.get("operators_replaced")
                else f"in {mode} mode",
                "state": "",
            }
        )
    if not subjects and sweeps:
        predicted = sum(p["explain"]["predicted_ms"] for p in _programs(report, mode))
        made.append(
            {
                "label": "Predicted time",
                "value": text.duration(predicted),
                "note": "by the cost model; not measured",
                "state": "",
            }
        )
    return made


def _speed_tile(subjects: dict, ours: str) -> dict:
    mine, eager = subjects[ours]["median_ms"], subjects["eager"]["median_ms"]
    factor = eager / mine
    note = f"{text.duration(mine)} instead of {text.duration(eager)}"
    if factor >= 1:
        return {
            "label": "Faster than PyTorch",
            "value": f"{text.times(factor)}×",
            "note": note,
            "state": "good",
        }
    return {
        "label": "Slower than PyTorch",
        "value": f"{text.times(1 / factor)}×",
        "note": note,
        "state": "bad",
    }


def _error_tile(own: dict) -> dict:
    ours = own["candidate"]["relative_error"]
    return {
        "label": "Error",
        "value": text.scientific(ours),
        "note": f"PyTorch's own: {text.scientific(own['eager']['relative_error'])}; "
        f"allowed: {text.scientific(own['allowed_relative_error'])}",
        "state": "" if ours <= own["allowed_relative_error"] else "bad",
    }


def _programs(report: dict, mode: str) -> list:
    return [
        p
        for p in report.get("programs", ())
        if p["mode"] == mode and "predicted_ms" in p["explain"]
    ]


def _sweeps(report: dict, mode: str) -> list:
    return [s for p in _programs(report, mode) for s in p["explain"].get("sweeps", ())]
