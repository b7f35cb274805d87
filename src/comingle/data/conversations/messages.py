"""Conversations of rows: parse messages, ShareGPT records, or pairs of prompt and response."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Required, TypedDict

from comingle.data.tables import field_of, has_column
from comingle.models.chat_templates import ASSISTANT, ROLES
from comingle.utils.errors import did_you_mean


class MessageRecord(TypedDict, total=False):
    """Message of a conversation, with the keys of :data:`comingle.models.chat_templates.Message`."""

    role: Required[str]
    content: Required[str]
    tools: list[object]
    tool_calls: list[dict[str, object]]
    tool_call_id: object
    name: object
    learn: bool


Messages = tuple[MessageRecord, ...]
"""Conversation: its messages in order."""

Remark = Callable[[str], None]
"""Function that receives a property of a row, such as "an empty message of the user"."""

SHAREGPT = "conversations"
"""Column of ShareGPT data sets."""
_OTHER_ROLES = {
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), ASSISTANT),
    "observation": "tool",
}
"""Roles of :data:`comingle.models.chat_templates.ROLES` by their names in other formats."""
_SYSTEM_COLUMNS = ("system", "system_prompt")
"""Columns with a system message."""
_ROLE, _CONTENT = ("role", "from"), ("content", "value")
"""Keys of a message's role and content; the second of each is ShareGPT's."""
_LOSS_KEYS = ("weight", "train", "training", "loss", "trainable")
"""Keys that can exclude a response from the loss."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys with the reasoning before a response."""
_READ_KEYS = {*_ROLE, *_CONTENT, *_LOSS_KEYS, *_REASONING_KEYS, "tool_calls", "tool_call_id", "name"}
"""Keys of a message that are read."""


@dataclass(frozen=True)
class Columns:
    """Columns of a row that hold the conversation.

    Args:
        messages: Column with a list of messages.
        prompt: Columns whose texts are joined to a prompt.
        response: Column with the response.
    """

    messages: str = "messages"
    prompt: tuple[str, ...] = ("prompt",)
    response: str = "response"

    @classmethod
    def read(cls, section: Mapping[str, object]) -> Columns:
        """Return the columns that a recipe's section ``data`` names, also if the section is not validated yet.

        A missing or invalid value is replaced by the default.
        """
        messages, prompt, response = section.get("messages"), section.get("prompt"), section.get("response")
        if not isinstance(messages, str):
            messages = cls.messages
        if not isinstance(response, str):
            response = cls.response
        prompt_columns = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompt_columns, list | tuple) or not all(isinstance(name, str) for name in prompt_columns):
            prompt_columns = ()
        return cls(messages=messages, prompt=tuple(prompt_columns) or cls.prompt, response=response)

    @property
    def are_named(self) -> bool:
        """True if the recipe names a column of prompts or responses.

        Rows are then read from these columns alone, even if they also have a column with a list of messages.
        """
        has_default_prompt = self.prompt == ("prompt",)
        has_default_response = self.response == "response"
        return not (has_default_prompt and has_default_response)

    @property
    def description(self) -> str:
        """Columns for messages, such as "'messages', or 'prompt' and 'response', or 'conversations' (ShareGPT)"."""
        prompt_and_response = f"{', '.join(map(repr, self.prompt))} and {self.response!r}"
        if self.are_named:
            return prompt_and_response
        return f"{self.messages!r}, or {prompt_and_response}, or {SHAREGPT!r} (ShareGPT)"

    def has(self, names: Sequence[str]) -> bool:
        """Return whether rows of a data set hold a conversation, judged by the names of their columns."""
        needed = (*self.prompt, self.response)
        if all(name in names or name.partition(".")[0] in names for name in needed):  # "a.b" is a field of column "a"
            return True
        if self.are_named:
            return False
        return self.messages in names or SHAREGPT in names


def messages_of(
    row: Mapping[str, object],
    columns: Columns,
    *,
    used_elsewhere: Collection[str] = (),
    remark: Remark = lambda text: None,
) -> Messages:
    """Return the conversation of a row: messages, ShareGPT's form of them, or a prompt with its response.

    If the recipe does not name the columns of prompt and response, a column of messages takes precedence.

    Args:
        row: Values by column. The columns ``system`` (or ``system_prompt``), ``history`` and ``tools`` are part of the
            conversation too.
        columns: Columns that hold the messages; ``are_named`` says whether the recipe names those of prompt and
            response.
        used_elsewhere: Columns that are read for other purposes, such as the user's name.
        remark: Called with each property of the row that users should know about but that does not make it unusable.

    Raises:
        ValueError: The row is not a conversation; says why.
    """
    if not columns.are_named and row.get(columns.messages) is not None:
        used_columns = [columns.messages]
        messages = _read_messages(row[columns.messages], columns.messages, remark)
    elif not columns.are_named and row.get(SHAREGPT) is not None:
        used_columns = [SHAREGPT]
        messages = _read_messages(row[SHAREGPT], SHAREGPT, remark)
    else:
        used_columns = [*columns.prompt, columns.response]
        messages = _prompt_and_response(row, columns)

    used: set[str] = set()
    for name in (*used_columns, *used_elsewhere):
        column, _dot, _field = name.partition(".")  # "meta.set" is the field "set" of the column "meta"
        used.add(name if name in row else column)
    unused = {name: value for name, value in row.items() if name not in used and _is_filled(value)}

    messages = _read_history(unused.pop("history", None), remark) + messages
    for name in _SYSTEM_COLUMNS:
        messages = _prepend_system(messages, unused.pop(name, None), name)
    tools = _read_tools(unused.pop("tools", None))
    if tools:
        messages[0]["tools"] = tools
    if tools or any("tool_calls" in message for message in messages):
        remark("tools or tool calls, which the base model's chat template writes; chat and serve offer no tools")
    if unused:
        remark(f"unused columns: {', '.join(unused)}")
    _check_responses(messages, remark)
    return tuple(messages)


def _is_filled(value: object) -> bool:
    """Return whether a row of a data set has a value here: not None, False, ``""`` or ``[]``; 0 counts as a value.

    Tables give rows without a value one of these fillers.
    """
    if value is None or value is False:
        return False
    is_empty = isinstance(value, str | Sized) and len(value) == 0
    return not is_empty


def _prompt_and_response(row: Mapping[str, object], columns: Columns) -> list[MessageRecord]:
    """Return a prompt and its response as two messages.

    The prompt consists of the texts of all prompt columns, joined with blank lines. Prompt columns after the first,
    such as ``input`` after ``instruction``, must exist but may be empty.

    Args:
        row: Values by column.
        columns: Columns of prompt and response.

    Raises:
        ValueError: A column is missing, or a value is not text.
    """
    values = {name: field_of(row, name) for name in (*columns.prompt, columns.response)}
    without_value = [name for name, value in values.items() if value is None]
    may_be_empty = [name for name in columns.prompt[1:] if has_column(row, name)]
    missing = [name for name in without_value if name not in may_be_empty]
    if missing:
        # Without names in the recipe, the missing column is a default and cannot be misspelt.
        hint = did_you_mean(missing[0], row) if columns.are_named else ""
        raise ValueError(f"no column {missing[0]!r}; found: {', '.join(row)}; allowed: {columns.description}.{hint}")
    texts = {name: _read_text(value, name) for name, value in values.items() if value is not None}
    prompts = [texts[name] for name in columns.prompt if name in texts]
    if len(columns.prompt) > 1:  # a single prompt is used even if it is empty
        prompts = [text for text in prompts if text.strip()]
    prompt = "\n\n".join(prompts)
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": texts[columns.response]}]


def _read_history(value: object, remark: Remark) -> list[MessageRecord]:
    """Return the messages of earlier turns from a column ``history``.

    Args:
        value: Pairs of question and response, or messages; a missing or empty value gives no messages.
        remark: Called with a text about each problem of a usable message, for a warning.

    Raises:
        ValueError: The value is neither a list of pairs nor a list of messages.
    """
    if not _is_filled(value):
        return []
    problem = f"history is {reprlib.repr(value)}; allowed: a list of [question, response], or of messages"
    if not isinstance(value, list | tuple):
        raise ValueError(problem)
    if all(isinstance(message, Mapping) for message in value):
        return _read_messages(value, "history", remark)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        raise ValueError(problem)
    messages: list[MessageRecord] = []
    for number, (question, response) in enumerate(value):
        where = f"history[{number}]"
        messages.append({"role": "user", "content": _read_text(question, where)})
        messages.append({"role": ASSISTANT, "content": _read_text(response, where)})
    return messages


def _prepend_system(messages: list[MessageRecord], value: object, column: str) -> list[MessageRecord]:
    """Prepend the system message of a row's column, unless the column is empty or the message is already there.

    Args:
        messages: Messages of the conversation.
        value: Value of the column, which holds a system message.
        column: Name of the column, for error messages.

    Raises:
        ValueError: The conversation begins with a different system message already, or the value is not text.
    """
    if not _is_filled(value):
        return messages
    text = _read_text(value, column)
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"].strip() == text.strip():
            return messages
        raise ValueError(f"two system messages, in column {column!r} and in the messages; allowed: one")
    return [{"role": "system", "content": text}, *messages]


def _read_tools(value: object) -> list[object]:
    """Return the tools of a conversation from a list or its JSON; empty if there is no value.

    Raises:
        ValueError: The value is not a list, or a tool has no name.
    """
    if not _is_filled(value):
        return []
    tools = _from_json(value)
    if not isinstance(tools, list | tuple) or not all(_is_function(tool) for tool in tools):
        raise ValueError(f"tools is {reprlib.repr(value)}; allowed: a list of functions with a name")
    return list(tools)


def _is_function(tool: object) -> bool:
    """Return whether a tool or a tool call of a conversation names a function.

    Its form is ``{name, ...}`` or ``{function: {name, ...}}``.
    """
    if not isinstance(tool, Mapping):
        return False
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return False
    name = function.get("name")
    return isinstance(name, str) and name != ""


def _from_json(value: object) -> object:
    """Parse a text as JSON, as data sets often store lists; return other values, and other texts, unchanged."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # not JSON, or nested too deeply
            return json.loads(value)
    return value


def _read_messages(value: object, column: str, remark: Remark) -> list[MessageRecord]:
    """Return the messages of a list; call ``remark`` if messages have keys that are not used.

    Args:
        value: The list.
        column: Name of the list's column, for error messages.
        remark: Called with a text about unused keys and about each problem of a usable message, for a warning.

    Raises:
        ValueError: The value is not a list of valid messages.
    """
    records = value if isinstance(value, Sequence) and not isinstance(value, str) else None
    if records is None or not all(isinstance(record, Mapping) for record in records):
        raise ValueError(f"{column} is {reprlib.repr(value)}; allowed: a list of messages with role and content")
    messages: list[MessageRecord] = []
    unused_keys: list[str] = []
    for number, record in enumerate(records):
        message = _read_message(record, f"{column}[{number}]", remark)
        messages.append(message)
        unused_keys += [key for key, content in record.items() if key not in _READ_KEYS and _is_filled(content)]
    # "name" is read, but used only in messages of tools. It is the last key in the remark.
    for record, message in zip(records, messages, strict=True):
        if _is_filled(record.get("name")) and message["role"] != "tool":
            unused_keys.append("name")
    if unused_keys:
        remark(f"unused keys of messages: {', '.join(dict.fromkeys(unused_keys))}")
    return messages


def _read_message(record: Mapping[str, object], where: str, remark: Remark) -> MessageRecord:
    """Convert a message in any of the known spellings to role, content and the keys that chat templates use.

    Reasoning is put before the content between ``<think>`` tags. A response without loss gets ``learn: False``.

    Args:
        record: The message as read.
        where: Path of the message in its row, such as ``messages[2]``, with which error messages begin.
        remark: Called with a text about each problem of a usable message, for a warning.

    Raises:
        ValueError: The role is unknown, or a value has a wrong type.
    """
    role = _first_value(record, _ROLE)
    content = _first_value(record, _CONTENT)
    if isinstance(role, str):
        role = _OTHER_ROLES.get(role, role)  # "user" for "human", for example
    if not isinstance(role, str) or role not in ROLES:
        allowed = f"{', '.join(ROLES)}, developer (and human, gpt)"
        raise ValueError(f"{where} has the role {reprlib.repr(role)}; allowed: {allowed}")
    calls, has_nameless_calls = _read_tool_calls(record.get("tool_calls"), role, f"{where}.tool_calls")
    may_lack_content = bool(calls) or has_nameless_calls
    text = "" if content is None and may_lack_content else _read_text(content, f"{where}.content")
    message: MessageRecord = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and _is_filled(record.get("tool_call_id")):
        message["tool_call_id"] = record["tool_call_id"]
    if role == "tool" and _is_filled(record.get("name")):
        message["name"] = record["name"]
    for key in _REASONING_KEYS:
        reasoning = record.get(key)
        has_reasoning = message["content"].lstrip().startswith("<think>")  # in the content, or from an earlier key
        if _is_filled(reasoning) and not has_reasoning:
            thought = _read_text(reasoning, f"{where}.{key}").strip("\n")
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
    if has_nameless_calls:
        remark("tool calls without a function name; these responses have no loss")
    if not _has_loss(record, role, where) or has_nameless_calls:
        message["learn"] = False
    return message


def _first_value(record: Mapping[str, object], keys: Sequence[str]) -> object:
    """Return the value of the first of several spellings of a key that a message has; None if it has none.

    Args:
        record: The message as read.
        keys: Spellings of the key, such as "role" and "from".
    """
    for key in keys:
        if record.get(key) is not None:
            return record[key]
    return None


def _has_loss(record: Mapping[str, object], role: str, where: str) -> bool:
    """Return False if a key such as ``weight: 0`` excludes a response from the loss; otherwise True.

    For messages that are no responses, the result is always True.

    Args:
        record: The message of a conversation, as read from the data.
        role: Its role, such as ``assistant``.
        where: Path of the message in the data, with which error messages begin.

    Raises:
        ValueError: A key such as ``weight`` has another value than 0 or 1, or puts the loss on a message that is no
            response.
    """
    is_response = role == ASSISTANT
    has_loss = True
    for key in _LOSS_KEYS:
        value = record.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"{where}.{key} is {reprlib.repr(value)}; allowed: 0 or 1, or true or false")
        is_on = bool(value)
        if is_on and not is_response:
            raise ValueError(
                f"{where}.{key} is {value!r} on a message of the {role}; allowed: only on responses (to train on "
                "whole conversations, set data.loss_on: all)"
            )
        if is_response and not is_on:
            has_loss = False
    return has_loss


def _read_tool_calls(value: object, role: str, where: str) -> tuple[list[dict[str, object]], bool]:
    """Return the tool calls that name a function, and whether there are calls without a name.

    Arguments that are a JSON text of an object are parsed. Calls without a name are dropped, since no template can
    write them.

    Args:
        value: List of calls or its JSON, in which a call is ``{name, arguments}`` or ``{function: {name, arguments}}``.
        role: Role of the message.
        where: Path of the calls in their row, such as ``messages[2].tool_calls``, with which error messages begin.

    Returns:
        Calls as ``{type, function: {name, arguments}}``, with ``id`` if they have one; and whether some lack a name.

    Raises:
        ValueError: The value is not a list of mappings, or the message is not a response.
    """
    if not _is_filled(value):
        return [], False
    parsed_value = _from_json(value)
    calls = parsed_value if isinstance(parsed_value, list | tuple) else None
    if role != ASSISTANT or calls is None or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{where} is {reprlib.repr(value)}; allowed: on responses, a list of functions with a name")
    normalised: list[dict[str, object]] = []
    has_nameless_calls = False
    for call in calls:
        if not _is_function(call):
            has_nameless_calls = True
            continue
        if "function" in call:  # {function: {name, arguments}}
            function = dict(call["function"])
        else:  # {name, arguments}
            function = {key: call[key] for key in ("name", "arguments") if key in call}
        arguments = function.get("arguments")
        parsed_arguments = _from_json(arguments)
        if isinstance(parsed_arguments, Mapping):
            function["arguments"] = parsed_arguments
        else:
            function["arguments"] = arguments or {}
        id_and_type = {key: call[key] for key in ("id", "type") if _is_filled(call.get(key))}
        normalised.append({"type": "function", **id_and_type, "function": function})
    return normalised, has_nameless_calls


def _read_text(value: object, where: str) -> str:
    """Return a message's text, given as a text or as a list of parts ``{type: text, text: ...}``.

    Args:
        value: The text or list.
        where: Name of the value in messages, such as ``history[0]``.

    Raises:
        ValueError: The value is of another type, or cannot be encoded as UTF-8.
    """
    if isinstance(value, list | tuple) and value and all(_is_text_part(part) for part in value):
        return "".join(_read_text(part["text"], where) for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{where} is {reprlib.repr(value)}; allowed: text, or a list of parts of type text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} holds an unpaired surrogate; allowed: valid Unicode text") from None
    return value


def _is_text_part(part: object) -> bool:
    """Return whether a part of a message is plain text rather than an image, for example.

    It is then ``{"type": "text", "text": ...}``, with no other keys that have a value.
    """
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        return False
    has_other_values = any(_is_filled(value) for key, value in part.items() if key not in ("type", "text"))
    return not has_other_values


def _check_responses(messages: Sequence[MessageRecord], remark: Remark) -> None:
    """Check that a conversation has a response with a loss, and that no response with a loss is empty.

    A response has no loss if it is the first message, as it has no prompt, or if it has ``learn: False``.

    Args:
        messages: The conversation.
        remark: Called with the text of a warning if the first message is a response, a message of another role is
            empty, or two consecutive messages have the same role.

    Raises:
        ValueError: No response has a loss, or one with a loss is empty.
    """
    responses = [message for message in messages if message["role"] == ASSISTANT]
    if not responses:
        raise ValueError("no response; at least one message of the assistant is needed")
    begins_with_response = messages[0]["role"] == ASSISTANT
    responses_with_prompt = responses[1:] if begins_with_response else responses
    if not responses_with_prompt:
        raise ValueError("the first message is the only response; begin with a message of the user or system")
    for response in responses:
        is_empty = not response["content"].strip() and not response.get("tool_calls")
        if is_empty and response.get("learn", True):
            raise ValueError("an empty response; allowed: text or tool calls in every message of the assistant")
    if not any(response.get("learn", True) for response in responses_with_prompt):
        raise ValueError(
            "every response is excluded from the loss, by a key or because a tool call has no function name; at least "
            "one response with loss is needed"
        )
    if begins_with_response:
        remark("begins with a message of the assistant, which has no loss")
    others = [message for message in messages if message["role"] != ASSISTANT]
    empty_roles = [message["role"] for message in others if not message["content"].strip()]
    if empty_roles:
        remark(f"an empty message of the {empty_roles[0]}")
    roles = [message["role"] for message in messages]
    repeated_roles = [role for role, next_role in pairwise(roles) if role == next_role and role != "tool"]
    if repeated_roles:
        remark(f"two consecutive messages of the {repeated_roles[0]}")
