"""Is a candidate's ModelNew the same function as the original's Model, and how fast is it?"""

from .pair import VerifyOptions, verify_pair
from .result import AccuracyRow, Check, PairError, VerifyResult

__all__ = ["AccuracyRow", "Check", "PairError", "VerifyOptions", "VerifyResult", "verify_pair"]
