"""Compare mathematical answers: LaTeX to tokens, tokens to expression trees, trees to normal forms compared exactly."""

from trimtab.rewards.mathematics.math_rule import grade_extracted, unbox
from trimtab.rewards.mathematics.tokenizer import tokenize

__all__ = ["grade_extracted", "tokenize", "unbox"]
