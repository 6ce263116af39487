"""The JSON schemas of tools, from types and docstrings, and the arguments of a call checked against one."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.own_parts import OwnPartError, location
from trimtab.text import nearest, shown

NOT_TOOLS = {"reset", "reward", "get_reward"}  # of an environment; the last is TRL's name
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_EXAMPLE = '"""What it does.\n\nArgs:\n    {0}: What it is.\n"""'


def function_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the schema of a function for `tools=` of a chat template; a missing type or docstring is an error."""
    from transformers.utils.chat_template_utils import get_json_schema

    where = f"{name} ({location(function)})" if location(function) else name
    parameters = inspect.signature(function).parameters
    example = _EXAMPLE.format(next(iter(parameters), "argument"))
    for parameter in parameters.values():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            raise OwnPartError(f"{where}: the model passes arguments by name: write {parameter} as named parameters")
        if parameter.annotation is parameter.empty:
            raise OwnPartError(f"{where}: add a type to the parameter {parameter.name}, as {parameter.name}: str")
    if not inspect.getdoc(function):
        raise OwnPartError(f"{where}: add a docstring, which tells the model what the tool does:\n{example}")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, or whatever annotations raise
        raise OwnPartError(
            f"{where}: no schema can be made of it: {error}. Give each parameter a type (str, int, float, bool, list, "
            f"dict, Literal, or a union) and a line under Args: in the docstring:\n{example}"
        ) from None
    schema["function"].pop("return", None)  # tokens of each prompt that no template needs
    return schema


def environment_schemas(make: type, name: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of an environment's tools by name: its public methods."""
    if not inspect.isclass(make):
        raise OwnPartError(f"{name} ({location(make)}): an environment is a class; a function belongs in tools.use")
    schemas = {}
    for method, function in inspect.getmembers(make, inspect.isroutine):
        if method.startswith("_") or method in NOT_TOOLS:
            continue
        # Bound to anything, so that the signature has no `self`; the class itself is made in a process of its own.
        bound = function if inspect.ismethod(function) else types.MethodType(function, object())
        schemas[method] = function_schema(bound, f"{name}.{method}")
    if not schemas:
        raise OwnPartError(f"{name} ({location(make)}): it has no public method, so the model has nothing to call")
    return schemas


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments of a call, in words for the model; empty if nothing is."""
    parameters = schema["function"]["parameters"]
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    signature = ", ".join(f"{key}: {_type_name(value)}" for key, value in properties.items())
    takes = f"{schema['function']['name']} takes ({signature})"
    for name in arguments:
        if name not in properties:
            hint = f": {nearest(name, properties)}" if properties else ""
            return f"unknown argument {shown(name)}{hint}. {takes}"
    for name in required:
        if name not in arguments:
            return f"the argument {name} is missing. {takes}"
    for name, value in arguments.items():
        if not _fits(properties[name], value):
            return f"the argument {name} is {shown(value)}, which is no {_type_name(properties[name])}. {takes}"
    return ""


def value_of(schema: Mapping[str, Any], text: str) -> Any:
    """Return what a text stands for by the type of a parameter; the text itself if it is no such value."""
    if _fits(schema, text):
        return text
    value: Any
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return value if _fits(schema, value) else text


def _fits(schema: Mapping[str, Any], value: object) -> bool:
    """Return whether a value has the type of a parameter; what this does not know fits."""
    if "anyOf" in schema:
        return any(_fits(each, value) for each in schema["anyOf"])
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        return False
    items = schema.get("items")
    return not (isinstance(value, list) and isinstance(items, dict)) or all(_fits(items, each) for each in value)


def _has_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):  # an int to Python, but not to a model
        return kind == "boolean"
    return kind not in _TYPES or isinstance(value, _TYPES[kind])


def _type_name(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_type_name(each) for each in schema["anyOf"])
    kinds = schema.get("type", "value")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)
