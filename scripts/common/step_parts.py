"""Name the parts of a training step: the phases that the scripts mark, and the groups of its kernels."""

PHASES = ("forward", "backward", "optimizer")
GROUPS = ("GEMM", "attention", "normalisation", "element-wise", "optimizer", "copies", "communication", "other")
