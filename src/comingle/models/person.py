"""What everybody has in the end: a language model or a net of one's own, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from comingle.data.templates import Message
from comingle.evaluation.losses import SampleScore
from comingle.evaluation.perplexity import Score
from comingle.evaluation.routing import Routing
from comingle.models.about import Exported
from comingle.models.pretrained import GenerationConfig, PreTrainedModel
from comingle.utils.errors import DataError


@dataclass(frozen=True, kw_only=True, repr=False)
class Personal:
    """One user's model: a :class:`comingle.models.personal.PersonalModel`, or of samples a
    :class:`comingle.models.personal_net.PersonalNet`.

    Which of them it is, a recipe says as it is read, so both are asked in the same way.

    Raises:
        DataError: by what only the other one can do.
    """

    name: str
    model: Any

    @overload
    def generate(
        self, prompt: str | Sequence[Message], generation_config: GenerationConfig | None = None, **options: Any
    ) -> str: ...

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], generation_config: GenerationConfig | None = None, **options: Any
    ) -> list[str]: ...

    def generate(self, prompt: Any, generation_config: GenerationConfig | None = None, **options: Any) -> Any:
        """A text that goes on from ``prompt``, or a response; of a language model."""
        raise self._has_no("generate")

    def perplexity(self, text: str, *, context: int = 128) -> float:
        """Perplexity of a text; of a language model."""
        raise self._has_no("perplexity")

    def logits(self, tokens: Tensor) -> Tensor:
        """What it says of each next token; of a language model."""
        raise self._has_no("logits")

    def score(self, tokens: Tensor, *, context: int) -> Score:
        """Loss of a stream of tokens; of a language model."""
        raise self._has_no("score")

    def route(self, text: str | Tensor, *, context: int = 128) -> Routing:
        """Which expert each token goes to; of a language model with routers."""
        raise self._has_no("route")

    def merge(self) -> PreTrainedModel:
        """A plain model of transformers; of a language model."""
        raise self._has_no("merge")

    def export(
        self, folder: str | Path, *, format: str = "transformers", dtype: str | None = None, force: bool = False
    ) -> Exported:
        """Write the model for other programs; of a language model."""
        raise self._has_no("export")

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs for inputs; of a net."""
        raise self._has_no("predict")

    def evaluate(self, samples: Any) -> SampleScore:
        """Mean loss and accuracy; of a net."""
        raise self._has_no("evaluate")

    def _has_no(self, asked: str) -> DataError:
        here = type(self)
        has = sorted(name for name, of in vars(Personal).items() if callable(of) and getattr(here, name) is not of)
        has = ", ".join(name for name in has if not name.startswith("_"))
        return DataError(f"user {self.name!r}: no {asked} of a {here.__name__}; it has model, {has}")
