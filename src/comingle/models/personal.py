"""The model of one user, for use outside the federation, and merging its adapters into the base model's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from comingle.models import routing
from comingle.models.adapted import AdaptedModel
from comingle.models.base import Base
from comingle.models.chat_templates import ROLES, ChatTemplate, Message, require_characters
from comingle.models.ensembles import NO_SINGLE_MODEL, EnsembleModel
from comingle.models.floral.model import FloralModel
from comingle.models.generation import as_tuple, check_context_length, continue_texts, read_sampling
from comingle.models.hardware import torch_defaults, without_compiling
from comingle.models.pretrained import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.routing import Routing, pieces, route
from comingle.models.scoring import SampleScore, Score, score_streams
from comingle.models.stacked import MixedLanguageModel
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.registry import load_object
from comingle.utils.trees import Tree

WIDE = torch.float32
"""The narrowest dtype in which changes of weights are computed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of one linear's weight in the base by a user's adapters: ``W + sum_j shares_j B_j A_j`` over experts j.

    Args:
        name: Name of the linear in the base's state dict.
        layer: Number of the decoder layer.
        key: "gate", "up" or "down" for a linear of an expert, otherwise empty.
        transposed: The base stores W as (d_in, d_out).
        a: Factors A, float32 or wider.
        b: Factors B, transposed, in the dtype of ``a``.
        shares: Weight of each expert times the LoRA scale.
    """

    name: str
    layer: int
    key: str
    transposed: bool
    a: Float[Tensor, "experts rank d_in"]
    b: Float[Tensor, "experts rank d_out"]
    shares: Float[Tensor, " experts"]

    def summed(self) -> Float[Tensor, "d_out d_in"]:
        """Return ``sum_j shares_j B_j A_j``."""
        return torch.einsum("e,ero,eri->oi", self.shares, self.b, self.a)

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> None:
        """Add the change in place to the base's weight W, which is (d_in, d_out) if ``transposed``."""
        change = self.summed()
        if self.transposed:
            change = change.mT
        weight.add_(change.to(weight))

    def only_expert(self, expert: int) -> Change:
        """Return the change of a single expert, with the share that it has in the sum."""
        selected = slice(expert, expert + 1)  # not an index, so that the expert axis remains
        return replace(self, a=self.a[selected], b=self.b[selected], shares=self.shares[selected])

    def reweighted(self, weights: Float[Tensor, " experts"]) -> Change:
        """Return the change with each expert's share multiplied by its weight."""
        return replace(self, shares=self.shares * weights.to(self.shares))


def changes_of_adapted(model: AdaptedModel, tensors: Tree, row: int) -> list[Change]:
    """Return the change of each adapted linear's weight by one user's adapters, for merging and exports.

    The change of an MLP's linear has the factors of all experts, each with the LoRA scale as its weight. So it is a sum
    over experts, not yet their mean: :func:`average_experts` divides the weights by the number of experts. As a side
    effect, the user's tensors are bound to the model's adapters.

    Args:
        model: The model of all users.
        tensors: The user's tensors ``(1, ...)`` by name.
        row: Index of the user among all users.
    """
    model.adapters.bind(tensors, [row])
    module_names = _module_names(model.base.model)
    present = model.adapters.present[row]
    num_experts = int(present.sum())
    changes = []
    for name, lora in model.adapters.attention.items():
        layer, shares = _layer_number(name), _equal_shares(1, lora.scale)  # no experts: one term B A, times the scale
        a, b = (_widen(factor) for factor in lora.factors)  # (1, rank, ...): the user axis serves as the expert axis
        changes.append(_change_of(module_names, lora.linear, layer, "", a, b, shares))
    for name, mlp in model.adapters.experts.items():
        layer, shares = _layer_number(name), _equal_shares(num_experts, mlp.scale)
        for key, linear in (*mlp.first.items(), ("down", mlp.last)):
            a, b = (factor.squeeze(0) for factor in mlp.factors[key])  # (experts, rank, ...) of the only bound user
            a, b = _widen(a)[present.to(a.device)], _widen(b)[present.to(b.device)]
            changes.append(_change_of(module_names, linear, layer, key, a, b, shares))
    return _trim_ranks(changes)  # without padding up to the largest rank of a user


def average_experts(changes: Sequence[Change]) -> list[Change]:
    """Return the changes of weights with each MLP's E experts averaged: every expert's change gets the weight 1 / E.

    Changes of attention, which has no experts, are unchanged.

    Args:
        changes: Changes of the weights of linear layers; those of an MLP have the key "gate", "up" or "down".
    """
    averaged = []
    for change in changes:
        is_of_mlp = change.key != ""
        if is_of_mlp:
            experts = len(change.a)
            change = change.reweighted(_equal_shares(experts, 1 / experts))
        averaged.append(change)
    return averaged


def changes_of_mixed(model: MixedLanguageModel, tensors: Tree) -> list[Change]:
    """Return the change of each adapted linear's weight in a user's client-level mixture.

    The clusters' adaptors are the experts of a change; its shares are the user's mixture weights pi times alpha.

    Args:
        model: The users' model.
        tensors: The tensors of one user, ``(1, ...)`` by name.
    """
    (mixture,) = model.shares(tensors)
    mixture = _widen(mixture)
    module_names = _module_names(model.base.model)
    changes = []
    for name, adapted in model.of_one_user(tensors).layers().items():
        a = _widen(adapted.get_parameter("a").detach())
        b = _widen(adapted.get_parameter("b").detach()).mT
        shares = adapted.alpha * adapted.mixture_of_layer(mixture)
        key = ""  # as for attention, so that `average_experts` keeps the shares
        changes.append(_change_of(module_names, adapted.base, _layer_number(name), key, a, b, shares))
    return changes


def _change_of(
    module_names: dict[int, str], linear: nn.Module, layer: int, key: str, a: Tensor, b: Tensor, shares: Tensor
) -> Change:
    """Return the change ``sum_j shares_j B_j A_j`` of one linear of the base, with its tensors on the CPU.

    Args:
        module_names: Name of each weight's module in the base, by the weight's ``id``.
        linear: The linear.
        layer: Number of its decoder layer.
        key: "gate", "up" or "down" for a linear of an MLP, otherwise empty.
        a: Factors A, ``(experts, rank, d_in)``.
        b: Factors B, transposed, ``(experts, rank, d_out)``.
        shares: Weight of each expert times the LoRA scale.
    """
    name = module_names[id(linear.weight)]
    transposed = not isinstance(linear, nn.Linear)  # GPT-2's Conv1D stores (d_in, d_out)
    a, b, shares = (t.detach().cpu() for t in (a, b, shares))
    return Change(name=name, layer=layer, key=key, transposed=transposed, a=a, b=b, shares=shares.to(a))


def _module_names(model: PreTrainedModel) -> dict[int, str]:
    """Map the ``id`` of each weight to its module's name, such as "model.layers.0.mlp.up_proj"."""
    return {id(weight): name.removesuffix(".weight") for name, weight in model.named_parameters()}


def _layer_number(name: str) -> int:
    """Return the number in a name such as "layers.3.mlp"."""
    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    return numbers[0]


def _equal_shares(experts: int, value: float) -> Float[Tensor, " experts"]:
    """Return mixture weights of a layer's experts that are all equal to ``value``."""
    return torch.full((experts,), value, dtype=torch.float64)


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor in at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, WIDE))


def _trim_ranks(changes: Sequence[Change]) -> list[Change]:
    """Remove the last ranks that are zero in all changes: padding of a user with a smaller rank than others."""
    rank = max(_used_rank(change) for change in changes)
    return [replace(change, a=change.a[:, :rank], b=change.b[:, :rank]) for change in changes]


def _used_rank(change: Change) -> int:
    """Return how many leading ranks of A and B suffice, as the products of all later ones are zero; at least 1.

    A user with a smaller rank than other users has zeros in the last ranks.
    """
    largest_a = change.a.abs().amax((0, 2))  # of each rank, over experts and columns
    largest_b = change.b.abs().amax((0, 2))
    nonzero_ranks = (largest_a * largest_b).nonzero()
    if len(nonzero_ranks) == 0:
        return 1
    last = int(nonzero_ranks.max())
    return last + 1


def why_not_merged(model: AdaptedModel, row: int) -> str:
    """Return why a user's model cannot be merged into plain weights of the base, or an empty string if it can.

    Args:
        model: The model of all users.
        row: Index of the user among them.
    """
    experts = int(model.adapters.present[row].sum())
    if experts == 1:
        return ""
    if routing.routed(model.adapters):
        return f"{experts} experts are chosen token by token"
    if any(mlp.mix == "output" for mlp in model.adapters.experts.values()):
        return f"{experts} experts are averaged after the MLP's nonlinearity"
    return ""  # experts are averaged in each linear layer


def merge_adapters(model: AdaptedModel, tensors: Tree, row: int) -> PreTrainedModel:
    """Return a copy of the base with ``W + s / E sum_j B_j A_j`` in place of every adapted weight W.

    s is the LoRA scale; the sum is over the user's E experts in MLPs, and has one term in attention. Requires that
    :func:`why_not_merged` returns "".

    Args:
        model: The model of all users.
        tensors: The user's tensors ``(1, ...)`` by name.
        row: Index of the user among all users.
    """
    merged = copy.deepcopy(model.base.model)
    for change in average_experts(changes_of_adapted(model, tensors, row)):
        change.add_to(merged.get_parameter(f"{change.name}.weight"))
    return merged


Losses = Callable[[Sequence[int], Tensor], Float[Tensor, "slots batch context"]]
Gates = Callable[[], Float[Tensor, "layers slots n experts"]]


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts that a run knows about a user's model besides its weights.

    Args:
        method: Name of the method.
        kind: Kind of the data.
        users: Number of users.
        counts: Amounts of data by split and unit, such as ``train_tokens``.
        scores: Measured scores, such as ``test_perplexity``.
        validate: Function that scores losses on the user's validation data, which it reads when it is called.
    """

    method: str
    kind: str
    users: int
    counts: Mapping[str, int]
    scores: Mapping[str, float]
    validate: Callable[[Losses, Gates | None], Any]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export.

    Args:
        folder: The written folder.
        format: Name of the format, such as "transformers".
        form: A sentence that describes what the files represent.
        lost: If the exported model is approximate, perplexities on the user's validation data, with and without the
            approximation; else empty.
    """

    folder: Path
    format: str
    form: str
    lost: Mapping[str, float] = field(default_factory=dict)


CONVERSATIONS = "conversations"
"""Kind of data of models that answer messages; those of other kinds continue texts."""


def chat_template_of(base: Base, model_info: ModelInfo | None) -> ChatTemplate | None:
    """Return the chat template of a user's model, or None if it is not for conversations.

    Without a template of the tokenizer, a model that was trained on conversations has comingle's plain template.

    Args:
        base: The pretrained model, with its tokenizer if it has one.
        model_info: Facts from the run, such as the kind of its data; None without a run.
    """
    if base.tokenizer is None:
        return None
    template = ChatTemplate(base.tokenizer, base.date)
    was_trained_on_conversations = model_info is not None and model_info.kind == CONVERSATIONS
    if template.has_own_template or was_trained_on_conversations:
        return template
    return None


def chat_ends(base: Base) -> tuple[int, ...]:
    """Return the tokens that end a response: those of the chat template, then those of the base's generation settings.

    Raises:
        DataError: The base's template rejects a conversation of one turn, its tokenizer has no end-of-text token, or
            that token has no row in the embedding.
    """
    assert base.tokenizer is not None
    template_ends = ChatTemplate(base.tokenizer, base.date).ends()
    base.require_rows(template_ends, "the end of a response")
    without_duplicates = dict.fromkeys([*template_ends, *base.ends])
    return tuple(without_duplicates)


def turn_end(base: Base, model_info: ModelInfo | None) -> int | None:
    """Return the token that ends a response in the model's chat template; None without a template or such a token.

    Args:
        base: The pretrained model, with its tokenizer if it has one.
        model_info: Facts from the run, such as the kind of its data; None without a run.
    """
    template = chat_template_of(base, model_info)
    if template is None:
        return None
    try:
        ends = template.ends()  # the end-of-text token, then the template's own end if that is another token
    except DataError:  # the template rejects a conversation of one turn
        return None
    if not ends:
        return None
    return ends[-1]


def generation_of(base: Base, model_info: ModelInfo | None) -> GenerationConfig:
    """Return the generation settings of an exported model, with the same end tokens as the user's model.

    The end tokens are those of the base's settings, then the one that ends a response in the chat template.

    Args:
        base: The pretrained model, with its tokenizer if it has one.
        model_info: Facts from the run; None without a run.
    """
    config = copy.deepcopy(base.model.generation_config)
    assert config is not None
    ends = []
    if config.eos_token_id is not None:
        ends += as_tuple(config.eos_token_id)
    ends += base.ends
    response_end = turn_end(base, model_info)
    if response_end is not None:
        ends.append(response_end)
    unique_ends = list(dict.fromkeys(ends))
    if len(unique_ends) == 1:
        (config.eos_token_id,) = unique_ends
    else:
        config.eos_token_id = unique_ends or None
    return config


@dataclass(frozen=True, kw_only=True, repr=False)
class Personal:
    """The model of one user; each method raises an error unless the subclass for the kind of data overrides it.

    Subclasses are :class:`comingle.models.personal.PersonalModel` for language and
    :class:`comingle.training.kinds.samples.PersonalNet` for samples.

    Raises:
        DataError: The method belongs to the other kind.
    """

    name: str
    model: Any

    @overload
    def generate(
        self, prompt: str | Sequence[Message], generation_config: GenerationConfig | None = None, **options: Any
    ) -> str: ...  # a prompt, or a conversation: a text

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], generation_config: GenerationConfig | None = None, **options: Any
    ) -> list[str]: ...  # several prompts: a text for each

    def generate(self, prompt: object, generation_config: GenerationConfig | None = None, **options: Any) -> object:
        """Refuse to generate text: only language models can, which override this.

        Args:
            prompt: A text, a list of texts, or messages.
            generation_config: Settings of transformers.
            options: Settings by name, which override ``generation_config``.

        Raises:
            DataError: The model is not a language model.
        """
        raise self._unsupported("generate")

    def perplexity(self, text: str, *, context: int = 128) -> float:
        """Refuse to compute the perplexity of a text: only language models can, which override this."""
        raise self._unsupported("perplexity")

    def logits(self, tokens: Tensor) -> Tensor:
        """Refuse to compute logits of next tokens: only language models can, which override this."""
        raise self._unsupported("logits")

    def score(self, tokens: Tensor, *, context: int) -> Score:
        """Refuse to compute the loss on tokens: only language models can, which override this."""
        raise self._unsupported("score")

    def route(self, text: str | Tensor, *, context: int = 128) -> Routing:
        """Refuse to show how a router weighs experts for each token: only language models can, which override this."""
        raise self._unsupported("route")

    def merge(self) -> PreTrainedModel:
        """Refuse to return a plain transformers model: only language models can, which override this."""
        raise self._unsupported("merge")

    def export(
        self,
        folder: str | Path,
        *,
        format: str = "transformers",
        dtype: str | None = None,
        force: bool = False,
        repository: str = "",
    ) -> Exported:
        """Refuse to write the model for other programs: only language models can be exported, which override this.

        Args:
            folder: A new folder.
            format: Format of the files.
            dtype: Number format of the weights; None for the base's.
            force: Replace an earlier export.
            repository: Name on the Hugging Face hub to which the folder will be uploaded, for its model card.

        Raises:
            DataError: The model is not a language model.
        """
        raise self._unsupported("export")

    def predict(self, inputs: Tensor | str | Path | Sequence[str | Path]) -> Tensor:
        """Refuse to compute outputs for inputs such as images: only nets can, which override this."""
        raise self._unsupported("predict")

    def evaluate(self, samples: object = None) -> SampleScore:
        """Refuse to compute loss and accuracy on samples: only nets can, which override this."""
        raise self._unsupported("evaluate")

    def _unsupported(self, method: str) -> DataError:
        """Return the error for a method that this subclass does not override; it lists the methods that it overrides.

        Args:
            method: Name of the method.
        """
        subclass = type(self)
        overridden = []
        for name, default in vars(Personal).items():
            is_public_method = callable(default) and not name.startswith("_")
            if is_public_method and getattr(subclass, name) is not default:
                overridden.append(name)
        allowed = ", ".join(sorted(overridden))
        return DataError(f"user {self.name!r}: a {subclass.__name__} has no {method}; allowed: model, {allowed}")


_EXPORT = "comingle.serving.export.exporting:export_personal"
"""Imported by name, because exports import runs."""


LanguageModel = AdaptedModel | EnsembleModel | MixedLanguageModel
"""Models of users of language models."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PersonalModel(Personal):
    """The language model of one user.

    Args:
        name: Name of the user.
        model: The users' model.
        tensors: Trained tensors by name.
        row: Index of the user in the federation.
        model_info: Facts from the user's run, for :meth:`export`.
    """

    model: LanguageModel
    tensors: Tree
    row: int
    model_info: ModelInfo | None = None

    def __repr__(self) -> str:
        return f"PersonalModel({self.name!r} on {self.model.base.name})"

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Yield a causal language model of transformers whose forward pass is that of the user's model.

        Use it in the context only: all users share the modules, and another user's adapters may be bound later.
        """
        if isinstance(self.model, AdaptedModel):  # LoRA adapters; each MLP mixes the user's experts
            self.model.adapters.bind(self.tensors, [self.row])
            yield self.model.network
        elif isinstance(self.model, EnsembleModel):  # a mixture of several models' predictions
            with self.model.mixed_network(self.tensors, [self.row]) as network:
                yield network
        else:  # a MixedLanguageModel: the weighted mean of several sets of adaptors is added to the weights
            (mixture,) = self.model.shares(self.tensors)
            with self._floral_model.mixing(mixture):
                yield cast(PreTrainedModel, self._floral_model.model)

    @cached_property
    def _floral_model(self) -> FloralModel:
        """The user's model in a client-level mixture, whose ``model`` is the causal language model."""
        return cast(MixedLanguageModel, self.model).of_one_user(self.tensors)

    @torch_defaults()
    def merge(self) -> PreTrainedModel:
        """Return a plain model of the base's architecture with the user's weights, for ``save_pretrained``.

        In bfloat16 the merged weights are rounded, so outputs differ slightly from those of :meth:`generate`.

        Raises:
            DataError: Several experts are mixed after a nonlinearity, which no weights can represent.
        """
        merged = self._merge_base()
        merged.generation_config = generation_of(self.model.base, self.model_info)
        return merged

    def _merge_base(self) -> PreTrainedModel:
        """Return a copy of the base with the user's adapters in its weights.

        Raises:
            DataError: No weights can hold the user's model.
        """
        if isinstance(self.model, MixedLanguageModel):  # a client-level mixture
            (mixture,) = self.model.shares(self.tensors)  # of this user, the only one in `tensors`
            return cast(PreTrainedModel, self._floral_model.merge(mixture))
        if isinstance(self.model, EnsembleModel):
            raise DataError(f"user {self.name!r}: {NO_SINGLE_MODEL}")
        obstacle = why_not_merged(self.model, self.row)
        if obstacle:
            raise DataError(
                f"user {self.name!r}: experts cannot be merged into weights, because {obstacle}; "
                "allowed: models with one expert (such as fedit) and client-level mixtures"
            )
        return merge_adapters(self.model, self.tensors, self.row)

    @torch_defaults()
    def export(
        self,
        folder: str | Path,
        *,
        format: str = "transformers",
        dtype: str | None = None,
        force: bool = False,
        repository: str = "",
    ) -> Exported:
        """Write the model to a folder that other programs can open, with a model card and the tokenizer.

        Args:
            folder: A folder that does not exist yet, unless ``force`` replaces an earlier export.
            format: "transformers" (a plain model, or the sparse mixture of the base's family), "peft" (one LoRA),
                "gguf" (for llama.cpp and Ollama), "gguf-adapter" (one LoRA for them), or "merged-approximately" (a
                plain model with gates fixed at their mean over the user's validation text, where the loss is measured).
            dtype: float32, bfloat16 or float64; for GGUF float32, bfloat16, q8_0 or a kind of llama-quantize
                such as q4_k_m; None for the base's.
            force: Replace an earlier export.
            repository: Name on the Hugging Face hub to which the folder will be uploaded, for the code in its model
                card; nothing is uploaded.

        Raises:
            DataError: The model does not fit the format; the error gives the reason and a format that works.
            RunError: The format or number format is unknown, or the folder cannot be written.
        """
        if isinstance(self.model, EnsembleModel):
            raise DataError(f"user {self.name!r}: {NO_SINGLE_MODEL}")
        options = {"format": format, "dtype": dtype, "force": force, "repository": repository}
        return load_object(_EXPORT)(self, Path(folder), **options)

    @torch_defaults()
    def logits(self, tokens: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n vocab"]:
        """Return the logits of each next token.

        Raises:
            DataError: A token has no row in the base's embedding.
        """
        self.model.base.require_rows(tokens.flatten().tolist(), "the tokens")
        with self.generating() as network, without_compiling():
            return network(input_ids=tokens.to(self.model.base.device), use_cache=False).logits

    @overload
    def generate(
        self, prompt: str | Sequence[Message], generation_config: GenerationConfig | None = None, **options: Any
    ) -> str: ...  # a prompt, or a conversation: a text

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], generation_config: GenerationConfig | None = None, **options: Any
    ) -> list[str]: ...  # several prompts: a text for each

    @torch_defaults()
    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[Message],
        generation_config: GenerationConfig | None = None,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> str | list[str]:
        """Continue ``prompt``, or respond to it; the prompt itself is not returned.

        Returns a text for a text or messages, a list for a list of texts. Each text of a list has the same continuation
        as it has alone, with the same ``seed``. Greedy unless ``do_sample`` or ``temperature`` is set.

        Args:
            prompt: A text, a list of texts, or messages (a list of ``{"role": ..., "content": ...}``). Messages are
                formatted by the base's chat template, or by comingle's plain one
                (:mod:`comingle.models.chat_templates`).
            generation_config: Settings of transformers; arguments given by name override them.
            max_new_tokens: Largest number of new tokens.
            do_sample: Sample instead of decoding greedily.
            temperature: Divisor of the logits when sampling.
            top_p: Probability mass to sample from, 0.95 by default.
            top_k: Number of tokens to sample from, 50 by default.
            stop: Strings that end a text, and are removed from it.
            seed: Seed of sampling.
            options: ``stop_strings`` (kept in the text), ``eos_token_id``, ``min_new_tokens``, ``min_p``,
                ``repetition_penalty`` and ``no_repeat_ngram_size``, all as in transformers.

        Raises:
            RecipeError: A setting is unknown, not supported or out of range.
            DataError: A prompt is not a text or exceeds the base's limit, or the chat template rejects the messages.
        """
        base, is_chat = self.model.base, _is_chat(prompt)
        prompts: list[Any]
        if is_chat:
            config_has_ends = generation_config is not None and generation_config.eos_token_id is not None
            if not config_has_ends:
                options.setdefault("eos_token_id", list(chat_ends(base)))
            template = ChatTemplate(self._tokenizer, base.date)
            prompts = [template.prompt(self._checked_messages(prompt))]
        else:
            prompts = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
            for text in prompts:
                if not isinstance(text, str):
                    raise DataError(f"user {self.name!r}: prompt: got {text!r:.40}; allowed: a text or a list of texts")
        sampling = read_sampling(
            generation_config,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=stop,
            seed=seed,
            **options,
        )
        with self.generating() as network:
            texts = continue_texts(network, base, prompts, sampling)
        is_single = is_chat or isinstance(prompt, str)
        return texts[0] if is_single else texts

    def _checked_messages(self, prompt: Sequence[object]) -> list[Message]:
        """Return the messages of a conversation; raise an error if one has an unknown role or no text.

        Raises:
            DataError: A message is not a mapping with a known role and a text.
        """
        messages: list[Message] = []
        for message in prompt:
            is_valid = (
                isinstance(message, Mapping)
                and message.get("role") in ROLES
                and isinstance(message.get("content"), str)
            )
            if not is_valid:
                allowed = f"a mapping with role ({', '.join(ROLES)}) and content"
                raise DataError(f"user {self.name!r}: message: got {message!r:.60}; allowed: {allowed}")
            messages.append(cast(Message, message))
        return messages

    @torch_defaults()
    def perplexity(self, text: str, *, context: int = 128) -> float:
        """Return the perplexity of a text.

        Args:
            text: The text.
            context: Tokens that a prediction sees at most; the text is cut into windows of this size.

        Raises:
            DataError: The argument is not a text, or has no token to predict.
            RecipeError: ``context`` is not an integer of at least 1, or exceeds the base's limit.
        """
        if not isinstance(text, str):
            raise DataError(f"user {self.name!r}: perplexity: got {text!r:.40}; allowed: one text")
        tokens = self._tokenize(text).int()
        self._window_size(context, len(tokens))  # raises an error if ``context`` is wrong
        predicts_first_token = self.model.base.begin is not None
        min_tokens = 1 if predicts_first_token else 2
        if len(tokens) < min_tokens:
            raise DataError(
                f"user {self.name!r}: perplexity: got {len(tokens)} tokens; allowed: a text of at least {min_tokens}"
            )
        return self.score(tokens, context=context).perplexity

    def _tokenize(self, text: str) -> Int[Tensor, " tokens"]:
        """Tokenize a text as in training and scoring, where text such as "</s>" never becomes a special token.

        Raises:
            DataError: The text is not valid Unicode.
        """
        require_characters(text)
        encoded: Any = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's tokenizer, which it must have."""
        assert self.model.base.tokenizer is not None
        return self.model.base.tokenizer

    def _window_size(self, context: int, tokens: int) -> int:
        """Return the number of input tokens per window for scoring a text: ``context``, or fewer for a shorter text.

        Args:
            context: Largest number of input tokens per window.
            tokens: Number of tokens of the text.

        Raises:
            RecipeError: ``context`` is not an integer from 1, or the window exceeds the base's number of positions.
        """
        if not isinstance(context, int) or isinstance(context, bool) or context < 1:
            raise RecipeError(f"context: got {context!r}; allowed: a whole number from 1")
        # The last token is no input, but a begin-of-text token is.
        num_inputs = tokens - 1 if self.model.base.begin is None else tokens
        window_size = min(context, max(1, num_inputs))
        check_context_length("context", window_size, self.model.base.model)
        return window_size

    @torch_defaults()
    def score(self, tokens: Tensor, *, context: int) -> Score:
        """Return the sum of losses on a stream of tokens.

        Args:
            tokens: The stream.
            context: Tokens per window; a shorter stream is a single window.

        Raises:
            DataError: A token has no row in the base's embedding or head.
        """

        base = self.model.base

        def losses(_models: object, windows: Tensor) -> Tensor:
            """Return the losses of this user's model, the only one."""
            return self.model.predict(self.tensors, [self.row], windows.to(base.device))

        window_size = self._window_size(context, len(tokens))
        base.require_rows(tokens, "the text")
        if base.begin is not None:
            base.require_rows([base.begin], "the text")
        streams, model_indices = [tokens], [0]  # `losses` ignores the index
        (score,) = score_streams(
            losses, streams, model_indices, context=window_size, batch=16, slots=1, begin=base.begin
        )
        return score

    @torch_defaults()
    def route(self, text: str | Tensor, *, context: int = 128, begins: bool = True) -> Routing:
        """Return each token's gates over the user's experts in every layer.

        Args:
            text: A text, or a stream of token ids.
            context: Tokens per forward pass.
            begins: Start every pass with the base's begin-of-text token, if it has one.

        Raises:
            DataError: The method has no routers, the text has no tokens, or a token has no row in the embedding.
        """
        model = self.model
        if not isinstance(model, AdaptedModel):
            raise DataError(f"user {self.name!r}: this model has one mixture for all tokens, so none can be routed")
        adapters = model.adapters
        if not routing.routed(adapters):
            raise DataError(f"user {self.name!r}: this model has no routers, so tokens cannot be routed")
        tokens = self._tokenize(text) if isinstance(text, str) else torch.as_tensor(text, dtype=torch.int64)
        if not len(tokens):
            raise DataError(f"user {self.name!r}: a text without tokens cannot be routed")
        begin = model.base.begin if begins else None
        inputs = tokens.tolist() if begin is None else [begin, *tokens.tolist()]
        model.base.require_rows(inputs, "the text")
        expert_names = routing.expert_names(adapters, self.row)

        def gates_of(window: Tensor) -> Tensor:
            """Return the user's gates ``(layers, n, experts)`` in one pass over ``n`` tokens."""
            adapters.bind(self.tensors, [self.row])
            model.backbone(input_ids=window.view(1, -1).to(model.base.device), use_cache=False)
            (gates_of_user,) = routing.gates(adapters).unbind(1)  # (layers, n, experts) of the only bound user
            return gates_of_user[..., : len(expert_names)]  # without padding of the expert axis

        with routing.record_gates(adapters), without_compiling():
            gates = route(gates_of, tokens, context=context, begin=begin)
        token_texts = pieces(self._tokenizer, tokens.tolist())
        return Routing(tokens=tuple(token_texts), experts=tuple(expert_names), gates=gates)


def _is_chat(prompt: object) -> bool:
    """Return whether a prompt has messages; it may have invalid items too, which are refused later."""
    return isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt)
