"""Elementwise work of a block as fused Triton kernels, each beside the torch reference that defines its result.

A kernel runs if its tensors are on a CUDA device, Triton is installed and the switch is on; otherwise its reference
runs. Both take the same arguments. Kernels compute in float32 and round once, so in bfloat16 they are a rounding or two
more exact than their references.
"""
