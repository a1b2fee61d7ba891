"""Which regions run, for tests and for tools/gpu_checks."""

from __future__ import annotations

import contextlib

from ingot.live.gradients import RegionCall


@contextlib.contextmanager
def regions_run():
    """A list that grows by a name for each region that runs inside, whoever calls it."""
    names: list[str] = []
    forward = RegionCall.forward

    def counted(call, leaves, *binding):
        results = forward(call, leaves, *binding)
        names.append(call.program.graph["name"])
        return results

    RegionCall.forward = counted
    try:
        yield names
    finally:
        RegionCall.forward = forward
