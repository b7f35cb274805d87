"""Bases and federations without weights, from which costs are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from comingle.config import Recipe
from comingle.config.settings import MEMORY
from comingle.data.populations import as_users
from comingle.data.samples.reading import Population
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.base import Base, freeze
from comingle.models.floral.model import FloralModel, roles
from comingle.models.floral.wrapper import floral
from comingle.models.folders import check_config, drop_kernel_choice, one_line
from comingle.models.hardware import resolve_attention, resolve_device, resolve_dtype
from comingle.models.layouts import decoder_layers
from comingle.models.loading import ALIASES, backbone, is_hub_reachable, lm_head, locate
from comingle.models.lora import init_zero, lora_scale
from comingle.models.model import share_weights
from comingle.models.pretrained import PreTrainedModel
from comingle.models.quantised import quantise_shapes
from comingle.models.random_bases import RANDOM_BASE_PREFIX, random_base
from comingle.models.stacked import MixedLanguageModel
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients
from comingle.training.kinds.base import check_on_language
from comingle.training.kinds.nets import SampleBatchSource, build_nets
from comingle.training.plan import make_plan
from comingle.utils.errors import BaseModelError, require_docstrings
from comingle.utils.records import expand_home
from comingle.utils.trees import ADAPTOR, ROUTER, Layout, Slot


def load_skeleton(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    quantise: str = "none",
    layers: int | None = None,
) -> Base:
    """Load a base without weights and tokenizer, to count costs from the shapes of its tensors.

    The tensors are on torch's meta device, but ``Base.device`` is the device that a run would use. For a model on the
    hub only config.json is downloaded.

    Args:
        name: Name of the base, as in the recipe.
        dtype: ``runtime.dtype`` of the recipe.
        device: ``runtime.device`` of the recipe.
        attention: ``runtime.attention`` of the recipe.
        quantise: ``quantise`` of the recipe.
        layers: Number of decoder layers that are kept; None for all.

    Raises:
        BaseModelError: As :func:`comingle.models.loading.load_base`.
    """
    require_docstrings()  # transformers fails under `python -OO`
    meta_device = torch.device("meta")
    run_device = resolve_device(device)
    run_dtype = resolve_dtype(dtype, run_device)
    implementation = resolve_attention(attention, run_device)
    with meta_device:
        if name.startswith(RANDOM_BASE_PREFIX):
            model = random_base(name, dtype=run_dtype, attention=implementation, seed=0)
        else:
            model = _model_of_config(name, run_dtype, implementation)
    freeze(model, None)  # None: there is no tokenizer
    if layers is not None:
        del decoder_layers(model)[layers:]
        model.config.num_hidden_layers = layers
    bits: Any = "" if quantise == "none" else quantise  # such as "8bit"
    if bits:
        quantise_shapes(model, bits, meta_device)
    return Base(model=model, tokenizer=None, name=name, dtype=run_dtype, device=run_device, quantised=bits)


def _model_of_config(name: str, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """Build a model of transformers from its configuration, on the current device.

    Args:
        name: Name of the base, as in the recipe.
        dtype: Dtype of its weights.
        attention: Attention implementation; None for the model's default.

    Raises:
        BaseModelError: The configuration cannot be read, or is of a model that comingle does not support.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _config_folder(name)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_config(folder, config.to_dict())
        return AutoModelForCausalLM.from_config(drop_kernel_choice(config), dtype=dtype, attn_implementation=attention)
    except BaseModelError:
        raise
    except Exception as error:  # transformers raises many types for a broken config.json
        raise BaseModelError(f"base model {name!r}: its config.json cannot be used: {one_line(error)}") from error


def _config_folder(name: str) -> Path:
    """Return a folder that contains a base's config.json.

    For a model on the hub only config.json is downloaded. If that fails, the whole model is found or downloaded as in a
    run.

    Args:
        name: Name of the base: an alias, a path or a repository.

    Raises:
        BaseModelError: There is no such model.
    """
    alias = ALIASES.get(name)
    if alias is not None:
        return _hub_config(alias.repository) or locate(name).path
    is_path = not name or expand_home(name).exists() or name.startswith((".", "~", "/")) or name.count("/") > 1
    if is_path:
        return locate(name).path
    return _hub_config(name) or locate(name).path


def _hub_config(repository: str) -> Path | None:
    """Return the folder of a repository's config.json; None if it is not cached and cannot be downloaded."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    if constants.HF_HUB_OFFLINE or not is_hub_reachable(constants.ENDPOINT):
        return None
    try:
        return Path(hf_hub_download(repository, "config.json")).parent
    except Exception:  # the caller then looks for the whole model, and reports the reason if that fails too
        return None


def bare_nets(recipe: Recipe, population: Population, all_names: Sequence[str] | None = None) -> InProcess:
    """Return a federation of nets from which costs are counted, with no more users than needed.

    All users train nets of the same shapes, so the first users are enough: as many as train in one batch (a pass). A
    pooled method, which trains one net on the samples of all users, gets all users.

    Args:
        recipe: Settings of the run.
        population: Users of this process and their samples.
        all_names: Names of the users of all processes; None if there is one process.

    Raises:
        RecipeError: As :func:`comingle.training.kinds.nets.build_nets`.
    """
    if all_names is None:
        all_names = population.users.names
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, all_names)
    plan = plan.updated("runtime", store=MEMORY)  # the few users are built in memory, whatever the run does
    if method.placement.pooled:
        return federate(build_nets(recipe, population, plan))
    # The size of a pass is known once a net is built, so first build one for few users. There are at least as many of
    # them as true clusters, on whose number costs depend.
    num_clusters = max(1, len({user.cluster for user in population.users}))
    few_users = replace(population, users=as_users(population.users[:num_clusters]))
    clients = build_nets(recipe, few_users, plan)
    users_of_pass = list(population.users[: clients.pass_size.users])
    if len(users_of_pass) <= num_clusters:
        return federate(clients)
    model = clients.model.only(range(len(users_of_pass)))
    # Trainers are the users whose models are trained; only a pooled method has other trainers than users.
    batch_source = cast(SampleBatchSource, clients.batch_source).with_trainers(users_of_pass)
    return federate(Clients(model, plan, trainers=users_of_pass, users=users_of_pass, batch_source=batch_source))


def bare_mixture(recipe: Recipe, base: Base, method: Method, users: int) -> MixedLanguageModel:
    """Build a client-level mixture of adaptors (FLoRAL) on a base that has shapes but no weights.

    It has the shapes of the model that :func:`comingle.models.stacked.mix_language_model` builds for a run.

    Args:
        recipe: Settings of the run.
        base: A base without weights.
        method: The recipe's method, which has a mixture.
        users: Number of users.

    Raises:
        RecipeError: The method does not support language models, or the recipe gives users different ranks.
    """
    check_on_language(recipe, method)
    mixture, rank = method.placement.mixture, recipe.adapters.rank
    assert mixture is not None
    assert isinstance(rank, int)  # checked above
    network = share_weights(base.model)  # adaptors are added to this copy in place; the base stays as it is
    net = floral(
        backbone(network),
        num_clusters=mixture.clusters,
        rank=rank,
        alpha=lora_scale(recipe.adapters.alpha, rank),
        bias=False,  # language models have adaptors of linear layers only
        norm=False,
        per_layer=mixture.per_layer,
        copy=False,
        generator=torch.Generator(),  # torch's global generator stays untouched
    )
    return MixedLanguageModel(
        name=base.name,
        net=net,
        layout=Layout(slots=tuple(_mixture_slots(net))),
        users=users,
        device=base.device,
        dtype=base.dtype,
        mixture=mixture,
        base=base,
        head=lm_head(base),
        embedding=network.get_input_embeddings(),
    )


def _mixture_slots(net: FloralModel) -> list[Slot]:
    """Return the slots (name, shape and roles) of the tensors that a user trains: adaptors, then the router.

    Args:
        net: The frozen base with adaptors and a router.
    """
    role_by_name = roles(net)
    slots = []
    # An adaptor has one role per cluster, since its leading dimension is that of clusters. A router has one role.
    for role, num_roles in ((ADAPTOR, net.num_clusters), (ROUTER, 1)):
        for name, parameter in net.named_parameters():
            if role_by_name.get(name) == role:
                slots.append(Slot(name=name, shape=tuple(parameter.shape), roles=(role,) * num_roles, init=init_zero))
    return slots
