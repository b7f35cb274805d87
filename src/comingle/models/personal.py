"""One user's language model: the frozen base with that user's adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from comingle.adapters import watching
from comingle.adapters.clustered import FloralModel
from comingle.errors import DataError
from comingle.evaluation.perplexity import Score, score_streams
from comingle.evaluation.routing import Routing, pieces, route
from comingle.models.adapted import AdaptedModel
from comingle.models.base import PreTrainedModel
from comingle.models.mixed import MixedLanguageModel
from comingle.models.owning import own_language_model
from comingle.trees import Tree


@dataclass(frozen=True, kw_only=True)
class PersonalModel:
    """Speaks and scores as one user's model. ``row`` is the user's row in the federation."""

    name: str
    model: AdaptedModel | MixedLanguageModel
    tensors: Tree
    row: int

    @contextmanager
    def speaking(self) -> Iterator[PreTrainedModel]:
        """The causal language model; within, and only there, it computes what this user's model does."""
        if isinstance(self.model, AdaptedModel):
            self.model.adapters.bind(self.tensors, [self.row])
            yield self.model.network
        else:
            with self._own.mixing(self._shares):
                yield cast(PreTrainedModel, self._own.model)

    @cached_property
    def _own(self) -> FloralModel:
        assert isinstance(self.model, MixedLanguageModel)
        return own_language_model(self.model, self.tensors)

    @property
    def _shares(self) -> Tensor:
        """The user's mixture."""
        assert isinstance(self.model, MixedLanguageModel)
        return self.model.shares(self.tensors)[0]

    def merge(self) -> PreTrainedModel:
        """A plain copy of the base's architecture, in whose weights are this user's: for ``save_pretrained``.

        In bfloat16 the sums are rounded, so it is not quite what :meth:`generate` speaks as.

        Raises:
            DataError: experts are mixed behind a nonlinearity, so no weight can hold them.
        """
        if isinstance(self.model, AdaptedModel):
            raise DataError(f"user {self.name!r}: experts cannot be merged into weights; client-level mixtures can")
        return cast(PreTrainedModel, self._own.merge(self._shares))

    @torch.no_grad()
    def generate(
        self, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.0, top_p: float = 0.95, seed: int = 0
    ) -> str:
        """Continue ``prompt``; greedy at temperature 0, otherwise nucleus sampling from ``seed``.

        Returns the continuation without the prompt.
        """
        tokenizer, device = self.model.base.tokenizer, self.model.base.device
        assert tokenizer is not None
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(device)
        if ids.shape[1] == 0:  # an empty prompt: start from the token that separates documents
            start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            ids = torch.tensor([[start]], device=device)
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {}
        # Lengths change with every token: compiling for each of them would not pay.
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"), self.speaking() as network:
            torch.manual_seed(seed)
            speak = cast(Callable[..., Tensor], network.generate)  # torch types every attribute as a Tensor
            out = speak(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
                **sampling,
            )
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def perplexity(self, text: str, *, context: int = 128) -> float:
        """Perplexity of ``text`` in windows of ``context`` tokens; NaN for fewer than two tokens."""
        tokenizer = self.model.base.tokenizer
        assert tokenizer is not None
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int32)
        if len(ids) < 2:
            return math.nan
        return self.score(ids, context=context).perplexity

    def score(self, tokens: Tensor, *, context: int) -> Score:
        """Score a stream of tokens in one pass."""

        def losses(rows: object, windows: Tensor) -> Tensor:
            return self.model.predict(self.tensors, [self.row], windows.to(self.model.base.device))

        return score_streams(losses, [tokens], [0], context=context, batch=16, slots=1)[0]

    def route(self, text: str | Tensor, *, context: int = 128) -> Routing:
        """Which expert each token of ``text`` (or of a stream of tokens) goes to, in every layer.

        Raises:
            DataError: the method has no routers, or the text has no tokens.
        """
        model, tokenizer = self.model, self.model.base.tokenizer
        assert tokenizer is not None
        if not isinstance(model, AdaptedModel):
            raise DataError(
                f"user {self.name!r}: one mixture for all tokens here, so they have no experts to choose from"
            )
        if not watching.routed(adapters := model.adapters):
            raise DataError(f"user {self.name!r}: no routers in this model, so tokens have no experts to choose from")
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
        tokens = torch.as_tensor(encoded, dtype=torch.int64)
        if not len(tokens):
            raise DataError(f"user {self.name!r}: a text without tokens cannot be routed")
        names = watching.expert_names(adapters, self.row)

        def forward(part: Tensor) -> Tensor:
            adapters.bind(self.tensors, [self.row])
            model.backbone(input_ids=part.view(1, -1).to(model.base.device), use_cache=False)
            return watching.gates(adapters)[:, 0, :, : len(names)]

        with watching.watched(adapters), torch.compiler.set_stance("force_eager"):
            gates = route(forward, tokens, context=context)
        return Routing(tokens=tuple(pieces(tokenizer, tokens.tolist())), experts=tuple(names), gates=gates)
