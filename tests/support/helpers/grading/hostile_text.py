r"""Hostile responses whose harm lies in the text: boxes without end, odd characters, shapes on which regexes
backtrack, LaTeX that does not close, and answers that would run as Python where a grader lets them."""

from __future__ import annotations

import random

TRICKS = ("\x00", "\x1b[2J", "\u202e", "\u200b", "\ud800", "\udfff", "\ufeff", "\u0301" * 500, "\x7f", "\x85", "\u2028")


def unbalanced(rng: random.Random, number: int) -> str:
    n = rng.randint(100, 20_000)
    forms = (
        r"\boxed{" + "{" * n + "5" + "}" * (n - 1),
        r"\boxed{\frac{1}{2}",
        r"\boxed{5}}}}" + "}" * n,
        r"\boxed{\left( 1, 2 }",
        r"\boxed{\left\{ 1 \right.}" + r"\left(" * n,
        r"\boxed{\begin{pmatrix} 1 & 2 }",
        r"\boxed{\begin{a}\begin{b}\end{a}\end{b}}",
        r"\boxed{\frac{}{}}",
        r"\boxed{\sqrt[}]{}",
        r"\boxed{\frac}",
        r"\boxed{^^^___}",
        r"\boxed{5^}",
        r"\boxed{\\\\\\}",
        r"\boxed{" + "\\" * n + "}",
        r"\boxed{" + "\\" * (n | 1) + "}",
        r"\boxed{$$$$$}",
        r"\boxed{\text{5}",
        r"\boxed{\left" + r"\left" * n + "}",
        r"\boxed{" + r"\}" * n + "}",
        "$" * n + r"\boxed{" + "$" * n,
        r"\boxed{\def\x{\x\x}\x}",
        r"\boxed{\newcommand{\a}{\a\a}\a}",
        r"\boxed{\input{/etc/passwd}}",
        r"\boxed{\catcode`\{=13 5}",
    )
    return "So we get " + forms[number % len(forms)]


def boxes(rng: random.Random, number: int) -> str:
    n = 1_000_000 if number == 0 else rng.randint(1000, 60_000)
    forms = (
        r"\boxed{1}" * n,
        r"\boxed{" * n,
        r"\boxed{" * n + "5" + "}" * n,
        "".join(rf"\boxed{{{k}}}" for k in range(n // 2)),
        r"\boxed{" * n + "5" + "}" * (n // 2),
        r"\boxed" * n,
        r"\boxed{}" * n,
        r"\boxed{\boxed{" + "5" * n + "}}",
        r"\boxed{" + "text " * n + "}",
        r"\boxed" + " " * n + "{5}",
        r"\boxed{5}" + "}" * n + "{" * n,
        r"\fbox{" * n + r"\boxed{7}",
        "Answer: " * n,
        "Answer: 5\n" * n,
        r"\boxed 5 " * n,
        r"The answer is \boxed{" + "x" * n,
        "final answer is " * n + "5",
        r"\boxed{5} \boxed{" * (n // 2),
        r"\\boxed{5}" * (n // 2),
        "\\boxed{\\text{" * (n // 4) + "5" + "}}" * (n // 4),
    )
    return forms[number % len(forms)]


def characters(rng: random.Random, number: int) -> str:
    trick = TRICKS[number % len(TRICKS)]
    n = rng.randint(1, 3000)
    forms = (
        rf"\boxed{{{trick}}}",
        rf"\boxed{{5{trick * n}7}}",
        rf"\box{trick}ed{{5}}",
        rf"{trick * n}\boxed{{x{trick}y}}",
        rf"\boxed{{\text{{{trick}}}}}",
        rf"\boxed{{5^{{{trick}}}}}",
        rf"Answer: {trick}5{trick}",
        rf"\boxed{{{''.join(rng.choices(TRICKS, k=40))}}}",
        rf"\boxed{{{''.join(chr(rng.randrange(0x20, 0x110000)) for _ in range(200)).replace(chr(123), '')}}}",
        f"\\boxed{{5\r\n\r\n{trick}\f\v\b}}",
    )
    return "Thus " + forms[(number // 2) % len(forms)]


def regexes(rng: random.Random, number: int) -> str:
    n = rng.randint(2000, 40_000)
    forms = (
        " " * n + "x",
        r"\boxed{" + " " * n + "x}",
        "The answer is" + " " * n + "!",
        "Answer:" + " " * n + "\n" + "Answer:" + "\t" * n,
        "1," * n + "x",
        r"\boxed{" + "1,111" * n + "x}",
        r"\boxed{" + "-" * n + "}",
        r"\boxed{" + "1 " * n + "}",
        r"\boxed{\frac{" + "1" * n + r"}\frac{" + "1" * n + "}}",
        r"\boxed{" + r"\text{a" * n + "}",
        r"\boxed{" + "a_" * n + "}",
        r"\boxed{" + "1.1e" * n + "}",
        r"\boxed{" + "((((a+)+)+)+)+" * (n // 10) + "}",
        r"\boxed{" + "0" * n + "/" + "}",
        r"\boxed{" + r"\frac{1}{1}" * (n // 10) + "!}",
        r"\boxed{" + "x=" * n + "}",
        r"\boxed{" + "$" * n + "}",
        r"\boxed{" + r"\ " * n + "}",
        r"\boxed{" + "1:" * n + "}",
        "(" * n + "A",
        "final answer " * (n // 10) + ":",
        "**" * n + "Answer" + "**" * n,
        r"\boxed{" + "1^1" * n + "}",
        r"\boxed{" + r"\sqrt" * (n // 5) + "1" * (n // 5) + "}",
        "\n" * n + "Answer" + "\n" * n + ":",
    )
    return "We think. " + forms[number % len(forms)]


SOUP = (
    *(r"\frac", r"\sqrt", r"\pm", r"\left(", r"\right)", r"\text{", r"\{", r"\}", r"\cup", r"\in", r"\le", r"\circ"),
    *(
        r"\infty",
        r"\pi",
        r"\sin",
        r"\log",
        r"\ln",
        r"\binom",
        r"\overline{",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\\",
    ),
    *(
        r"\%",
        r"\$",
        r"\cdot",
        r"\times",
        r"\ldots",
        r"\lfloor",
        r"\rfloor",
        r"\angle",
        r"\dot",
        r"\mp",
        r"\approx",
        r"\, ",
    ),
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "|",
        "^",
        "_",
        "+",
        "-",
        "*",
        "/",
        "=",
        "<",
        ">",
        "!",
        "'",
        ",",
        ";",
        ":",
        ".",
        "&",
    ),
    *(
        "0",
        "1",
        "2",
        "7",
        "42",
        "0.5",
        ".5",
        "1e3",
        "x",
        "y",
        "i",
        "e",
        "f(x)",
        "cm",
        "or",
        "and",
        " ",
        " ",
        "°",
        "²",
        "½",
    ),
)


def soup(rng: random.Random) -> str:
    """Some of what answers are made of, in no order: most of it means nothing, and all of it must be survived."""
    return "".join(rng.choices(SOUP, k=rng.randint(1, 14)))


def injections(rng: random.Random, number: int, canary: str) -> str:
    """Python that would write the canary, as the answer; and tricks of its kind with names and attributes."""
    write = f"open('{canary}','w').write('x')"
    shell = f"__import__('os').system('touch {canary}')"
    path = f"__import__('pathlib').Path('{canary}').touch()"
    attribute = "().__class__.__bases__[0].__subclasses__()"
    symbol = f'Symbol("x").__init__.__globals__["__builtins__"]["__import__"]("os").system("touch {canary}")'
    forms = (
        shell,
        path,
        f'exec("{write}")',
        f'eval("{shell}")',
        f"[{write} for x in [1]][0]",
        f"(lambda: {write})()",
        f'f"{{{shell}}}"',
        f"{attribute}[104]",
        symbol,
        f"Function('f')(x).func.__globals__ or {path}",
        rf"\operatorname{{{shell}}}",
        rf"\text{{{shell}}}",
        rf"5 + \mathrm{{{write}}}",
        f"sympify('{shell}')",
        f'parse_expr("{path}")',
        f"S('{write}')",
        f"x.subs(x, {shell})",
        f"lambdify(x, '{shell}')(1)",
        f"\\frac{{{shell}}}{{1}}",
        f"1 if {path} else 2",
        f"{{5: {shell}}}[5]",
        f"x_{{{path}}}",
        f"5); {write}; (5",
        f"5\n{write}\n",
        f"5'); {write} #",
        f"Integer(5).__class__.mro()[-1].__subclasses__() and {write}",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary} ;",
        f"\\write18{{touch {canary}}}",
        f"\\immediate\\openout\\x={canary} \\closeout\\x",
        '"{0.__class__.__init__.__globals__}".format(x)',
        "while True: pass",
        "[9**9**9 for _ in iter(int, 1)]",
        "cos.__class__.__call__(cos, 9**9**9)",
        "'x' * 10**12",
        "[0] * 10**12",
        "(lambda f: f(f))(lambda f: f(f))",
        "raise SystemExit",
        "exit()",
        "os._exit(1)",
    )
    return forms[number % len(forms)]
