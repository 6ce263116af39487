"""The fast sampler: decoder models of known families over a paged cache, each step one CUDA graph."""
