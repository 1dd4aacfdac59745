"""Sparse paged attention ops. `reference` says what each op means; `torch_ops` is the same ops, fast, on PyTorch alone."""

from . import reference, torch_ops


__all__ = ["reference", "torch_ops"]
