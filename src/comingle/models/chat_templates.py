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
Place = tuple[int, int, int]
"""Character offsets of a response: its start, its end, and its end including any text that closes the conversation."""
TokenPlace = tuple[int, int, int]
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
ROLES = ("system", "user", ASSISTANT, "tool")

PLAIN = (
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
_PROBE = "\ue002{}\ue003"

_THINK, _END_THINK = "<think>", "</think>"
_OWN_KEYS = ("learn", "tools")
_DIRECTIVES = (*(f"-{key}" for key in "dmHIMSjy"), *"aAbBcdfGHIjmMpSuUVwWxXyYZz")


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
    def own(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def dated(self) -> bool:
        """Whether the template writes the current date."""
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
        if self.own:
            return self._apply_template(messages, add_prompt, template=None)
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                "the base's tokenizer has no end-of-text token, so responses would have no end; give another base"
            )
        return self._apply_template(messages, add_prompt, template=self._plain)

    @property
    def _plain(self) -> str:
        """The plain template, with the begin-of-text token if the tokenizer adds it to texts."""
        return f"{'{{ bos_token }}' if begin_of(self.tokenizer) else ''}{PLAIN}"

    @property
    def source(self) -> str | dict[str, str]:
        """The Jinja template to write beside an exported model; a dict by name if the tokenizer has several templates.

        Other programs should build the same prompts as :meth:`prompt`. So two things are written into the template: a
        fixed date, and the text that begins a response if the tokenizer's template ignores ``add_generation_prompt``.
        """
        if not self.own:
            return self._plain
        own: Any = self.tokenizer.chat_template
        own = self._with_date if self.dated and isinstance(own, str) else own
        if not (header := self._response_header):  # the template writes it already
            return own
        prompt = f"{{% if add_generation_prompt %}}{{{{ {json.dumps(header, ensure_ascii=False)} }}}}{{% endif %}}"
        return f"{own}{prompt}" if isinstance(own, str) else {**own, "default": f"{own['default']}{prompt}"}

    def _apply_template(self, messages: Sequence[Message], add_prompt: bool, *, template: str | None) -> str:
        """Render messages with a Jinja template.

        Args:
            messages: The conversation.
            add_prompt: Append the text that begins a response.
            template: The template; None for the tokenizer's, with :attr:`date` if it writes the current date.

        Raises:
            DataError: The template raises an error, say because of the order of roles.
        """
        tools = messages[0].get("tools") if messages else None
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    # Without comingle's own keys: "learn", and "tools", which the template gets as an argument.
                    [{key: value for key, value in message.items() if key not in _OWN_KEYS} for message in messages],
                    tools=list(tools) if tools else None,
                    chat_template=template if template or not self.dated else self._with_date,
                    tokenize=False,
                    add_generation_prompt=add_prompt,
                )
            )
        except Exception as error:  # templates are programs that may raise any error
            reason = " ".join(str(error).split()) or type(error).__name__
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the base's chat template refuses the roles {roles}: {reason}") from None

    @cached_property
    def _with_date(self) -> str:
        """The tokenizer's template with :attr:`date` as the current date.

        A Jinja macro replaces ``strftime_now``, as transformers does not let callers pass functions to templates.
        """
        own = str(self.tokenizer.get_chat_template())
        if self.date is None:
            return own
        values = {f"%{key}": self.date.strftime(f"%{key}") for key in _DIRECTIVES}
        filters = "".join(f" | replace({key!r}, {value!r})" for key, value in values.items())
        # The empty expression protects a newline at the template's start: transformers lets Jinja drop the first
        # newline after a block tag such as endmacro.
        return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}{{{{ '' }}}}{own}"

    def _prompt_text(self, messages: Sequence[Message]) -> str:
        """Return the prompt of the next response as text; it ends with the response's header, such as "<|assistant|>".

        Trailing spaces are left to the response, because tokenizers join a space and the next word.
        """
        # `_response_header` is empty unless the template ignores `add_prompt`.
        return (self.render(messages, add_prompt=True) + self._response_header).rstrip(" ")

    @cached_property
    def _response_header(self) -> str:
        """Text that begins a response, such as "<|assistant|>", if the template's prompts lack it, else empty.

        Some templates ignore ``add_generation_prompt``. The text is then read from a rendered conversation: it stands
        between a question and the placeholder ``probe`` of its response.
        """
        question = [{"role": "user", "content": "a"}]
        probe = _PROBE.format(0)
        try:
            prompt, whole = self.render(question, add_prompt=True), self.render([*question, _response(probe)])
            ignores_prompt = prompt == self.render(question)
        except DataError:
            return ""
        header, found_probe, _ = whole.removeprefix(prompt).partition(probe)
        is_usable = found_probe and whole.startswith(prompt) and header.strip()
        return header if ignores_prompt and is_usable else ""

    # ------------------------------------------------------------ tokens

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt of the next response as tokens.

        Raises:
            DataError: The template rejects the messages or omits one, or they are not valid Unicode.
        """
        require_characters("".join(message["content"] or "" for message in messages))
        # Special tokens that a message spells out become placeholders, so that they are tokenised as plain text.
        safe, hidden_texts = self._hide_special_tokens(messages)
        safe, _ = self._format_calls(safe)  # which calls the template omits matters in training only
        text = self._prompt_text(safe)
        self._check_written(safe, text)
        return tuple(token for token, _, _ in self._tokenize(text, hidden_texts))  # without character offsets

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Tokenise a conversation up to its last response.

        A response begins where :meth:`prompt` ends. It ends with the last special token that the template writes after
        it, except for an end-of-text token that is only written at the end of a conversation.

        Raises:
            RewrittenTurnsError: The template changes earlier turns when a conversation continues.
            DataError: The template rejects the messages or omits one, or no response is to be learnt.
        """
        return self._encode_prepared(*self._prepare_messages(messages))

    def encode_turns(self, messages: Sequence[Message]) -> list[Encoded]:
        """Tokenise a conversation, or each response with its own prompt if the template changes earlier turns.

        Tool calls that the template does not write are counted once for the conversation, on the first result.

        Raises:
            DataError: As in :meth:`encode`.
        """
        safe, hidden_texts, learnt, unwritten_calls = self._prepare_messages(messages)
        try:
            return [self._encode_prepared(safe, hidden_texts, learnt, unwritten_calls)]
        except RewrittenTurnsError:
            if len(learnt) < 2:  # to encode this response alone would fail again
                raise
        turns = [self._encode_prepared(safe, hidden_texts, [number], unwritten=0) for number in learnt]
        return [replace(turns[0], unwritten_calls=unwritten_calls), *turns[1:]]

    def _prepare_messages(self, messages: Sequence[Message]) -> tuple[list[Message], list[str], list[int], int]:
        """Prepare messages for the template: hide the texts of special tokens, and format tool calls.

        A response is learnt unless it is the first message, is excluded by ``learn: False``, or has tool calls that the
        template does not write.

        Returns:
            The messages, the texts of hidden special tokens, the indices of responses to learn, and the number of
            responses whose tool calls the template does not write.
        """
        safe, hidden_texts = self._hide_special_tokens(messages)
        safe, unwritten = self._format_calls(safe)
        learnt = [  # the first message has no prompt
            number
            for number, message in enumerate(safe)
            if number and message["role"] == ASSISTANT and message.get("learn", True) and number not in unwritten
        ]
        if not learnt:
            why = "the base's chat template does not write its tool calls" if unwritten else "all are excluded"
            raise DataError(f"no response to learn: {why}; allowed: at least one after a message")
        return safe, hidden_texts, learnt, len(unwritten)

    def _encode_prepared(
        self, messages: list[Message], hidden_texts: list[str], learnt: Sequence[int], unwritten: int
    ) -> Encoded:
        """Tokenise prepared messages up to the last response to learn.

        Args:
            messages: Messages from :meth:`_prepare_messages`.
            hidden_texts: Texts of special tokens that the messages' placeholders stand for.
            learnt: Indices of the responses to learn, in order.
            unwritten: Number of responses whose tool calls the template does not write.

        Raises:
            RewrittenTurnsError: The template changes earlier turns when a conversation continues.
            DataError: The template omits a message.
        """
        text, places, masked = self._locate_responses(messages[: learnt[-1] + 1], learnt)
        tokens = self._tokenize_as_prompts(text, hidden_texts, [prompt_end for prompt_end, _, _ in places])
        responses = [self._span_of(place, tokens) for place in places]
        references = [
            self._reference_of(place, span, text, tokens, hidden_texts)
            for place, span in zip(places, responses, strict=True)
        ]
        _, last_stop = responses[-1]
        return Encoded(
            tokens=tuple(token for token, _, _ in tokens[:last_stop]),
            responses=tuple(responses),
            references=tuple(references),
            masked=None if masked is None else tuple(self._span_of(place, tokens) for place in masked),
            unwritten_calls=unwritten,
        )

    def _tokenize_as_prompts(
        self, text: str, hidden_texts: Sequence[str], prompt_ends: Sequence[int]
    ) -> list[TokenPlace]:
        """Tokenise a rendered text so that each prompt in it has the tokens that it has alone, as in generation.

        A prompt's last token may depend on the text after it. The text is split at the ends of such prompts.

        Args:
            text: The rendered conversation.
            hidden_texts: Texts of special tokens that the text's placeholders stand for.
            prompt_ends: Character offsets of the prompts' ends.
        """
        tokens = self._tokenize(text, hidden_texts)
        cuts = []
        for prompt_end in prompt_ends:
            tokens_of_prompt = tokens[: bisect_right(tokens, prompt_end, key=_stop_of)]
            if self._tokenize(text[:prompt_end], hidden_texts) != tokens_of_prompt:
                cuts.append(prompt_end)
        return self._tokenize(text, hidden_texts, cuts) if cuts else tokens

    def _span_of(self, place: Place, tokens: Sequence[TokenPlace]) -> Span:
        """Return the indices of a response's tokens, up to its last special token, or all if it has none.

        Args:
            place: Character offsets of the response.
            tokens: Tokens of the conversation, from :meth:`_tokenize`.
        """
        first_character, end_character, end_of_closing = place
        begin = bisect_right(tokens, first_character, key=_stop_of)
        # Text that closes the conversation counts only if the response itself has no special token.
        for last_character in (end_character, end_of_closing):
            end = bisect_right(tokens, last_character, key=_stop_of)
            special = [index for index in range(begin, end) if tokens[index][0] in self._special_tokens]
            if special:
                return begin, special[-1] + 1
        return begin, bisect_left(tokens, end_character, key=_start_of)

    def _reference_of(
        self, place: Place, span: Span, text: str, tokens: Sequence[TokenPlace], hidden_texts: Sequence[str]
    ) -> str:
        """Return the text of a response without special tokens at its end, to compare generated texts with it.

        Args:
            place: Character offsets of the response.
            span: Indices of its tokens, from :meth:`_span_of`.
            text: The rendered conversation.
            tokens: Tokens of the conversation, from :meth:`_tokenize`.
            hidden_texts: Texts of special tokens that the text's placeholders stand for.
        """
        (first, last, _), (start, stop) = place, span
        ids, num_removed = [token for token, _, _ in tokens[start:stop]], 0
        while ids and ids[-1] in self._special_tokens:
            ids.pop()
            num_removed += 1
        if any(token in self._special_tokens for token in ids):  # generated texts are shown without them
            return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        end_character = _start_of(tokens[stop - num_removed]) if num_removed else last
        return _restore_special_tokens(text[first:end_character], hidden_texts).strip()

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end a response: the end-of-text token, then the template's own if it is another.

        The template's own token is the last token of an example conversation.
        """
        example = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        last = self.encode(example).tokens[-1]
        end_of_text: Any = self.tokenizer.eos_token_id
        ends = [] if end_of_text is None else [end_of_text]
        if last in self._special_tokens and last not in ends:
            ends.append(last)
        return tuple(ends)

    # ------------------------------------------------------------ places of responses

    def _locate_responses(
        self, messages: Sequence[Message], learnt: Sequence[int]
    ) -> tuple[str, list[Place], list[Place] | None]:
        """Render a conversation, and find its responses in the text.

        Args:
            messages: The conversation; the last message is a response to learn.
            learnt: Indices of the responses to learn.

        Returns:
            The text, the character offsets of the responses to learn, and those of the other responses. The last are
            None if a response cannot be found in the text.

        Raises:
            RewrittenTurnsError: The text of an earlier response differs from that in a shorter conversation.
            DataError: The template omits a message.
        """
        text, final = self._render_final(messages)
        self._check_written(messages[:-1], text)
        final_start, _, _ = final
        if missing := _missing_part(messages[-1]["content"], text[final_start:], thoughts=True):
            raise _omission_error(messages, len(messages) - 1, missing)
        places, masked, some_unknown = [], [], False
        for number in (n for n, message in enumerate(messages[:-1]) if message["role"] == ASSISTANT):
            place = self._locate_earlier(messages, number, text)
            if number in learnt:
                start, end, _ = place or (0, 0, 0)
                if place is None or _missing_part(messages[number]["content"], text[start:end], thoughts=True):
                    raise RewrittenTurnsError(
                        "the base's chat template rewrites earlier turns when a conversation continues, so responses "
                        "have no fixed position; give conversations of one turn"
                    )
                places.append(place)
            elif place is not None:
                masked.append(place)
            else:
                # A response that opens the conversation follows no prompt, so its place is never known. That matters
                # only if it has ``learn: False``: then its tokens must be masked.
                some_unknown = some_unknown or number > 0 or not messages[number].get("learn", True)
        return text, [*places, final], None if some_unknown else masked

    def _locate_earlier(self, messages: Sequence[Message], number: int, text: str) -> Place | None:
        """Return where a response that is not the last begins and ends in a rendered conversation.

        Args:
            messages: The conversation.
            number: Index of the response.
            text: The rendered conversation.

        Returns:
            Character offsets: the start, the end, and the end once more. A :data:`Place` has two ends, which differ
            only for the last response, where text that closes the conversation may follow. None if the text does not
            begin with the response's prompt.
        """
        if not number:  # a response that opens the conversation has no prompt
            return None
        try:
            prompt = self._prompt_text(messages[:number])
            # The response ends where the shorter conversation and the whole one begin to differ.
            end = _common_prefix(self.render(messages[: number + 1]), text)
        except DataError:
            return None
        return (len(prompt), end, end) if text.startswith(prompt) and len(prompt) < end else None

    def _render_final(self, messages: Sequence[Message]) -> tuple[str, Place]:
        """Render a conversation for training: the prompt of its last response as in generation, then the response.

        Some templates write a conversation differently once it has a response. Then the response is appended to the
        prompt.

        Args:
            messages: The conversation; the last message is a response.

        Returns:
            The text, and three character offsets: the response's start, the response's end, and the end of the text.
            Some templates close a conversation by text that does not belong to the response.
        """
        whole, prompt = self.render(messages), self._prompt_text(messages[:-1])
        text = whole if whole.startswith(prompt) else prompt + self._response_after_prompt(messages, whole)
        try:
            # Closing text is missing if the conversation continues with another prompt.
            without_closing = _common_prefix(self.render(messages, add_prompt=True), whole)
            end = without_closing + len(text) - len(whole)  # the same place in `text`, counted from the end
        except DataError:  # the template refuses a prompt here, so closing text cannot be told from the response
            end = len(text)
        if end <= len(prompt):  # the two renderings differ before the response: no end of it was found
            end = len(text)
        return text, (len(prompt), end, len(text))

    def _response_after_prompt(self, messages: Sequence[Message], whole: str) -> str:
        """Return the last response with its end token, in a form that can follow the prompt.

        This is for templates whose rendered conversation does not begin with the prompt. Two kinds are supported: some
        templates open a thought (``<think>``) in the prompt and remove thoughts from responses, and some write the
        system message in a prompt only.

        Args:
            messages: The conversation; the last message is a response.
            whole: The rendered conversation.

        Raises:
            RewrittenTurnsError: The template is of neither kind.
        """
        question, answer = _PROBE.format(1), _PROBE.format(2)  # placeholders of the last two messages
        probed = [*messages[:-2], {**messages[-2], "content": question}]
        # The text between question and response, in a conversation and in a prompt.
        header = self.render([*probed, _response(answer)]).partition(question)[2].partition(answer)[0].rstrip(" ")
        prompt_header = self._prompt_text(probed).partition(question)[2]
        # The text from the beginning of the conversation to the response.
        before_response = self.render([*messages[:-1], _response(answer)]).partition(answer)[0].rstrip(" ")
        if not prompt_header.startswith(header) or not whole.startswith(before_response):
            raise RewrittenTurnsError(
                "the base's chat template rewrites earlier turns when a conversation continues: its prompt ends with "
                f"{prompt_header[-40:]!r}, but responses follow {header[-40:]!r}; give a base whose template is "
                "consistent"
            )
        response = whole[len(before_response) :]
        if _THINK not in prompt_header.rpartition(_END_THINK)[2]:  # the prompt opens no thought
            return response
        if response.lstrip().startswith(_THINK):  # the response keeps its thought, whose opening the prompt has already
            return response.lstrip().removeprefix(_THINK).lstrip("\n")
        content = messages[-1]["content"].lstrip()
        # The template removed the thought: insert it again, or an empty one.
        thought, ended, after = content.removeprefix(_THINK).lstrip("\n").rpartition(_END_THINK)
        space = after[: len(after) - len(after.lstrip())] if ended else "\n\n"
        opening = thought if ended else "\n"
        return f"{opening}{_END_THINK}{space}{response.lstrip()}"

    # ------------------------------------------------------------ what a template leaves out

    def _check_written(self, messages: Sequence[Message], text: str) -> None:
        """Check that a rendered text contains all messages and tools, as some templates leave out roles or tools.

        Thoughts of responses may be missing: many templates remove them from earlier turns.

        Args:
            messages: The conversation.
            text: The conversation as the template writes it.

        Raises:
            DataError: A message or a tool is missing.
        """
        if not self.own:  # the plain template writes everything
            return
        flat, omitted = _without_spaces(text), self._omitted_by_role(messages)
        for number, message in enumerate(messages):
            content = message["content"]
            required = content.rpartition(_END_THINK)[2] if message["role"] == ASSISTANT else content
            # A short content may stand in the text by chance, so messages omitted by their role are looked up.
            missing = content if number in omitted else _missing_part(required, flat)
            if missing.strip():
                raise _omission_error(messages, number, missing)
        for tool in (messages[0].get("tools") if messages else None) or ():
            name = str((tool.get("function") or tool).get("name", ""))
            if _missing_part(name, flat):
                raise DataError(
                    f"the base's chat template leaves out the tools ({name}); give a base whose template writes tools, "
                    "or leave out tools"
                )

    def _omitted_by_role(self, messages: Sequence[Message]) -> frozenset[int]:
        """Return the indices of messages that the template omits because of their role.

        Each content is replaced by a placeholder, the conversation is rendered, and missing placeholders are found.
        Results are cached by the messages' roles and by which messages have text. Tool calls can change a result too,
        so results for conversations with tool calls are not cached.
        """
        key = tuple((message["role"], bool(message["content"].strip())) for message in messages)
        has_calls = any(message.get("tool_calls") for message in messages)
        if has_calls or key not in self._omitted_by_roles:
            probed = [
                {**message, "content": _PROBE.format(number)} if has_text else message
                for number, (message, (_, has_text)) in enumerate(zip(messages, key, strict=True))
            ]
            try:
                text = self.render(probed, add_prompt=True)
            except DataError:  # the template checks contents, so placeholders do not work
                return frozenset()
            omitted = frozenset(
                number for number, (_, has_text) in enumerate(key) if has_text and _PROBE.format(number) not in text
            )
            if has_calls:
                return omitted
            self._omitted_by_roles[key] = omitted
        return self._omitted_by_roles[key]

    @cached_property
    def _omitted_by_roles(self) -> dict[tuple[tuple[str, bool], ...], frozenset[int]]:
        """Cache of :meth:`_omitted_by_role` by the messages' roles and whether they have text."""
        return {}

    def _format_calls(self, messages: list[Message]) -> tuple[list[Message], frozenset[int]]:
        """Return the messages with tool calls in the template's format; find calls that the template omits.

        Some templates need the arguments of a call as a mapping, others as JSON. Both formats are tried. The result has
        the format in which the template writes the calls of more messages.

        Returns:
            The messages, and the indices of messages with calls of which the template omits a name or an argument.

        Raises:
            DataError: The template rejects both formats.
        """
        calls_tools = [number for number, message in enumerate(messages) if message.get("tool_calls")]
        if not calls_tools:
            return messages, frozenset()
        options, refusal = list[tuple[list[Message], frozenset[int]]](), None
        for as_json in (False, True):
            formatted = [_with_arguments(message, as_json) for message in messages]
            try:
                rendered = _without_spaces(self.render(formatted))
            except DataError as error:
                refusal = error
                continue
            unwritten = frozenset(number for number in calls_tools if not _contains_calls(messages[number], rendered))
            options.append((formatted, unwritten))
        if refusal is not None and not options:
            raise refusal

        def num_unwritten(option: tuple[list[Message], frozenset[int]]) -> int:
            _, unwritten_of_option = option
            return len(unwritten_of_option)

        return min(options, key=num_unwritten)

    # ------------------------------------------------------------ special tokens in messages

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        """Texts of the tokenizer's special tokens by ID."""
        return {number: t.content for number, t in self.tokenizer.added_tokens_decoder.items() if t.special}

    @cached_property
    def _hidden_pattern(self) -> re.Pattern[str]:
        """Pattern of the texts to hide: those of special tokens, and the opening of a placeholder."""
        return re.compile("|".join(map(re.escape, [*self._special_tokens.values(), _OPEN])))

    def _hide_special_tokens(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        """Replace special tokens in messages by numbered placeholders, so that a user's text cannot forge a turn.

        After rendering, :meth:`_tokenize` tokenises the replaced texts as plain text. Roles stay as they are.

        Returns:
            The messages, and the replaced texts by number.
        """
        hidden_texts: list[str] = []

        def placeholder(found: re.Match[str]) -> str:
            hidden_texts.append(found[0])
            return f"{_OPEN}{len(hidden_texts) - 1}{_CLOSE}"

        def hide(value: object) -> Any:
            """Replace special tokens in all strings of a JSON value."""
            if isinstance(value, str):
                return self._hidden_pattern.sub(placeholder, value)
            if isinstance(value, Mapping):
                return {key: hide(item) for key, item in value.items()}
            return [hide(item) for item in value] if isinstance(value, list | tuple) else value

        safe: list[Message] = [
            {**hide({**message, "content": message["content"] or ""}), "role": message["role"]} for message in messages
        ]
        return safe, hidden_texts

    def _tokenize(self, text: str, hidden_texts: Sequence[str], cuts: Sequence[int] = ()) -> list[TokenPlace]:
        """Tokenise a rendered text in which placeholders stand for spelled-out special tokens of messages.

        Such a spelling, say "<|im_end|>" in a user's message, becomes tokens of plain text, never the special token.

        Args:
            text: The text with placeholders, each a number between two delimiters.
            hidden_texts: The spellings that placeholders stand for, by number.
            cuts: Character offsets at which to split the text before tokenising, so that no token crosses them.

        Returns:
            ``(token, start, end)`` of each token, with character offsets in ``text``. All tokens of a hidden text have
            the offsets of its placeholder.
        """
        tokens, piece_start = [], 0
        for first, last in pairwise([0, *cuts, len(text)]):
            # With a group in the pattern, re.split returns text and the numbers in placeholders alternately.
            for index, piece in enumerate(re.split(f"{_OPEN}(\\d+){_CLOSE}", text[first:last])):
                is_placeholder = index % 2 == 1
                if is_placeholder:
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


def _start_of(token: TokenPlace) -> int:
    """Return the character offset of a token's start."""
    return token[1]


def _stop_of(token: TokenPlace) -> int:
    """Return the character offset of a token's end."""
    return token[2]


def _response(content: str) -> Message:
    """Return a message of the assistant."""
    return {"role": ASSISTANT, "content": content}


def _common_prefix(first: str, second: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _restore_special_tokens(text: str, hidden_texts: Sequence[str]) -> str:
    """Replace placeholders by the texts of special tokens."""
    return re.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda found: hidden_texts[int(found[1])], text)


def _without_spaces(text: str) -> str:
    """Return a text without white space, which templates strip and add."""
    return "".join(text.split())


def _missing_part(content: str, text: str, *, thoughts: bool = False) -> str:
    """Return the first part of a message's content that a rendered text lacks, verbatim and as JSON; else "".

    White space is ignored, because templates strip and add it.

    Args:
        content: The message's content.
        text: The rendered text.
        thoughts: Look for the thoughts (``<think>...</think>``) and the text around them one by one; otherwise the
            only part is the whole content.
    """
    flat = _without_spaces(text)
    for part in re.split("</?think>", content) if thoughts else [content]:
        as_json = json.dumps(part, ensure_ascii=False)[1:-1]  # without its quotes
        if _without_spaces(part) not in flat and _without_spaces(as_json) not in flat:
            return part
    return ""


def _omission_error(messages: Sequence[Message], number: int, missing: str) -> DataError:
    """Return the error for a message that the chat template omits.

    Args:
        messages: The conversation.
        number: Index of the omitted message.
        missing: The part of the message that the rendered text lacks.
    """
    role, shown = messages[number]["role"], " ".join(missing.split())
    return DataError(
        f"the base's chat template leaves out the {role} message (messages[{number}]: {shown!r:.60}); give a base "
        f"whose template writes the role {role} at this position, or leave the message out"
    )


def _with_arguments(message: Message, as_json: bool) -> Message:
    """Return a message in one of the two formats of tool calls that templates expect.

    Args:
        message: The message.
        as_json: Convert the arguments of tool calls to JSON texts; otherwise the message is returned unchanged.
    """
    if not as_json or not message.get("tool_calls"):
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
    return not any(
        _missing_part(text, rendered)
        for call in message["tool_calls"]
        for text in (call["function"]["name"], *_strings_of(call["function"].get("arguments")))
    )


def _strings_of(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings_of(item)
