"""Whether a candidate, constructed from the original's seed, holds the original's state."""

from __future__ import annotations

from .execution import same_bits
from .reference import Reference


def construction_problem(reference: Reference, reply: dict, state: dict) -> str:
    """What is unlike, or "". state: the candidate's parameters and buffers after construction."""
    wanted = reference.initial_state
    missing = sorted(k[2:] for k in set(wanted) - set(state))
    extra = sorted(k[2:] for k in set(state) - set(wanted))
    if missing or extra:
        return (
            "its parameters and buffers are not the original's: "
            f"missing {missing or 'none'}, added {extra or 'none'}"
        )
    for key, value in wanted.items():
        found = state[key]
        if found.shape != value.shape or found.dtype != value.dtype:
            return (
                f"{key[2:]} is {found.dtype} {list(found.shape)}, the original's is "
                f"{value.dtype} {list(value.shape)}"
            )
    unlike = [k[2:] for k, v in wanted.items() if not same_bits(v, state[k])]
    if unlike:
        return f"with the same seed, {', '.join(unlike)} differ in value"
    if reply.get("state_dict") != reference.state_dict_names:
        return "the names in its state_dict differ, or their order does"
    if reply.get("requires_grad") != reference.requires_grad:
        return "requires_grad of its parameters differs"
    return ""
