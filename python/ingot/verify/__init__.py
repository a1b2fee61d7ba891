"""Is a candidate's ModelNew the same function as the original's Model, and how fast is it?"""

from .ahead import Extensions
from .pair import VerifyOptions, begin, verify_pair
from .result import AccuracyRow, Check, PairError, VerifyResult

__all__ = [
    "AccuracyRow",
    "Check",
    "Extensions",
    "PairError",
    "VerifyOptions",
    "VerifyResult",
    "begin",
    "verify_pair",
]
