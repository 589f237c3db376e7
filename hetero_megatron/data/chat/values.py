"""What records hold besides turns: tools, documents, options. Where a table stores JSON text, its value."""

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
_DOCUMENT_TEXTS = ("title", "text", "contents", "content", "snippet")


def read_tools(record: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]] | None:
    """``tools``: a list of objects, or JSON text of it, of one of them or of parameters, as tables store it."""
    tools = parsed(record.get("tools"), "tools", where)
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UserError("is not a list", field="tools", value=shown(tools), accepted="a list of tools", where=where)
    return [_tool(tool, f"tools[{i}]", where) for i, tool in enumerate(tools)]


def _tool(tool: Any, field: str, where: str) -> Mapping[str, Any]:
    tool = as_object(tool, field, where, '{"type": "function", "function": {"name": …, "parameters": …}}')
    if tool.get("function") is None:
        return _with_parameters({key: value for key, value in tool.items() if key != "function"}, field, where)
    function = as_object(tool["function"], f"{field}.function", where, "an object")
    return {**tool, "function": _with_parameters(function, f"{field}.function", where)}


def _with_parameters(function: Mapping[str, Any], field: str, where: str) -> Mapping[str, Any]:
    """A JSON schema is never text."""
    if not isinstance(function.get("parameters"), str):
        return function
    return {**function, "parameters": as_object(function["parameters"], f"{field}.parameters", where, "an object")}


def read_documents(record: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]] | None:
    """``documents``, a list of objects, or JSON text of it; any other text describes the record."""
    documents = record.get("documents")
    if isinstance(documents, str) and not documents.lstrip().startswith("["):
        return None
    documents = parsed(documents, "documents", where)
    if documents is None:
        return None
    accepted = 'a list of {"title": …, "text": …}'
    if not isinstance(documents, list):
        raise UserError("is not a list", field="documents", value=shown(documents), accepted=accepted, where=where)
    return [_document(document, f"documents[{i}]", where, accepted) for i, document in enumerate(documents)]


def _document(document: Any, field: str, where: str, accepted: str) -> Mapping[str, Any]:
    """Without keys that have no value; what templates write of it is text or a number."""
    contents = {key: value for key, value in as_object(document, field, where, accepted).items() if value is not None}
    for key in _DOCUMENT_TEXTS:
        if type(contents.get(key, "")) not in (str, int, float):
            raise UserError(
                "is no text", field=f"{field}.{key}", value=shown(contents[key]), accepted="a string", where=where
            )
    return contents


def read_options(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``chat_template_kwargs``: further names that the template knows, as TRL reads them."""
    field = "chat_template_kwargs"
    options = parsed(record.get(field), field, where)
    if options is None:
        return {}
    options = as_object(options, field, where, '{"enable_thinking": false, …}')
    if reserved := sorted(_RESERVED & options.keys()):
        raise UserError("is no option", field=f"{field}.{reserved[0]}", accepted="other names", where=where)
    return options


def parsed(value: Any, field: str, where: str) -> Any:
    """The value of JSON text; empty text is none."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value, where)
    except UserError as error:  # which counts lines of the text, not of the file
        raise UserError(error.problem, field=field, value=shown(value), where=where) from None


def as_object(value: Any, field: str, where: str, accepted: str) -> Mapping[str, Any]:
    """An object, or the one that JSON text holds. UserError: anything else."""
    is_text = isinstance(value, str) and not value.lstrip().startswith("{")
    parsed_value = None if is_text else parsed(value, field, where)
    if not isinstance(parsed_value, dict):
        raise UserError("is no object", field=field, value=shown(value), accepted=accepted, where=where)
    return parsed_value
