"""What each kernel of the paged sampler must do, told by its plain twin, for any device and type.

Run as a script, which only makes sense in Triton's interpreter, it prints a JSON object: what went wrong, by case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from helpers.triton_interpreter import try_all
from trimtab.rollout.paged import torch_ops as plain
from trimtab.rollout.paged.decode_state import HOME, KEY, LIMIT, LIVE, MADE, PAGE, POSITION, TOKEN, State

Case = Callable[[torch.device, torch.dtype], None]
HOST = torch.device("cpu")
DEAD = 2  # the row of a state that does not live


def close(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Equal to the rounding of a type, NaN where the other is NaN; a GPU adds in another order each time."""
    tolerance = 3e-2 if dtype != torch.float32 else 1e-4 if mine.is_cuda else 1e-5
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers that are the same for every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def copied(state: State, device: torch.device) -> State:
    """A copy of a state on a device."""
    return State(*(getattr(state, part.name).clone().to(device) for part in fields(State)))


@contextmanager
def setting(where: Any, **values: int) -> Iterator[None]:
    """Constants of a module, for a while."""
    before = {name: getattr(where, name) for name in values}
    for name, value in values.items():
        setattr(where, name, value)
    yield
    for name, value in before.items():
        setattr(where, name, value)


def add_norm(width: int, added: bool, device: torch.device, dtype: torch.dtype) -> None:
    from trimtab.rollout.paged import kernels

    x, delta = normal(0, 5, width).to(device), normal(1, 5, width).to(device, dtype)
    x[3] = 0  # eps alone keeps this row finite
    delta[3] = 0
    weight = normal(2, width).to(device)
    mine, theirs = (torch.zeros(5, width, dtype=dtype, device=device) for _ in range(2))
    stream = x.clone()
    kernels.add_norm(stream, delta if added else None, weight, 1e-5, mine)
    plain.add_norm(x, delta if added else None, weight, 1e-5, theirs)
    assert torch.equal(stream, x), "the residual stream"
    close(mine, theirs, dtype)


def gated(width: int, device: torch.device, dtype: torch.dtype) -> None:
    from trimtab.rollout.paged import kernels

    both = (normal(0, 3, 2 * width) * 4).to(device, dtype)
    both[0, 0], both[1, 0] = 90.0, -90.0  # where exp leaves fp32
    mine, theirs = (torch.zeros(3, width, dtype=dtype, device=device) for _ in range(2))
    kernels.gated(both, mine)
    plain.gated(both, theirs)
    close(mine, theirs, dtype)


def attend(heads: int, kv: int, d: int, normed: bool, whole: bool, device: torch.device, dtype: torch.dtype) -> None:
    """`whole`: a row's pages are one program's. What no row may read is NaN."""
    from trimtab.rollout.paged import kernels
    from trimtab.rollout.paged.kernels import layers

    rows, pages = 7, 5
    state = State.empty(rows + 2, pages, 1, [1], HOST)  # a graph for fewer rows than there is room for
    state.numbers[LIVE, :rows] = 1
    state.numbers[LIVE, DEAD] = 0
    state.numbers[POSITION, :rows] = torch.tensor([0, 1, 77, 63, 64, 130, pages * PAGE - 1])
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0))
    state.pages[:rows] = order.view(rows, pages).int()
    cache = torch.full((2, rows * pages, kv, PAGE, d), torch.nan)
    for row in range(rows):
        for position in range(int(state.numbers[POSITION, row])):
            page = int(state.pages[row, position // PAGE])
            cache[:, page, :, position % PAGE] = normal(row * 1000 + position, 2, kv, d)
    cache = cache.to(device, dtype)
    qkv = normal(7, rows, (heads + 2 * kv) * d).to(device, dtype)
    angle = (normal(8, pages * PAGE, d // 2) * 3).repeat(1, 2).to(device)  # both halves turn alike
    cos, sin = angle.cos(), angle.sin()
    norms = (normal(10, d).to(device), normal(11, d).to(device)) if normed else None
    state, mine_cache = copied(state, device), cache.clone()
    mine, theirs = (torch.full((rows, heads * d), 7.0, dtype=dtype, device=device) for _ in range(2))
    with setting(layers, BUSY=1, CROWD=1) if whole else setting(layers):
        kernels.attend(qkv, norms, 1e-6, (cos, sin), mine_cache, state, mine)
    plain.attend(qkv, norms, 1e-6, (cos, sin), cache, state, theirs)
    live = state.numbers[LIVE, :rows].bool()
    assert mine[live].isfinite().all(), "a row has read what is not its own"
    close(mine[live], theirs[live], dtype)
    close(mine_cache, cache, dtype)
    assert mine[DEAD].eq(7).all(), "a row that does not live was written"


def place(heads: int, kv: int, d: int, normed: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Two prefixes end to end, of which one goes on in a second page, and a token that belongs to none."""
    from trimtab.rollout.paged import kernels

    position = torch.cat([torch.arange(5), torch.arange(PAGE - 3, PAGE + 2), torch.zeros(1).long()]).to(device)
    page = torch.tensor([3] * 5 + [0] * 3 + [2] * 2 + [-1], device=device)
    qkv = normal(7, 11, (heads + 2 * kv) * d).to(device, dtype)
    angle = (normal(8, 2 * PAGE, d // 2) * 3).repeat(1, 2).to(device)
    norms = (normal(10, d).to(device), normal(11, d).to(device)) if normed else None
    theirs = torch.full((2, 4, kv, PAGE, d), 7.0, dtype=dtype, device=device)
    mine = theirs.clone()
    made = kernels.place(qkv, norms, 1e-6, (angle.cos(), angle.sin()), mine, position, page)
    wanted = plain.place(qkv, norms, 1e-6, (angle.cos(), angle.sin()), theirs, position, page)
    for ours, others in zip((*made, mine), (*wanted, theirs), strict=True):
        assert ours.shape == others.shape
        assert ours.dtype == others.dtype
        close(ours, others, dtype)


def copy_pages(kv: int, d: int, device: torch.device, dtype: torch.dtype) -> None:
    """One page may be copied to many, in all layers."""
    from trimtab.rollout.paged import kernels

    theirs = normal(0, 3, 2, 6, kv, PAGE, d).to(device, dtype)
    mine = theirs.clone()
    source, target = torch.tensor([4, 4, 1], device=device), torch.tensor([0, 5, 2], device=device)
    kernels.copy_pages(mine, source, target)
    plain.copy_pages(theirs, source, target)
    assert torch.equal(mine, theirs)
    assert torch.equal(mine[:, :, 0], mine[:, :, 5])


def drawing_state(rows: int, ends: list[int], sampling: tuple[float, float, int]) -> State:
    """Rows anywhere in their responses, one of them dead, homes in another order than rows."""
    generator = torch.Generator().manual_seed(5)
    state = State.empty(rows + 3, 1, 6, ends, HOST)
    numbers = state.numbers[:, :rows]
    numbers[LIVE] = 1
    numbers[LIVE, DEAD] = 0
    numbers[KEY] = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    numbers[MADE] = torch.arange(rows) % 6
    numbers[POSITION] = numbers[MADE] + 3
    numbers[TOKEN] = 3
    numbers[LIMIT] = 6
    numbers[HOME] = torch.randperm(rows, generator=generator)
    state.tokens.fill_(-1)
    state.logps.fill_(-1)
    state.sampling.copy_(torch.tensor(sampling, dtype=torch.float))
    return state


def drawn_alike(
    logits: Tensor,
    sampling: tuple[float, float, int] | None,
    ends: list[int] | None = None,
    skip: tuple[int, ...] = (),
    differing: int = 0,
) -> State:
    """What the kernel draws, which is what its twin draws, but for the rows to `skip` and so many `differing` ones.

    A row may differ where the number drawn falls on the border of two tokens, which is rounded differently.
    """
    from trimtab.rollout.paged import kernels

    rows = len(logits)
    theirs = copied(drawing_state(rows, [1, 3, 7] if ends is None else ends, sampling or (1.0, 1.0, 0)), logits.device)
    mine = copied(theirs, logits.device)
    kernels.draw(logits, mine, sampling is None)
    plain.draw(logits, theirs, sampling is None)
    same = torch.ones(rows, dtype=torch.bool, device=logits.device)
    same[list(skip)] = False
    same &= (mine.numbers[:, :rows] == theirs.numbers[:, :rows]).all(0)
    off = rows - int(same.sum()) - len(skip)
    assert off <= differing, f"{off} rows of {rows} differ: {mine.numbers[:, :rows][:, ~same].tolist()}"
    homes = mine.numbers[HOME, :rows][same]
    assert torch.equal(mine.tokens[homes], theirs.tokens[homes])
    torch.testing.assert_close(mine.logps[homes], theirs.logps[homes], rtol=1e-5, atol=1e-5)
    assert torch.equal(mine.numbers[:, rows:], theirs.numbers[:, rows:]), "rows that are not in the batch"
    return mine


def draw(
    vocabulary: int, sampling: tuple[float, float, int] | None, rows: int, device: torch.device, dtype: torch.dtype
) -> None:
    logits = (normal(vocabulary, rows, vocabulary) * 2).to(device, dtype)
    drawn_alike(logits, sampling, differing=rows // 20 if rows > 100 else 0)


def draw_from_ties(sampling: tuple[float, float, int] | None, device: torch.device, dtype: torch.dtype) -> None:
    """Logits of few values: a bound falls on many equal ones, which stay or go together; -0 is 0."""
    logits = normal(3, 6, 150).round().to(device, dtype)
    logits[:4] = (logits[:4] > 1).to(dtype) * 0.5  # halves and zeros
    logits[:4, ::2] *= -1  # of both signs
    drawn_alike(logits, sampling)


def draw_what_can_come(sampling: tuple[float, float, int] | None, device: torch.device, dtype: torch.dtype) -> None:
    """-inf is never drawn, be it first, last, or all of a block; nor what the exponential makes 0."""
    logits = torch.full((7, 150), -torch.inf)
    logits[:, 130:140] = normal(4, 7, 10)
    logits[3:, 5], logits[4:, 149] = 1.0, -500.0
    logits[5] = -3e4
    logits[5, 77] = 2.0
    logits[6, :] = -torch.inf
    logits[6, 64] = -1e4
    logits = logits.to(device, dtype)
    state = drawn_alike(logits, sampling)
    for row in (row for row in range(7) if row != DEAD):
        token = int(state.numbers[TOKEN, row])
        assert logits[row, token] > -600 or token == 64
        home, made = int(state.numbers[HOME, row]), int(state.numbers[MADE, row]) - 1
        assert state.tokens[home, made] == token
        assert state.logps[home, made].isfinite()


def draw_beside_nan(sampling: tuple[float, float, int] | None, device: torch.device, dtype: torch.dtype) -> None:
    """A row without sense harms no other, draws a token that exists, and says so by its log-probability."""
    logits = normal(6, 6, 150).to(device, dtype)
    logits[3], logits[4, 70] = torch.nan, torch.nan
    state = drawn_alike(logits, sampling, skip=(3, 4))
    for row in (3, 4):
        assert 0 <= state.numbers[TOKEN, row] < 150
        home = int(state.numbers[HOME, row])
        assert state.logps[home, row].isnan()
        assert state.tokens[home].ge(0).nonzero().tolist() == [[row]]


def draw_to_the_end(device: torch.device, dtype: torch.dtype) -> None:
    """A row stops at an end token, or with its last token, and not before."""
    logits = torch.full((13, 70), -torch.inf)
    logits[torch.arange(13), torch.arange(13)] = 0.0
    for sampling in (None, (1.0, 1.0, 0)):
        for ends in ([5], [7, 11, 1], [69, 2, 0, 4, 9], []):
            state = drawn_alike(logits.to(device, dtype), sampling, ends)
            live = [row not in ends and row % 6 != 5 and row != DEAD for row in range(13)]
            assert state.numbers[LIVE, :13].tolist() == live
            assert state.tokens[int(state.numbers[HOME, DEAD])].eq(-1).all()


def draw_as_asked(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Top-k and top-p leave what they say: over many rows all of it is drawn, and nothing else."""
    logits = torch.tensor([0.0, 3.0, -1.0, 2.0, 1.0, -2.0]).expand(rows, 6).contiguous().to(device, dtype)
    for sampling, kept in (((1.0, 0.85, 0), {1, 3}), ((2.0, 0.9, 3), {1, 3, 4})):
        state = drawn_alike(logits, sampling)
        drawn = state.numbers[TOKEN, :rows].tolist()
        assert {token for row, token in enumerate(drawn) if row != DEAD} == kept


SAMPLINGS: dict[str, tuple[float, float, int] | None] = {
    "greedy": None,
    "all": (1.0, 1.0, 0),
    "hot": (1.7, 1.0, 0),
    "top-k": (0.7, 1.0, 20),
    "top-p": (1.3, 0.8, 0),
    "both": (1.0, 0.6, 50),
    "one": (1.0, 1e-9, 0),
    "more than there are": (1.0, 1.0, 100_000),
}
HARD = ("greedy", "all", "both")
SHAPES = [(6, 2, 32), (4, 4, 32), (8, 1, 32), (24, 1, 32)]  # query heads, kv heads, width: groups of 3, 1, 8, 24
GPU_SHAPES = [(group * kv, kv, d) for group, kv, d in product((1, 3, 4, 8, 32), (2,), (64, 128))]


def cases(shapes: list[tuple[int, int, int]], vocabularies: list[int], rows: int) -> dict[str, Case]:
    """Every case by its name."""
    made: dict[str, Case] = {}
    for width, added in product((1, 64, 72), (False, True)):
        made[f"add_norm {width}{' added' if added else ''}"] = partial(add_norm, width, added)
    for width in (100, 1024, 1500):
        made[f"gated {width}"] = partial(gated, width)
    for (heads, kv, d), (normed, whole) in product(shapes, ((False, True), (True, False))):
        name = f"attend {heads}/{kv}x{d}{' normed' if normed else ''}{' whole' if whole else ' split'}"
        made[name] = partial(attend, heads, kv, d, normed, whole)
    for heads, kv, d in shapes:
        made[f"place {heads}/{kv}x{d}"] = partial(place, heads, kv, d, False)
        made[f"place {heads}/{kv}x{d} normed"] = partial(place, heads, kv, d, True)
    for kv, d in ((1, 32), (3, 64)):
        made[f"copy_pages {kv}x{d}"] = partial(copy_pages, kv, d)
    for (name, sampling), vocabulary in product(SAMPLINGS.items(), vocabularies):
        made[f"draw {name} of {vocabulary}"] = partial(draw, vocabulary, sampling, rows)
    for name, sampling in ((name, SAMPLINGS[name]) for name in HARD):
        made[f"draw {name} from ties"] = partial(draw_from_ties, sampling)
        made[f"draw {name} of what can come"] = partial(draw_what_can_come, sampling)
        made[f"draw {name} beside nan"] = partial(draw_beside_nan, sampling)
    return made | {"draw to the end": draw_to_the_end, "draw as asked": partial(draw_as_asked, 4 * rows)}


BLOCK = 64  # logits at one time in the interpreter: several blocks of few logits
INTERPRETED = cases(SHAPES, [BLOCK, 150], 4)


def main() -> None:
    from trimtab.rollout.paged.kernels import sampling as drawing

    drawing.BLOCK = BLOCK
    try_all(INTERPRETED)


if __name__ == "__main__":
    main()
