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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
        if len(self.inputs) != len(self.targets):
            got = f"{len(self.inputs)} inputs but {len(self.targets)} targets"
            raise DataError(f"samples: {got}; every input needs one target")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def contents(self) -> tuple[Tensor, Tensor]:
        """Content that a digest covers."""
        return self.inputs, self.targets

    def first(self, count: int) -> Samples:
        """Return the first ``count`` samples, or all if there are fewer."""
        return Samples(inputs=self.inputs[:count], targets=self.targets[:count])


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
        chosen = torch.tensor(users, dtype=torch.int64)
        starts, counts = self.starts[chosen, None], self.counts[chosen, None]
        # A larger index would read another user's samples.
        assert bool(((indices >= PAD) & (indices < counts)).all()), "an index beyond the user's samples"
        # Absent samples repeat the user's first. If the last user has no samples, its start is past the end.
        rows = (starts + indices.clamp(min=0)).clamp(max=len(self.inputs) - 1).to(self.inputs.device)
        return _gather(self.inputs, rows), _gather(self.targets, rows), (indices != PAD).to(self.inputs.device)


def _gather(values: Tensor, at: Int64[Tensor, "users batch"]) -> Tensor:
    """Return ``values[at]`` with the shape ``(users, batch, *shape)``.

    Args:
        values: Inputs or targets of all users' samples, with samples along the first axis.
        at: Index of each sample in ``values``.
    """
    return values.index_select(0, at.flatten()).view(*at.shape, *values.shape[1:])


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
    steps = -(-count // batch_size)
    rows = torch.full((steps * batch_size,), PAD, dtype=torch.int64)
    rows[:count] = torch.randperm(count, generator=generator, device=generator.device).cpu()
    return rows.view(steps, batch_size)


def join(parts: Sequence[Samples]) -> Samples:
    """Concatenate samples."""
    return Samples(
        inputs=torch.cat([part.inputs for part in parts]), targets=torch.cat([part.targets for part in parts])
    )


def bank_of(
    parts: Sequence[Samples], *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> SampleBank:
    """Concatenate the samples of all users to a bank, from which batches of many users are gathered at once.

    :func:`check` checks that their shapes agree.

    Args:
        parts: Samples of each user.
        device: Device of inputs and targets.
        dtype: Dtype of inputs and real targets; None to keep theirs.
    """
    joined, counts = join(parts), torch.tensor([len(part) for part in parts])
    return SampleBank(
        inputs=joined.inputs.to(device, dtype),
        targets=joined.targets.to(device, dtype if joined.targets.is_floating_point() else None),
        starts=counts.cumsum(0) - counts,
        counts=counts,
    )


def check(users: Sequence[UserSamples], *, classes: int | None = None) -> None:
    """Check that users can share a task.

    Args:
        users: The users.
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


def _check_split(user: UserSamples, split: Split, first: UserSamples, classes: int | None) -> None:
    """Check that a split has samples (validation may have none) with the shapes of the first user's and finite values.

    Args:
        user: The user.
        split: The split.
        first: First user of the run; the train samples of this user have the shapes that all samples need.
        classes: Number of classes; None for a regression.

    Raises:
        DataError: A check fails.
    """
    samples, where = user.split(split), f"user {user.name!r}: {split}"
    if not len(samples):
        if split != "valid":
            raise DataError(f"{where} has no samples; at least 1 is needed")
        return
    for name in ("inputs", "targets"):
        values: Tensor = getattr(samples, name)
        got, needed = tuple(values.shape[1:]), tuple(getattr(first.train, name).shape[1:])
        if got != needed:
            expected = f"those of user {first.name!r} {needed}"
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
    if targets.is_floating_point() != (classes is None):
        got, needed = str(targets.dtype).removeprefix("torch."), "real numbers" if classes is None else "whole numbers"
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
    if not is_zipfile(path):  # np.load would read another file as a pickle or as a single array
        if not path.is_file():
            raise DataError(f"{path}: no such file")
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
    x, y = _as_cpu_tensor(inputs, f"{where}: inputs"), _as_cpu_tensor(targets, f"{where}: targets")
    x = as_inputs(x, where)
    if len(x) != (len(y) if y.dim() else 0):
        raise DataError(
            f"{where}: inputs have shape {tuple(x.shape)} but targets {tuple(y.shape)}; every input needs one target"
        )
    if y.is_floating_point():
        y = y.reshape(len(y), -1) if len(y) else y.reshape(0, 1)  # -1 would be ambiguous without samples
    elif y.dim() == 2 and y.shape[1] == 1:
        y = y.flatten().long()
    elif y.dim() == 1:
        y = y.long()
    else:
        raise DataError(f"{where}: targets have shape {tuple(y.shape)}; allowed: a class number or a vector per input")
    return Samples(inputs=x, targets=y)


def as_inputs(x: Tensor, where: str) -> Tensor:
    """Return real numbers with at least two axes; scale images as :func:`as_samples` does.

    Args:
        x: Inputs; the first axis counts samples.
        where: Place for error messages.

    Raises:
        DataError: ``x`` is a single number, or an array of integers of unknown range.
    """
    if not x.dim():
        raise DataError(f"{where}: inputs are a single number; allowed: arrays with samples along the first axis")
    if not x.is_floating_point() and x.dim() in (3, 4):
        if x.dtype not in _WHITE:  # the dtype does not determine the range of pixel values
            got = f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
            raise DataError(
                f"{where}: inputs are {got}, integers of unknown range; allowed: uint8 or uint16 for images, or real "
                "numbers"
            )
        x = as_images(x)
    x = x if x.is_floating_point() else x.float()
    return x if x.dim() > 1 else x.unsqueeze(1)


_WHITE = {torch.bool: 1, torch.uint8: 255, torch.uint16: 65535}
"""Pixel value of white by dtype."""


def as_images(pixels: Tensor) -> Tensor:
    """Return images ``(n, h, w)``, ``(n, h, w, c)`` or ``(n, c, h, w)`` as floats ``(n, c, h, w)`` in [0, 1].

    Pixels are divided by the largest value of their dtype. With four axes, the last axis has the channels if its length
    is 1, 3 or 4, unless the second axis has length 1, 3 or the same length. Otherwise the second axis has the channels.
    """
    if pixels.dim() == 3:
        pixels = pixels.unsqueeze(1)  # one channel
        return pixels.contiguous().float() / _WHITE[pixels.dtype]
    second, last = pixels.shape[1], pixels.shape[-1]
    if last in (1, 3, 4) and second not in {1, 3, last}:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels.contiguous().float() / _WHITE[pixels.dtype]


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
        # Unsigned integers of more than 2 bytes, on which torch supports few operations.
        if array.dtype.kind == "u" and array.dtype.itemsize > 2:
            array = array.astype(np.int64)
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
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
    """Return whether an object may be a pair of inputs and targets."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, Tensor | np.ndarray) for d in data)


ALLOWED_SAMPLES = "a torch Dataset of (input, target), a pair of arrays or tensors"
"""Allowed data, for error messages."""


def _read_items(data: Any, where: str) -> Samples:
    """Return all items of a map-style PyTorch data set, in order.

    Args:
        data: The data set.
        where: Its place, for messages.

    Raises:
        DataError: The data set has no length or no items, or an item is not a pair of numbers or arrays.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise DataError(f"{where}: got a data set without a length; allowed: one with __len__ and __getitem__")
    inputs, targets = [], []
    for number in range(len(data)):
        item = data[number]
        if not isinstance(item, tuple | list) or len(item) != 2:
            got = f"{len(item)} parts" if isinstance(item, tuple | list) else type(item).__name__
            raise DataError(f"{where}: item {number} is {got}; allowed: (input, target)")
        inputs.append(_as_item_tensor(item[0], f"{where}: the input of item {number}"))
        targets.append(_as_item_tensor(item[1], f"{where}: the target of item {number}"))
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

    Of a label with ``n_y`` samples, ``floor(share n_y)`` are held out. One more is held out of the labels that lose
    most by rounding, until ``round(share n)`` samples, but at least one, are held out. The last sample of a label is
    never held out. Within a label, the first samples are held out.

    Args:
        labels: Label of each sample.
        share: Fraction to hold out.

    Returns:
        Indices of the samples that are kept, and of those that are held out, each in ascending order.
    """
    if share <= 0 or not len(labels):
        return torch.arange(len(labels)), torch.arange(0)
    counts = labels.bincount()  # of each label, like all tensors up to is_held_out
    quota = share * counts.double()
    num_held_out = quota.floor().long().minimum((counts - 1).clamp(min=0))
    num_missing = max(1, round(share * len(labels))) - int(num_held_out.sum())
    # The loss of each label by rounding; -1 if only its last sample is left.
    lost = torch.where(num_held_out < counts - 1, quota - num_held_out, -1.0)
    most_lost = lost.sort(descending=True, stable=True).indices[: max(0, num_missing)]
    may_give_one = lost[most_lost] >= 0
    num_held_out[most_lost[may_give_one]] += 1
    is_held_out = _rank_in_label(labels, counts) < num_held_out[labels]
    return (~is_held_out).nonzero().flatten(), is_held_out.nonzero().flatten()


def _rank_in_label(labels: Int64[Tensor, " n"], counts: Int64[Tensor, " classes"]) -> Int64[Tensor, " n"]:
    """Return for each sample the number of earlier samples with the same label.

    Args:
        labels: Label of each sample.
        counts: Number of samples of each label.
    """
    order = labels.argsort(stable=True)  # samples of label 0, then of label 1, and so on
    first_of_label = counts.cumsum(0) - counts  # positions in that order
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(labels)) - first_of_label[labels[order]]
    return rank


def select_samples(samples: Samples, places: Int64[Tensor, " m"]) -> Samples:
    """Return the samples at these indices."""
    return Samples(inputs=samples.inputs[places], targets=samples.targets[places])


def warn_unseen(users: Sequence[UserSamples]) -> None:
    """Warn of users with labels in valid or test that their train samples lack."""
    unseen = {user.name: labels for user in users if (labels := unseen_labels(user))}
    if unseen:
        logger.warning("%s", describe_unseen(unseen, len(unseen), len(users)))


def unseen_labels(user: UserSamples) -> list[int]:
    """Return the labels in a user's valid and test samples that its train samples lack."""
    return sorted({*find_unseen(user, user.valid), *find_unseen(user, user.test)})


def describe_unseen(unseen: Mapping[str, Sequence[int]], count: int, num_users: int) -> str:
    """Return the warning about users with labels that their train samples lack.

    Args:
        unseen: Missing labels of the first of these users, by name.
        count: Number of these users.
        num_users: Number of all users.
    """
    named = [f"{name!r} on {list_labels(labels)}" for name, labels in islice(unseen.items(), _LISTED_USERS)]
    more = f"; and {count - _LISTED_USERS} more users" if count > _LISTED_USERS else ""
    description = f"{count} of {num_users} users are validated or tested on labels that their train samples lack"
    return f"{description}: {'; '.join(named)}{more}"


def find_unseen(user: UserSamples, samples: Samples) -> list[int]:
    """Return the labels of ``samples`` that the user's train samples lack."""
    return samples.targets[~torch.isin(samples.targets, user.train.targets)].unique().tolist()


def list_labels(labels: Sequence[int]) -> str:
    """Return the first five labels as one line."""
    return ", ".join(map(str, labels[:_LISTED_LABELS])) + (" ..." if len(labels) > _LISTED_LABELS else "")
