"""GPU kernels in Triton. Each is tested against a version in plain torch."""
