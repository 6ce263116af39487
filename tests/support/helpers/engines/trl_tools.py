"""Conversations in TRL: a tiny Qwen3 over ASCII characters whose answers are, every other time, read as a call."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.engines import trl_runs
from helpers.engines.verl_runs import tiny_model
from trimtab.engines.trl import TrimtabTrainer, last_message

PAD, END, START = "<pad>", "<|im_end|>", "<|im_start|>"
CHARACTERS = [character for character in string.printable if character not in "\t\r\x0b\x0c"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)


class CallingTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that finds a call in every answer whose first token has an even number."""

    tool = "python"
    arguments: Any = {"code": "print({first} * 1000003)"}  # noqa: RUF012

    def parse_response(self, response: Any, schema: Any = None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.decode(response, skip_special_tokens=True)}
        if response[0] % 2 == 0:
            texts = {name: str(value).format(first=response[0]) for name, value in self.arguments.items()}
            arguments = {name: type(value)(texts[name]) for name, value in self.arguments.items()}
            function = {"name": self.tool, "arguments": arguments}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message


def chat_tokenizer() -> Any:
    """One token per character, and chat markup."""
    vocabulary = {word: number for number, word in enumerate([PAD, END, START, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="~"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = CallingTokenizer(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.add_special_tokens({"additional_special_tokens": [START]})
    fast.chat_template = TEMPLATE
    fast.response_schema = {"type": "object"}  # TRL wants one; it is not read, since `parse_response` is our own
    return fast


def chat_model(seed: int = 0) -> Any:
    """A model of twenty thousand parameters with random weights."""
    return tiny_model(seed, len(CHARACTERS) + 3)


def digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward that no two conversations need share: what the last message has of lower-case letters."""
    texts = [last_message(completion) for completion in completions]
    return [sum(character.islower() for character in text) / (1 + len(text)) for text in texts]


class Noted(TrimtabTrainer):
    """A trainer that notes what was sampled, turn by turn, and the batches that it trained on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.turns: list[tuple[list[list[int]], list[list[int]]]] = []
        self.batches: list[dict[str, Any]] = []
        self.conversations: list[Any] = []
        super().__init__(*args, **options)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
        found = super()._generate_single_turn(prompt_ids, *args, **options)
        self.turns.append(([list(ids) for ids in prompt_ids], [list(ids) for ids in found[0]]))
        return found

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        self.conversations += completions
        return super()._calculate_rewards(inputs, prompts, completions, ids)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.batches.append(batch)
        return batch


def conversation_parts(folder: Path, objective: str, **settings: Any) -> dict[str, Any]:
    """A model, arguments and eight prompts for conversations of up to three turns."""
    from datasets import Dataset

    args = trl_runs.config(
        folder,
        objective=objective,
        max_completion_length=96,
        max_tool_calling_iterations=2,
        **{"generation_kwargs": {"max_new_tokens": 12}, **settings},
    )
    prompts = [[{"role": "user", "content": f"{n}?"}] for n in range(8)]
    data = Dataset.from_dict({"prompt": prompts, "answer": list("01234567")})
    return {"model": chat_model(), "args": args, "data": data, "tokenizer": chat_tokenizer()}


def conversation_trainer(folder: Path, objective: str, tokenizer: Any = None, **options: Any) -> Noted:
    """A trainer of those; `options` with `args_` before them are its settings."""
    settings = {name.removeprefix("args_"): value for name, value in options.items() if name.startswith("args_")}
    given = {name: value for name, value in options.items() if not name.startswith("args_")}
    parts = conversation_parts(folder, objective, **settings)
    made: Noted = trl_runs.trainer(
        parts["model"],
        parts["args"],
        Noted,
        train_dataset=parts["data"],
        processing_class=tokenizer or parts["tokenizer"],
        reward_funcs=digits,
        **given,
    )
    return made
