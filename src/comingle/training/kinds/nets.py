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
from comingle.data.populations import UserCollection, as_users
from comingle.data.samples.reading import Augment, MakeNet, Population
from comingle.data.samples.samples import SampleBank, Samples, UserSamples, bank_of, check, pool_samples
from comingle.data.samples.scoring import score_samples
from comingle.methods.base import Method, Phase, Stream
from comingle.models.floral.wrapper import adaptor_size, floral
from comingle.models.hardware import require_room, resolve_device, resolve_dtype, return_freed_memory
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

COLUMNS_PER_PASS = 2**24
"""Default number of parameters, over all users, in one step; their gradients and copies need memory.

Measured with 300 users of 784-200-10 and 60 of a CNN with 0.9 million parameters: four times as many take 4 to 9% less
time, and 0.3 and 0.5 GB more."""

INPUT_BYTES_PER_PASS = 32 << 20
"""Default size of the inputs of all users in one step on the CPU, to which intermediate results are proportional.

Measured with 100 users of a CNN with 62 thousand parameters and 61 MiB of inputs: half as many users take 2% more
processor time and 0.1 GB less."""

MAX_SAMPLES_PER_PASS = 512
"""Largest number of test samples of one user (or of one split) that a forward pass scores."""


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
        smallest_batch: int = 1,
    ):
        """Copy the samples of trainers that are in memory to the device.

        Args:
            trainers: Owners of the samples: each user, or a single one if the method pools the data of all users.
            plan: Settings of the run, in the form that training uses.
            batch_size: Largest number of samples per trainer.
            device: Device of inputs.
            dtype: Data type of inputs.
            loss: Loss by which held-out data is scored.
            augment: Changes training inputs at random.
            smallest_batch: Smallest number of samples in a batch; smaller ones are not trained on.
        """
        super().__init__(trainers, plan, batch_size, smallest_batch=smallest_batch)
        self.loss, self.augment = loss, augment
        self.device_and_dtype = {"device": device, "dtype": dtype}
        """Device and dtype of inputs."""
        self._cached_banks: dict[tuple[int, ...], tuple[Sequence[Samples], SampleBank]] = {}
        """The two latest results of :meth:`_bank`: splits with their samples in one tensor, by ids of the splits."""
        self.banks: dict[str, SampleBank] = {}
        """Samples of all trainers in one tensor, by split; empty if trainers are not in memory."""
        if not self.trainers.in_memory:  # samples are read for each batch instead
            return
        for trainer in self.trainers:
            if len(trainer.train) < smallest_batch:
                got = f"{len(trainer.train)} train samples"
                raise DataError(f"user {trainer.name!r}: {got}; batch norm needs at least {smallest_batch} in a batch")
        for split in ("train", "valid"):
            samples_of_trainers = [trainer.split(split) for trainer in self.trainers]
            self.banks[split] = bank_of(samples_of_trainers, **self.device_and_dtype, moves=True)
        return_freed_memory()  # of the samples as they were read

    def count(self, trainer: int, stream: Stream) -> int:
        """Return the number of samples of a trainer in a split, "train" or "valid"."""
        owner = self.trainers[trainer]
        return len(owner.valid if stream == "valid" else owner.train)

    def pass_size(self, device: torch.device, columns: int) -> PassSize:
        """Return how many users and samples one pass takes, so that all copies of the net fit into memory.

        Each user has a copy of the net. With privacy of single examples, each sample has a copy.

        Args:
            device: Device of the pass; on the CPU the inputs of a pass are limited, too.
            columns: Number of parameters of the net.
        """
        largest_micro_batch = self.plan.runtime.micro_batch or self.batch_size  # whole batches by default
        samples_per_user = min(largest_micro_batch, self.batch_size)
        privacy = self.plan.privacy
        protects_examples = privacy is not None and privacy.protects == "example"
        copies_per_user = samples_per_user if protects_examples else 1
        users_in_memory = max(1, COLUMNS_PER_PASS // max(1, columns * copies_per_user))
        has_batch_norm = self.smallest_batch > 1  # its last bits depend on the number of users in a pass
        if device.type == "cpu" and self.banks and not has_batch_norm:
            bytes_per_user = samples_per_user * self.banks["train"].inputs[:1].nbytes
            users_in_memory = min(users_in_memory, max(1, INPUT_BYTES_PER_PASS // max(1, bytes_per_user)))
        return PassSize(users=self.plan.users_per_step or users_in_memory, sequences=samples_per_user)

    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int64[Tensor, "users batch"]:
        """Return the sample numbers of the next batch of each trainer; see :meth:`Batches.draw` for the arguments."""
        return self.numbers(trainers, phase, round_number, step, repeat)

    def examples_at(
        self, trainers: Sequence[int], indices: Int[Tensor, "users batch"], round_number: int
    ) -> Int64[Tensor, "users batch"]:
        """Return the indices themselves as a batch, whose samples :meth:`read` reads; used for example-level privacy.

        Args:
            trainers: Not used.
            indices: Indices of the samples of each trainer; ``PAD`` for none.
            round_number: The round, counted from 0, on which the augmentation of these samples will depend.
        """
        self.enter(round_number)
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

        Args:
            stream: Split of the samples.
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            drawn: Sample numbers of each trainer.
        """
        if self.banks:  # the samples of all trainers are on the device
            inputs, targets, is_sample = self.banks[stream].take(trainers, drawn)
        else:
            samples_of_trainers = [self.trainers[trainer].split(stream) for trainer in trainers]
            bank = self._bank(samples_of_trainers)  # has only these trainers
            inputs, targets, is_sample = bank.take(range(len(trainers)), drawn)
        if self.augment is not None and stream == "train":
            augmented = []
            for trainer, inputs_of_trainer, numbers in zip(trainers, inputs, drawn, strict=True):
                augmented.append(self._augmented(trainer, inputs_of_trainer, numbers))
            inputs = torch.stack(augmented)
        return inputs, targets, is_sample

    def _augmented(self, trainer: int, inputs: Tensor, numbers: Int[Tensor, " batch"]) -> Float[Tensor, "batch ..."]:
        """Return the inputs of one trainer's batch, augmented at random.

        The random stream depends on the round and the samples, so a batch that is read twice in a round is the same.

        Args:
            trainer: Number of the user who trains (0 if one model is trained on all users' data).
            inputs: Inputs ``(batch, ...)``.
            numbers: Sample numbers of the batch.
        """
        assert self.augment is not None
        random = generator(self.plan.seed, self.trainers[trainer].name, self._round, "augment", *numbers.tolist())
        augmented = self.augment([trainer], inputs.unsqueeze(0), random)  # one trainer: (1, batch, ...)
        return augmented[0]

    def loss_counts(self, drawn: Int[Tensor, "users batch"]) -> Int64[Tensor, " users"]:
        """Return the number of samples in the batch of each user, without padding."""
        return (drawn != PAD).sum(1)

    def score(
        self,
        predict: Predict,
        splits: Sequence[AnySplit],
        model_numbers: Sequence[int],
        pass_size: PassSize,
        gates: Gates | None,
    ) -> list[SampleScore]:
        """Return the loss, and the accuracy of classifiers, on each of several splits under a model of its own.

        Args:
            predict: Returns the outputs of models, given by number, for a batch of each.
            splits: Samples to score.
            model_numbers: For each split, the number of the model that scores it.
            pass_size: Number of users and samples in one training pass, which bounds a scoring pass.
            gates: Not used; nets have no routers.
        """
        bank = self._bank(splits)
        splits_per_pass = max(1, min(pass_size.users, len(model_numbers)))

        def forward(split_numbers: Sequence[int], inputs: Tensor) -> Tensor:
            """Return the outputs for a batch of each of these splits, each under the model that scores the split."""
            return predict([model_numbers[number] for number in split_numbers], inputs)

        return score_samples(
            forward, bank, range(len(splits)), loss=self.loss, batch=MAX_SAMPLES_PER_PASS, slots=splits_per_pass
        )

    # ---------------------------------------------------------------- counted without data

    scores_more = True

    def with_trainers(self, trainers: Sequence[UserSamples]) -> SampleBatchSource:
        """Return a batch source of other trainers with the same settings, but without augmentation.

        The memory and operations of a step are counted with one, for as many users as train at once.

        Args:
            trainers: The trainers, with samples of the same shape.
        """
        inputs = self.banks["train"].inputs
        return SampleBatchSource(
            trainers,
            self.plan,
            self.batch_size,
            device=inputs.device,
            dtype=inputs.dtype,
            loss=self.loss,
            smallest_batch=self.smallest_batch,
        )

    def without_data(self, fake: Callable[[Tensor], Tensor]) -> SampleBatchSource:
        """Return a copy to count costs with: its samples are fake tensors, and are not augmented.

        Args:
            fake: Converts a tensor to a ``FakeTensor``, which only has a shape, dtype and device.
        """
        batch_source = copy.copy(self)
        batch_source.banks = {}
        for split, bank in self.banks.items():
            batch_source.banks[split] = replace(bank, inputs=fake(bank.inputs), targets=fake(bank.targets))
        batch_source.augment = None
        return batch_source

    def blank(self, users: int, count: int, fake: Callable[[Tensor], Tensor]) -> Int64[Tensor, "users count"]:
        """Return a batch to count costs with: the number of the first sample of each user, repeated.

        The costs of samples are equal, so any sample will do.

        Args:
            users: Number of users.
            count: Number of samples of each user.
            fake: Not used; a batch has sample numbers, which cost little.
        """
        return torch.zeros(users, count, dtype=torch.int64)

    def blank_inputs(
        self, users: int, count: int, fake: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "users count ..."]:
        """Return fake inputs in the shape of the samples, without values, to count costs.

        Args:
            users: Number of users.
            count: Number of samples of each user.
            fake: Converts a tensor on the meta device to a ``FakeTensor``, which only has a shape, dtype and device.
        """
        inputs = self.banks["train"].inputs  # (samples of all users, ...)
        return fake(torch.empty(users, count, *inputs.shape[1:], dtype=inputs.dtype, device="meta"))

    def scored_at_once(self, users: Sequence[AnyUser], pass_size: PassSize) -> int:
        """Return how many samples of each user a forward pass scores: the whole test set of each user, up to a limit.

        Smaller test sets are padded to the largest one, so this is the size of the largest, at most
        :data:`MAX_SAMPLES_PER_PASS`.

        Args:
            users: The users who are scored.
            pass_size: Number of users and samples in a training pass; without effect here.
        """
        largest_test_set = max(len(user.test) for user in users)
        return min(MAX_SAMPLES_PER_PASS, largest_test_set)

    def _bank(self, splits: Sequence[Samples]) -> SampleBank:
        """Return the samples of several splits in one tensor on the device; the two latest results are cached.

        Args:
            splits: The splits, such as the test splits of all users.
        """
        key = tuple(id(samples) for samples in splits)
        if key not in self._cached_banks:
            bank = bank_of(splits, **self.device_and_dtype, moves=True)
            while len(self._cached_banks) > 1:
                oldest_key = next(iter(self._cached_banks))
                del self._cached_banks[oldest_key]
            # The splits are cached with their bank: while they exist, no other object can have their ids.
            self._cached_banks[key] = (splits, bank)
        _splits, bank = self._cached_banks[key]
        return bank


T = TypeVar("T")

_NUM_TRIED = 2
"""Number of users, and of samples of each, in a trial pass of a net; batch norm needs two."""


def net_name(recipe: Recipe, population: Population) -> str:
    """Return the name of the net that a recipe trains, for messages and metrics.

    It is the ``base`` of the recipe without ``net:``, otherwise the data's own net, such as ``"cnn"``. A net that a
    program passes has the name of the function that makes it; ``"own"`` if that is a lambda.

    Raises:
        RecipeError: The base is not a net.
    """
    if not isinstance(population.net, str):  # a function
        function_name = getattr(population.net, "__name__", "")
        return function_name if function_name.isidentifier() else "own"  # "<lambda>" is no identifier
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
    name = net_name(recipe, population)
    input_shape, num_outputs = population.input_shape, population.classes
    name_or_function = population.net  # a net of comingle, or a function of the user's program

    def make(seed: int) -> nn.Module:
        if isinstance(name_or_function, str):
            return make_net(name, input_shape, num_outputs, seed=seed)
        with torch.random.fork_rng(devices=()):  # the function draws weights from torch's global generator
            torch.manual_seed(derive("net", "own", seed))
            return _make_own_net(name_or_function, name, input_shape, num_outputs)

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
    net = _call_or_refuse(lambda: copy.deepcopy(net), f"net {name!r}: cannot be copied").train()
    buffers = {key: b.detach() for key, b in net.named_buffers() if b.is_floating_point()}
    tensors = {key: p.detach() for key, p in net.named_parameters()}
    tensors.update(buffers)
    any_tensor = next(iter(tensors.values()))  # for the dtype and the device
    # ``_NUM_TRIED`` users with as many samples each: two, as batch norm cannot train on one sample.
    inputs = torch.zeros(
        _NUM_TRIED, _NUM_TRIED, *population.input_shape, dtype=any_tensor.dtype, device=any_tensor.device
    )

    def call(tensors_of_user: dict[str, Tensor], inputs_of_user: Tensor) -> Any:
        return call_with(net, tensors_of_user, inputs_of_user)

    tensors_of_one = {key: t.clone() for key, t in tensors.items()}
    tensors_of_several = {key: t.expand(_NUM_TRIED, *t.shape).clone() for key, t in tensors.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        outputs = _call_or_refuse(
            lambda: call(tensors_of_one, inputs[0]), f"net {name!r}: cannot take inputs of {population.input_shape}"
        )
        _check_outputs(outputs, name, population)
        _call_or_refuse(
            lambda: vmap(call, randomness="different")(tensors_of_several, inputs),
            f"net {name!r}: users' copies cannot run together under torch.vmap",
        )
    for key, buffer in buffers.items():
        buffer_after_pass = tensors_of_one[key]
        # PyTorch counts writes in place in ``_version``, also those that do not change values.
        if buffer_after_pass._version or not torch.equal(buffer_after_pass, buffer):
            return True
    return False


def _check_modules(net: nn.Module, name: str) -> None:
    """Check the modules of a net, of which each user gets a copy: their parameters, buffers and batch norm.

    Args:
        net: The net.
        name: Its name, for errors.

    Raises:
        RecipeError: The net has no parameters, a parameter or buffer is lazy or not finite, or batch norm has no
            running statistics or no momentum.
    """
    if next(net.parameters(), None) is None:
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


def _call_or_refuse(function: Callable[[], T], problem: str) -> T:
    """Return the result of a function that runs the user's net; convert any error to a ``RecipeError``.

    Args:
        function: The function.
        problem: First words of the error message.
    """
    try:
        return function()
    except Exception as error:  # the user's code may raise anything
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecipeError(f"{problem}: {first_line}") from error


def _check_outputs(outputs: object, name: str, population: Population) -> None:
    """Check that the outputs of a net for a batch of :data:`_NUM_TRIED` samples have the shape (samples, outputs).

    A loss that pairs outputs with targets (``paired``), such as cross-entropy, needs as many outputs as classes, or as
    numbers in the target of a regression.

    Args:
        outputs: Result of the net.
        name: Name of the net, for the error.
        population: Users and their loss.

    Raises:
        RecipeError: The outputs have another shape.
    """
    loss = population.measure
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else None
    got = type(outputs).__name__ if shape is None else shape
    is_matrix = shape is not None and len(shape) == 2 and shape[0] == _NUM_TRIED
    if not loss.paired:
        if not is_matrix:
            raise RecipeError(
                f"net {name!r}: outputs are {got} for {_NUM_TRIED} samples; allowed: ({_NUM_TRIED}, outputs)"
            )
        return
    allowed = (_NUM_TRIED, population.classes)  # classes of a classifier, or numbers in a target
    if shape != allowed:
        each = "class" if loss.classes else "number in a target"
        raise RecipeError(
            f"net {name!r}: outputs are {got} for {_NUM_TRIED} samples; allowed: {allowed}, one for each {each}"
        )


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
        recipe: Settings of the run.
        population: Users of the run.
        plan: Settings of the run, in the form that training uses.
        reads_later: Whether samples are read on first use, and not now.
        local_numbers: Numbers of the users whose samples are on this machine; None for all.
        checks_validation_data: Whether to check that users have validation data, if the run needs it.

    Raises:
        RecipeError: The base is not a net, the method is for language models, a method that assigns users to components
            by their true clusters has too few components, or batch norm cannot take the batches.
        DataError: The samples of users cannot share a net.
    """
    plan = with_full_participation(plan)  # the one trainer of pooled data takes part in every round
    local_population = population
    if local_numbers is not None:
        local_population = replace(population, users=population.users.select(local_numbers))
    users = local_population.users
    if not reads_later:
        _check_users(local_population)
    model = net_model(recipe, population, plan.method)
    if local_numbers is not None:
        model = model.only(local_numbers)

    trainers = _net_trainers(users, plan.method, reads_later=reads_later)
    # Augmentation may have settings for each user, but none for the one trainer of pooled data.
    augment = None if plan.method.placement.pooled else local_population.augmentation
    largest_batch = batch_size(plan, len(users))
    smallest_batch = _smallest_batch(model, plan, largest_batch)

    def make_batch_source() -> SampleBatchSource:
        """Return the source of the trainers' batches, which reads their samples."""
        return SampleBatchSource(
            trainers,
            plan,
            largest_batch,
            device=model.device,
            dtype=model.dtype,
            loss=local_population.measure,
            augment=augment,
            smallest_batch=smallest_batch,
        )

    if reads_later:
        return Clients(model, plan, trainers=trainers, users=users, batch_source=make_batch_source, reads=False)
    batch_source = make_batch_source()
    return Clients(model, plan, trainers=trainers, users=users, batch_source=batch_source, reads=checks_validation_data)


def _net_trainers(
    users: UserCollection[UserSamples], method: Method, *, reads_later: bool
) -> UserCollection[UserSamples]:
    """Return the owners of the nets that are trained: the users, or a single trainer with the samples of all users.

    Args:
        users: The users on this machine.
        method: Method of the run, which may pool the data of all users.
        reads_later: Whether samples are read on first use, and not now.
    """
    if not method.placement.pooled:
        return users
    if reads_later:
        return as_users([lazy_user(UserSamples, "everyone", lambda: pool_samples(users))])
    return as_users([pool_samples(users)])


def net_model(recipe: Recipe, population: Population, method: Method) -> StackedModel:
    """Return the net of a run, with a copy of its parameters for each user.

    Depending on the method, it consists of one or several nets with initial weights of their own: the components of a
    mixture, or a shared and a local net with a gate between them.

    Args:
        recipe: The recipe, which names the net and the device.
        population: Users of the run, with the shape of their samples and the loss.
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
    name = net_name(recipe, population)
    mixture = method.placement.mixture
    make_net_of_seed = net_maker(recipe, population)
    first_net = make_net_of_seed(recipe.seed)
    changes_buffers = check_net(first_net, name, population)
    num_nets = _count_nets(method)
    require_room(f"method {method.name}", num_nets, sum(p.numel() for p in first_net.parameters()))
    nets = [first_net]
    for number in range(1, num_nets):
        seed = recipe.seed + SEED_STEP * number  # a seed that no run with another seed uses
        nets.append(make_net_of_seed(seed))

    if mixture is not None and mixture.of == "adaptors":  # users mix low-rank changes of one net
        nets = [_add_adaptors(nets[0], recipe, method)]
    if method.placement.gated:  # a gate weights a shared and a local net for each sample
        nets = [gated_pair(*nets, inputs=math.prod(population.input_shape), seed=recipe.seed)]
    compiled = recipe.runtime.compile
    if compiled == "auto":
        compiled = recipe.training.rounds >= COMPILE_FROM
    return stack(
        nets,
        name=NETS + name,
        users=1 if method.placement.pooled else len(population.users),  # pooled: one model for all users' data
        mixture=mixture,
        device=device,
        dtype=dtype,
        loss=population.measure,
        compiled=bool(compiled),
        batchwise=changes_buffers,  # such as batch norm, in which the samples of a batch affect each other
    )


def _count_nets(method: Method) -> int:
    """Return the number of nets with initial weights of their own that a method trains."""
    mixture = method.placement.mixture
    if method.placement.gated:
        return 2  # a shared and a local one, with a gate between them
    if mixture is not None and mixture.of == "models":
        return mixture.clusters
    return method.server.server_models  # more than 1 if the server keeps several models


def _add_adaptors(net: nn.Module, recipe: Recipe, method: Method) -> nn.Module:
    """Add adaptors (low-rank changes of layers) to a net, in place: one set for each component of the method's mixture.

    Args:
        net: The net.
        recipe: The recipe, whose section ``floral`` has the size of adaptors.
        method: Method of the run, whose mixture has adaptors as components.

    Raises:
        RecipeError: The adaptors do not fit into memory.
    """
    mixture = method.placement.mixture
    assert mixture is not None
    settings = recipe.floral.model_dump()
    has_default_size = settings["rank"] is None and settings["budget"] is None
    if has_default_size:
        settings["budget"] = DEFAULT_BUDGET
    size_settings = {key: settings[key] for key in ("rank", "budget", "conv", "lora", "bias", "norm")}
    require_room(f"method {method.name}", mixture.clusters, adaptor_size(net, **size_settings), ADAPTOR_SETS)
    return floral(
        net,
        copy=False,
        generator=torch.Generator(),  # unseeded, as initial values are drawn again for each user
        num_clusters=mixture.clusters,
        per_layer=mixture.per_layer,
        warn=not has_default_size,  # of layers that exceed the budget, if the recipe sets it
        **settings,
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
    """Check that the samples of all users have one shape, and that the net takes it.

    Raises:
        DataError: Samples have another shape, or targets that do not fit.
    """
    num_classes = population.classes if population.measure.classes else None
    check(population.users, classes=num_classes)
    first = population.users[0]  # the users' shapes are equal, as was just checked
    shape = tuple(first.train.inputs.shape[1:])
    allowed_shape = tuple(population.input_shape)
    if shape != allowed_shape:
        raise DataError(f"user {first.name!r}: inputs have shape {shape}; allowed: {allowed_shape}, as the net takes")


def _check_clusters(population: Population, method: Method) -> None:
    """Check that a method that assigns users to components by their true clusters has a component for each cluster.

    Raises:
        RecipeError: The method has fewer components than there are clusters.
    """
    mixture = method.placement.mixture
    if mixture is None or not mixture.optimal:  # users are not assigned by their true clusters
        return
    clusters = [user.cluster for user in population.users if user.cluster is not None]
    num_clusters = max(clusters) + 1 if clusters else 0  # numbered from 0
    if mixture.clusters < num_clusters:
        raise RecipeError(
            f"method {method.name}: clusters is {mixture.clusters}; allowed: at least {num_clusters}, the true clusters"
        )


def _smallest_batch(model: StackedModel, plan: RunPlan, largest_batch: int) -> int:
    """Return the smallest size that a batch may have: 1, or 2 with batch norm.

    Args:
        model: The net.
        plan: Settings of the run, in the form that training uses.
        largest_batch: Largest batch size of the run.

    Raises:
        RecipeError: Batch norm cannot take the batches, as they are smaller or are split into micro-batches.
    """
    if not model.batchwise:  # no batch norm
        return 1
    smallest_of_users = min(values_in(plan.training.batch_size))
    # Pooled: one trainer has all users' data, with the largest batch size.
    smallest_batch_size = largest_batch if plan.method.placement.pooled else smallest_of_users
    if smallest_batch_size < LEAST_FOR_NORM:
        need = f"{model.name} has batch norm, which needs at least {LEAST_FOR_NORM}"
        raise RecipeError(f"training.batch_size: got {smallest_batch_size}; {need}")
    micro_batch = plan.runtime.micro_batch
    if micro_batch is not None and micro_batch < largest_batch:
        raise RecipeError(
            f"runtime.micro_batch: got {micro_batch}; {model.name} has batch norm, which needs whole "
            f"batches; allowed: at least {largest_batch}, or null"
        )
    return LEAST_FOR_NORM


LEAST_FOR_NORM = 2
"""Smallest batch of batch norm; a single sample has no variance."""
