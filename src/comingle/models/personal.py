"""One user's model: the frozen base with that user's adapters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from comingle.adapters import watching
from comingle.errors import DataError
from comingle.evaluation.perplexity import Score, score_streams
from comingle.evaluation.routing import Routing, pieces, route
from comingle.models.adapted import AdaptedModel
from comingle.trees import Tree


@dataclass(frozen=True, kw_only=True)
class PersonalModel:
    """Speaks and scores as one user's model. ``row`` is the user's row in the federation."""

    name: str
    model: AdaptedModel
    tensors: Tree
    row: int

    @torch.no_grad()
    def generate(
        self, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.0, top_p: float = 0.95, seed: int = 0
    ) -> str:
        """Continue ``prompt``; greedy at temperature 0, otherwise nucleus sampling from ``seed``.

        Returns the continuation without the prompt.
        """
        tokenizer, device = self.model.base.tokenizer, self.model.base.device
        assert tokenizer is not None
        speak = cast(Callable[..., Tensor], self.model.network.generate)  # torch types every attribute as a Tensor
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(device)
        if ids.shape[1] == 0:  # an empty prompt: start from the token that separates documents
            start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            ids = torch.tensor([[start]], device=device)
        self.model.adapters.bind(self.tensors, [self.row])
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {}
        # Lengths change with every token: compiling for each of them would not pay.
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(seed)
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
            return self.model.losses(self.tensors, [self.row], windows.to(self.model.base.device))[0]

        return score_streams(losses, [tokens], [0], context=context, batch=16, slots=1)[0]

    def route(self, text: str | Tensor, *, context: int = 128) -> Routing:
        """Which expert each token of ``text`` (or of a stream of tokens) goes to, in every layer.

        Raises:
            DataError: the method has no routers, or the text has no tokens.
        """
        tokenizer, adapters = self.model.base.tokenizer, self.model.adapters
        assert tokenizer is not None
        if not watching.routed(adapters):
            raise DataError(f"user {self.name!r}: no routers in this model, so tokens have no experts to choose from")
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
        tokens = torch.as_tensor(encoded, dtype=torch.int64)
        if not len(tokens):
            raise DataError(f"user {self.name!r}: a text without tokens cannot be routed")
        names = watching.expert_names(adapters, self.row)

        def forward(part: Tensor) -> Tensor:
            adapters.bind(self.tensors, [self.row])
            self.model.backbone(input_ids=part.view(1, -1).to(self.model.base.device), use_cache=False)
            return watching.gates(adapters)[:, 0, :, : len(names)]

        with watching.watched(adapters), torch.compiler.set_stance("force_eager"):
            gates = route(forward, tokens, context=context)
        return Routing(tokens=tuple(pieces(tokenizer, tokens.tolist())), experts=tuple(names), gates=gates)
