"""Methods and attachments of the user's own: their options are read off the function, and they are tried before use."""

from __future__ import annotations

import inspect
import typing
from types import UnionType
from typing import Annotated, Any, Literal

import torch

from trimtab.objectives.methods.registry import Entry, Option
from trimtab.objectives.objective import Objective
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.rules.penalties import Penalty
from trimtab.objectives.token_batch import TokenBatch
from trimtab.own_parts import OwnPartError, errors_located, load_part, location
from trimtab.text import shown

_SIMPLE = (bool, int, float, str, type(None))
_KINDS = "a number, true or false, text, or a Literal of choices"


def own_entry(name: str) -> Entry:
    """Read an entry off the function that `python:MODULE:NAME` stands for; its keyword arguments are its options."""
    build = load_part(name)
    with errors_located(name, build):
        signature = inspect.signature(build)
        hints = typing.get_type_hints(build, include_extras=True)
        title, _, notes = inspect.cleandoc(build.__doc__ or "").partition("\n")
    options, types, meanings = {}, {}, {}
    for key, parameter in signature.parameters.items():
        where = f"{name}: {location(build)}: its argument {key!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise OwnPartError(f"{where} is no option: name every option, with a default")
        if parameter.default is parameter.empty:
            raise OwnPartError(f"{where} needs a default: arguments are options, and a recipe may leave them out")
        annotation = hints.get(key, type(parameter.default))
        types[key], meanings[key] = _type_and_meaning(annotation)
        options[key] = parameter.default
        if not _is_simple(types[key]) or types[key] is type(None):
            raise OwnPartError(f"{where} has the type {shown(annotation)}: an option is {_KINDS}")
    return Entry(name, "", title, notes.strip(), build, options, types, meanings)


def _type_and_meaning(annotation: Any) -> tuple[Any, Option]:
    """Return the type of an option, and what `Annotated[float, "how soft"]` says about it."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation, Option("")
    kind, *notes = typing.get_args(annotation)
    return kind, Option(next((note for note in notes if isinstance(note, str)), ""))


def _is_simple(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return all(map(_is_simple, typing.get_args(annotation)))
    return typing.get_origin(annotation) is Literal or annotation in _SIMPLE


def check_built(entry: Entry, built: object, attached: bool) -> Objective | TokenRule | Penalty:
    """Return what a user's function built, or raise if it is not what its place in the name asks for."""
    where = f"{entry.name}: {location(entry.build)}"
    if attached:
        if isinstance(built, TokenRule | Penalty):
            return built
        if isinstance(built, Objective):
            raise OwnPartError(f"{where}: it returns an Objective, so it is a method: write it first, before any +")
        raise OwnPartError(f"{where}: it returned {shown(built)}, and an attachment is a TokenRule or a Penalty")
    if isinstance(built, Objective):
        return built
    if isinstance(built, TokenRule | Penalty):
        raise OwnPartError(f"{where}: it returns an attachment: write for example 'dapo + {entry.name}'")
    raise OwnPartError(f"{where}: it returned {shown(built)}, and a method is an Objective")


def try_on_a_batch(name: str, objective: Objective) -> None:
    """Plan a small batch and take its loss, so that a mistake in the user's code is found before a run starts."""
    with errors_located(name, load_part(name)):
        advantage = objective.advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1]))
        batch = _small_batch(advantage, objective)
        out, grad_logp = objective.loss_and_grad(batch.old_logp + 0.05, objective.plan(batch))
    if not bool(torch.isfinite(out.loss)) or not bool(torch.isfinite(grad_logp).all()):
        raise OwnPartError(f"{name}: {location(load_part(name))}: on a small batch its loss or gradient is not finite")


def _small_batch(advantage: torch.Tensor, objective: Objective) -> TokenBatch:
    """Return four responses of three tokens each, with every field; no random number is drawn."""
    sequence = torch.arange(4).repeat_interleave(3)
    old_logp = -torch.linspace(0.01, 6.0, 12)
    current = old_logp if objective.token_stats == "current" else None
    return TokenBatch(
        old_logp=old_logp,
        advantage=advantage[sequence],
        sequence=sequence,
        entropy=torch.linspace(2.0, 0.1, 12),
        token=torch.arange(12),
        segment=torch.arange(12) // 2,
        sampler_logp=old_logp,
        ref_logp=old_logp,
        current_logp=current,
        proxy_logp=old_logp,
        sum_p2=torch.full((12,), 0.5),
        sum_p2_logp=torch.full((12,), -0.3),
        group=torch.tensor([0, 0, 1, 1]),
        reward=torch.tensor([1.0, 0.0, 0.5, 0.5]),
    )
