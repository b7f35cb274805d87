"""Samples of a user: arrays of inputs and targets, their splits, and checks of them.

The counterpart of :mod:`comingle.data.text.streams` for tasks other than language, such as FLoRAL's regressions and
images.

A label that occurs only in a user's test or validation samples cannot be learnt. Samples are therefore held out label
by label, about the same fraction of each, and the last sample of a label always stays in train. (FedMerge's public code
holds out samples at random.)

If test samples are assigned by the task instead (as in FLoRAL) or come from elsewhere, a label may be missing in train
all the same. Then it is part of the setting, since other users can teach the model this label: there is a warning, not
an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from math import ceil
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from comingle.data.row_files import describe_cause
from comingle.models.scoring import PAD
from comingle.utils.errors import DataError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
"""Names of the splits, in order."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Inputs with targets: class numbers, or vectors for a regression.

    Raises:
        DataError: The numbers of inputs and targets differ.
    """

    inputs: Float[Tensor, " n *shape"]
    targets: Int[Tensor, " m"] | Float[Tensor, "m d"]  # m equals n; checked in __post_init__ for a readable error

    def __post_init__(self) -> None:
        """Check that there is one target for each input."""
        if len(self.inputs) != len(self.targets):
            got = f"{len(self.inputs)} inputs but {len(self.targets)} targets"
            raise DataError(f"samples: {got}; every input needs one target")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def contents(self) -> tuple[Tensor, Tensor]:
        """The tensors that identify these samples; a digest of a user's data is computed from them."""
        return self.inputs, self.targets

    def first(self, count: int) -> Samples:
        """Return the first ``count`` samples, or all if there are fewer."""
        return Samples(inputs=self.inputs[:count], targets=self.targets[:count])

    def select(self, numbers: Int64[Tensor, " m"]) -> Samples:
        """Return the samples with these numbers."""
        return Samples(inputs=self.inputs[numbers], targets=self.targets[numbers])


@dataclass(frozen=True, kw_only=True)
class UserSamples:
    """Samples of one user.

    Args:
        name: Name of the user.
        train: Samples to train on.
        valid: Samples to validate on; may be empty.
        test: Samples to test on.
        cluster: True cluster of the user, if it is known.
    """

    name: str
    train: Samples
    valid: Samples
    test: Samples
    cluster: int | None = None

    def split(self, split: Split) -> Samples:
        """Return the samples of a split."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


@dataclass(frozen=True, kw_only=True)
class SampleBank:
    """Samples of one split of all users, concatenated: user i has ``counts[i]`` samples from ``starts[i]`` on.

    ``inputs`` and ``targets`` are on the training device, ``starts`` and ``counts`` on the CPU.
    """

    inputs: Float[Tensor, " total *shape"]
    targets: Int[Tensor, " total"] | Float[Tensor, "total d"]
    starts: Int64[Tensor, " population"]
    counts: Int64[Tensor, " population"]

    def take(
        self, users: Sequence[int], indices: Int[Tensor, "users batch"]
    ) -> tuple[Float[Tensor, "users batch *shape"], Tensor, Bool[Tensor, "users batch"]]:
        """Gather a batch for each of these users: samples ``indices[s]`` of user ``users[s]``.

        Samples with the index ``PAD`` are absent: they repeat another sample and must not contribute to the loss.

        Args:
            users: Numbers of the users.
            indices: Indices within each user's samples, or ``PAD``.

        Returns:
            Inputs and targets of shape ``(users, batch, ...)``, and which samples are present, on the bank's device.
        """
        indices = indices.cpu().long()
        user_numbers = torch.tensor(users, dtype=torch.int64)
        starts, counts = self.starts[user_numbers, None], self.counts[user_numbers, None]
        # A larger index would read another user's samples.
        assert bool(((indices >= PAD) & (indices < counts)).all()), "an index beyond the user's samples"
        is_present = indices != PAD
        rows = starts + indices.clamp(min=0)  # PAD, a negative index, repeats the user's first sample
        rows = rows.clamp(max=len(self.inputs) - 1)  # if the last user has no samples, its start is past the end
        device = self.inputs.device
        rows = rows.to(device)
        return _gather(self.inputs, rows), _gather(self.targets, rows), is_present.to(device)


def _gather(values: Tensor, indices: Int64[Tensor, "users batch"]) -> Tensor:
    """Return ``values[indices]``; values ``(n, 3, 32, 32)`` of samples give the shape ``(users, batch, 3, 32, 32)``.

    Args:
        values: Inputs or targets of all users' samples.
        indices: Index of each sample in ``values``.
    """
    return values.index_select(0, indices.flatten()).view(*indices.shape, *values.shape[1:])


def epoch(count: int, batch_size: int, generator: torch.Generator) -> Int64[Tensor, "steps batch"]:
    """Return the indices of one shuffled pass over ``count`` samples; the last batch is padded with ``PAD``.

    The batches are those of a ``DataLoader`` with ``shuffle`` and without ``drop_last``.

    Args:
        count: Number of samples.
        batch_size: Samples per batch.
        generator: Generator of the shuffle.

    Returns:
        Indices of shape ``(steps, batch_size)``.
    """
    num_steps = ceil(count / batch_size)
    indices = torch.full((num_steps * batch_size,), PAD, dtype=torch.int64)
    indices[:count] = torch.randperm(count, generator=generator, device=generator.device).cpu()
    return indices.view(num_steps, batch_size)


def join(parts: Sequence[Samples]) -> Samples:
    """Return all samples of several sets as one set, in order; without a copy if they lie so in memory."""
    return Samples(inputs=_joined([part.inputs for part in parts]), targets=_joined([part.targets for part in parts]))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after another: a view if they are adjacent in memory, such as rows of one tensor."""
    first = parts[0]
    if any(type(part) is not Tensor for part in parts):  # such as fake tensors, which have no memory
        return torch.cat(list(parts))
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        is_alike = part.dtype == first.dtype and part.shape[1:] == first.shape[1:] and part.is_contiguous()
        is_adjacent = part.untyped_storage().data_ptr() == storage and part.data_ptr() == end
        if not (is_alike and is_adjacent) or first.device.type != "cpu":
            return torch.cat(list(parts))
        end += part.nbytes
    total = sum(map(len, parts))
    shape = (total, *first.shape[1:])
    return first.as_strided(shape, torch.empty(shape, device="meta").stride())


def copy_into_one(parts: Iterable[Samples], counts: Sequence[int]) -> list[Samples]:
    """Copy sets of samples into one tensor, and return views of it, which :func:`join` need not copy.

    Args:
        parts: The sets, made one after another if they come from a generator.
        counts: Number of samples of each set.
    """
    views: list[Samples] = []
    joined: Samples | None = None
    for part, (start, end) in zip(parts, pairwise(accumulate(counts, initial=0)), strict=True):
        if joined is None:
            new = {name: t.new_empty(sum(counts), *t.shape[1:]) for name, t in vars(part).items()}
            joined = Samples(**new)
        view = Samples(inputs=joined.inputs[start:end], targets=joined.targets[start:end])
        view.inputs.copy_(part.inputs)
        view.targets.copy_(part.targets)
        views.append(view)
    return views


def bank_of(
    parts: Sequence[Samples],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    moves: bool = False,
) -> SampleBank:
    """Join the samples of all users to a bank, from which batches of many users are gathered at once.

    :func:`check` checks that their shapes agree.

    Args:
        parts: Samples of each user.
        device: Device of inputs and targets.
        dtype: Dtype of inputs and real targets; None to keep theirs.
        moves: Whether the samples become views of the bank if it has their device and dtype, so that memory holds them
            once.
    """
    joined = join(parts)
    counts = torch.tensor([len(part) for part in parts])
    target_dtype = dtype if joined.targets.is_floating_point() else None  # class numbers keep their dtype
    bank = SampleBank(
        inputs=joined.inputs.to(device, dtype),
        targets=joined.targets.to(device, target_dtype),
        starts=counts.cumsum(0) - counts,
        counts=counts,
    )
    if moves:
        _move(parts, "inputs", bank.inputs)
        _move(parts, "targets", bank.targets)
    return bank


def _move(parts: Sequence[Samples], name: str, joined: Tensor) -> None:
    """Make the inputs or targets of several sets views of the tensor that has them one after another.

    Args:
        parts: The sets, which keep their values.
        name: "inputs" or "targets".
        joined: The tensor.
    """
    for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        values: Tensor = getattr(part, name)
        if type(values) is Tensor and values.dtype == joined.dtype and values.device == joined.device:
            object.__setattr__(part, name, view)  # the values of a frozen dataclass stay the same


def check(users: Sequence[UserSamples], *, classes: int | None = None) -> None:
    """Check that one net and one loss fit the samples of all users, before training begins.

    Args:
        users: The users; the first one determines the shapes.
        classes: Number of classes; None for a regression.

    Raises:
        DataError: There are no users, two have the same name, or a user has no train or test samples. Or samples differ
            from the first user's in shape or kind of target, inputs are not finite, or a target is out of range.
    """
    if not users:
        raise DataError("no users; a task needs at least one")
    names: set[str] = set()
    for user in users:
        if user.name in names:
            raise DataError(f"user {user.name!r}: two users have this name; names must be unique")
        names.add(user.name)
        for split in SPLITS:
            _check_split(user, split, users[0], classes)


def _check_split(user: UserSamples, split: Split, first_user: UserSamples, classes: int | None) -> None:
    """Check that a split has samples (validation may have none) with the shapes of the first user's and finite values.

    Args:
        user: The user with its data.
        split: Name of the split to check.
        first_user: First user of the run, whose train samples have the shapes that all samples need.
        classes: Number of classes; None for a regression.

    Raises:
        DataError: A check fails.
    """
    samples, where = user.split(split), f"user {user.name!r}: {split}"
    if len(samples) == 0:
        if split == "valid":
            return
        raise DataError(f"{where} has no samples; at least 1 is needed")
    for name in ("inputs", "targets"):
        values: Tensor = getattr(samples, name)
        values_of_first: Tensor = getattr(first_user.train, name)
        got, needed = tuple(values.shape[1:]), tuple(values_of_first.shape[1:])
        if got != needed:
            expected = f"those of user {first_user.name!r} {needed}"
            raise DataError(f"{where} {name} have shape {got} but {expected}; all need the same shape")
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise DataError(f"{where} {name} hold NaN or infinite values; allowed: finite numbers")
    _check_targets(samples.targets, classes, where)


def _check_targets(targets: Tensor, classes: int | None, where: str) -> None:
    """Check that targets are class numbers below ``classes``, or real numbers if ``classes`` is None.

    Args:
        targets: Targets of a user's split, at least one.
        classes: Number of classes; None for a regression.
        where: User and split, for the message.

    Raises:
        DataError: Targets have the wrong type, or a class number is out of range.
    """
    is_real = targets.is_floating_point()
    needs_real = classes is None
    if is_real != needs_real:
        got = str(targets.dtype).removeprefix("torch.")
        needed = "real numbers" if needs_real else "whole numbers"
        raise DataError(f"{where} targets are {got}; this task needs {needed}")
    if classes is not None:
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise DataError(f"{where} targets go from {low} to {high}; allowed: 0 to {classes - 1}")


def pool_samples(users: Sequence[UserSamples]) -> UserSamples:
    """Return a user "everyone" with the samples of all users, for the centralized baseline."""

    train, valid, test = (join([user.split(split) for user in users]) for split in SPLITS)
    return UserSamples(name="everyone", train=train, valid=valid, test=test)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an npz file; pickled objects are not loaded.

    Raises:
        DataError: The file does not exist, is not an npz file, or is damaged.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if not is_zipfile(path):  # np.load would read another file as a pickle or as a single array
        raise DataError(f"{path}: not a readable npz file: got {path.stat().st_size} bytes, no complete zip archive")
    try:
        with path.open("rb") as raw, np.load(raw) as file:  # np.load(path) would not close a damaged file
            return {key: file[key] for key in file.files}
    except Exception as error:  # numpy, zipfile, zlib and tokenize raise unrelated exceptions
        raise DataError(f"{path}: not a readable npz file: {describe_cause(error)}") from error


def as_samples(inputs: object, targets: object, where: str) -> Samples:
    """Return samples from arrays or tensors of any numeric type.

    Inputs become real numbers with at least two axes. Inputs of type bool, uint8 or uint16 with three or four axes are
    images, and are scaled to [0, 1] with channels first. Integer targets of shape ``(n,)`` or ``(n, 1)`` are class
    numbers; real ones become vectors of shape ``(n, d)``, for a regression.

    Args:
        inputs: Inputs; the first axis counts samples.
        targets: Targets; the first axis counts samples.
        where: Place for error messages.

    Raises:
        DataError: Values are not numbers, inputs of three or four axes have another integer type, or the numbers of
            inputs and targets differ.
    """
    x = _as_cpu_tensor(inputs, f"{where}: inputs")
    y = _as_cpu_tensor(targets, f"{where}: targets")
    x = as_inputs(x, where)
    if y.dim() == 0 or len(x) != len(y):
        raise DataError(
            f"{where}: inputs have shape {tuple(x.shape)} but targets {tuple(y.shape)}; every input needs one target"
        )
    if y.is_floating_point() and len(y) == 0:
        y = y.reshape(0, 1)  # torch refuses reshape(0, -1)
    elif y.is_floating_point():
        y = y.reshape(len(y), -1)
    elif y.dim() == 2 and y.shape[1] == 1:
        y = y.flatten().long()
    elif y.dim() == 1:
        y = y.long()
    else:
        raise DataError(f"{where}: targets have shape {tuple(y.shape)}; allowed: a class number or a vector per input")
    return Samples(inputs=x, targets=y)


def as_inputs(x: Tensor, where: str) -> Tensor:
    """Return real numbers with at least two axes; scale images to [0, 1] (:func:`as_images`).

    Args:
        x: Inputs; the first axis counts samples. Integers of three or four axes are images.
        where: Place for error messages.

    Raises:
        DataError: ``x`` is a single number, or an array of integers of unknown range.
    """
    if x.dim() == 0:
        raise DataError(f"{where}: inputs are a single number; allowed: arrays with samples along the first axis")
    if x.is_floating_point():
        real = x
    elif x.dim() not in (3, 4):
        real = x.float()
    elif x.dtype in _WHITE_BY_DTYPE:  # pixels
        real = as_images(x)
    else:  # the dtype does not determine the range of pixel values
        got = f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
        raise DataError(
            f"{where}: inputs are {got}, integers of unknown range; allowed: uint8 or uint16 for images, or real "
            "numbers"
        )
    return real.unsqueeze(1) if real.dim() == 1 else real  # (n,) becomes (n, 1): one feature per sample


_WHITE_BY_DTYPE = {torch.bool: 1, torch.uint8: 255, torch.uint16: 65535}
"""Pixel value of white by dtype."""


def as_images(pixels: Tensor) -> Tensor:
    """Return images ``(n, h, w)``, ``(n, h, w, c)`` or ``(n, c, h, w)`` as floats ``(n, c, h, w)`` in [0, 1].

    Pixels are divided by the largest value of their dtype. With four axes, the second or the last has the channels. It
    is the last axis if its length is 1, 3 or 4, as in ``(n, 32, 32, 3)``, unless the second axis has length 1, 3 or the
    length of the last, as in ``(n, 3, 4, 4)``.
    """
    if pixels.dim() == 3:
        pixels = pixels.unsqueeze(1)  # one channel
    else:
        second, last = pixels.shape[1], pixels.shape[3]
        channels_are_last = last in (1, 3, 4) and second not in (1, 3, last)
        if channels_are_last:
            pixels = pixels.permute(0, 3, 1, 2)
    return pixels.contiguous().float() / _WHITE_BY_DTYPE[pixels.dtype]


def _as_cpu_tensor(values: object, where: str) -> Tensor:
    """Return numbers as a tensor on the CPU, in the machine's byte order.

    Args:
        values: Tensor, array or nested list.
        where: Place and name of the values, such as "user 'ada': inputs", for error messages.

    Raises:
        DataError: The values are not numbers, or are complex.
    """
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":  # Booleans, signed and unsigned integers, real numbers
            raise DataError(f"{where} are {array.dtype}; allowed: numbers")
        is_large_unsigned = array.dtype.kind == "u" and array.dtype.itemsize > 2
        if is_large_unsigned:  # torch supports few operations on these
            array = array.astype(np.int64)
        native_dtype = array.dtype.newbyteorder("=")
        tensor = torch.from_numpy(np.array(array, dtype=native_dtype))
    if tensor.is_complex():
        raise DataError(f"{where} are complex; allowed: real numbers")
    return tensor


def read_samples(data: Any, where: str) -> Samples:
    """Return samples from a PyTorch data set, or from a pair of arrays or tensors.

    Args:
        data: A data set or a pair (inputs, targets); :class:`Samples` are returned unchanged.
        where: Name of the data in error messages.

    Raises:
        DataError: The data has another type, or its inputs and targets do not fit each other.
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise DataError(
                f"{where}: got a TensorDataset of {len(data.tensors)} tensors; allowed: two, inputs and targets"
            )
        return as_samples(*data.tensors, where)
    if isinstance(data, Dataset):
        return _read_items(data, where)
    if not is_pair(data):
        raise DataError(f"{where}: got {type(data).__name__}; allowed: {ALLOWED_SAMPLES}")
    inputs, targets = data
    return as_samples(inputs, targets, where)


def is_pair(data: object) -> bool:
    """Return whether an object may be a pair of inputs and targets: a tuple or list of two tensors or arrays."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    return all(isinstance(part, Tensor | np.ndarray) for part in data)


ALLOWED_SAMPLES = "a torch Dataset of (input, target), a pair of arrays or tensors"
"""Allowed data, for error messages."""


def _read_items(data: Any, where: str) -> Samples:
    """Return all items of a map-style PyTorch data set, in order.

    Args:
        data: The data set.
        where: Its place, for error messages.

    Raises:
        DataError: The data set has no length or no items, or an item is not a pair of numbers or arrays.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise DataError(f"{where}: got a data set without a length; allowed: one with __len__ and __getitem__")
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for number in range(len(data)):
        item = data[number]
        if not isinstance(item, tuple | list):
            raise DataError(f"{where}: item {number} is {type(item).__name__}; allowed: (input, target)")
        if len(item) != 2:
            raise DataError(f"{where}: item {number} is {len(item)} parts; allowed: (input, target)")
        input_value, target_value = item
        inputs.append(_as_item_tensor(input_value, f"{where}: the input of item {number}"))
        targets.append(_as_item_tensor(target_value, f"{where}: the target of item {number}"))
    if not inputs:
        raise DataError(f"{where}: no samples; at least 1 is needed")
    return as_samples(_stack(inputs, f"{where}: inputs"), _stack(targets, f"{where}: targets"), where)


def _as_item_tensor(value: object, where: str) -> Tensor:
    """Return the input or target of one sample as a tensor on the CPU.

    Args:
        value: A number, array, tensor or image.
        where: Name of the value in error messages.

    Raises:
        DataError: The value is not numeric.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":  # Booleans, signed and unsigned integers, real numbers
        raise DataError(f"{where} is {type(value).__name__}; allowed: numbers, an array, a tensor or an image")
    if array.dtype == np.float16:  # nets do not train in float16
        return torch.from_numpy(array.astype(np.float32))
    return torch.from_numpy(np.array(array))  # copied, since a tensor on an image's read-only memory would warn


def _stack(values: list[Tensor], where: str) -> Tensor:
    """Stack tensors of equal shape along a new first dimension.

    Args:
        values: Inputs or targets of samples.
        where: Name of all values in messages, such as "user 'ada': inputs".

    Raises:
        DataError: The shapes differ, or the tensors cannot be stacked.
    """
    shapes = dict.fromkeys(tuple(value.shape) for value in values)
    if len(shapes) > 1:
        first, other, *_ = shapes
        raise DataError(f"{where} have shapes {first} and {other}; all need the same shape")
    try:
        return torch.stack(values)
    except (RuntimeError, TypeError) as error:
        raise DataError(f"{where} cannot be stacked: {describe_cause(error)}") from error


logger = logging.getLogger("comingle")

_LISTED_LABELS = 5
"""Number of labels that a warning lists per user."""
_LISTED_USERS = 3
"""Number of users that a warning lists."""


def hold_out(labels: Int64[Tensor, " n"], share: float) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " held_out"]]:
    """Select samples to hold out for validation or test, about the same fraction of each label (stratified).

    With the share 0.3, labels with 9 and 4 samples have 2.7 and 1.2 samples to hold out, rounded down to 2 and 1. As
    ``round(0.3 * 13)`` is 4, one more is held out of the label that loses most by rounding, the first. At least one
    sample is held out, but never the last of a label. Within a label, the first samples are held out.

    Args:
        labels: Label of each sample.
        share: Fraction to hold out.

    Returns:
        Indices of the samples that are kept, and of those that are held out, each in ascending order.
    """
    if share <= 0 or len(labels) == 0:
        none = torch.arange(0)
        return torch.arange(len(labels)), none
    # Per label: the number of its samples, and how many of them are held out.
    counts = labels.bincount()
    not_rounded = share * counts.double()
    all_but_one = (counts - 1).clamp(min=0)
    num_held_out = not_rounded.floor().long().minimum(all_but_one)
    # One more of the labels that lose most by rounding.
    num_missing = max(1, round(share * len(labels))) - int(num_held_out.sum())
    may_lose_one = num_held_out < counts - 1  # and still keep a sample
    lost_by_rounding = torch.where(may_lose_one, not_rounded - num_held_out, -1.0)
    sorted_labels = lost_by_rounding.sort(descending=True, stable=True).indices
    chosen_labels = sorted_labels[: max(0, num_missing)]
    chosen_labels = chosen_labels[may_lose_one[chosen_labels]]
    num_held_out[chosen_labels] += 1
    # Per sample.
    is_held_out = _rank_in_label(labels, counts) < num_held_out[labels]
    return (~is_held_out).nonzero().flatten(), is_held_out.nonzero().flatten()


def _rank_in_label(labels: Int64[Tensor, " n"], counts: Int64[Tensor, " classes"]) -> Int64[Tensor, " n"]:
    """Return for each sample the number of earlier samples with the same label: [0, 0, 1, 1, 2] for [5, 3, 5, 3, 5].

    Args:
        labels: Label of each sample.
        counts: Number of samples of each label.
    """
    # For [5, 3, 5, 3, 5], samples sorted by label are [1, 3, 0, 2, 4]; those of label 5 begin at position 2.
    sorted_samples = labels.argsort(stable=True)
    first_position = counts.cumsum(0) - counts  # of each label
    position = torch.arange(len(labels))
    rank = torch.empty_like(sorted_samples)
    rank[sorted_samples] = position - first_position[labels[sorted_samples]]
    return rank


def select_samples(samples: Samples, indices: Int64[Tensor, " m"]) -> Samples:
    """Return the samples at these indices."""
    return Samples(inputs=samples.inputs[indices], targets=samples.targets[indices])


def warn_unseen(users: Sequence[UserSamples]) -> None:
    """Warn of users with labels in valid or test that their train samples lack."""
    unseen_by_user: dict[str, list[int]] = {}
    for user in users:
        labels = unseen_labels(user)
        if labels:
            unseen_by_user[user.name] = labels
    if unseen_by_user:
        logger.warning("%s", describe_unseen(unseen_by_user, len(unseen_by_user), len(users)))


def unseen_labels(user: UserSamples) -> list[int]:
    """Return the labels in a user's valid and test samples that its train samples lack."""
    return sorted({*find_unseen(user, user.valid), *find_unseen(user, user.test)})


def describe_unseen(unseen_by_user: Mapping[str, Sequence[int]], count: int, num_users: int) -> str:
    """Return the warning about users with labels that their train samples lack.

    Args:
        unseen_by_user: Labels that the train samples lack, for the first of these users.
        count: Number of these users.
        num_users: Number of all users.
    """
    first_users = islice(unseen_by_user.items(), _LISTED_USERS)
    listed = "; ".join(f"{name!r} on {list_labels(labels)}" for name, labels in first_users)
    if count > _LISTED_USERS:
        listed += f"; and {count - _LISTED_USERS} more users"
    return f"{count} of {num_users} users are validated or tested on labels that their train samples lack: {listed}"


def find_unseen(user: UserSamples, samples: Samples) -> list[int]:
    """Return the labels of ``samples`` that the user's train samples lack."""
    is_seen = torch.isin(samples.targets, user.train.targets)
    return samples.targets[~is_seen].unique().tolist()


def list_labels(labels: Sequence[int]) -> str:
    """Return the first five labels as one line, such as ``0, 1, 2, 3, 4 ...``."""
    listed = ", ".join(map(str, labels[:_LISTED_LABELS]))
    return f"{listed} ..." if len(labels) > _LISTED_LABELS else listed
