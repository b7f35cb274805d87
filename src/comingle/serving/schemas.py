"""What the OpenAI API's requests may say: the part of the standard that there is, and what is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from comingle.models.sampling import Sampling

_LONGEST_STOP = 1000


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _joined(value: Any) -> Any:
    """Parts of text as one; a part that is no text stays, and is refused."""
    if isinstance(value, list) and all(_is_text(part) for part in value):
        return "".join(part["text"] for part in value)
    return value


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]], BeforeValidator(_as_list), Field(max_length=4)
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """Whether a last chunk says how many tokens there were."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Request(_Strict):
    """What both kinds of completions have. What changes nothing here is taken at its default only, or as a label."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops = []
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1)
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = None
    # As other servers of this API have them beside the standard.
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)

    @model_validator(mode="after")
    def _is_streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    def sampling(self, new: int, seed: int) -> Sampling:
        """With the standard's defaults: temperature 1, nothing cut off."""
        return Sampling(
            max_new_tokens=new,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            stop=tuple(self.stop),
            seed=seed,
        )


class ChatMessage(_Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined)]
    name: None = None  # templates have no place for it

    def plain(self) -> dict[str, str]:
        """As the base's templates know it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _has_probabilities(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        return self

    @property
    def wanted(self) -> int | None:
        """New tokens at most."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many likeliest tokens come with each token's probability."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Request):
    """``POST /v1/completions``; a prompt is a text, tokens, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def wanted(self) -> int | None:
        """New tokens at most; the standard's default."""
        return self.max_tokens or 16

    @property
    def likeliest(self) -> int | None:
        """How many likeliest tokens come with each token's probability."""
        return self.logprobs


class RouteRequest(_Strict):
    """``POST /v1/route``, which is this server's own: where the tokens of an answer went."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    prompt: str | None = None
    text: str = Field(min_length=1)
