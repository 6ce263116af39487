"""A second opinion on countdown: expressions by Python's own parser, in fractions; and attempts to fool the rule."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def fraction_value(text: str, numbers: Sequence[int], operations: str) -> Fraction | None:
    """The value of a valid expression; None where it is not one, or divides with a remainder."""
    if not re.fullmatch(r"[-0-9+*/() ]+", text):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        value, used = _value(tree, operations)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return value if used == Counter(numbers) else None


def _value(node: ast.expr, operations: str) -> tuple[Fraction, Counter[int]]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), Counter([node.value])
    if not isinstance(node, ast.BinOp) or SIGNS.get(type(node.op), "?") not in operations:
        raise ValueError(ast.dump(node))
    (a, left), (b, right) = _value(node.left, operations), _value(node.right, operations)
    sign = SIGNS[type(node.op)]
    value = a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b
    if value.denominator != 1:
        raise ValueError("a remainder")
    return value, left + right


def steps_value(text: str, numbers: Sequence[int], operations: str) -> Fraction | None:
    """The last result of valid steps; None where a step is false, or uses what is not there, or something is left."""
    there = [Fraction(number) for number in numbers]
    for step in text.split(","):
        formula, equals, result = step.partition("=")
        match = re.fullmatch(r"([0-9]+)[-+*/]([0-9]+)", formula)
        if not equals or match is None or not re.fullmatch("0|[1-9][0-9]*", result):
            return None
        pair = [Fraction(match[1]), Fraction(match[2])]
        for number in pair:
            if number not in there:
                return None
            there.remove(number)
        value = fraction_value(formula, [int(each) for each in pair], operations)
        if value is None or value != Fraction(result):
            return None
        there.append(value)
    return there[0] if len(there) == 1 else None


# (why it is not right, ground truth, response)
FOOLING: tuple[tuple[str, str, str], ...] = (
    ("a number is missing", "3 7 5=21", "3*7"),
    ("a number is missing", "3 7 5=5", "5"),
    ("the target alone", "3 7 5=16", "16"),
    ("a number is used twice", "3 7 5=16", "3*7-5+5-5"),
    ("a number is used twice", "3 7 5=9", "3+3+3"),
    ("a number is used twice in place of another", "3 7 5=10", "5+5"),
    ("a number that occurs once is used twice", "4 4 5=8", "4*4/4+4"),
    ("one of two equal numbers is missing", "4 4 5=20", "4*5"),
    ("another number", "3 7 5=16", "3*7-5*1"),
    ("another number", "3 7 5=16", "16+3*0*7*5"),
    ("another number", "3 7 5=16", "8+8"),
    ("a zero is smuggled in", "3 7 5=16", "3*7-5+0"),
    ("digits are joined", "3 7 5=42", "37+5"),
    ("digits are joined", "1 2 3=15", "12+3"),
    ("digits are joined across a space", "1 2 3=15", "1 2+3"),
    ("digits are joined by parentheses", "3 7 5=105", "(3)(7)5"),
    ("a product without a sign", "3 7 5=50", "(3+7)5"),
    ("a product without a sign", "3 7 5=50", "5(3+7)"),
    ("a number is taken apart", "12 3=6", "1+2+3"),
    ("a leading zero", "3 7 5=16", "03*7-5"),
    ("a leading zero", "3 7 5=16", "3*7-005"),
    ("a decimal point", "3 7 5=16", "3.0*7-5"),
    ("a decimal point", "3 7 5=16", "3*7-5."),
    ("an underscore", "37 5=32", "3_7-5"),
    ("an exponent", "3 7 5=16", "3e0*7-5"),
    ("another base", "3 7 5=16", "0x3*7-5"),
    ("a unary minus", "3 7 5=16", "-5+3*7"),
    ("a unary minus", "3 7 5=16", "3*7+-5"),
    ("a unary minus", "3 7 5=26", "3*7--5"),
    ("a unary minus in parentheses", "3 7 5=16", "3*7+(-5)"),
    ("a unary plus", "3 7 5=16", "+3*7-5"),
    ("a unary plus", "3 7 5=16", "3*+7-5"),
    ("an inversion", "3 7 5=16", "~3*7-5"),
    ("a power", "2 3 1=7", "2**3-1"),
    ("a power", "2 3 1=7", "2^3-1"),
    ("a whole-number division", "7 2 1=4", "7//2+1"),
    ("a remainder", "7 2 1=2", "7%2+1"),
    ("a division with a remainder", "7 2 1=4", "7/2+1"),
    ("a division with a remainder that a product would undo", "3 2 4=6", "3/2*4"),
    ("a division by zero", "3 3 5=0", "5/(3-3)"),
    ("a division of zero by zero", "3 3 5 5=0", "(3-3)/(5-5)"),
    ("a factorial", "3 7 5=16", "3!+7+5-2"),
    ("an operation that is not allowed", "8 2 1=3 +-*", "8/2-1"),
    ("an operation that is not allowed", "3 7 5=16 +-", "3*7-5"),
    ("an operation that is not allowed", "3 7 5=15 +", "3+7+5-0"),
    ("an equation", "3 7 5=16", "3*7-5=16"),
    ("an equation", "3 7 5=16", "16=3*7-5"),
    ("a comparison", "3 7 5=1", "3*7-5==16"),
    ("steps in place of an expression", "3 7 5=16", "3*7=21,21-5=16"),
    ("two expressions", "3 7 5=16", "3*7-5,3*7-5"),
    ("two expressions", "3 7 5=16", "3*7-5 3*7-5"),
    ("two expressions", "3 7 5=16", "3*7-5;3*7-5"),
    ("two lines", "3 7 5=16", "3*7-5\n3+7+5"),
    ("two lines", "3 7 5=16", "3*\n7-5"),
    ("a tab", "3 7 5=16", "3*7\t-5"),
    ("words", "3 7 5=16", "The answer is 3*7-5"),
    ("words", "3 7 5=16", "3*7-5 is right"),
    ("a word", "3 7 5=16", "correct"),
    ("a comment", "3 7 5=16", "3*7-5#"),
    ("a comment", "3 7 5=16", "3*7-5/*5*/"),
    ("a box", "3 7 5=16", r"\boxed{3*7-5}"),
    ("a full stop", "3 7 5=16", "3*7-5."),
    ("quotes", "3 7 5=16", "'3*7-5'"),
    ("code", "3 7 5=16", "__import__('os').getpid()"),
    ("code", "3 7 5=16", "(lambda:16)()"),
    ("a name", "3 7 5=16", "x*7-5"),
    ("brackets", "3 7 5=16", "[3*7]-5"),
    ("braces", "3 7 5=16", "{3*7}-5"),
    ("a parenthesis is open", "3 7 5=16", "(3*7-5"),
    ("a parenthesis is closed", "3 7 5=16", "3*7-5)"),
    ("parentheses the wrong way", "3 7 5=16", ")3*7-5("),
    ("empty parentheses", "3 7 5=16", "3*7-5()"),
    ("empty parentheses", "3 7 5=16", "()3*7-5"),
    ("a sign at the end", "3 7 5=16", "3*7-5-"),
    ("signs alone", "3 7 5=16", "+-*"),
    ("Arabic digits", "3 7 5=16", "٣*7-5"),
    ("full-width digits", "3 7 5=16", "３*７-５"),
    ("mathematical digits", "3 7 5=16", "𝟛*𝟟-𝟝"),
    ("a superscript", "3 7 5=16", "3*7-5²"),
    ("a circled digit", "3 7 5=16", "③*7-5"),
    ("a Roman numeral", "3 7 5=16", "Ⅲ*7-5"),
    ("another multiplication sign", "3 7 5=16", "3×7-5"),
    ("another minus", "3 7 5=16", "3*7−5"),
    ("a hyphen of another kind", "3 7 5=16", "3*7‐5"),
    ("a character without width", "3 7 5=16", "3*7\u200b-5"),
    ("a space without break", "3 7 5=16", "3\u00a0*7-5"),
    ("a null character", "3 7 5=16", "3*7-5\x00"),
    ("a null character", "3 7 5=16", "\x003*7-5"),
    ("a surrogate", "3 7 5=16", "3*7-5\ud800"),
    ("another value", "3 7 5=16", "3*7+5"),
    ("another value", "3 7 5=16", "3*(7-5)"),
    ("minus the target", "3 7 5=16", "5-3*7"),
    ("the ground truth", "3 7 5=16", "3 7 5=16"),
    # in steps
    ("a false equation", "3 7 5=16 +-* steps", "3*7=22,22-5=16"),
    ("a false equation at the end", "3 7 5=16 +-* steps", "3*7=21,21-5=17"),
    ("two false equations that lead there", "3 7 5=16 +-* steps", "3+7=11,11+5=16"),
    ("a false equation with the target", "3 7 5=16 +-* steps", "3+7=10,10+5=16"),
    ("a step is missing", "3 7 5=21 +-* steps", "3*7=21"),
    ("a step is missing", "3 7 5=16 +-* steps", "21-5=16"),
    ("a step too many", "3 7 5=16 +-* steps", "3*7=21,21-5=16,16-0=16"),
    ("the same step twice", "3 7 5=16 +-* steps", "3*7=21,3*7=21,21-5=16"),
    ("a step goes on with what is used up", "3 7 5=16 +-* steps", "3*7=21,21-5=16,3*7=21"),
    ("a number is used twice", "3 7 5=14 +-* steps", "7+7=14"),
    ("a number is used twice", "3 7 5=0 +-* steps", "3-3=0,0*7=0,0*5=0"),
    ("a number is used twice for both sides", "3 7 5=15 +-* steps", "5+5=10,10+5=15"),
    ("a result is used twice", "3 7 5=42 +-* steps", "3*7=21,21+21=42"),
    ("a result is used before it is there", "3 7 5=16 +-* steps", "21-5=16,3*7=21"),
    ("a number of nowhere", "3 7 5=16 +-* steps", "9+7=16"),
    ("the target comes first", "3 7 5=21 +-* steps", "3*7=21,21-5=16"),
    ("something is left over", "3 7 5 1=16 +-* steps", "3*7=21,21-5=16"),
    ("a negative result", "3 7 5=1 +-* steps", "3-7=-4,-4+5=1"),
    ("a negative result", "3 7 5=1 +-* steps", "3-7=4,5-4=1"),
    ("a sum of three", "3 7 5=15 +-* steps", "3+7+5=15"),
    ("parentheses", "3 7 5=16 +-* steps", "(3*7)=21,21-5=16"),
    ("a chain of equations", "3 7 5=16 +-* steps", "3*7=21-5=16"),
    ("an equation the wrong way", "3 7 5=16 +-* steps", "21=3*7,16=21-5"),
    ("an expression in place of steps", "3 7 5=16 +-* steps", "3*7-5"),
    ("a comma at the end", "3 7 5=16 +-* steps", "3*7=21,21-5=16,"),
    ("a comma at the start", "3 7 5=16 +-* steps", ",3*7=21,21-5=16"),
    ("two commas", "3 7 5=16 +-* steps", "3*7=21,,21-5=16"),
    ("a semicolon", "3 7 5=16 +-* steps", "3*7=21;21-5=16"),
    ("a new line", "3 7 5=16 +-* steps", "3*7=21\n21-5=16"),
    ("a leading zero in a result", "3 7 5=16 +-* steps", "3*7=021,21-5=16"),
    ("a leading zero in a result that is used", "3 7 5=16 +-* steps", "3*7=021,021-5=16"),
    ("an equation that is true without numbers", "3 7 5=16 +-* steps", "=,3*7=21,21-5=16"),
    ("an operation that is not allowed", "3 7 5=16 +- steps", "3*7=21,21-5=16"),
    ("a division with a remainder", "7 2 1=4 +-*/ steps", "7/2=3,3+1=4"),
    ("a division by zero", "3 3 5=0 +-*/ steps", "3-3=0,5/0=0"),
    ("other digits", "3 7 5=16 +-* steps", "３*7=21,21-5=16"),
    ("words", "3 7 5=16 +-* steps", "3*7=21,21-5=16 done"),
    ("words between the steps", "3 7 5=16 +-* steps", "3*7=21, so 21-5=16"),
)
# (ground truth, response): what is right, however odd it looks
RIGHT: tuple[tuple[str, str], ...] = (
    ("3 7 5=16", "3*7-5"),
    ("3 7 5=16", "7*3-5"),
    ("3 7 5=16", " 3 * 7 - 5 "),
    ("3 7 5=16", "3*7-5\n"),
    ("3 7 5=16", "(((3)*(7)))-(5)"),
    ("5 7 3=16", "3*7-5"),
    ("3 7 5=1", "3-7+5"),
    ("3 7 5=1", "(3-7)+5"),
    ("3 7 5=6", "3*(7-5)"),
    ("3 7 5=9", "7-(3-5)"),
    ("8 2 1=3", "8/2-1"),
    ("8 2 1=3 +-*/ expression", "8/2-1"),
    ("8 4 2=1", "8/4/2"),
    ("8 4 2=4", "8/(4/2)"),
    ("2 6 3=9", "6/2*3"),
    ("0 3 5=0", "0/(3+5)"),
    ("4 4=16", "4*4"),
    ("10 20=30", "10+20"),
    ("3 7  5 = 16  *-", "3*7-5"),
    ("3 7 5=16 steps", "3*7=21,21-5=16"),
    ("3 7 5=16 +-* steps", "3*7=21,21-5=16"),
    ("3 7 5=16 +-* steps", "7*3=21, 21-5=16"),
    ("3 7 5=16 +-* steps", " 3 * 7 = 21 , 21 - 5 = 16 "),
    ("3 7 5 21=0 +-* steps", "3*7=21,21-21=0,5*0=0"),
    ("1 2 3 4=10 + steps", "1+2=3,3+3=6,6+4=10"),
    ("1 2 3 4=10 + steps", "1+2=3,3+4=7,3+7=10"),
    ("9 3 3=1 */ steps", "9/3=3,3/3=1"),
)
