"""Is a candidate's ModelNew the same function as the original's Model, and how fast is it?"""

from .pair import VerifyOptions, begin, verify_pair
from .result import AccuracyRow, Check, PairError, VerifyResult

__all__ = [
    "AccuracyRow",
    "Check",
    "PairError",
    "VerifyOptions",
    "VerifyResult",
    "begin",
    "verify_pair",
]
