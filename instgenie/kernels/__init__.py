"""Elementwise work of a block as fused Triton kernels, each beside the torch reference that says what it computes.

A kernel runs where its tensors are on a CUDA device, Triton is there and the switch is on; everywhere else its
reference runs. Both take the same arguments. Kernels compute in float32 and round once, so in bfloat16 they are a
rounding or two nearer to the truth than their references.
"""
