"""Chat templates and long prompts are handled within limits of time and memory, and fail in words."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from helpers.objectives.made_tokenizers import byte_level_bpe
from helpers.train.short_runs import short_run
from trimtab.data import read_file
from trimtab.trainer.model import LongPromptError, Policy, demo_model, demo_tokenizer, prompts
from trimtab.trainer.train.prompts import encode_prompts

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
TEXTS = ["1+2=", "Ein Übermaß – 答案是 42。", "🤖\tand a\nline </s>", "x" * 3000]


def byte_level(template: str | None = None) -> Any:
    inner = byte_level_bpe(TEXTS, 300, ["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template
    )  # fmt: skip


def with_template(template: Any) -> Policy:
    return Policy(None, byte_level(template), torch.device("cpu"))


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def test_a_template_is_rendered_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPTS", 3)  # several calls of the worker
    policy = with_template(PLAIN)
    conversations = [chat(text) for text in TEXTS * 2]
    rendered = prompts.render_prompts(policy.tokenizer, conversations)
    options = {"add_generation_prompt": True, "tokenize": False}
    assert rendered == [policy.tokenizer.apply_chat_template(messages, **options) for messages in conversations]
    assert rendered[0] == "<s><system>Be brief.\n<user>1+2=\nA"


HOSTILE = {
    "it raises": ("{{ raise_exception('no \x1b[31m system role\n\x07') }}", r"no \x1b[31m system role \x07"),
    "it is no template": ("{% for %}", "TemplateSyntaxError"),
    "a name is missing": ("{{ nothing.at.all }}", "UndefinedError"),
    "it divides by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "it looks for modules": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "it loops": ("{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    "it computes": ("{{ (9 ** (9 ** 9)) % 7 }}", "takes more than"),
    "it multiplies a text": ("{{ 'x' * 10 ** 11 }}", "takes more than"),
    "it writes without end": ("{{ 'x' * 10 ** 8 }}", "takes more than"),
    "it nests lists": ("{% set x = range(99999)|list %}{{ (x * 9999) * 9999 }}", "takes more than"),
    "it calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
    "it is a number": (7, "not text but int"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_that_fails_or_does_not_end_is_an_error_in_words(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "CPU_SECONDS", 1.0)
    template, words = HOSTILE[kind]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        with_template(template).encode(chat("1+2="))
    assert words in str(error.value) and str(error.value).isprintable()
    assert "chat template" in str(error.value)


def test_after_a_hostile_template_others_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="chat template"):
        with_template("{{ 'x' * 10 ** 11 }}").encode(chat("1"))
    assert len(with_template(PLAIN).encode(chat("1"))) > 5


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ten_megabytes(tmp_path: Path) -> Any:
    file = tmp_path / "rows.jsonl"
    row = '{{"prompt": "{}", "reward_model": {{"ground_truth": "1"}}, "data_source": "made"}}\n'
    file.write_text(row.format("1+2=") + row.format("12+3=" * 2_000_000))
    return read_file(str(file))


@pytest.mark.parametrize("tokenizer", [demo_tokenizer, byte_level, lambda: byte_level(PLAIN)])
def test_a_prompt_of_ten_megabytes_is_refused_with_its_row_and_little_memory(tmp_path: Path, tokenizer: Any) -> None:
    policy = Policy(None, tokenizer(), torch.device("cpu"))
    task = ten_megabytes(tmp_path)
    before = peak()
    with pytest.raises(ValueError, match=r"rows\.jsonl.*2.*10,000,0.. characters.*rollout\.max_prompt_tokens=1024"):
        encode_prompts(policy, [(0, task[0]), (1, task[1])], 1024)
    assert peak() - before < 500 << 20


def test_a_worked_solution_of_ten_megabytes_is_refused(tmp_path: Path) -> None:
    policy = Policy(demo_model(0), demo_tokenizer(), torch.device("cpu"))
    with pytest.raises(LongPromptError, match="more than 64 tokens"):
        policy.encode_solution("1" * 10_000_000)


@pytest.mark.parametrize("text", ["12 + 3 = 15. " * 8000, "word " * 20_000, " " * 100_000, "x" * 100_000])
def test_a_long_prompt_within_the_limit_has_the_tokens_it_always_had(text: str) -> None:
    policy = with_template(None)
    expected = policy.tokenizer.encode(text, add_special_tokens=False)
    (ids,) = policy.encode_batch([[{"role": "user", "content": text}]], limit=len(expected))
    assert ids == expected


def test_a_panic_of_a_tokenizer_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As the Rust code of tokenizers raises it."""

    def encode(*_: Any, **__: Any) -> Any:
        raise PanicException("index out of bounds: \x1b[0m")

    policy = with_template(None)
    monkeypatch.setattr(type(policy.tokenizer), "__call__", encode)
    with pytest.raises(ValueError, match=r"tokenizer fails .*index out of bounds: \\x1b.*check its tokenizer.json"):
        policy.encode_batch([chat("1")])


# --- a prompt survives encoding and decoding

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def emptied_folder(folder: Path) -> Path:
    """Return a model's folder with the tokenizer of a Qwen2 that has lost its vocabulary."""
    demo_model(0).save_pretrained(folder)
    names = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
    described = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "added_tokens_decoder": {str(n): {"content": name, "special": True} for n, name in enumerate(names)},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def test_a_run_does_not_start_with_a_tokenizer_that_loses_its_prompts(tmp_path: Path) -> None:
    settings = {"model.path": json.dumps(str(emptied_folder(tmp_path / "model"))), "warm_start.steps": "0"}
    run, _ = short_run(tmp_path / "run", settings)
    with pytest.raises(ValueError, match=r"tokenizer loses the prompt '.*Is tokenizer\.json missing"):
        run.prepare()
    run.discard_if_unused()


@pytest.mark.parametrize("text", TEXTS[1:])
def test_a_prompt_that_survives_is_returned_as_the_model_reads_it(text: str) -> None:
    assert text in with_template(PLAIN).check_survival([chat(text)])[0]


def test_a_template_that_swallows_a_message_is_an_error() -> None:
    with pytest.raises(ValueError, match="chat template leaves out the user message '1234567'"):
        with_template("{{ messages[0].content }}").check_survival([chat("1234567")])
    with pytest.raises(ValueError, match=r"chat template leaves out the system message 'Be brief\.'"):
        with_template("{{ messages[-1].content }}").check_survival([chat("1234567")])


def test_a_tokenizer_may_change_letters_but_not_lose_most_of_them() -> None:
    lower = byte_level(None)
    lower.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    policy = Policy(None, lower, torch.device("cpu"))
    policy.check_survival([[{"role": "user", "content": "Ein ÜBERMAß ½ №5"}]])
    digits = Policy(None, demo_tokenizer(), torch.device("cpu"))
    digits.check_survival([[{"role": "user", "content": "12+34=x"}]])  # one letter is unknown
    with pytest.raises(ValueError, match="tokenizer loses the prompt 'Was ist"):
        digits.check_survival([[{"role": "user", "content": "Was ist die Summe von 12 und 3?"}]])


def test_a_template_of_a_megabyte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chat template has 1,048,\d\d\d characters"):
        with_template("{# " + "x" * (1 << 20) + " #}").encode(chat("1"))
