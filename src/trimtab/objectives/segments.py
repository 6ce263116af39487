"""Split responses into subsentences for SSPO: from token ids and a tokenizer to segment ids.

A clause ends with a delimiter and what closes after it: more delimiters, closing quotes and brackets, white space. The
boundary is the last token edge between the end of that delimiter and the start of the next clause; a token that holds
both leaves no boundary, and an edge inside a character is none. All of it is one regular expression over the bytes of
the batch, in bytes because byte-level BPE cuts characters into several tokens. Time is linear in the text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from trimtab.objectives.lazy_torch import Tensor, torch

DELIMITERS = ".!?;:,\n。．！？；：，、"
CLOSERS = ")]}\u201d\u2019\u00bb）】〕』」》〉］｝\u00a0\u3000"  # the last two are white space beyond ASCII

# Bytes that no UTF-8 text holds. Of a special token, which closes a clause; of the end of a response; and what stands
# for the latter in a token that a model sampled byte by byte.
SPECIAL, END, OTHER = b"\xff", b"\xfe", b"\xfd"


def segment_ids(
    tokens: Sequence[int] | Tensor,
    tokenizer: Any,
    *,
    sequence: Sequence[int] | Tensor | None = None,
    mask: Tensor | None = None,
    after_tool: Sequence[bool] | Tensor | None = None,
    delimiters: str = DELIMITERS,
    min_tokens: int = 1,
    keep_numbers: bool = True,
) -> Tensor:
    """Return the segment id of every token of one response or, with `sequence`, of each response in a packed batch.

    With `mask`, as `TokenBatch.from_padded` takes it, `tokens` are padded (responses, positions), and so are the ids
    returned. Where the mask leaves out tokens inside of a response, as those of a tool, a new segment starts.

    Ids count from 0 in every response. `tokenizer` is a `tokenizers.Tokenizer`, a fast tokenizer of transformers, or a
    mapping from token ids to bytes without the special tokens (`token_bytes`). Segments of fewer than `min_tokens`
    tokens are joined to their neighbours. `keep_numbers` leaves `3.14`, `1,000`, `.5`, `12:30`, `1{,}000` and
    `1,\\!000` whole. `after_tool` marks tokens right after the output of a tool, which is not among the tokens: no
    segment spans it.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens={min_tokens} must be at least 1")
    if not delimiters:
        raise ValueError("delimiters is empty: without any, give no segments and use a response ratio (gspo)")
    ids = torch.as_tensor(tokens)
    options: dict[str, Any] = {"delimiters": delimiters, "min_tokens": min_tokens, "keep_numbers": keep_numbers}
    if mask is not None:
        if sequence is not None or after_tool is not None:
            raise ValueError("mask says which response each token is of, and what is a tool's: give it alone")
        return _of_padded(ids, tokenizer, mask.to(ids.device), options)
    if ids.ndim != 1:
        raise ValueError(f"segment_ids takes a flat list of token ids, got shape {tuple(ids.shape)}")
    if ids.is_floating_point() and len(ids):
        raise ValueError(f"token ids are whole numbers, got {ids.dtype}")
    owner = None if sequence is None else torch.as_tensor(sequence)
    if owner is not None and owner.shape != ids.shape:
        raise ValueError(f"sequence has shape {tuple(owner.shape)}, the tokens {tuple(ids.shape)}: one value per token")
    if after_tool is not None and bool((after := torch.as_tensor(after_tool)).any()):
        return _by_turn(ids, tokenizer, owner, after.to(ids.device), options)
    if not len(ids):
        return torch.zeros(0, dtype=torch.int64, device=ids.device)
    starts = torch.zeros(1, dtype=torch.int64)
    if owner is not None:
        starts = torch.cat([starts, torch.diff(owner.cpu()).nonzero().squeeze(1) + 1])
    begins = _clause_starts(ids.tolist(), starts, tokenizer, _clause_ends(delimiters, keep_numbers))
    if min_tokens > 1:
        begins = _joined(begins, starts, min_tokens)
    number = begins.cumsum(0)
    lengths = torch.diff(starts, append=starts.new_tensor([len(ids)]))
    return (number - number[starts].repeat_interleave(lengths)).to(ids.device)  # every response counts from 0


def _of_padded(ids: Tensor, tokenizer: Any, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Split the rows of a padded batch; what the mask leaves out gets 0."""
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise ValueError(f"with a mask of shape {tuple(mask.shape)} the tokens need that shape, not {tuple(ids.shape)}")
    made = torch.zeros_like(ids)
    rows, columns = mask.nonzero(as_tuple=True)
    after_gap = torch.zeros_like(rows, dtype=torch.bool)
    after_gap[1:] = (rows[1:] == rows[:-1]) & (columns[1:] > columns[:-1] + 1)
    made[rows, columns] = segment_ids(ids[rows, columns], tokenizer, sequence=rows, after_tool=after_gap, **options)
    return made


def _by_turn(ids: Tensor, tokenizer: Any, owner: Tensor | None, after_tool: Tensor, options: dict[str, Any]) -> Tensor:
    """Return segment ids where each turn of a response is segmented by itself, and segments are numbered on."""
    if after_tool.shape != ids.shape:
        raise ValueError(f"after_tool has shape {tuple(after_tool.shape)}, the tokens {tuple(ids.shape)}")
    sequence = torch.zeros_like(ids) if owner is None else owner.to(ids.device)
    starts_response = torch.diff(sequence, prepend=sequence[:1] - 1) != 0
    starts_turn = after_tool.bool() | starts_response
    in_turn = segment_ids(ids, tokenizer, sequence=starts_turn.cumsum(0) - 1, **options)
    number = ((torch.diff(in_turn, prepend=in_turn[:1] - 1) != 0) | starts_turn).cumsum(0)
    end = torch.full((1,), len(ids), device=ids.device)
    lengths = torch.diff(starts_response.nonzero().squeeze(1), append=end)
    return number - number[starts_response].repeat_interleave(lengths)


# 30 ms for 512 responses of 256 tokens, of a step that takes 900 ms on a GPU.
def _clause_starts(ids: Sequence[int], starts: Tensor, tokenizer: Any, clause_ends: re.Pattern[bytes]) -> Tensor:
    """Return a mask of the tokens that start a clause after another one; `starts` are those that start a response."""
    known = _known_bytes(ids, tokenizer)
    pieces = [known[token] for token in ids]
    bounds = [*starts.tolist(), len(ids)]
    text = b"".join([b"".join(pieces[first:last]) + END for first, last in pairwise(bounds)])
    clauses = list(clause_ends.finditer(text))
    if not clauses:
        return torch.zeros(len(ids), dtype=torch.bool)
    # The first byte of every token, with an end after each response among them.
    response = torch.zeros(len(ids), dtype=torch.int64)
    response[starts[1:]] = 1
    place = torch.arange(len(ids)) + response.cumsum(0)
    sizes = torch.ones(len(ids) + len(starts), dtype=torch.int64)
    sizes[place] = _integers(map(len, pieces))
    edges = sizes.cumsum(0) - sizes
    delimited = _integers(clause.end(1) for clause in clauses)
    end = _integers(clause.end() for clause in clauses)
    token = torch.searchsorted(edges, end, right=True) - 1
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    while True:  # back from edges inside a character
        edge = edges[token]
        back = (delimited < edge) & (edge < end) & (content[edge] & 0xC0 == 0x80)
        if not bool(back.any()):
            break
        token = token - back.to(token.dtype)
    mask = torch.zeros(len(sizes), dtype=torch.bool)
    mask[token[delimited <= edges[token]]] = True
    return mask[place]


def _integers(values: Iterable[int]) -> Tensor:
    return torch.frombuffer(array("q", values), dtype=torch.int64)  # torch.tensor of a list takes five times as long


def _joined(begins: Tensor, starts: Tensor, min_tokens: int) -> Tensor:
    """Join segments of fewer tokens to the next one, the last of a response to the one before."""
    kept: list[int] = []
    for first, end in pairwise([*starts.tolist(), len(begins)]):
        own = [first]
        for start in (begins[first:end].nonzero().squeeze(1) + first).tolist():
            if start - own[-1] >= min_tokens:
                own.append(start)
        kept += own[1:-1] if end - own[-1] < min_tokens else own[1:]
    joined = torch.zeros_like(begins)
    joined[kept] = True
    return joined


@lru_cache(maxsize=16)
def _clause_ends(delimiters: str, keep_numbers: bool) -> re.Pattern[bytes]:
    """Compile the pattern of a clause's first delimiter (group 1) and of everything that closes behind it."""
    mark = _any_of(delimiters)
    mark += rb"(?<!\\[!-~])"  # LaTeX's `\,` is a space
    mark += rb"(?<!\\left\.)(?<!\\right\.)"  # and its `\left.` an invisible bracket
    if keep_numbers:
        mark += rb"(?!(?<=[0-9][.,:])(?:\\!)?[0-9])"  # 3.14  1,000  12:30  1,\!000
        mark += rb"(?!(?<=[0-9]\{,)\}[0-9])"  # 1{,}000
        mark += rb"(?!(?<=\.)(?<![^\s(\[{=+\-*/<>$\xfe]\.)[0-9])"  # .5
    closer = rb"\s|\\[)\]}]|\\\\(?=\s)|" + SPECIAL + b"|" + _any_of(CLOSERS)
    # Marks that open as well as close: quotes close right after a full stop, all of them between a character and a gap.
    stopped = b"(?:(?<=[.!?])|(?<=" + "。|！|？".encode() + b"))[\"']+"
    between = rb"(?<!\s)(?<!\xc2\xa0)(?<!\xe3\x80\x80)[\"'`*_$]+(?=" + END + b"|" + closer + b"|" + mark + b")"
    # Possessive: a repetition that can backtrack holds some 300 bytes of memory for every byte it has matched.
    return re.compile(b"(" + mark + b")(?:" + b"|".join([closer, mark, stopped, between]) + b")*+")


def _any_of(characters: str) -> bytes:
    return b"(?:" + b"|".join(re.escape(character.encode()) for character in characters) + b")"


def _known_bytes(ids: Sequence[int], tokenizer: Any) -> Mapping[int, bytes]:
    """Return the bytes of a batch's tokens; those of a tokenizer are kept for the next batch."""
    if isinstance(tokenizer, Mapping):
        return _without_end(_bytes_by_id(set(ids), tokenizer))  # not kept: a mapping may change from call to call
    inner, special = _backend(tokenizer)
    added = frozenset((number, token.content) for number, token in inner.get_added_tokens_decoder().items())
    known = _kept_bytes(
        tokenizer, (inner, frozenset(special), added, inner.get_vocab_size(False), _is_byte_level(inner))
    )
    if missing := set(ids) - known.keys():
        known |= _without_end(_bytes_by_id(missing, tokenizer))
    return known


@lru_cache(maxsize=4)
def _kept_bytes(tokenizer: Any, state: Hashable) -> dict[int, bytes]:
    """Return the bytes known of a tokenizer's tokens, to be filled; `state` differs once the tokenizer is changed."""
    return {}


def _without_end(pieces: Mapping[int, bytes]) -> dict[int, bytes]:
    return {token: piece.replace(END, OTHER) for token, piece in pieces.items()}


def token_bytes(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of all ids that are not special; `segment_ids` takes this mapping in place of a tokenizer."""
    return {token: text for token, text in _bytes_by_id(ids, tokenizer).items() if text != SPECIAL}


def _bytes_by_id(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of every id, `SPECIAL` for special tokens and for ids that the tokenizer does not know."""
    # A model whose logits are padded beyond its tokenizer's vocabulary may sample unknown ids.
    if isinstance(tokenizer, Mapping):
        return {token: tokenizer.get(token, SPECIAL) for token in ids}
    inner, special = _backend(tokenizer)
    byte_level = _is_byte_level(inner)
    made = {}
    for token in ids:
        if token < 0:
            raise ValueError(f"{token} is no token id: leave masked and padded positions out")
        piece = None if token in special else inner.id_to_token(token)
        made[token] = SPECIAL if piece is None else _piece_bytes(piece, byte_level)
    return made


def _backend(tokenizer: Any) -> tuple[Any, set[int]]:
    """Return the `tokenizers.Tokenizer` inside a tokenizer, and the ids of its special tokens."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "id_to_token"):
        kind = type(tokenizer).__name__
        raise ValueError(f"{kind} is neither a tokenizers.Tokenizer nor a fast transformers tokenizer")
    added = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    return inner, added | set(getattr(tokenizer, "all_special_ids", ()))


def _is_byte_level(inner: Any) -> bool:
    """Return whether tokens are written in the alphabet of byte-level BPE."""
    # Run the decoder: its type does not tell, it may be a sequence of several. U+0120 is that alphabet's space.
    return inner.decoder is not None and inner.decoder.decode(["a\u0120b"]) == "a b"


def _piece_bytes(piece: str, byte_level: bool) -> bytes:
    if byte_level and _BYTES.keys() >= set(piece):
        return bytes(map(_BYTES.__getitem__, piece))
    if not byte_level and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    # SentencePiece writes a space as U+2581; added tokens of a byte-level tokenizer are plain text.
    return piece.replace("\u2581", " ").encode("utf-8", "surrogatepass")


def _byte_table() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable Latin-1 is itself, other bytes are letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_table()
