"""Is a candidate's ModelNew the same function as the original's Model, and how fast is it?"""

from .pair import PairError, VerifyOptions, verify_pair
from .result import AccuracyRow, Check, VerifyResult

__all__ = ["AccuracyRow", "Check", "PairError", "VerifyOptions", "VerifyResult", "verify_pair"]
