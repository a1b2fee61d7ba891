"""The ways in which a user may give forward's arguments: by place, by name, or not at all."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import passing

_PLAIN = (int, float, bool, str, type(None))


def parameters_of(module: torch.nn.Module) -> list:
    """Those of its forward, each an inspect.Parameter, that can be given by place; none where a
    call does not reach forward as it was given (hooks get no arguments that are given by name)."""
    hooked = module._forward_pre_hooks or module._forward_hooks
    if hooked or type(module).__call__ is not torch.nn.Module.__call__:
        return []
    try:
        # Of a function around it, its own: that is what is called.
        found = inspect.signature(module.forward, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in found if parameter.kind in by_place]


def by_name(parameters: list, values: list) -> tuple[list, list]:
    """(values with the defaults of what they do not give, the names of the last of them: all but
    those that can be given by place alone)."""
    if len(values) > len(parameters):
        return values, []
    given = list(values)
    for parameter in parameters[len(values) :]:
        if not isinstance(parameter.default, _PLAIN):
            break
        given.append(parameter.default)
    named = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    alone = len(parameters) - len(named)
    return given, named[: max(0, len(given) - alone)]


def left_out(parameters: list, values: list) -> list | None:
    """The values without those that have defaults; None where that would be the same call, or one
    without a tensor."""
    needed = [p for p in parameters if p.default is inspect.Parameter.empty]
    if len(values) > len(parameters) or not passing.tensors_of(values[: len(needed)]):
        return None
    pairs = zip(parameters[len(needed) :], values[len(needed) :])
    if all(isinstance(v, _PLAIN) and v == p.default for p, v in pairs):
        return None
    return values[: len(needed)]


def call(module: torch.nn.Module, values: list, names: list) -> Any:
    """The last values go by these names."""
    by_place = len(values) - len(names)
    return module(*values[:by_place], **dict(zip(names, values[by_place:])))
