"""GPU kernels (Triton). Each has a plain torch twin that it is tested against."""
