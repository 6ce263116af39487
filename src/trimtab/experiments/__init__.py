"""Experiments with whole runs and models: comparisons, stress tests, evaluation on benchmarks."""
