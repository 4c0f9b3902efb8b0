"""Tests of the generated kernels that need no GPU."""
