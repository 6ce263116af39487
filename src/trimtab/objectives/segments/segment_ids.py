"""Subsentences for SSPO: from token ids and a tokenizer to segment ids.

A clause ends with a delimiter and what closes behind it: more delimiters, closing quotes and brackets, white space. The
boundary is the last edge of a token from the end of that delimiter to the start of the next clause; a token that holds
both leaves none. The work is done on bytes, because byte-level BPE cuts characters into several tokens, and an edge
inside a character is no boundary. Every byte is read a bounded number of times, so time is linear whatever the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DELIMITERS = ".!?;:,\n。．！？；：，、"


def segment_ids(
    tokens: Sequence[int] | Tensor,
    tokenizer: Any,
    *,
    sequence: Sequence[int] | Tensor | None = None,
    delimiters: str = DELIMITERS,
    min_tokens: int = 1,
    keep_numbers: bool = True,
) -> Tensor:
    """Segment ids, from 0 and non-decreasing, for the tokens of one response or, with `sequence`, of a packed batch.

    `tokenizer` is a `tokenizers.Tokenizer`, a fast one of transformers, or a table of the bytes of every token that is
    not special (`token_bytes`). `min_tokens` joins shorter segments to their neighbours; `keep_numbers` leaves `3.14`,
    `1,000`, `.5`, `12:30`, `1{,}000` and `1,\\!000` whole. A batch numbers its segments anew in every response.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens={min_tokens} must be at least 1")
    if not delimiters:
        raise ValueError("delimiters is empty: without any, give no segments and use a response ratio (gspo)")
    ids = torch.as_tensor(tokens)
    if ids.ndim != 1:
        raise ValueError(f"segment_ids takes a flat list of token ids, got shape {tuple(ids.shape)}")
    if ids.is_floating_point() and len(ids):
        raise ValueError(f"token ids are whole numbers, got {ids.dtype}")
    owner = None if sequence is None else torch.as_tensor(sequence)
    if owner is not None and owner.shape != ids.shape:
        raise ValueError(f"sequence has shape {tuple(owner.shape)}, the tokens {tuple(ids.shape)}: one value per token")
    from trimtab.objectives.segments.numbering import segment_numbers  # numpy, which objectives otherwise do without

    owners = None if owner is None else owner.cpu().numpy()
    made = segment_numbers(ids.cpu().numpy(), owners, tokenizer, delimiters, min_tokens, keep_numbers)
    return torch.from_numpy(made).to(ids.device)
