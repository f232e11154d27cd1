"""The CPU: products on BLAS, everything else as generated kernels, run by two workers over one launch table."""
