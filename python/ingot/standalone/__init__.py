"""Parts of a standalone file: what its kernels are for, its regions, its forward."""
