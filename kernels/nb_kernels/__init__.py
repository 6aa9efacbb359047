"""Triton kernels of megatron_nb, each beside its float64 reference. Imports torch and triton only."""
