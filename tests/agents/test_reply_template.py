"""Replies as the model's own chat template would write them, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.agents.tokenizers_of_models import CHATML, PROBLEM, qwen, small_tokenizer
from trimtab.agents import ReplyTemplate, ToolSet
from trimtab.agents.reply_template import ObservedText
from trimtab.data import Problem, user
from trimtab.trainer.model.loading import demo_tokenizer

HERE = "python:helpers.agents.misbehaving_tools"
MARKUP = "a <|im_end|> b <|im_start|> <tool_call> </tool_response> </think> <|endoftext|>"
SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
# As Llama 3.1's: the text of a tool is written as JSON.
JSON = CHATML.replace("message['content']", "(message.content | tojson if message.role == 'tool' else message.content)")
TRIMMED = CHATML.replace("message['content']", "message.content | trim")
NAMED = CHATML.replace(
    "message['role'] +", "message['role'] + ('=' + message.name if message.role == 'tool' else '') +"
)
NO_TOOLS = (
    "{% for m in messages if m.role == 'tool' %}{{ raise_exception('roles must alternate') }}{% endfor %}" + CHATML
)
ONE_TOOL = (
    "{% set before = namespace(role='') %}{% for m in messages %}{% if m.role == 'tool' == before.role %}"
    "{{ raise_exception('one reply') }}{% endif %}{% set before.role = m.role %}{% endfor %}" + CHATML
)
FORGETFUL = CHATML.replace(  # as DeepSeek-R1's
    "message['content']", "(message.content.split('</think>')[-1] if message.role == 'assistant' else message.content)"
)


@pytest.fixture(scope="module")
def tools() -> Iterator[ToolSet]:
    made = ToolSet(["calculator", f"{HERE}:double"])
    yield made
    made.close()


def reply(template: ReplyTemplate, *texts: str, limit: int = 512, tool: str = "calculator") -> str:
    end = template.tokenizer.eos_token_id
    return str(template.tokenizer.decode(template.render([7, end], [(tool, text) for text in texts], limit).tokens))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_split_special_tokens_alone_would_let_markup_through(name: str) -> None:
    tokenizer = qwen(name)
    text = ObservedText(tokenizer)
    markup = set(tokenizer.added_tokens_decoder)
    assert markup & set(tokenizer.encode(MARKUP, split_special_tokens=True)), "then ObservedText is not needed any more"
    assert not markup & set(text.encode(MARKUP))
    assert tokenizer.decode(text.encode(MARKUP)) == MARKUP
    plain = "Plain text, 12 * 3 = 36;\n\tété 中文 🙂"
    assert text.encode(plain) == tokenizer.encode(plain, add_special_tokens=False)
    assert tokenizer.decode(text.encode("a\ud800b")) == "a?b"


def test_words_that_were_added_to_a_vocabulary_stay_words() -> None:
    tokenizer = small_tokenizer(CHATML)
    tokenizer.add_tokens(["photosynthesis", "<note>"])
    text = ObservedText(tokenizer)
    assert text.encode("photosynthesis") == tokenizer.encode("photosynthesis") and len(text.encode("<note>")) > 1


def test_what_a_vocabulary_cannot_say_is_left_out() -> None:
    tokenizer = demo_tokenizer()
    text = ObservedText(tokenizer)
    assert tokenizer.encode("1?") == [tokenizer.encode("1")[0], tokenizer.pad_token_id]
    assert text.encode("1?<end>2") == tokenizer.encode("12")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_qwen(name: str, tools: ToolSet) -> None:
    template = ReplyTemplate(qwen(name), tools)
    assert (template.call_format, template.notes) == ("hermes", [])
    assert template.prompt_tools() == tools.schemas()
    assert template.prompts([PROBLEM]) == [list(PROBLEM.prompt)]
    before, after = "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert reply(template, "6") == f"{before}6{after}"
    assert reply(template, "6", "7") == f"{before}6\n</tool_response>\n<tool_response>\n7{after}"
    # A base model ends with <|endoftext|>: then the template's own end of a message is written too.
    other = template.render([7, 151643], [("calculator", "6")], 512).tokens
    assert template.tokenizer.decode(other) == f"<|im_end|>{before}6{after}"


@pytest.mark.parametrize(
    ("chat_template", "written"),
    [
        (CHATML, "\n<|im_start|>tool\n {} <|im_end|>\n<|im_start|>assistant\n"),
        (JSON, '\n<|im_start|>tool\n" {} "<|im_end|>\n<|im_start|>assistant\n'),
        (TRIMMED, "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"),
        (NAMED, "\n<|im_start|>tool=calculator\n {} <|im_end|>\n<|im_start|>assistant\n"),
        (NO_TOOLS, "\n<|im_start|>user\n {} <|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_other_templates(tools: ToolSet, chat_template: str, written: str) -> None:
    template = ReplyTemplate(small_tokenizer(chat_template), tools)
    text = 'say "é"\\'
    shown = 'say \\"é\\"\\\\' if chat_template is JSON else text
    assert reply(template, f" {text} ") == written.format(shown)
    assert any("as the user's messages" in note for note in template.notes) == (chat_template is NO_TOOLS)


def test_a_name_that_a_model_made_up_is_not_written(tools: ToolSet) -> None:
    template = ReplyTemplate(small_tokenizer(NAMED), tools)
    assert reply(template, "no", tool="<|im_end|>").startswith("\n<|im_start|>tool=\nno")


def test_several_replies_where_a_template_takes_one(tools: ToolSet) -> None:
    template = ReplyTemplate(small_tokenizer(ONE_TOOL), tools)
    assert reply(template, "6", "7") == "\n<|im_start|>tool\n6\n7<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_what_was_said_is_named(tools: ToolSet) -> None:
    [note] = [n for n in ReplyTemplate(small_tokenizer(FORGETFUL + "{# <think> #}"), tools).notes if "rewrites" in n]
    assert "the reasoning of a message once others follow" in note and "chat_template.jinja" in note
    last = CHATML.replace("+ message['content']", "+ ('' if loop.last else '') + message['content']")
    assert not any("rewrites" in note for note in ReplyTemplate(small_tokenizer(last), tools).notes)


@pytest.mark.parametrize(
    ("chat_template", "problem"),
    [
        ("{{ messages[0].content }}", "cannot be continued: it writes neither a tool's nor a user's message"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "cannot be rendered: too costly",
        ),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(
    tools: ToolSet, chat_template: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.agents import reply_template

    monkeypatch.setattr(reply_template, "LIMITS", reply_template.WorkerLimits(1.0, 0.5, 256 << 20, 1 << 20))
    with pytest.raises(ValueError, match=problem):
        ReplyTemplate(small_tokenizer(chat_template), tools)


@pytest.mark.parametrize("chat_template", [CHATML, SYSTEM + CHATML])
def test_tools_that_a_template_does_not_write_down_are_in_the_prompt(tools: ToolSet, chat_template: str) -> None:
    template = ReplyTemplate(small_tokenizer(chat_template), tools)
    assert template.prompt_tools() == [] and "does not write these tools down" in template.notes[0]
    [messages] = template.prompts([PROBLEM])
    assert messages[0]["role"] == ("system" if chat_template == CHATML else "user")
    assert '"name": "double"' in messages[0]["content"] and "<tool_call>" in messages[0]["content"]
    assert messages[-1]["content"].endswith("What is 2*3?")
    [given] = template.prompts([Problem(({"role": "system", "content": "Be brief."}, *user("q")), "", "exact", "")])
    assert given[0]["content"].endswith("\n\nBe brief.") and len(given) == 2


def test_another_format_is_told_in_the_prompt(tools: ToolSet) -> None:
    template = ReplyTemplate(small_tokenizer(CHATML), tools, call_format="llama")
    assert '"parameters": OBJECT' in template.prompts([PROBLEM])[0][0]["content"]
    with pytest.raises(ValueError, match="'yaml' must be one of auto, hermes"):
        ReplyTemplate(small_tokenizer(CHATML), tools, call_format="yaml")  # type: ignore[arg-type]


def test_without_a_chat_template(tools: ToolSet) -> None:
    template = ReplyTemplate(demo_tokenizer(), tools)
    assert (template.call_format, template.notes, reply(template, "6")) == ("plain", [], " 6 ")  # it has no newline
    assert template.prompts([PROBLEM]) == [list(PROBLEM.prompt)] and template.prompt_tools() == []
    assert reply(ReplyTemplate(small_tokenizer(CHATML), tools, chat=False), "6") == "\n6\n"


@pytest.mark.parametrize("limit", [16, 64, 200])
@pytest.mark.parametrize("kind", ["plain", "json"])
def test_a_long_reply_loses_its_middle_and_says_so(tools: ToolSet, limit: int, kind: str) -> None:
    template = ReplyTemplate(small_tokenizer(JSON if kind == "json" else CHATML), tools)
    text = "begin " + '"long"\n' * 2_000 + " end"
    rendered = template.render([7], [("calculator", text)], limit)
    markup = len(template.render([7], [("calculator", "")], limit).tokens)
    assert limit // 2 <= len(rendered.tokens) - markup <= limit
    shown = rendered.texts[0][1]
    assert shown.startswith("begin") and shown.endswith("end")
    assert ("characters left out ...]" if limit == 200 else "[...]") in shown
    several: Any = template.render([7], [("calculator", text)] * 8, limit)
    assert len(several.tokens) - markup <= limit
