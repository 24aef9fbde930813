"""Faster ways to the same numbers: captured steps, clients side by side, fused inference, cached features, Triton."""
