"""Nets that users train whole: construction, checks and batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from torch.func import vmap

from comingle.config import Recipe
from comingle.config.settings import values_in
from comingle.data.populations import as_users
from comingle.data.samples.reading import Augment, MakeNet, Population
from comingle.data.samples.samples import SampleBank, Samples, UserSamples, bank_of, check, pool_samples
from comingle.data.samples.scoring import score_samples
from comingle.methods.base import Method, Phase, Stream
from comingle.models.floral.wrapper import adaptor_size, floral
from comingle.models.hardware import require_room, resolve_device, resolve_dtype
from comingle.models.model import call_with
from comingle.models.nets import builder_arguments, make_net
from comingle.models.scoring import PAD, Gates, Loss, SampleScore
from comingle.models.stacked import StackedModel, gated_pair, stack
from comingle.training.batch_sources import AnySplit, AnyUser, PassBatchSource, Predict
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import ADAPTOR_SETS, NETS, lazy_user, with_full_participation
from comingle.training.settings import PassSize, RunPlan
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.seeds import derive, generator

COLUMNS_PER_PASS = 2**26
"""Default number of parameters, over all users, in one step; their gradients and copies need memory."""

SCORED_PER_SLOT = 512
"""Largest number of samples per slot in a scoring pass."""


class SampleBatchSource(PassBatchSource):
    """Batches for shuffled epochs over samples, each an input with a target.

    Batch norm cannot train on a single sample, and would mix padding into smaller batches.
    """

    def __init__(
        self,
        trainers: Sequence[UserSamples],
        plan: RunPlan,
        batch_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        loss: Loss,
        augment: Augment | None = None,
        least: int = 1,
    ):
        """Copy the samples of trainers that are in memory to the device.

        Batches of fewer than ``least`` samples are not trained on. ``loss`` scores held-out data; ``augment`` changes
        training inputs at random.
        """
        super().__init__(trainers, plan, batch_size, least=least)
        self.loss, self.augment = loss, augment
        self.like = {"device": device, "dtype": dtype}
        """Device and dtype of inputs."""
        self._scored: dict[tuple[int, ...], tuple[Sequence[Samples], SampleBank]] = {}
        """Cache of the latest sets that were scored, by the ids of the sets, with their samples in one tensor."""
        self.banks: dict[str, SampleBank] = {}
        """Samples of all trainers in one tensor, by split; empty if trainers are not in memory."""
        if not self.trainers.in_memory:  # samples are read for each batch instead
            return
        for trainer in self.trainers:
            if len(trainer.train) < least:
                got = f"{len(trainer.train)} train samples"
                raise DataError(f"user {trainer.name!r}: {got}; batch norm needs at least {least} in a batch")
        self.banks = {
            split: bank_of([trainer.split(split) for trainer in self.trainers], **self.like)
            for split in ("train", "valid")
        }

    def count(self, trainer: int, stream: Stream) -> int:
        """Return the number of samples of a trainer."""
        owner = self.trainers[trainer]
        return len(owner.valid if stream == "valid" else owner.train)

    def pass_size(self, device: torch.device, columns: int) -> PassSize:
        """Return how many users and samples one pass takes; copies of the net dominate its memory.

        Each user has a copy of the net. With privacy of single examples, each sample has a copy.
        """
        sequences = min(self.plan.runtime.micro_batch or self.batch_size, self.batch_size)
        privacy = self.plan.privacy
        copies_per_user = sequences if privacy is not None and privacy.protects == "example" else 1
        users = self.plan.users_per_step or max(1, COLUMNS_PER_PASS // max(1, columns * copies_per_user))
        return PassSize(users=users, sequences=sequences)

    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int64[Tensor, "users batch"]:
        """Return the sample numbers of the next batch of each trainer."""
        return self.numbers(trainers, phase, round_number, step, repeat)

    def examples_at(
        self, trainers: Sequence[int], indices: Int[Tensor, "users batch"], round_number: int
    ) -> Int64[Tensor, "users batch"]:
        """Return the sample indices unchanged: a drawn batch of this source consists of sample indices."""
        self.enter(round_number)  # augmentation depends on the round
        return indices.long()

    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int64[Tensor, "users batch"]]:
        """Yield the numbers of all training samples of each trainer, in order."""
        self.enter(round_number)  # augmentation depends on the round
        return self.all_numbers(trainers)

    def held_out(self, trainers: Sequence[int]) -> Iterator[Int64[Tensor, "users batch"]]:
        """Yield the numbers of all validation samples of each trainer, in order."""
        return self.all_numbers(trainers, "valid")

    def read(
        self, stream: Stream, trainers: Sequence[int], drawn: Int[Tensor, "users batch"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and a mask that is False at padding; training inputs are augmented.

        A bank is a tensor with the samples of several users, from which batches are taken by sample number.
        """
        if self.banks:  # one bank per split, with all users
            inputs, targets, present = self.banks[stream].take(trainers, drawn)
        else:  # users are not in memory: read those of this batch
            bank = self._bank([self.trainers[trainer].split(stream) for trainer in trainers])
            inputs, targets, present = bank.take(range(len(trainers)), drawn)
        if self.augment is not None and stream == "train":
            batches = zip(trainers, inputs, drawn, strict=True)
            inputs = torch.stack([self._augmented(trainer, x, numbers) for trainer, x, numbers in batches])
        return inputs, targets, present

    def _augmented(self, trainer: int, inputs: Tensor, numbers: Int[Tensor, " batch"]) -> Float[Tensor, "batch ..."]:
        """Return the inputs of one user's batch, augmented at random.

        The random stream is that of the user, the round and the sample numbers, so that the same batch is augmented
        equally if it is read again in this round.

        Args:
            trainer: Index into ``self.trainers``, which has one entry per user, or a single one if data is pooled.
            inputs: Inputs ``(batch, ...)``.
            numbers: Sample numbers of the batch.
        """
        assert self.augment is not None
        random = generator(self.plan.seed, self.trainers[trainer].name, self._round, "augment", *numbers.tolist())
        return self.augment([trainer], inputs.unsqueeze(0), random)[0]

    def loss_counts(self, drawn: Int[Tensor, "users batch"]) -> Int64[Tensor, " users"]:
        """Return the number of samples in the batch of each user, without padding."""
        return (drawn != PAD).sum(1)

    def score(
        self, predict: Predict, sets: Sequence[AnySplit], rows: Sequence[int], pass_size: PassSize, gates: Gates | None
    ) -> list[SampleScore]:
        """Return the loss, and the accuracy of classifiers, on each of several sets under a model of its own.

        Args:
            predict: Returns the outputs of models, given by number, for a batch of each.
            sets: Samples to score.
            rows: For each set, the number of the model that scores it.
            pass_size: Number of users and samples in one training pass, which bounds a scoring pass.
            gates: Not used; nets have no routers.
        """
        bank = self._bank(sets)
        slots = max(1, min(pass_size.users, len(rows)))

        def forward(set_numbers: Sequence[int], inputs: Tensor) -> Tensor:
            """Return the outputs for a batch of each of these sets, each under the model that scores the set."""
            return predict([rows[number] for number in set_numbers], inputs)

        return score_samples(forward, bank, range(len(sets)), loss=self.loss, batch=SCORED_PER_SLOT, slots=slots)

    # ---------------------------------------------------------------- counted without data

    scores_more = True

    def of(self, trainers: Sequence[UserSamples]) -> SampleBatchSource:
        """Return the batch source of other trainers, without augmentation."""
        like, size = self.banks["train"].inputs, self.batch_size
        same = {"device": like.device, "dtype": like.dtype, "loss": self.loss, "least": self.least}
        return SampleBatchSource(trainers, self.plan, size, **same)

    def without_data(self, fake: Callable[[Tensor], Tensor]) -> SampleBatchSource:
        """Return the source with fake tensors for the data, which have a shape but no memory, to count costs.

        It does not augment, as the cost of that is negligible.
        """
        batch_source = copy.copy(self)
        batch_source.banks = {
            name: replace(bank, inputs=fake(bank.inputs), targets=fake(bank.targets))
            for name, bank in self.banks.items()
        }
        batch_source.augment = None
        return batch_source

    def blank(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Int64[Tensor, "users count"]:
        """Return a batch that repeats the first sample."""
        return torch.zeros(users, count, dtype=torch.int64)

    def blank_inputs(
        self, users: int, count: int, fake: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "users count ..."]:
        """Return fake inputs in the shape of the samples."""
        inputs = self.banks["train"].inputs
        return fake(torch.empty(users, count, *inputs.shape[1:], dtype=inputs.dtype, device="meta"))

    def scored_at_once(self, users: Sequence[AnyUser], pass_size: PassSize) -> int:
        """Return the size of the largest test set, up to a limit."""
        return min(SCORED_PER_SLOT, max(len(user.test) for user in users))

    def _bank(self, sets: Sequence[Samples]) -> SampleBank:
        """Return a bank of the samples of several sets: one tensor on the device, from which batches are taken.

        The two latest banks are cached, as test and validation sets are scored in turn.
        """
        key = tuple(id(samples) for samples in sets)
        if key not in self._scored:
            latest = dict(list(self._scored.items())[-1:])
            # Sets are kept along with their bank, so that no other object gets their ids.
            self._scored = latest | {key: (sets, bank_of(sets, **self.like))}
        _, bank = self._scored[key]
        return bank


T = TypeVar("T")

_TRIED = 2
"""Number of users, and of samples of each, in a trial pass of a net; batch norm needs two."""


def net_name(recipe: Recipe, population: Population) -> str:
    """Return the name of the net that a recipe trains, for messages and metrics.

    It is the ``base`` of the recipe, otherwise the usual net of the data. A net that a program passes has the name of
    the function that makes it, or "own" if the function is a lambda.

    Raises:
        RecipeError: The base is not a net.
    """
    if not isinstance(population.net, str):
        name = getattr(population.net, "__name__", "")
        return name if name.isidentifier() else "own"  # the name of a lambda, "<lambda>", is no identifier
    if "base" not in recipe.model_fields_set:
        return population.net
    if not recipe.base.startswith(NETS):
        label = recipe.data.label
        raise RecipeError(
            f"base: got {recipe.base!r} for {label}; allowed: {NETS}NAME, or no base for the data's own net"
        )
    return recipe.base.removeprefix(NETS)


def net_maker(recipe: Recipe, population: Population) -> Callable[[int], nn.Module]:
    """Return a function that makes the net with the initial weights of a seed.

    Raises:
        RecipeError: The net does not exist, does not fit the samples, or cannot be stacked over users.
    """
    name, shape, outputs = net_name(recipe, population), population.input_shape, population.classes
    net = population.net  # a name, or a function of the user's program

    def make(seed: int) -> nn.Module:
        if isinstance(net, str):
            return make_net(name, shape, outputs, seed=seed)
        with torch.random.fork_rng(devices=()):  # the function draws weights from torch's global generator
            torch.manual_seed(derive("net", "own", seed))
            return _make_own_net(net, name, shape, outputs)

    return make


def _make_own_net(make: MakeNet, name: str, shape: Sequence[int], outputs: int) -> nn.Module:
    """Call a function of the user's program that makes a net, with or without arguments, and check its result.

    Args:
        make: The function; takes either nothing, or the shape of an input and the number of outputs.
        name: Name of the net, for errors.
        shape: Shape of an input.
        outputs: Number of outputs.

    Raises:
        RecipeError: It is a net instead of a function, takes other arguments, or returns no net.
    """
    if isinstance(make, nn.Module):
        kind = type(make).__name__
        raise RecipeError(f"net: got an instance of {kind}; pass a function that makes one: lambda: {kind}(...)")
    try:
        arguments = builder_arguments(make, shape, outputs)
    except TypeError as error:
        raise RecipeError(f"net {name!r}: {error}") from error
    net = make(*arguments)
    if not isinstance(net, nn.Module):
        raise RecipeError(f"net {name!r}: its function returned {type(net).__name__}; allowed: an nn.Module")
    return net


def check_net(net: nn.Module, name: str, population: Population) -> bool:
    """Check that copies of a net run together under ``torch.vmap`` and give outputs that fit the loss.

    Also find out whether its forward pass changes buffers in training.

    Args:
        net: The net.
        name: Its name, for errors.
        population: Users and their loss.

    Returns:
        True if a forward pass in training mode changes buffers, such as running statistics.

    Raises:
        RecipeError: The copies cannot run together, or outputs have another shape.
    """
    _check_modules(net, name)
    net = _try(lambda: copy.deepcopy(net), f"net {name!r}: cannot be copied").train()
    tensors = {key: p.detach() for key, p in net.named_parameters()}
    buffers = {key: b.detach() for key, b in net.named_buffers() if b.is_floating_point()}
    tensors |= buffers
    any_tensor = next(iter(tensors.values()))  # for the dtype and the device
    # ``_TRIED`` users with as many samples each: two, as batch norm cannot train on one sample.
    inputs = torch.zeros(_TRIED, _TRIED, *population.input_shape, dtype=any_tensor.dtype, device=any_tensor.device)

    def call(tensors_of_user: dict[str, Tensor], x: Tensor) -> Any:
        return call_with(net, tensors_of_user, x)

    with torch.no_grad(), torch.random.fork_rng(devices=()):
        # First one user alone, then several users together.
        single = {key: t.clone() for key, t in tensors.items()}
        outputs = _try(lambda: call(single, inputs[0]), f"net {name!r}: cannot take inputs of {population.input_shape}")
        _check_outputs(outputs, name, population)
        stacked = {key: t.expand(_TRIED, *t.shape).clone() for key, t in tensors.items()}
        _try(
            lambda: vmap(call, randomness="different")(stacked, inputs),
            f"net {name!r}: users' copies cannot run together under torch.vmap",
        )
    # A write in place raises the version of a buffer even if its values stay the same, as on these inputs of zeros.
    return any(single[key]._version or not torch.equal(single[key], buffers[key]) for key in buffers)


def _check_modules(net: nn.Module, name: str) -> None:
    """Check that a net can be trained as one copy per user, all of them in one stacked forward pass.

    Raises:
        RecipeError: The net has no parameters, a parameter or buffer is lazy or not finite, or batch norm has no
            running statistics or no momentum.
    """
    if not any(True for _ in net.parameters()):
        raise RecipeError(f"net {name!r}: has no parameters; allowed: an nn.Module with parameters")
    for key, t in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(t):
            raise RecipeError(f"net {name!r}: {key} has no shape yet; allowed: modules that are not lazy")
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise RecipeError(f"net {name!r}: {key} is not finite; allowed: finite numbers (-1e9 in a mask for -inf)")
    for key, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats:
            why = "otherwise a sample's output depends on the rest of its batch even in evaluation"
            raise RecipeError(f"net {name!r}: {key} has track_running_stats=False; allowed: True, because {why}")
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None:
            raise RecipeError(f"net {name!r}: {key} has momentum None, a mean over all batches; allowed: a number")


def _try(run: Callable[[], T], problem: str) -> T:
    """Call a function and return its result; convert any error to a recipe error that begins with ``problem``."""
    try:
        return run()
    except Exception as error:  # the net is the user's code and may raise anything
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecipeError(f"{problem}: {first_line}") from error


def _check_outputs(outputs: object, name: str, population: Population) -> None:
    """Check the outputs of a net for a batch of :data:`_TRIED` samples.

    They must have the shape (samples, outputs). A loss that pairs outputs with targets (``paired``) needs one output
    for each class, or for each number in the target of a regression; other losses take any number of outputs.

    Args:
        outputs: Result of the net.
        name: Name of the net, for the error.
        population: Users and their loss.

    Raises:
        RecipeError: The outputs have another shape.
    """
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    loss, wanted = population.measure, (_TRIED, population.classes)  # classes: or numbers in a regression's target
    is_matrix = isinstance(outputs, Tensor) and outputs.dim() == 2 and len(outputs) == _TRIED
    if loss.paired and (not is_matrix or got != wanted):
        each = "class" if loss.classes else "number in a target"
        raise RecipeError(
            f"net {name!r}: outputs are {got} for {_TRIED} samples; allowed: {wanted}, one for each {each}"
        )
    if not loss.paired and not is_matrix:
        raise RecipeError(f"net {name!r}: outputs are {got} for {_TRIED} samples; allowed: ({_TRIED}, outputs)")


def build_nets(
    recipe: Recipe,
    population: Population,
    plan: RunPlan,
    *,
    reads_later: bool = False,
    local_numbers: Sequence[int] | None = None,
    checks_validation_data: bool = True,
) -> Clients:
    """Return the users with their copies of the net, with adaptors if the method mixes adaptors.

    Args:
        recipe: The recipe.
        population: Users of the run.
        plan: Plan of the run.
        reads_later: Whether samples are read on first use, and not now.
        local_numbers: Numbers of the users whose samples are on this machine; None for all.
        checks_validation_data: Whether to check that users have validation data, if the run needs it.

    Raises:
        RecipeError: The base is not a net, the method is for language models, a method that assigns users to components
            by their true clusters has too few components, or batch norm cannot take the batches.
        DataError: The samples of users cannot share a net.
    """
    plan = with_full_participation(plan)  # the one trainer of pooled data takes part in every round
    is_pooled = plan.method.placement.pooled
    local_population = population
    if local_numbers is not None:
        local_population = replace(population, users=population.users.select(local_numbers))
    users = local_population.users
    if not reads_later:
        _check_users(local_population)
    model = net_model(recipe, population, plan.method)
    if local_numbers is not None:
        model = model.only(local_numbers)
    if not is_pooled:
        trainers = users
    elif reads_later:
        trainers = as_users([lazy_user(UserSamples, "everyone", lambda: pool_samples(users))])
    else:
        trainers = as_users([pool_samples(users)])
    size = batch_size(plan, len(users))
    smallest_size = _least_batch(model, plan, size)

    def make_batch_source() -> SampleBatchSource:
        """Return the source of the trainers' batches, which reads their samples."""
        return SampleBatchSource(
            trainers,
            plan,
            size,
            device=model.device,
            dtype=model.dtype,
            loss=local_population.measure,
            # Augmentation may have settings for each user, but none for the one trainer of pooled data.
            augment=None if is_pooled else local_population.augmentation,
            least=smallest_size,
        )

    if reads_later:  # the clients call the function on first use
        return Clients(model, plan, trainers=trainers, users=users, batch_source=make_batch_source, reads=False)
    batch_source = make_batch_source()
    return Clients(model, plan, trainers=trainers, users=users, batch_source=batch_source, reads=checks_validation_data)


def net_model(recipe: Recipe, population: Population, method: Method) -> StackedModel:
    """Return the net that all users train.

    Args:
        recipe: The recipe.
        population: Users of the run.
        method: Method of the run.

    Raises:
        RecipeError: See :func:`build_nets`.
    """
    check_on_nets(method)
    _check_clusters(population, method)
    device = resolve_device(recipe.runtime.device)
    dtype = torch.float32 if recipe.runtime.dtype == "auto" else resolve_dtype(recipe.runtime.dtype, device)
    if dtype == torch.float16:
        raise RecipeError("runtime.dtype: float16 is for language models; nets take auto, bfloat16, float32 or float64")
    users = 1 if method.placement.pooled else len(population.users)
    name, mixture = net_name(recipe, population), method.placement.mixture
    make = net_maker(recipe, population)
    if method.placement.gated:
        num_nets = 2  # a shared and a local one, with a gate between them
    elif mixture is not None and mixture.of == "models":
        num_nets = mixture.clusters
    else:
        num_nets = method.server.server_models  # some servers keep several models with different initial weights
    first = make(recipe.seed)
    batchwise = check_net(first, name, population)
    require_room(f"method {method.name}", num_nets, sum(p.numel() for p in first.parameters()))
    # Nets of one run need seeds that no run with another seed uses.
    nets = [first, *(make(recipe.seed + SEED_STEP * number) for number in range(1, num_nets))]
    if mixture is not None and mixture.of == "adaptors":
        settings = recipe.floral.model_dump()
        is_default = settings["rank"] is None and settings["budget"] is None
        if is_default:  # 1% of each layer's parameters; no warning where rank 1 has more
            settings["budget"] = DEFAULT_BUDGET
        size_settings = {key: settings[key] for key in ("rank", "budget", "conv", "lora", "bias", "norm")}
        require_room(f"method {method.name}", mixture.clusters, adaptor_size(nets[0], **size_settings), ADAPTOR_SETS)
        settings |= {"num_clusters": mixture.clusters, "per_layer": mixture.per_layer, "warn": not is_default}
        # The adaptors are added to the net in place. The values drawn here are not used, as they are drawn again for
        # each user; a generator of their own leaves torch's global one untouched.
        nets = [floral(nets[0], copy=False, generator=torch.Generator(), **settings)]
    if method.placement.gated:
        nets = [gated_pair(*nets, inputs=math.prod(population.input_shape), seed=recipe.seed)]
    compiled = recipe.runtime.compile
    if compiled == "auto":
        compiled = recipe.training.rounds >= COMPILE_FROM
    return stack(
        nets,
        name=NETS + name,
        users=users,
        mixture=mixture,
        device=device,
        dtype=dtype,
        loss=population.measure,
        compiled=bool(compiled),
        batchwise=batchwise,
    )


DEFAULT_BUDGET = 0.01
"""Parameters of an adaptor relative to its layer, without ``floral.rank`` and ``floral.budget``; at least rank 1."""

COMPILE_FROM = 20
"""Number of rounds from which ``runtime.compile: auto`` compiles convolutions.

Compiling takes some seconds, once per machine. The number of users does not count, so that a user alone on a machine
runs the same code as all users in one process."""


SEED_STEP = 1_000_003
"""Difference between the seeds of the nets of an ensemble, so that runs with other seeds share none."""


def check_on_nets(method: Method) -> None:
    """Check that a method supports nets.

    Raises:
        RecipeError: It is only for language models.
    """
    if why := method.unfit_for_nets:
        raise RecipeError(f"method {method.name}: {why}")


def _check_users(population: Population) -> None:
    """Check that the samples of all users have one shape, which the net takes; a program may have passed any samples.

    Raises:
        DataError: Samples have another shape, or targets that do not fit.
    """
    check(population.users, classes=population.classes if population.measure.classes else None)
    first = population.users[0]  # the users' shapes are equal, as was just checked
    if (got := tuple(first.train.inputs.shape[1:])) != tuple(population.input_shape):
        raise DataError(
            f"user {first.name!r}: inputs have shape {got}; allowed: {tuple(population.input_shape)}, as the net takes"
        )


def _check_clusters(population: Population, method: Method) -> None:
    """Check that a method that assigns users to components by their true clusters has a component for each cluster.

    With fewer components, two clusters would share one. Additional components are allowed, but have no users.

    Raises:
        RecipeError: The method has fewer components than there are clusters.
    """
    mixture = method.placement.mixture
    if mixture is None or not mixture.optimal:  # users learn their weights, without the true clusters
        return
    clusters = [user.cluster for user in population.users if user.cluster is not None]
    num_clusters = max(clusters, default=-1) + 1  # numbered from 0
    if (got := mixture.clusters) < num_clusters:
        raise RecipeError(
            f"method {method.name}: clusters is {got}; allowed: at least {num_clusters}, the true clusters"
        )


def _least_batch(model: StackedModel, plan: RunPlan, size: int) -> int:
    """Return the smallest size that a batch may have: 1, or 2 with batch norm.

    Args:
        model: The net.
        plan: Plan of the run.
        size: Largest batch size of the run.

    Raises:
        RecipeError: Batch norm cannot take the batches, as they are smaller or are split into micro-batches.
    """
    if not model.batchwise:
        return 1
    smallest = size if plan.method.placement.pooled else min(values_in(plan.training.batch_size))
    if smallest < LEAST_FOR_NORM:
        need = f"{model.name} has batch norm, which needs at least {LEAST_FOR_NORM}"
        raise RecipeError(f"training.batch_size: got {smallest}; {need}")
    if plan.runtime.micro_batch is not None and plan.runtime.micro_batch < size:
        raise RecipeError(
            f"runtime.micro_batch: got {plan.runtime.micro_batch}; {model.name} has batch norm, which needs whole "
            f"batches; allowed: at least {size}, or null"
        )
    return LEAST_FOR_NORM


LEAST_FOR_NORM = 2
"""Smallest batch of batch norm; a single sample has no variance."""
