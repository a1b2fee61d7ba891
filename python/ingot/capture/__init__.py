"""From an nn.Module to Ingot graphs: what they take over, and what stays PyTorch's."""

from ingot.capture.captured import Captured, CaptureError, Region, Unsupported
from ingot.capture.importer import capture

__all__ = ["CaptureError", "Captured", "Region", "Unsupported", "capture"]
