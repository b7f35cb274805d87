"""Samples: each user trains a copy of a net."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.config import Recipe
from comingle.data.populations import as_users
from comingle.data.samples.images import ImageFormat, read_images
from comingle.data.samples.reading import (
    ALLOWED_SAMPLES,
    Population,
    SamplesReader,
    image_format_of,
    may_be_user_samples,
    pixels_as_inputs,
)
from comingle.data.samples.samples import (
    SampleBank,
    Samples,
    UserSamples,
    as_inputs,
    pool_samples,
    read_samples,
)
from comingle.data.samples.scoring import score_samples
from comingle.data.samples.section import SamplesSection
from comingle.methods.base import Method
from comingle.models.base import Base
from comingle.models.floral.model import FloralModel
from comingle.models.hardware import torch_defaults
from comingle.models.model import Model, copy_with_tensors
from comingle.models.personal import Personal
from comingle.models.routers import merge_models, mix_probabilities
from comingle.models.scoring import MSE, Loss, SampleScore, find_loss
from comingle.models.stacked import StackedModel
from comingle.training.batch_sources import AnyUser
from comingle.training.client import Clients
from comingle.training.kinds.base import DataRequest, Kind, RunData
from comingle.training.kinds.nets import build_nets, check_on_nets, net_model
from comingle.training.settings import RunPlan
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.records import expand_home
from comingle.utils.trees import CLIENT_ROUTER, Tree

SCORED_AT_ONCE = 512
"""Number of samples in one forward pass of :meth:`PersonalNet.evaluate`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PersonalNet(Personal):
    """The net of one user.

    Its parameters are not shared with other users and can be trained further. It is in evaluation mode. The state dict
    is that of the plain net, with adaptors merged into its weights (for an ensemble, of a :class:`MixtureOfModels`).
    """

    model: nn.Module
    loss: Loss = MSE
    """Loss that :meth:`evaluate` computes."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one input in training; None if it is unknown."""
    image_format: ImageFormat | None = None
    """Size and colours of images in training; None if the run did not read image files."""
    test_data: Callable[[], Samples] | None = None
    """Reads the user's own test data; None if the net does not come from a run."""

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.model.parameters())
        return f"PersonalNet({self.name!r}, {type(self.model).__name__} of {count:,} parameters)"

    @torch_defaults()
    @torch.no_grad()
    def predict(self, inputs: Tensor | str | Path | Sequence[str | Path]) -> Float[Tensor, "batch outputs"]:
        """Return the outputs for a batch of inputs.

        Args:
            inputs: A tensor ``(batch, ...)`` on any device, of real numbers as in training, or of ``uint8``,
                ``uint16`` or ``bool``, which are scaled as in training. For a run on folders of images also the path
                of an image or a list of paths, which are read as in training.

        Returns:
            Outputs in the dtype and on the device of the net.

        Raises:
            DataError: Inputs have another type or shape than in training, or an image cannot be read.
        """
        return self.model(self._as_batch(inputs).to(next(self.model.parameters())))

    def _as_batch(self, inputs: object) -> Float[Tensor, "batch ..."]:
        """Return the argument of :meth:`predict` as a batch of real numbers in the shape of training.

        Raises:
            DataError: Inputs have another type or shape than in training, or an image cannot be read.
        """
        where, shape = f"user {self.name!r}", self.input_shape
        batch_shape = "(batch, ...)" if shape is None else f"(batch, {', '.join(map(str, shape))})"
        allowed = f"a tensor of shape {batch_shape}"
        if self.image_format is not None:
            allowed += ", or paths of images"

        if isinstance(inputs, Tensor):
            got = f"a tensor of shape {tuple(inputs.shape)}"
            batch = as_inputs(inputs, where)
        elif self.image_format is not None and (paths := _as_paths(inputs)):
            batch = pixels_as_inputs(read_images(paths, self.image_format))
            got = f"images of shape {tuple(batch.shape[1:])}"
        else:
            raise DataError(f"{where}: inputs: got {_describe_inputs(inputs)}; allowed: {allowed}")

        if shape is None or tuple(batch.shape[1:]) == shape:
            return batch
        is_single_input = isinstance(inputs, Tensor) and tuple(inputs.shape) == shape
        advice = "; for a single input, pass inputs.unsqueeze(0)" if is_single_input else ""
        raise DataError(f"{where}: inputs: got {got}; allowed: {allowed}{advice}")

    @torch_defaults()
    def evaluate(self, samples: Any = None) -> SampleScore:
        """Return the mean loss, and the accuracy if targets are classes; NaN without samples.

        Args:
            samples: A map-style ``torch.utils.data.Dataset`` of ``(input, target)``, a pair of arrays or tensors, or
                :class:`comingle.data.samples.samples.Samples`. None: the user's own test data, as the run reads it.

        Raises:
            DataError: The type is not supported, targets do not fit the task of the net, or the user's own test data
                cannot be read.
        """
        where = f"user {self.name!r}: samples"
        if samples is None and self.test_data is not None:
            samples = self.test_data()
        bank = self._make_bank(read_samples(samples, where), where)
        targets = bank.targets

        def forward(_rows: Sequence[int], inputs: Tensor) -> Tensor:
            """Return the outputs for ``(1, batch, ...)`` inputs, after checking that targets are classes of the net."""
            outputs = self.predict(inputs[0])  # (batch, outputs) of the single user
            predicts_classes = self.loss.classes and self.loss.paired
            if predicts_classes and len(targets):
                lowest, highest, last_class = int(targets.min()), int(targets.max()), outputs.shape[-1] - 1
                if lowest < 0 or highest > last_class:
                    raise DataError(f"{where}: targets go from {lowest} to {highest}; allowed: 0 to {last_class}")
            return outputs.unsqueeze(0)  # the single user

        scores = score_samples(forward, bank, [0], loss=self.loss, batch=SCORED_AT_ONCE, slots=1)
        return scores[0]

    def _make_bank(self, samples: Samples, where: str) -> SampleBank:
        """Return samples in the form that ``score_samples`` takes, as those of the only user, on the device of the net.

        Args:
            samples: The samples.
            where: Words that begin error messages, such as ``"user 'ann': samples"``.

        Raises:
            DataError: Targets are real numbers, but the net was trained on classes.
        """
        parameter = next(self.model.parameters())  # for its dtype and device
        targets = samples.targets
        if self.loss.classes:
            if targets.is_floating_point():
                raise DataError(f"{where}: targets are real numbers; allowed: class numbers, as in training")
            targets = targets.to(parameter.device)
        else:
            if not targets.is_floating_point():  # integers as targets of a regression
                targets = targets.float().reshape(-1, 1)
            targets = targets.to(parameter)
        counts = torch.tensor([len(samples)])
        first_sample = torch.zeros_like(counts)
        return SampleBank(inputs=samples.inputs.to(parameter), targets=targets, starts=first_sample, counts=counts)


def _describe_inputs(inputs: object) -> str:
    """Return a short description of inputs of a wrong type, for errors, such as "list of int"."""
    type_name = type(inputs).__name__
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        return type_name
    if not inputs:
        return f"an empty {type_name}"
    return f"{type_name} of {type(inputs[0]).__name__}"


def _as_paths(inputs: object) -> list[Path]:
    """Return a path or a sequence of paths as a list; empty for anything else."""
    if isinstance(inputs, str | PathLike):
        paths = [inputs]
    elif isinstance(inputs, Sequence) and all(isinstance(path, str | PathLike) for path in inputs):
        paths = list(inputs)
    else:
        paths = []
    return [expand_home(os.fspath(path)) for path in paths]


class MixtureOfModels(nn.Module):
    """``sum_c shares_c models_c(x)``: the mixed outputs of an ensemble, before any softmax.

    With ``probabilities``, the logits of the mixture of class probabilities: ``log sum_c shares_c
    softmax(models_c(x))``.
    """

    shares: Float[Tensor, " clusters"]

    def __init__(self, models: Sequence[nn.Module], shares: Float[Tensor, " clusters"], *, probabilities: bool = False):
        """Store the models and their weights.

        Args:
            models: Models of the components.
            shares: Weight of each model.
            probabilities: Whether to mix class probabilities instead of outputs.
        """
        super().__init__()
        self.models, self.probabilities = nn.ModuleList(models), probabilities
        self.register_buffer("shares", shares.clone())

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """Return the weighted mean of outputs, or with ``probabilities`` the logits of the mean prediction."""
        outputs = torch.stack([model(inputs) for model in self.models])
        if self.probabilities:
            return mix_probabilities(outputs, self.shares)
        return torch.tensordot(self.shares, outputs, dims=1)


def personal_net(name: str, model: StackedModel, tensors: Tree) -> PersonalNet:
    """Return the net of one user as a module of its own, which shares no memory with those of other users.

    Args:
        name: Name of the user.
        model: The model that all users train.
        tensors: Tensors of the user ``(1, ...)``.
    """
    net = _own_net(model, tensors)
    return PersonalNet(name=name, model=net.requires_grad_(True).eval(), loss=model.loss)


def _own_net(model: StackedModel, tensors: Tree) -> nn.Module:
    """Return a user's net as a plain module; a mixture becomes one merged net, or a :class:`MixtureOfModels`.

    Args:
        model: The model that all users train.
        tensors: Tensors of the user ``(1, ...)``.
    """
    if model.mixture is None:
        return copy_with_tensors(model.net, tensors)
    weights = model.shares(tensors)[0]  # of the mixture, (clusters,)
    if isinstance(model.net, FloralModel):  # mixes adaptors
        return copy_with_tensors(model.net, tensors).merge(weights)
    if model.mixture.merges_models:  # mixes parameters
        return copy_with_tensors(model.net, merge_models(tensors, weights.unsqueeze(0)))
    models = []  # mixes outputs
    for cluster in range(len(weights)):
        # Tensors of models are (1, clusters, *shape).
        tensors_of_model = {name: t[:, cluster] for name, t in tensors.items() if name != CLIENT_ROUTER}
        models.append(copy_with_tensors(model.net, tensors_of_model))
    return MixtureOfModels(models, weights, probabilities=model.mixes_probabilities)


OWN = ""
"""Entry in a run folder for a net or a loss that a program passed."""


class NetKind(Kind):
    """Base of the kinds whose users train copies of a net."""

    user, needs_base = UserSamples, False

    def check(self, recipe: Recipe, method: Method) -> None:
        """Check that the method supports nets: no adapters of a language model and no token routers."""
        check_on_nets(method)

    def model(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Model:
        """Return the net that all users train, or the nets if the method mixes several."""
        return net_model(recipe, run_data.common, plan.method)

    def clients(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Clients:
        """Return the users on this machine, each with a copy of the net."""
        return build_nets(
            recipe,
            run_data.common,
            plan,
            reads_later=run_data.unread,  # whether users' data is read on demand
            local_numbers=run_data.here,  # of the users on this machine; None for all
            checks_validation_data=run_data.checks_validation_data,
        )

    def pooled(self, users: Sequence[AnyUser]) -> UserSamples:
        """Return one user with the samples of all users."""
        return pool_samples(users)

    def personal(self, name: str, model: Model, tensors: Tree, row: int) -> PersonalNet:
        """Return the trained net of one user as a module, to predict with; see :meth:`Kind.personal`."""
        return personal_net(name, cast(StackedModel, model), tensors)

    def with_inputs(self, personal: Personal, recipe: Recipe, settings: Mapping[str, Any]) -> Personal:
        """Return the net of a user with the shape of its inputs and, for image files, how they are read.

        Args:
            personal: The net.
            recipe: Recipe of the run.
            settings: Settings of the kind that the run folder stores: `input_shape`, and `labels`, the names of the
                classes, which data from image files has.
        """
        input_shape = settings.get("input_shape")
        image_format = None
        if settings.get("labels") and isinstance(recipe.data, SamplesSection):  # the data is image files
            image_format = image_format_of(recipe.data)
        return replace(
            cast(PersonalNet, personal),
            input_shape=None if input_shape is None else tuple(input_shape),
            image_format=image_format,
        )

    def with_test_data(self, personal: Personal, test_data: Callable[[], Any]) -> Personal:
        """Return the net of a user with a function that reads the user's test data."""
        return replace(cast(PersonalNet, personal), test_data=test_data)

    def with_num_users(self, recipe: Recipe, users: int) -> Recipe:
        """Raise an error, as the number of users follows from the data of the recipe.

        Raises:
            RecipeError: Always.
        """
        raise RecipeError(f"--users: got {users}; the users are those of the recipe's data; leave out --users")


class SamplesKind(NetKind):
    """Inputs with targets, read from files or passed by a program."""

    name, accepted_data = "samples", ALLOWED_SAMPLES

    def check(self, recipe: Recipe, method: Method) -> None:
        """Check the method, and that the loss exists."""
        super().check(recipe, method)
        loss = section(recipe).loss
        if loss is not None:
            find_loss(loss, classes=False)  # raises if there is no such loss

    def reader(self, request: DataRequest) -> SamplesReader:
        """Return a reader of the users' samples: those that a program passes, or the files that the recipe names.

        Raises:
            DataError: The recipe names no files, and no program passes samples.
            RecipeError: A program passes samples, but the recipe sets ``image_size`` or ``grayscale``.
        """
        data_section = section(request.recipe)
        has_passed_samples = request.given is not None
        has_files = data_section.users is not None
        if not has_passed_samples and not has_files:
            raise DataError("users: passed by a program; pass them again: comingle.run(recipe, users={...})")
        seed = request.recipe.data_seed
        return SamplesReader(data_section, seed, given=request.given, net=request.net, loss=request.loss)

    def accepts(self, data: Any, options: Mapping[str, Any]) -> bool:
        """Return whether ``data`` is a PyTorch dataset, a pair of arrays, or splits of these."""
        return may_be_user_samples(data)

    def settings(self, run_data: RunData) -> dict[str, Any]:
        """Return what the run folder stores of the population, so that the run opens without its samples.

        Keys: "net" and "loss" are names, "whole" is True if targets are class numbers, "classes" is the number of
        outputs of the net, "labels" are the names of classes. The name of a net that a program passed is :data:`OWN`.
        """
        common = cast(Population, run_data.common)
        return {
            "net": common.net if isinstance(common.net, str) else OWN,
            "loss": common.measure.name,
            "whole": common.measure.classes,
            "classes": common.classes,
            "input_shape": list(common.input_shape),
            "labels": list(common.labels),
        }

    def reopened(
        self, base: Base | None, users: Sequence[AnyUser], settings: Mapping[str, Any], *, net: Any = None
    ) -> RunData:
        """Return the data of a finished run whose folder is opened; the samples are not read.

        Args:
            base: None; nets have no frozen base.
            users: The run's users, without samples.
            settings: Result of :meth:`settings`, stored in the run folder.
            net: Function that returns a new net, if the caller passed one instead of a recipe's.

        Raises:
            DataError: A program passed the net to the run, and does not pass it again.
        """
        net_was_passed = settings["net"] == OWN
        if net_was_passed and net is None:
            raise DataError("net: made by a function of a program; pass it again: comingle.load(folder, base=make_net)")
        common = Population(
            users=as_users(users),
            loss=_reopened_loss(settings["loss"], settings["whole"]),
            classes=settings["classes"],
            input_shape=tuple(settings["input_shape"]),
            net=settings["net"] if net is None else net,
            labels=tuple(settings["labels"]),
        )
        return RunData(kind=self, base=base, users=common.users, common=common, unread=True)


def section(recipe: Recipe) -> SamplesSection:
    """Return the data section of a recipe with samples."""
    return cast(SamplesSection, recipe.data)


def _reopened_loss(name: str, classes: bool) -> Loss:
    """Return the loss of a run whose folder is opened, by name.

    A loss that a program passed is not stored with the run; in its place the result is a loss that raises an error.

    Args:
        name: Name of the loss in the run folder.
        classes: Whether targets are classes.
    """

    def raise_missing(*_: Any) -> Any:
        raise DataError(f"loss {name!r}: passed by a program; pass it again to score models")

    try:
        return find_loss(name, classes=classes)
    except RecipeError:
        return Loss(name=name, function=raise_missing, classes=classes)


KIND = SamplesKind()
