"""Tokenisation of conversations with the base model's chat template, or with a plain one if it has none.

The plain template writes the tokenizer's end-of-text token after every response::

    ### User:
    Describe a comet.

    ### Assistant:
    A ball of ice.<|endoftext|>

    ### User:
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from comingle.utils.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Indices of the first token and of the one after the last."""
ResponseOffsets = tuple[int, int, int]
"""Character offsets of a response: its start, its end, and its end including any text that closes the conversation."""
LocatedToken = tuple[int, int, int]
"""A token, and the character offsets of its start and end in the text."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tokenised conversation; each response is a span of tokens that includes the token that ends it."""

    tokens: tuple[int, ...]
    responses: tuple[Span, ...]
    """The responses that carry a loss."""
    references: tuple[str, ...]
    """The text of each response, as the template writes it."""
    masked: tuple[Span, ...] | None = ()
    """Responses without a loss even if all other tokens have one; None if their positions cannot be determined."""
    unwritten_calls: int = 0
    """Number of responses whose tool calls the template does not write; they carry no loss."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest response, including its end token."""
        return max(stop - start for start, stop in self.responses)


def begin_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the begin-of-text token if the tokenizer adds it to every text, else an empty tuple."""
    ids: Any = tokenizer("")["input_ids"]
    return tuple(ids[:1]) if ids and ids[0] == tokenizer.bos_token_id else ()


Message = Mapping[str, Any]
"""A message with the keys ``role`` and ``content``.

Optional keys: ``tool_calls``, ``tool_call_id`` and ``name`` are passed to the template; ``learn: False`` excludes a
response from the loss; ``tools`` of the first message are those of the whole conversation.
"""

ASSISTANT = "assistant"
"""Role of the model's responses in a conversation."""

ROLES = ("system", "user", ASSISTANT, "tool")

PLAIN_TEMPLATE = (
    "{% if tools %}{{ '### Tools:\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '\n' }}"
    "{% endif %}"
    "{% for message in messages %}{{ '### ' + message['role'].capitalize() + ':\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)

# Placeholder of the text of a special token in a message: it hides the text while the template is rendered, so that
# the text is not tokenised as the special token.
_OPEN, _CLOSE = "\ue000", "\ue001"
# Placeholder of a message's content, to find its position in the rendered text.
_CONTENT_PLACEHOLDER = "\ue002{}\ue003"

_THINK, _END_THINK = "<think>", "</think>"
_KEYS_OF_COMINGLE = ("learn", "tools")
_STRFTIME_DIRECTIVES = (*(f"-{key}" for key in "dmHIMSjy"), *"aAbBcdfGHIjmMpSuUVwWxXyYZz")


class RewrittenTurnsError(DataError):
    """Raised if a template changes earlier responses when the conversation continues."""


def require_characters(text: str) -> None:
    """Check that a text is valid Unicode.

    Raises:
        DataError: The text has a lone surrogate, as Python reads undecodable bytes of a terminal.
    """
    if half := re.search("[\ud800-\udfff]", text):
        raise DataError(f"a text is not valid Unicode: {half[0]!r} at {half.start()}")


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, or the plain one if it has none.

    Args:
        tokenizer: A fast tokenizer, as token offsets are needed.
        date: The date for templates that write the current date; None: the date of each call.
    """

    tokenizer: PreTrainedTokenizerBase
    date: datetime | None = None

    @property
    def has_own_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def writes_date(self) -> bool:
        """True if the template writes the current date."""
        return "strftime_now" in str(self.tokenizer.chat_template)

    # ------------------------------------------------------------ text

    def render(self, messages: Sequence[Message], *, add_prompt: bool = False) -> str:
        """Return a conversation as the text that the chat template writes.

        Args:
            messages: The conversation.
            add_prompt: Append the text that begins the next response.

        Raises:
            DataError: The template rejects the messages, say their order, or the tokenizer has no end-of-text token for
                the plain template.
        """
        if self.has_own_template:
            return self._apply_template(messages, add_prompt, template=None)
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                "the base's tokenizer has no end-of-text token, so responses would have no end; give another base"
            )
        return self._apply_template(messages, add_prompt, template=self._plain)

    @property
    def _plain(self) -> str:
        """The template for tokenizers without one of their own; it begins with the begin-of-text token if texts do."""
        return f"{'{{ bos_token }}' if begin_of(self.tokenizer) else ''}{PLAIN_TEMPLATE}"

    @property
    def source(self) -> str | dict[str, str]:
        """The Jinja template to write beside an exported model; a dict by name if the tokenizer has several templates.

        The template has a fixed date, and writes the text that begins a response where the tokenizer's own ignores
        ``add_generation_prompt``. So other programs build the same prompts as :meth:`prompt`.
        """
        if not self.has_own_template:
            return self._plain
        template: Any = self.tokenizer.chat_template
        if self.writes_date and isinstance(template, str):
            template = self._template_with_date
        header = self._response_header
        if not header:  # the template heeds `add_generation_prompt`
            return template
        header_literal = json.dumps(header, ensure_ascii=False)
        write_header = f"{{% if add_generation_prompt %}}{{{{ {header_literal} }}}}{{% endif %}}"
        if isinstance(template, str):
            return f"{template}{write_header}"
        return {**template, "default": f"{template['default']}{write_header}"}

    def _apply_template(self, messages: Sequence[Message], add_prompt: bool, *, template: str | None) -> str:
        """Render messages with a Jinja template.

        Args:
            messages: The conversation.
            add_prompt: Append the text that begins a response.
            template: The template; None for the tokenizer's, in which :attr:`date` replaces the current date.

        Raises:
            DataError: The template raises an error, say because of the order of roles.
        """
        tools = messages[0].get("tools") if messages else None
        plain_messages = []
        for message in messages:  # without "learn" and "tools"
            plain_messages.append({key: value for key, value in message.items() if key not in _KEYS_OF_COMINGLE})
        try:
            if template is None and self.writes_date:
                template = self._template_with_date
            text = self.tokenizer.apply_chat_template(
                plain_messages,
                tools=list(tools) if tools else None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_prompt,
            )
            return str(text)
        except Exception as error:  # templates are programs that may raise any error
            reason = " ".join(str(error).split()) or type(error).__name__
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the base's chat template refuses the roles {roles}: {reason}") from None

    @cached_property
    def _template_with_date(self) -> str:
        """The tokenizer's template with :attr:`date` as the current date.

        A Jinja macro ``strftime_now(format)`` takes precedence over the function of this name in transformers. It
        replaces each strftime directive in the format, such as "%Y" by "2026".
        """
        template = str(self.tokenizer.get_chat_template())
        if self.date is None:
            return template
        filters = ""
        for directive_letters in _STRFTIME_DIRECTIVES:
            directive = f"%{directive_letters}"
            filters += f" | replace({directive!r}, {self.date.strftime(directive)!r})"
        macro = f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}"
        # Jinja drops a newline after a block tag such as endmacro; the empty expression keeps the template's.
        return f"{macro}{{{{ '' }}}}{template}"

    def _prompt_text(self, messages: Sequence[Message]) -> str:
        """Return the prompt of the next response as text; it ends with the response's header, such as "<|assistant|>".

        Trailing spaces are left to the response, because tokenizers join a space and the next word.
        """
        text = self.render(messages, add_prompt=True)
        text += self._response_header  # empty unless the template ignores `add_prompt`
        return text.rstrip(" ")

    @cached_property
    def _response_header(self) -> str:
        """Text that begins a response, such as "<|assistant|>", if the template ignores ``add_prompt``, else empty.

        It is the text between question and response in an example conversation.
        """
        question = [{"role": "user", "content": "a"}]
        response_text = _CONTENT_PLACEHOLDER.format(0)
        try:
            without_prompt = self.render(question)
            with_prompt = self.render(question, add_prompt=True)
            with_response = self.render([*question, _response(response_text)])
        except DataError:
            return ""
        heeds_add_prompt = with_prompt != without_prompt
        if heeds_add_prompt or not with_response.startswith(without_prompt) or response_text not in with_response:
            return ""
        header, _, _ = with_response.removeprefix(without_prompt).partition(response_text)
        return header if header.strip() else ""

    # ------------------------------------------------------------ tokens

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt of the next response as tokens.

        Raises:
            DataError: The template rejects the messages or omits one, or they are not valid Unicode.
        """
        require_characters("".join(message["content"] or "" for message in messages))
        # Special tokens that a message spells out become placeholders, so that they are tokenised as plain text.
        prepared, hidden_texts = self._hide_special_tokens(messages)
        prepared, _omitted_calls = self._format_calls(prepared)
        text = self._prompt_text(prepared)
        self._raise_if_omitted(prepared, text)
        return tuple(token for token, _start, _stop in self._tokenize(text, hidden_texts))

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Tokenise a conversation up to its last response.

        A response begins where :meth:`prompt` ends. It ends with the last special token that the template writes after
        it, except for an end-of-text token that is only written at the end of a conversation.

        Raises:
            RewrittenTurnsError: The template changes earlier turns when a conversation continues.
            DataError: The template rejects the messages or omits one, or no response is to be learnt.
        """
        prepared, hidden_texts, learnt, num_unwritten = self._prepare_messages(messages)
        return self._encode_prepared(prepared, hidden_texts, learnt, num_unwritten)

    def encode_turns(self, messages: Sequence[Message]) -> list[Encoded]:
        """Tokenise a conversation, or each response with its own prompt if the template changes earlier turns.

        Only the first result has ``unwritten_calls``, the number for the conversation.

        Raises:
            DataError: As in :meth:`encode`.
        """
        prepared, hidden_texts, learnt, num_unwritten = self._prepare_messages(messages)
        try:
            return [self._encode_prepared(prepared, hidden_texts, learnt, num_unwritten)]
        except RewrittenTurnsError:
            if len(learnt) == 1:  # separate encoding would do the same
                raise
        first, *others = [self._encode_prepared(prepared, hidden_texts, [index], unwritten=0) for index in learnt]
        return [replace(first, unwritten_calls=num_unwritten), *others]

    def _prepare_messages(self, messages: Sequence[Message]) -> tuple[list[Message], list[str], list[int], int]:
        """Prepare messages for the template: hide the texts of special tokens, and format tool calls.

        A response is learnt unless it is the first message, has ``learn: False``, or has tool calls that the template
        does not write.

        Returns:
            The messages, the texts of hidden special tokens, the indices of responses to learn, and the number of
            responses whose tool calls the template does not write.
        """
        prepared, hidden_texts = self._hide_special_tokens(messages)
        prepared, unwritten = self._format_calls(prepared)
        learnt = []
        for index, message in enumerate(prepared):
            is_response = message["role"] == ASSISTANT and index > 0
            if is_response and message.get("learn", True) and index not in unwritten:
                learnt.append(index)
        if not learnt:
            reason = "the base's chat template does not write its tool calls" if unwritten else "all are excluded"
            raise DataError(f"no response to learn: {reason}; allowed: at least one after a message")
        return prepared, hidden_texts, learnt, len(unwritten)

    def _encode_prepared(
        self, messages: list[Message], hidden_texts: list[str], learnt: Sequence[int], unwritten: int
    ) -> Encoded:
        """Tokenise prepared messages up to the last response to learn.

        Args:
            messages: Messages from :meth:`_prepare_messages`.
            hidden_texts: Texts of special tokens, in the order of their placeholders in the messages.
            learnt: Indices of the responses to learn, in order.
            unwritten: Number of responses whose tool calls the template does not write.

        Raises:
            RewrittenTurnsError: The template changes earlier turns when a conversation continues.
            DataError: The template omits a message.
        """
        last_learnt = learnt[-1]
        text, learnt_offsets, masked_offsets = self._locate_responses(messages[: last_learnt + 1], learnt)
        prompt_ends = [response_start for response_start, _, _ in learnt_offsets]
        tokens = self._tokenize_as_prompts(text, hidden_texts, prompt_ends)
        spans = [self._span_of(offsets, tokens) for offsets in learnt_offsets]
        references = []
        for offsets, span in zip(learnt_offsets, spans, strict=True):
            references.append(self._reference_of(offsets, span, text, tokens, hidden_texts))
        masked_spans = None  # the position of a response that gets no loss could not be determined
        if masked_offsets is not None:
            masked_spans = tuple(self._span_of(offsets, tokens) for offsets in masked_offsets)
        _, end_of_last_response = spans[-1]
        ids = [token for token, _start, _end in tokens]
        return Encoded(
            tokens=tuple(ids[:end_of_last_response]),
            responses=tuple(spans),
            references=tuple(references),
            masked=masked_spans,
            unwritten_calls=unwritten,
        )

    def _tokenize_as_prompts(
        self, text: str, hidden_texts: Sequence[str], prompt_ends: Sequence[int]
    ) -> list[LocatedToken]:
        """Tokenise a rendered text so that each prompt in it has the same tokens as the prompt alone in generation.

        A tokenizer may join the end of a prompt and the text after it into one token. There the text is cut.

        Args:
            text: The rendered conversation.
            hidden_texts: Texts of special tokens, in the order of their placeholders in the text.
            prompt_ends: Character offsets of the prompts' ends.
        """
        tokens = self._tokenize(text, hidden_texts)
        cuts = []
        for prompt_end in prompt_ends:
            tokens_of_prompt = tokens[: bisect_right(tokens, prompt_end, key=_stop_of)]
            if self._tokenize(text[:prompt_end], hidden_texts) != tokens_of_prompt:
                cuts.append(prompt_end)
        return self._tokenize(text, hidden_texts, cuts) if cuts else tokens

    def _span_of(self, offsets: ResponseOffsets, tokens: Sequence[LocatedToken]) -> Span:
        """Return the indices of a response's tokens, up to and including its last special token, which ends it.

        Without a special token in the response, it ends at the last one in the closing text of the conversation, and
        without that at its last character.

        Args:
            offsets: Character offsets of the response: its start, its end, and its end with closing text.
            tokens: Tokens of the conversation, from :meth:`_tokenize`.
        """
        start_character, end_character, end_with_closing_text = offsets
        begin = bisect_right(tokens, start_character, key=_stop_of)  # the first token that ends after the start
        for end_of_search in (end_character, end_with_closing_text):
            end = bisect_right(tokens, end_of_search, key=_stop_of)
            for index in reversed(range(begin, end)):
                token, _, _ = tokens[index]
                if token in self._special_tokens:
                    return begin, index + 1
        return begin, bisect_left(tokens, end_character, key=_start_of)

    def _reference_of(
        self,
        offsets: ResponseOffsets,
        span: Span,
        text: str,
        tokens: Sequence[LocatedToken],
        hidden_texts: Sequence[str],
    ) -> str:
        """Return the text of a response without special tokens, to compare generated texts with it.

        Args:
            offsets: Character offsets of the response: its start, its end, and the end of any text that closes the
                conversation after it.
            span: Indices of its tokens, from :meth:`_span_of`.
            text: The rendered conversation.
            tokens: Tokens of the conversation, from :meth:`_tokenize`.
            hidden_texts: Texts of special tokens, in the order of their placeholders in the text.
        """
        start_character, end_character, _ = offsets
        start, stop = span
        ids = [token for token, _, _ in tokens[start:stop]]
        while ids and ids[-1] in self._special_tokens:  # the tokens that end the response
            ids.pop()
        # Take the text from the rendered conversation, or from its tokens if it has special tokens to be left out.
        if any(token in self._special_tokens for token in ids):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        first_removed = start + len(ids)
        if first_removed < stop:
            end_character = _start_of(tokens[first_removed])
        return _restore_special_tokens(text[start_character:end_character], hidden_texts).strip()

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end a response: the end-of-text token, then the template's own if it is another.

        The template's own token is the last token of an example conversation.
        """
        example = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        last_token = self.encode(example).tokens[-1]
        end_of_text: Any = self.tokenizer.eos_token_id
        ends = [] if end_of_text is None else [end_of_text]
        if last_token in self._special_tokens and last_token not in ends:
            ends.append(last_token)
        return tuple(ends)

    # ------------------------------------------------------------ positions of responses

    def _locate_responses(
        self, messages: Sequence[Message], learnt: Sequence[int]
    ) -> tuple[str, list[ResponseOffsets], list[ResponseOffsets] | None]:
        """Render a conversation, and find its responses in the text.

        Args:
            messages: The conversation; the last message is a response to learn.
            learnt: Indices of the responses to learn.

        Returns:
            The text, the character offsets of the responses to learn, and the character offsets of all other responses,
            which get no loss. The last is None if one of the other responses cannot be found.

        Raises:
            RewrittenTurnsError: The text of an earlier response differs from that in a shorter conversation.
            DataError: The template omits a message.
        """
        text, last_offsets = self._render_final(messages)
        self._raise_if_omitted(messages[:-1], text)
        last_start, _, _ = last_offsets
        missing = _missing_part(messages[-1]["content"], text[last_start:], thoughts=True)
        if missing:
            raise _omission_error(messages, len(messages) - 1, missing)
        learnt_offsets, masked_offsets, found_all = [], [], True
        for index, message in enumerate(messages[:-1]):
            if message["role"] != ASSISTANT:
                continue
            offsets = self._locate_earlier(messages, index, text)
            if index in learnt:
                if offsets is None or self._is_rewritten(message, offsets, text):
                    raise RewrittenTurnsError(
                        "the base's chat template rewrites earlier turns when a conversation continues, so responses "
                        "have no fixed position; give conversations of one turn"
                    )
                learnt_offsets.append(offsets)
            elif offsets is not None:
                masked_offsets.append(offsets)
            elif index > 0 or not message.get("learn", True):
                # A first message has no prompt, by which it could be located. Without ``learn: False`` it may have a
                # loss like any other text, so that it needs no mask.
                found_all = False
        return text, [*learnt_offsets, last_offsets], masked_offsets if found_all else None

    @staticmethod
    def _is_rewritten(response: Message, offsets: ResponseOffsets, text: str) -> bool:
        """Return whether the template rewrote a response: the text lacks a thought or another part of its content.

        Args:
            response: The message.
            offsets: Character offsets of the response in the text.
            text: The rendered conversation.
        """
        start, end, _ = offsets
        return _missing_part(response["content"], text[start:end], thoughts=True) != ""

    def _locate_earlier(self, messages: Sequence[Message], index: int, text: str) -> ResponseOffsets | None:
        """Return the position in the rendered conversation of a response that is not the last message.

        Args:
            messages: The conversation.
            index: Index of the response.
            text: The rendered conversation.

        Returns:
            Character offsets of start, end, and end with closing text, which only the last response has; None if the
            text does not begin with the response's prompt.
        """
        if index == 0:  # without a prompt
            return None
        try:
            prompt = self._prompt_text(messages[:index])
            shorter_conversation = self.render(messages[: index + 1])
        except DataError:
            return None
        start = len(prompt)
        end = _common_prefix(shorter_conversation, text)  # after the response the two texts differ
        if not text.startswith(prompt) or end <= start:
            return None
        end_with_closing_text = end
        return (start, end, end_with_closing_text)

    def _render_final(self, messages: Sequence[Message]) -> tuple[str, ResponseOffsets]:
        """Render a conversation for training: the prompt of its last response as in generation, then the response.

        Args:
            messages: The conversation; the last message is a response.

        Returns:
            The text, and three character offsets: the response's start, the response's end, and the end of the text.
                Some templates write closing text after the last response.
        """
        whole, prompt = self.render(messages), self._prompt_text(messages[:-1])
        text = whole
        if not whole.startswith(prompt):
            text = prompt + self._response_after_prompt(messages, whole)
        start, end = len(prompt), len(text)
        try:
            continued = self.render(messages, add_prompt=True)  # with the next prompt in place of closing text
        except DataError:
            return text, (start, end, len(text))
        # The closing text is the part of `whole` from which on `continued` differs.
        closing_length = len(whole) - _common_prefix(continued, whole)
        end_without_closing = len(text) - closing_length
        if end_without_closing > start:  # otherwise `continued` and `whole` differ before the response
            end = end_without_closing
        return text, (start, end, len(text))

    def _response_after_prompt(self, messages: Sequence[Message], whole: str) -> str:
        """Return the text of the last response, to be appended to its prompt if ``whole`` does not begin with it.

        Two kinds of templates are supported: those whose prompt ends with ``<think>`` and that remove thoughts from
        responses, and those that write the system message in a prompt only.

        Args:
            messages: The conversation; the last message is a response.
            whole: The rendered conversation.

        Raises:
            RewrittenTurnsError: The template is of neither kind.
        """
        question, answer = _CONTENT_PLACEHOLDER.format(1), _CONTENT_PLACEHOLDER.format(2)  # of the last two messages
        probed = [*messages[:-2], {**messages[-2], "content": question}]
        # The text after the question, such as "<|assistant|>", in a conversation and in a prompt.
        _, _, after_question = self.render([*probed, _response(answer)]).partition(question)
        header = _text_before(answer, after_question)
        _, _, prompt_header = self._prompt_text(probed).partition(question)
        before_response = _text_before(answer, self.render([*messages[:-1], _response(answer)]))
        if not prompt_header.startswith(header) or not whole.startswith(before_response):
            raise RewrittenTurnsError(
                "the base's chat template rewrites earlier turns when a conversation continues: its prompt ends with "
                f"{prompt_header[-40:]!r}, but responses follow {header[-40:]!r}; give a base whose template is "
                "consistent"
            )
        response = whole[len(before_response) :]
        _, _, after_last_thought = prompt_header.rpartition(_END_THINK)
        prompt_opens_thought = _THINK in after_last_thought
        if not prompt_opens_thought:
            return response
        response = response.lstrip()
        if response.startswith(_THINK):  # the prompt has this tag already
            return response.removeprefix(_THINK).lstrip("\n")
        return _restore_thought(messages[-1]["content"], response)

    # ------------------------------------------------------------ what a template leaves out

    def _raise_if_omitted(self, messages: Sequence[Message], text: str) -> None:
        """Raise an error if a rendered text lacks a message or a tool, as some templates leave out roles or tools.

        The thoughts of responses may be missing.

        Args:
            messages: The conversation.
            text: The conversation as the template writes it.

        Raises:
            DataError: A message or a tool is missing.
        """
        if not self.has_own_template:  # the plain template writes everything
            return
        flat = _without_spaces(text)
        omitted = self._omitted_by_role(messages)
        for index, message in enumerate(messages):
            required = message["content"]
            if message["role"] == ASSISTANT:
                _, _, required = required.rpartition(_END_THINK)  # without thoughts
            # A short omitted message such as "ok" may be part of another: do not search for it.
            missing = message["content"] if index in omitted else _missing_part(required, flat)
            if missing.strip():
                raise _omission_error(messages, index, missing)
        tools = messages[0].get("tools") if messages else None
        for tool in tools or ():
            function = tool.get("function") or tool
            name = str(function.get("name", ""))
            if _missing_part(name, flat):
                raise DataError(
                    f"the base's chat template leaves out the tools ({name}); give a base whose template writes tools, "
                    "or leave out tools"
                )

    def _omitted_by_role(self, messages: Sequence[Message]) -> frozenset[int]:
        """Return the indices of messages that the template omits whatever their content, such as those of a tool.

        The conversation is rendered with a placeholder as the content of each message. Messages whose placeholder is
        missing from the text are omitted. Results are cached by roles, except for conversations with tool calls,
        because a template may write a message depending on the calls before it.
        """
        key = tuple((message["role"], bool(message["content"].strip())) for message in messages)  # role, has text
        has_calls = any(message.get("tool_calls") for message in messages)
        if not has_calls and key in self._omitted_by_roles:
            return self._omitted_by_roles[key]
        probed, placeholders = list(messages), dict[int, str]()
        for index, message in enumerate(messages):
            if message["content"].strip():
                placeholders[index] = _CONTENT_PLACEHOLDER.format(index)
                probed[index] = {**message, "content": placeholders[index]}
        try:
            text = self.render(probed, add_prompt=True)
        except DataError:  # the template checks contents, so placeholders do not work
            return frozenset()
        omitted = frozenset(index for index, placeholder in placeholders.items() if placeholder not in text)
        if not has_calls:
            self._omitted_by_roles[key] = omitted
        return omitted

    @cached_property
    def _omitted_by_roles(self) -> dict[tuple[tuple[str, bool], ...], frozenset[int]]:
        """Cache of the messages that the template leaves out, by all messages' roles and whether they have text."""
        return {}

    def _format_calls(self, messages: list[Message]) -> tuple[list[Message], frozenset[int]]:
        """Return the messages with the arguments of tool calls in the format that the template expects.

        Some templates expect mappings, others JSON texts. Both are tried, and the result has the format in which the
        template writes the calls of more messages.

        Returns:
            The messages, and the indices of messages with a call whose name or arguments the template omits.

        Raises:
            DataError: The template rejects both formats.
        """
        with_calls = [index for index, message in enumerate(messages) if message.get("tool_calls")]
        if not with_calls:
            return messages, frozenset()
        best_messages: list[Message] | None = None
        fewest_unwritten = frozenset[int]()
        refusal: DataError | None = None
        messages_with_json = [_with_json_arguments(message) for message in messages]
        for formatted in (messages, messages_with_json):
            try:
                rendered = _without_spaces(self.render(formatted))
            except DataError as error:
                refusal = error
                continue
            unwritten = frozenset(index for index in with_calls if not _contains_calls(messages[index], rendered))
            if best_messages is None or len(unwritten) < len(fewest_unwritten):
                best_messages, fewest_unwritten = formatted, unwritten
        if best_messages is None:
            assert refusal is not None
            raise refusal
        return best_messages, fewest_unwritten

    # ------------------------------------------------------------ special tokens in messages

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        """Texts of the tokenizer's special tokens by ID."""
        return {id: token.content for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def _hidden_pattern(self) -> re.Pattern[str]:
        """Pattern of the texts that :meth:`_hide_special_tokens` replaces.

        They are the texts of special tokens, and the character that opens a placeholder, so that no message can forge
        a placeholder.
        """
        return re.compile("|".join(map(re.escape, [*self._special_tokens.values(), _OPEN])))

    def _hide_special_tokens(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        """Replace special tokens in messages by numbered placeholders, so that a user's text cannot forge a turn.

        After rendering, :meth:`_tokenize` tokenises the replaced texts as plain text. Roles stay as they are.

        Returns:
            The messages, and the replaced texts by number.
        """
        hidden_texts: list[str] = []

        def placeholder_for(special_token: re.Match[str]) -> str:
            number = len(hidden_texts)
            hidden_texts.append(special_token.group())
            return f"{_OPEN}{number}{_CLOSE}"

        def hide(value: object) -> Any:
            """Replace special tokens in all strings of a JSON value."""
            if isinstance(value, str):
                return self._hidden_pattern.sub(placeholder_for, value)
            if isinstance(value, Mapping):
                return {key: hide(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [hide(item) for item in value]
            return value

        safe_messages: list[Message] = []
        for message in messages:
            safe_message = hide({**message, "content": message["content"] or ""})
            safe_messages.append({**safe_message, "role": message["role"]})
        return safe_messages, hidden_texts

    def _tokenize(self, text: str, hidden_texts: Sequence[str], cuts: Sequence[int] = ()) -> list[LocatedToken]:
        """Tokenise a rendered text in which placeholders stand for spellings of special tokens in messages.

        Such a spelling, say "<|im_end|>" in a user's message, becomes tokens of plain text.

        Args:
            text: The text with placeholders, each a number between two delimiters.
            hidden_texts: The spellings that placeholders stand for, by number.
            cuts: Character offsets at which to split the text before tokenising, so that no token crosses them.

        Returns:
            ``(token, start, end)`` of each token, with character offsets in ``text``. All tokens of a hidden text have
            the offsets of its placeholder.
        """
        tokens, piece_start = [], 0
        for part_start, part_end in pairwise([0, *cuts, len(text)]):
            # Because of the group in the pattern, re.split returns texts and placeholders' numbers alternately.
            pieces = re.split(f"{_OPEN}(\\d+){_CLOSE}", text[part_start:part_end])
            for index, piece in enumerate(pieces):
                is_number = index % 2 == 1
                if is_number:
                    piece_end = piece_start + len(piece) + 2  # the number and two delimiters
                    ids, _ = self._tokenize_piece(hidden_texts[int(piece)], plain=True)
                    tokens += [(token, piece_start, piece_end) for token in ids]
                else:
                    piece_end = piece_start + len(piece)
                    ids, offsets = self._tokenize_piece(piece, plain=False)
                    spans = zip(ids, offsets, strict=True)
                    tokens += [(token, piece_start + start, piece_start + stop) for token, (start, stop) in spans]
                piece_start = piece_end
        return tokens

    def _tokenize_piece(self, text: str, *, plain: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text and their character offsets.

        Args:
            text: The text.
            plain: Treat the spelling of a special token as plain text.

        Raises:
            DataError: The tokenizer is not a fast one, which alone has offsets.
        """
        if not self.tokenizer.is_fast:
            raise DataError("the base's tokenizer has no token offsets; give a base with a fast tokenizer")
        encoded: Any = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=plain,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return encoded["input_ids"], encoded["offset_mapping"]


def _start_of(token: LocatedToken) -> int:
    """Return the character offset of a token's start."""
    return token[1]


def _stop_of(token: LocatedToken) -> int:
    """Return where a token ends in its text, as a number of characters from the start."""
    return token[2]


def _response(content: str) -> Message:
    """Return a message of the assistant."""
    return {"role": ASSISTANT, "content": content}


def _common_prefix(first: str, second: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def _restore_special_tokens(text: str, hidden_texts: Sequence[str]) -> str:
    """Return a text in which each placeholder is replaced by the text that it stands for.

    Args:
        text: A rendered text.
        hidden_texts: Texts of special tokens that placeholders stand for, by the placeholder's number.
    """

    def hidden_text_of(placeholder: re.Match[str]) -> str:
        number = int(placeholder[1])
        return hidden_texts[number]

    return re.sub(f"{_OPEN}(\\d+){_CLOSE}", hidden_text_of, text)


def _without_spaces(text: str) -> str:
    """Return a text without white space, which templates strip and add."""
    return "".join(text.split())


def _missing_part(content: str, text: str, *, thoughts: bool = False) -> str:
    """Return the first part of a message's content that a rendered text lacks, or "" if it has all parts.

    White space is ignored. A part may be rendered verbatim or as JSON.

    Args:
        content: The message's content.
        text: The rendered text.
        thoughts: Split the content at ``<think>`` and ``</think>``, and look for each part; else look for the whole.
    """
    text = _without_spaces(text)
    parts = re.split("</?think>", content) if thoughts else [content]
    for part in parts:
        as_json = json.dumps(part, ensure_ascii=False).removeprefix('"').removesuffix('"')
        if _without_spaces(part) not in text and _without_spaces(as_json) not in text:
            return part
    return ""


def _text_before(part: str, text: str) -> str:
    """Return the text before the first occurrence of a part, without trailing spaces."""
    before, _, _ = text.partition(part)
    return before.rstrip(" ")


def _restore_thought(content: str, response: str) -> str:
    """Put the thought of a message back in front of its rendered response, from which the template removed it.

    For templates whose generation prompt ends with ``<think>``: the result, such as "Add.</think> 4<|im_end|>",
    continues that prompt, so it lacks the opening tag. A message without a thought gets an empty one.

    Args:
        content: The message, such as "<think>Add.</think> 4".
        response: The response as the template writes it, such as "4<|im_end|>".
    """
    content = content.lstrip().removeprefix(_THINK).lstrip("\n")
    thought, end_tag, answer = content.rpartition(_END_THINK)
    if not end_tag:
        return f"\n{_END_THINK}\n\n{response}"
    space = answer[: len(answer) - len(answer.lstrip())]
    return f"{thought}{_END_THINK}{space}{response}"


def _omission_error(messages: Sequence[Message], index: int, missing: str) -> DataError:
    """Return the error for a message that the chat template omits.

    Args:
        messages: The conversation.
        index: Index of the omitted message.
        missing: The part of the message that the rendered text lacks.
    """
    role, shown = messages[index]["role"], " ".join(missing.split())
    return DataError(
        f"the base's chat template leaves out the {role} message (messages[{index}]: {shown!r:.60}); give a base "
        f"whose template writes the role {role} at this position, or leave the message out"
    )


def _with_json_arguments(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as JSON texts, such as '{"city": "Oslo"}'."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str):  # a text is JSON already
            arguments = json.dumps(arguments, ensure_ascii=False)
            call = {**call, "function": {**call["function"], "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _contains_calls(message: Message, rendered: str) -> bool:
    """Return whether a rendered text contains the names and arguments of all tool calls of a message."""
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        if any(_missing_part(text, rendered) for text in (name, *_strings_of(arguments))):
            return False
    return True


def _strings_of(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_of(item)
