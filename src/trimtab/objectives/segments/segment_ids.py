"""Split responses into subsentences for SSPO: from token ids and a tokenizer to segment ids.

A clause ends with a delimiter and what closes after it: more delimiters, closing quotes and brackets, white space. The
boundary is the last token edge between the end of that delimiter and the start of the next clause; a token that holds
both leaves no boundary, and an edge inside a character is none. Time is linear in the text, whatever it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.objectives.lazy_torch import Tensor, torch

DELIMITERS = ".!?;:,\n。．！？；：，、"


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
    from trimtab.objectives.segments.splitter import segment_numbers  # numpy, which objectives otherwise do without

    owners = None if owner is None else owner.cpu().numpy()
    made = segment_numbers(ids.cpu().numpy(), owners, tokenizer, min_tokens, (delimiters, keep_numbers))
    return torch.from_numpy(made).to(ids.device)


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
