"""The bridge to libingot: finding and loading it, and programs that run on PyTorch tensors."""
