"""Compare mathematical answers: LaTeX to tokens, tokens to expression trees, trees to normal forms compared exactly."""

from trimtab.grading.mathematics.math_rule import asks_for_several, grade_extracted, unbox
from trimtab.grading.mathematics.tokenizer import tokenize

__all__ = ["asks_for_several", "grade_extracted", "tokenize", "unbox"]
