"""Benchmarks: avg@k, pass@k and maj@k with confidence intervals by problem, every response kept."""

from trimtab.experiments.evaluate.options import EvalOptions

__all__ = ["EvalOptions", "run_eval"]


def run_eval(options: EvalOptions) -> int:
    """Run `trimtab eval`: evaluate or regrade, show and store the result; return the exit code."""
    # Imported here, because the command line imports this package for its options, and torch takes seconds.
    from trimtab.experiments.evaluate.launch import evaluate_and_show, regrade_and_show

    return evaluate_and_show(options) if options.regrade is None else regrade_and_show(options.regrade, options)
