"""What conversations hold besides text: tools, calls of them, documents. Where a table stores JSON text, its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.data.chat.marks import shown
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import parse_json

# Names of render_jinja_template's own arguments, which an option of a record must not replace.
_RESERVED = frozenset(
    (
        "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
        "return_assistant_tokens_mask", "continue_final_message",
    )
)  # fmt: skip


def read_tools(record: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]] | None:
    """``tools``: a list of objects, or JSON text of it, of one of them or of parameters, as tables store it."""
    tools = _parsed(record.get("tools"), "tools", where)
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UserError("is not a list", field="tools", value=shown(tools), accepted="a list of tools", where=where)
    return [_tool(tool, f"tools[{i}]", where) for i, tool in enumerate(tools)]


def _tool(tool: Any, field: str, where: str) -> Mapping[str, Any]:
    tool = _object(tool, field, where, '{"type": "function", "function": {"name": …, "parameters": …}}')
    if "function" in tool:
        tool = {**tool, "function": _object(tool["function"], f"{field}.function", where, "an object")}
        return {**tool, "function": _with_parameters(tool["function"], f"{field}.function", where)}
    return _with_parameters(tool, field, where)


def _with_parameters(function: Mapping[str, Any], field: str, where: str) -> Mapping[str, Any]:
    """A JSON schema is never text."""
    if not isinstance(function.get("parameters"), str):
        return function
    return {**function, "parameters": _object(function["parameters"], f"{field}.parameters", where, "an object")}


def read_tool_calls(calls: Any, field: str, where: str) -> list[Mapping[str, Any]]:
    """A list of objects, or JSON text of it, of one of them or of ``function``; arguments stay as they are written."""
    calls = _parsed(calls, field, where)
    if not isinstance(calls, list):
        raise UserError("is not a list", field=field, value=shown(calls), accepted="a list of calls", where=where)
    calls_read = []
    for i, call in enumerate(calls):
        call = _object(call, f"{field}[{i}]", where, '{"type": "function", "function": {"name": …, "arguments": …}}')
        if "function" in call:
            call = {**call, "function": _object(call["function"], f"{field}[{i}].function", where, "an object")}
        calls_read.append(call)
    return calls_read


def read_documents(record: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]] | None:
    """``documents``, a list of objects, or JSON text of it; any other text describes the record."""
    documents = record.get("documents")
    if isinstance(documents, str) and not documents.lstrip().startswith("["):
        return None
    documents = _parsed(documents, "documents", where)
    if documents is None:
        return None
    accepted = 'a list of {"title": …, "text": …}'
    if not isinstance(documents, list):
        raise UserError("is not a list", field="documents", value=shown(documents), accepted=accepted, where=where)
    return [_object(document, f"documents[{i}]", where, accepted) for i, document in enumerate(documents)]


def read_options(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``chat_template_kwargs``: further names that the template knows, as TRL reads them."""
    field = "chat_template_kwargs"
    options = _parsed(record.get(field), field, where)
    if options is None:
        return {}
    options = _object(options, field, where, '{"enable_thinking": false, …}')
    if reserved := sorted(_RESERVED & options.keys()):
        raise UserError("is no option", field=f"{field}.{reserved[0]}", accepted="other names", where=where)
    return options


def _parsed(value: Any, field: str, where: str) -> Any:
    """The value of JSON text; empty text is none."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value, where)
    except UserError as error:  # which counts lines of the text, not of the file
        raise UserError(error.problem, field=field, value=shown(value), where=where) from None


def _object(value: Any, field: str, where: str, accepted: str) -> Mapping[str, Any]:
    parsed = _parsed(value, field, where)
    if not isinstance(parsed, dict):
        raise UserError("is no object", field=field, value=shown(value), accepted=accepted, where=where)
    return parsed
