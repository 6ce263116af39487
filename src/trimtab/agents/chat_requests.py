"""Bodies of Chat Completions requests: checked, bounded, and in one form. They are hostile input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trimtab.text import nearest, shown

MAX_STOP, MAX_STOP_CHARACTERS = 16, 256
MAX_TOOLS, MAX_CALLS = 512, 128
MAX_NAME = 256  # characters of the name of a tool
ROLES = ("system", "developer", "user", "assistant", "tool")

# Sampling is the run's: these are read, counted if they ask for something else, and not followed.
IMPOSED: dict[str, Any] = {
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "seed": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
}
# They change nothing that is sampled or returned.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# What cannot be honoured, unless it is one of these values.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "one answer is sampled per request: send the request several times"),
    "logit_bias": ((None, {}), "the policy is sampled as it is"),
    "top_logprobs": ((None, 0), "only the log-probabilities of the sampled tokens are known"),
    "response_format": (
        (None, {"type": "text"}),
        "the policy is sampled without a grammar: ask for JSON in the prompt",
    ),
    "parallel_tool_calls": ((None, True), "the policy may call several tools in one message"),
    "functions": ((None, []), "give tools instead"),
    "function_call": ((None,), "give tool_choice instead"),
    "modalities": ((None, ["text"]), "the policy writes text only"),
    "audio": ((None,), "the policy writes text only"),
    "prediction": ((None,), "there are no predicted outputs"),
    "web_search_options": ((None,), "there is no web search"),
    "chat_template_kwargs": ((None, {}), "the run renders the chat template as it is"),
}
READ = (
    "messages", "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "stream",
    "stream_options", "tools", "tool_choice", "logprobs",
)  # fmt: skip


class RequestError(Exception):
    """What a request is refused with: status, code, and the parameter that is at fault."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's interface has it."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request in one form.

    `messages` have `content` as text, and arguments of calls as objects. `callable_tools` is False where the request
    wants no calls. `overridden` are the parameters that ask for what the run does not do.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    callable_tools: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    overridden: tuple[str, ...]


def parse_request(
    body: bytes, *, model: str, temperature: float, top_p: float, max_messages: int, max_depth: int
) -> ChatRequest:
    """Return the request that a body holds, or raise RequestError."""
    given = _load(body, max_depth)
    for name in given:
        if name not in READ and name not in IMPOSED and name not in REFUSED and name not in IGNORED:
            _refuse(f"unknown parameter {shown(name)}: {nearest(name, READ)}", shown(name), "unknown_parameter")
    for name, (allowed, why) in REFUSED.items():
        if name in given and not any(_same(given[name], each) for each in allowed):
            _refuse(f"{name} cannot be {shown(given[name])}: {why}", name, "unsupported_value")
    tools = _tools(given.get("tools"))
    choice, choice_overridden = _tool_choice(given.get("tool_choice"), tools)
    imposed = {"model": (model,), "temperature": (None, temperature), "top_p": (None, top_p), **IMPOSED}
    overridden = [name for name, fine in imposed.items() if name in given and given[name] not in fine]
    streamed = _flag(given, "stream")
    options = given.get("stream_options")
    if options is not None and not isinstance(options, dict):
        _refuse(f"stream_options is {shown(options)}: give an object", "stream_options", "invalid_type")
    return ChatRequest(
        _messages(given.get("messages"), max_messages),
        tools,
        choice,
        _max_tokens(given),
        _stop(given.get("stop")),
        streamed,
        streamed and bool((options or {}).get("include_usage")),
        _flag(given, "logprobs"),
        tuple(overridden) + (("tool_choice",) if choice_overridden else ()),
    )


def _refuse(message: str, param: str | None, code: str = "invalid_value") -> NoReturn:
    raise RequestError(message, param, code)


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and value == allowed


def _load(body: bytes, max_depth: int) -> dict[str, Any]:
    def constant(name: str) -> NoReturn:
        _refuse(f"the body has the number {name}, which JSON does not have", None, "invalid_json")

    try:
        given = json.loads(body, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        why = str(error)[:200] if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        _refuse(f"the body is no valid JSON: {why}", None, "invalid_json")
    if not isinstance(given, dict):
        _refuse("the body must be a JSON object", None, "invalid_json")
    # A lone half of a surrogate pair can be neither encoded nor recorded.
    plain: dict[str, Any] = _plain(given, max_depth, _encodable if b"\\u" in body else None)
    return plain


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any, depth: int, clean: Callable[[str], str] | None) -> Any:
    """Return a value without halves of surrogate pairs; refuse one that is nested too deep or not finite."""
    if isinstance(value, str):
        return clean(value) if clean else value
    if isinstance(value, float) and not math.isfinite(value):  # as 1e999
        _refuse("the body has a number that is too large", None, "invalid_json")
    if isinstance(value, dict | list):
        if depth <= 0:
            _refuse("the body is nested too deep", None, "too_deep")
        if isinstance(value, list):
            return [_plain(each, depth - 1, clean) for each in value]
        return {_plain(key, depth, clean): _plain(each, depth - 1, clean) for key, each in value.items()}
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    if not isinstance(given.get(name), bool | None):
        _refuse(f"{name} is {shown(given[name])}: give true or false", name, "invalid_type")
    return bool(given.get(name))


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    wanted = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _refuse(f"{name} is {shown(value)}: give a whole number above 0", name)
        wanted.append(value)
    return min(wanted, default=None)


def _stop(stop: Any) -> tuple[str, ...]:
    given = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(given, list) or len(given) > MAX_STOP or not all(isinstance(each, str) for each in given):
        _refuse(f"stop is {shown(stop)}: give a text, or a list of at most {MAX_STOP}", "stop")
    if any(len(each) > MAX_STOP_CHARACTERS for each in given):
        _refuse(f"stop has a text of more than {MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(each for each in given if each)


def _tool_choice(choice: Any, tools: Sequence[Any]) -> tuple[bool, bool]:
    """Return whether calls are wanted, and whether the choice is one that cannot be forced on the policy."""
    if choice is None or choice == "auto":
        return bool(tools), False
    if choice == "none":
        return False, False
    if not tools:
        _refuse("tool_choice needs tools", "tool_choice")
    if choice == "required":  # frameworks send it by default
        return True, True
    _refuse(
        f"tool_choice cannot be {shown(choice)}: the policy decides what it calls; give auto or none",
        "tool_choice",
        "unsupported_value",
    )


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        _refuse(f"tools must be a list of at most {MAX_TOOLS}", "tools", "invalid_type")
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            _refuse(f"{where} is {shown(tool)}: only functions are known", where, "unsupported_value")
        function = tool.get("function")
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            _refuse(f"{where}.function must have a name of at most {MAX_NAME} characters", f"{where}.function")
        parameters = function.get("parameters")
        if parameters is not None and not _is_schema(parameters):
            _refuse(f"{where}.function.parameters is no schema of an object", f"{where}.function.parameters")
    return tools


def _is_schema(parameters: Any) -> bool:
    """Return whether the parameters of a function are in the form that calls are read by."""
    if not isinstance(parameters, dict):
        return False
    properties, required = parameters.get("properties"), parameters.get("required")
    properties, required = {} if properties is None else properties, [] if required is None else required
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(isinstance(each, dict) for each in properties.values()) and all(isinstance(r, str) for r in required)


def _is_name(name: Any) -> bool:
    return _is_text(name) and bool(name)


def _is_text(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= MAX_NAME


def _messages(messages: Any, most: int) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        _refuse("messages must be a list of at least one message", "messages", "invalid_type")
    if len(messages) > most:
        _refuse(f"messages are {len(messages):,}, and at most {most:,} are allowed", "messages", "too_many_messages")
    names: dict[str, str] = {}  # of the tools that were called, by the calls' ids
    return [_message(message, f"messages[{number}]", names) for number, message in enumerate(messages)]


def _message(message: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        _refuse(f"{where} must have one of the roles {', '.join(ROLES)}, not {shown(role)}", f"{where}.role")
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    for part in ("name", "tool_call_id"):
        value = message.get(part)
        if value is not None and not _is_text(value):
            _refuse(f"{where}.{part} must be a text of at most {MAX_NAME} characters", f"{where}.{part}")
        if value:
            read[part] = value
    if role == "tool" and "name" not in read and read.get("tool_call_id") in names:
        read["name"] = names[read["tool_call_id"]]
    if role == "assistant":
        _read_assistant(message, read, where, names)
    return read


def _read_assistant(message: Mapping[str, Any], read: dict[str, Any], where: str, names: dict[str, str]) -> None:
    for unknown in ("audio", "function_call"):
        if message.get(unknown) is not None:
            _refuse(f"{where}.{unknown} is not known here", f"{where}.{unknown}", "unsupported_value")
    if not read["content"] and isinstance(message.get("refusal"), str):
        read["content"] = message["refusal"]
    # The second is the name that vLLM and OpenRouter give it.
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        read["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        _refuse(f"{where}.tool_calls must be a list of at most {MAX_CALLS}", f"{where}.tool_calls", "invalid_type")
    read["tool_calls"] = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        identifier = call.get("id") or "" if isinstance(call, dict) else ""
        if not isinstance(function, dict) or not _is_name(function.get("name")) or not isinstance(identifier, str):
            place = f"{where}.tool_calls[{number}]"
            _refuse(f"{place} must be a call of a function, with an id and a name", place)
        names[identifier[:MAX_NAME]] = function["name"]
        called = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
        read["tool_calls"].append({"id": identifier[:MAX_NAME], "type": "function", "function": called})


def _arguments(arguments: Any) -> Any:
    """Return the arguments of a call by value; text that is no JSON object stays text."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        try:
            return _plain(value, 64, _encodable) if isinstance(value, dict) else arguments
        except RequestError:
            return arguments
    return arguments if isinstance(arguments, dict) else {}


def _content(content: Any, where: str) -> str:
    """Return content as text; of parts only texts are known."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        _refuse(f"{where} is {shown(content)}: give a text", where, "invalid_type")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            place = f"{where}[{number}]"
            _refuse(f"{place} is of the type {shown(kind)}: the policy reads text only", place, "unsupported_value")
        texts.append(text)
    return "\n".join(texts)
