"""From ATen graphs to Ingot graphs: what they take over, and what stays PyTorch's."""

from ingot.capture.captured import Captured, CaptureError, Region, Unsupported

__all__ = ["CaptureError", "Captured", "Region", "Unsupported"]
