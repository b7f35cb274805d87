"""Tasks that are not language, as a kind of data: their users, each with samples, and the net they train.

FLoRAL's regressions are in :mod:`~comingle_papers.tasks.synthetic`; the image tasks of FLoRAL and FedMerge, and the
numbers of all tasks, are in :mod:`~comingle_papers.tasks.image_tasks`.

Which samples a user holds follows from the task and the seed alone, never from the method, and a smaller ``fraction``
keeps a part of the same samples: FLoRAL's tasks the first, FedMerge's some of each label. Validation samples come out
of those that are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor

from comingle.config import Recipe
from comingle.config.settings import (
    Count,
    DataSection,
    Fraction,
    Positive,
    Section,
    expand_plain_name,
    unread_keys_of_text,
)
from comingle.data.populations import as_users
from comingle.data.samples.reading import Augment, Population
from comingle.data.samples.samples import UserSamples, check, warn_unseen
from comingle.data.samples.section import NO_WINDOWS, UNREAD
from comingle.models.base import Base
from comingle.training.kinds.base import DataRequest, RunData
from comingle.training.kinds.samples import NetKind
from comingle.utils.errors import DataError, RecipeError, did_you_mean
from comingle.utils.names import FOLDER_VARIABLE
from comingle.utils.records import expand_home
from comingle_papers.tasks import image_tasks
from comingle_papers.tasks.image_tasks import (
    CIFAR10_COLOURS,
    REDUCED_MINIMUM,
    TASKS,
    Setting,
    Shift,
    make_shifted,
    make_skewed,
    pool_images,
)
from comingle_papers.tasks.images import (
    Images,
    check_images,
    check_labels,
    has_images,
    hold_out_valid,
    read_domains,
    read_images,
)
from comingle_papers.tasks.synthetic import DIMENSION, OUTPUTS, Kind, make_synthetic

ReadImages = TypeVar("ReadImages", Images, dict[str, Images])

DOMAIN_SIDE = 64
"""Size to which FedMerge's public code scales the images of PACS, which are 227 x 227 on the hub."""


@dataclass(frozen=True, kw_only=True)
class Task(Population):
    """A population with samples, and the net that it trains.

    With ``augment``, train batches go through :meth:`augmented`.
    """

    loss: Literal["mse", "cross_entropy"]
    net: str
    clusters: int
    augment: bool
    shift: Shift | None = None

    @property
    def augmentation(self) -> Augment | None:
        """The function :meth:`augmented`, which flips and crops train images at random; None without ``augment``."""
        return self.augmented if self.augment else None

    def augmented(
        self, rows: Sequence[int], inputs: Float[Tensor, "users batch c h w"], generator: torch.Generator
    ) -> Float[Tensor, "users batch c h w"]:
        """Flip and crop train images at random.

        Images are already rotated by their cluster's angle, and the flip is left to right in the unrotated image. So it
        is top to bottom for images rotated by 90 or 270 degrees. If the angle of any user's cluster is not a multiple
        of 90 degrees, all images are only cropped.

        Args:
            rows: Indices of the users in ``self.users``.
            inputs: The users' normalised images, shape ``(users, batch, c, h, w)``.
            generator: Source of the draws.
        """
        batch_size = inputs.shape[1]
        images = inputs.flatten(0, 1)
        quarter_turns = [self._quarter_turns(self.users[row].cluster or 0) for row in rows]  # of each user
        if all(turns == int(turns) for turns in quarter_turns):
            is_flipped_vertically = [turns % 2 == 1 for turns in quarter_turns for _ in range(batch_size)]
            images = image_tasks.flip_some(images, generator, vertically=is_flipped_vertically)
        means, deviations = CIFAR10_COLOURS  # with which the images of all augmented tasks are normalised
        black = [-mean / std for mean, std in zip(means, deviations, strict=True)]
        return image_tasks.crop_randomly(images, generator, fill=black).view(inputs.shape)

    def _quarter_turns(self, cluster: int) -> float:
        """Return the rotation of the cluster's images in multiples of 90 degrees, such as 0.5 for 45 degrees."""
        if self.shift != "rotate":
            return 0.0
        return 4 * cluster / self.clusters


def make_task(
    name: str,
    *,
    seed: int,
    users: int | None = None,
    clusters: int | None = None,
    fraction: float = 1.0,
    shift: str | None = None,
    path: str | Path | None = None,
    test_samples: int | None = None,
    valid: float | None = None,
    alpha: float | None = None,
    labels_per_cluster: int | None = None,
) -> Task:
    """Return a task by name, with its users' samples.

    Args:
        name: A key of :data:`TASKS`.
        seed: Seed of the samples.
        users: Number of users; None for the task's default.
        clusters: The true number of clusters; None for the task's default.
        fraction: Share of their train samples that users keep, at least ``REDUCED_MINIMUM``; FLoRAL's "Reduced" tasks
            have 0.05.
        shift: How clusters differ: images rotated ("rotate") or labels renumbered ("labels"); None for the task's
            default, which is "rotate" for MNIST and CIFAR-10. Other tasks have no shift.
        path: Folder of the images (:mod:`comingle_papers.tasks.images` lists the file names) or ``hub:NAME``; None for
            ``$COMINGLE_DATA/images`` if that holds them, else the hub.
        test_samples: Test samples per user: the number to generate in a synthetic task, an upper limit for images;
            None for the task's own samples, or for images without a limit.
        valid: Share of a user's kept train samples that become validation samples; None for the task's default, a
            tenth in FedMerge's tasks and none in FLoRAL's.
        alpha: Concentration of the Dirichlet distribution of each label's shares among users, for tasks whose names end
            in "-personal" or "-cluster"; None for the task's default.
        labels_per_cluster: Number of labels of each cluster, for tasks whose names end in "-cluster"; None divides all
            labels among the clusters.

    Raises:
        RecipeError: The task or shift is unknown, or a number is out of range.
        DataError: Images cannot be read, or a user has no samples of some kind.
    """
    setting = _find_setting(name)
    _check_partition(name, setting, clusters=clusters, alpha=alpha, labels_per_cluster=labels_per_cluster)
    num_users = setting.users if users is None else users
    num_clusters = setting.clusters if clusters is None else clusters
    valid_share = setting.valid if valid is None else float(valid)
    _check_numbers(
        name,
        users=num_users,
        clusters=num_clusters,
        fraction=fraction,
        test_samples=test_samples,
        valid=valid_share,
    )
    chosen_shift = _choose_shift(name, shift)
    if setting.is_synthetic:  # FLoRAL's regressions
        task = _make_synthetic_task(
            cast(Kind, name),
            path,
            seed=seed,
            users=num_users,
            clusters=num_clusters,
            test_samples=test_samples,
        )
    elif setting.is_skewed:  # FedMerge's image tasks
        task = _make_skewed_task(
            name,
            path,
            seed=seed,
            users=num_users,
            clusters=num_clusters,
            test_samples=test_samples,
            alpha=setting.alpha if alpha is None else alpha,
            labels_per_cluster=labels_per_cluster,
            fraction=fraction,
        )
    else:  # FLoRAL's image tasks
        task = _make_shifted_task(
            name,
            path,
            seed=seed,
            users=num_users,
            clusters=num_clusters,
            test_samples=test_samples,
            shift=chosen_shift,
        )
    return _split_and_check(task, setting, fraction=fraction, valid=valid_share)


def _find_setting(name: str) -> Setting:
    """Return the defaults of a task.

    Raises:
        RecipeError: There is no such task.
    """
    if name not in TASKS:
        raise RecipeError(f"no task {name!r}.{did_you_mean(name, TASKS)} Allowed: {', '.join(TASKS)}")
    return TASKS[name]


def _split_and_check(task: Task, setting: Setting, *, fraction: float, valid: float) -> Task:
    """Keep a fraction of the train samples, hold out validation samples, and check the users.

    Args:
        task: The task, whose users have train and test samples.
        setting: The task's defaults, such as its numbers of users, clusters and labels.
        fraction: Share of their train samples that users keep.
        valid: Share of the kept train samples that become validation samples.

    Raises:
        DataError: A user has no samples of some kind, or lacks a label in its train samples.
    """
    users = list(task.users)
    if not setting.is_skewed:  # FedMerge's skewed tasks have applied the fraction already
        users = [_reduce_train_samples(user, fraction) for user in users]
    users = [hold_out_valid(user, valid) for user in users]
    check(users, classes=task.classes if task.loss == "cross_entropy" else None)
    if setting.is_skewed:
        check_labels(users)
    return replace(task, users=as_users(users))


def _check_partition(
    name: str, setting: Setting, *, clusters: int | None, alpha: float | None, labels_per_cluster: int | None
) -> None:
    """Check that the options that control the partition apply to this task.

    Args:
        name: The task, for error messages.
        setting: The task's defaults, such as its numbers of users, clusters and labels.
        clusters: Number of clusters; None if not given.
        alpha: Concentration of the Dirichlet shares; None if not given.
        labels_per_cluster: Labels per cluster; None if not given.

    Raises:
        RecipeError: An option does not apply, or alpha is out of range.
    """
    where = f"task {name!r}"
    if clusters is not None and setting.partition == "personal":
        raise RecipeError(f"{where}: clusters={clusters}; its users are in no clusters; allowed: none")
    if clusters is not None and setting.partition == "domain":
        raise RecipeError(f"{where}: clusters={clusters}; its clusters are its domains; allowed: none")
    if alpha is not None and setting.partition not in ("personal", "cluster"):
        raise RecipeError(
            f"{where}: alpha={alpha}; this task does not split labels by shares; {_list_tasks_with('alpha')}"
        )
    if alpha is not None and not 0 < alpha < float("inf"):
        raise RecipeError(f"{where}: alpha={alpha}; allowed: above 0")
    if labels_per_cluster is not None and setting.partition != "cluster":
        raise RecipeError(
            f"{where}: labels_per_cluster={labels_per_cluster}; this task has no clusters of labels; "
            f"{_list_tasks_with('labels_per_cluster')}"
        )


def _list_tasks_with(option: str) -> str:
    """Return the end of an error message, "allowed for: cifar100-cluster, ...": the tasks that an option applies to."""
    partitions = {"alpha": ("personal", "cluster"), "labels_per_cluster": ("cluster",)}[option]
    tasks = [name for name, setting in TASKS.items() if setting.partition in partitions]
    return f"allowed for: {', '.join(tasks)}"


def _check_numbers(
    name: str, *, users: int, clusters: int, fraction: float, test_samples: int | None, valid: float
) -> None:
    """Check that the numbers of a task are in range.

    Args:
        name: The task, for error messages.
        users: Number of users.
        clusters: Number of clusters.
        fraction: Share of their train samples that users keep.
        test_samples: Test samples per user; None for the task's own.
        valid: Share of the train samples that become validation samples.

    Raises:
        RecipeError: A number is out of range; the message says what is allowed.
    """
    where = f"task {name!r}"
    if users < 1:
        raise RecipeError(f"{where}: users={users}; allowed: from 1")
    has_domains = TASKS[name].partition == "domain"  # these are the clusters, and are checked when images are read
    if not has_domains and clusters < 1:
        raise RecipeError(f"{where}: clusters={clusters}; allowed: 1 to {users}, the number of users")
    if not has_domains and clusters > users:
        raise RecipeError(
            f"{where}: clusters={clusters}; allowed: 1 to {users}, the number of users, as cluster {users} would have "
            "no user"
        )
    if not 0 < fraction <= 1:
        raise RecipeError(f"{where}: fraction={fraction}; allowed: above 0, up to 1")
    if test_samples is not None and test_samples < 1:
        raise RecipeError(f"{where}: test_samples={test_samples}; allowed: from 1")
    if not 0 <= valid < 1:
        raise RecipeError(f"{where}: valid={valid}; allowed: from 0, below 1")


def _choose_shift(name: str, shift: str | None) -> Shift | None:
    """Return how clusters differ, "rotate" or "labels": as given, else the task's own shift; None if it has none.

    Args:
        name: Name of the learning task, such as "cifar10".
        shift: The shift as given; None for the task's own.

    Raises:
        RecipeError: The shift is unknown, or the task has none.
    """
    shift_of_task = TASKS[name].shift
    if shift is None:
        return shift_of_task
    if shift_of_task is None:
        raise RecipeError(f"task {name!r}: shift={shift!r}; this task has no shift, since its users already differ")
    allowed = get_args(Shift)
    if shift not in allowed:
        raise RecipeError(
            f"task {name!r}: shift={shift!r}.{did_you_mean(shift, allowed)} Allowed: {', '.join(allowed)}"
        )
    return cast(Shift, shift)


def _reduce_train_samples(user: UserSamples, fraction: float) -> UserSamples:
    """Keep the first ``fraction`` of a user's train samples, but at least ten, to test training on little data.

    FLoRAL's section 5 sets this minimum.
    """
    num_kept = max(REDUCED_MINIMUM, round(fraction * len(user.train)))
    return replace(user, train=user.train.first(num_kept))


def _make_synthetic_task(
    kind: Kind, path: str | Path | None, *, seed: int, users: int, clusters: int, test_samples: int | None
) -> Task:
    """Return one of FLoRAL's regressions, whose samples are generated.

    Args:
        kind: The regression: linear, mlp or mlp-norm.
        path: ``data.task.path`` of the recipe, the folder of a task's images; refused, as nothing is read.
        seed: Seed of the samples.
        users: Number of users.
        clusters: Number of clusters.
        test_samples: Test samples per user; None for the task's own.

    Raises:
        RecipeError: A path was given.
    """
    if path is not None:
        raise RecipeError(f"task {kind!r}: path={str(path)!r}; this task is generated and takes no path")
    setting = TASKS[kind]
    users_with_samples = make_synthetic(
        kind,
        users=users,
        clusters=clusters,
        train=setting.train,
        test=setting.test,
        seed=seed,
        fresh_test=test_samples,  # newly drawn samples in place of the task's own
    )
    return Task(
        users=as_users(users_with_samples),
        loss="mse",
        classes=OUTPUTS[kind],  # of a regression, the number of outputs
        clusters=clusters,
        augment=False,
        input_shape=(DIMENSION,),
        net=setting.net,
    )


def _make_shifted_task(
    name: str, path: str | Path | None, *, clusters: int, shift: Shift | None, **options: Any
) -> Task:
    """Return one of FLoRAL's image tasks, whose clusters differ by a shift or by their labels.

    Args:
        name: Name of the learning task, such as "cifar10".
        path: The folder or hub name of the images; None for ``$COMINGLE_DATA/images``, else the hub.
        clusters: Number of clusters.
        shift: "rotate" or "labels"; None if clusters have different labels.
        **options: Further arguments of :func:`~comingle_papers.tasks.image_tasks.make_shifted`.
    """
    setting = TASKS[name]
    images_of_split = _read_splits(name, setting, path)
    users = make_shifted(name, setting, images_of_split, clusters=clusters, shift=shift, **options)
    return _image_task(setting, users, clusters, shift)


def _make_skewed_task(name: str, path: str | Path | None, **options: Any) -> Task:
    """Return one of FedMerge's image tasks, which are skewed: users differ in their labels or in their images' domain.

    Args:
        name: Name of the learning task, such as "cifar10".
        path: The folder or hub name of the images; None for ``$COMINGLE_DATA/images``, else the hub.
        **options: Arguments of :func:`~comingle_papers.tasks.image_tasks.make_skewed`; if users differ in their images'
            domain, ``clusters`` is replaced by the number of domains.
    """
    setting = TASKS[name]
    if setting.partition == "domain":

        def read(source: str | Path) -> Images:
            return read_domains(setting.images, source, largest=DOMAIN_SIDE)

        images = _read_from_source(read, name, path)
        check_images(images, classes=setting.classes, coloured=setting.coloured, where=f"task {name!r}: images")
        options["clusters"] = len(images.domain_names)
    else:
        images_of_split = _read_splits(name, setting, path)
        images = pool_images(list(images_of_split.values()), f"task {name!r}")
    users = make_skewed(name, setting, images, **options)
    return _image_task(setting, users, options["clusters"], shift=None)


def _image_task(setting: Setting, users: tuple[UserSamples, ...], clusters: int, shift: Shift | None) -> Task:
    """Return a classification task of users with images.

    Args:
        setting: The task's defaults, such as its numbers of users, clusters and labels.
        users: The users with their samples.
        clusters: Number of clusters.
        shift: The shift between clusters, if there is one.
    """
    return Task(
        users=as_users(users),
        loss="cross_entropy",
        classes=setting.classes,
        clusters=clusters,
        augment=setting.augment,
        input_shape=tuple(users[0].train.inputs.shape[1:]),
        net=setting.net,
        shift=shift,
    )


def _read_splits(name: str, setting: Setting, path: str | Path | None) -> dict[str, Images]:
    """Read and check the images of the splits "train" and "test".

    Args:
        name: Name of the learning task, such as "cifar10".
        setting: The task's defaults, such as its numbers of users, clusters and labels.
        path: The folder or hub name of the images; None for ``$COMINGLE_DATA/images``, else the hub.

    Raises:
        DataError: Images cannot be read, or do not have the task's channels or labels.
    """

    def read(source: str | Path) -> dict[str, Images]:
        return read_images(setting.images or name, source)

    images_of_split = _read_from_source(read, name, path)
    for split, images in images_of_split.items():
        where = f"task {name!r}: {split} images"
        check_images(images, classes=setting.classes, coloured=setting.coloured, where=where)
    return images_of_split


def _read_from_source(read: Callable[[str | Path], ReadImages], name: str, path: str | Path | None) -> ReadImages:
    """Read a task's images from a path, else from ``$COMINGLE_DATA/images`` if that holds them, else from the hub.

    Args:
        read: Reads the images of a source, a folder or a hub name.
        name: Name of the learning task, such as "cifar10".
        path: The source as given; None for ``$COMINGLE_DATA/images``, else the hub.

    Raises:
        DataError: The images cannot be read; if no path was given, the message names the alternatives to the hub.
    """
    if path is not None:
        return read(path)
    data_set = TASKS[name].images or name
    data_folder = os.environ.get(FOLDER_VARIABLE, "")
    images_folder = expand_home(data_folder) / "images"
    if data_folder and has_images(data_set, images_folder):
        return read(images_folder)
    try:
        return read(TASKS[name].hub)
    except DataError as error:
        reason = f"{images_folder} has no images of {data_set}" if data_folder else f"${FOLDER_VARIABLE} is not set"
        raise DataError(
            f"{error}; without the hub, give data.task.path or ${FOLDER_VARIABLE}/images ({reason})"
        ) from error


class TaskSection(Section):
    """Users of a task that is not language: see ``comingle_papers.tasks.kind``."""

    name: str
    """FLoRAL's ``linear``, ``mlp``, ``mlp-norm``, ``mnist``, ``cifar10`` and ``cifar100``; FedMerge's
    ``cifar100-personal``, ``cifar100-cluster`` and ``pacs``, and the first two with ``cifar10-`` and ``mnist-``.
    """
    users: Count | None = None
    """Number of users; by default the paper's."""
    clusters: Count | None = None
    """True clusters; by default the paper's. User k is in cluster k mod C; in tasks ``-cluster`` the users of a cluster
    follow each other. Not for ``-personal`` and ``pacs``.
    """
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the train samples that users keep, at least 10 samples; 0.05 is the paper's "Reduced"."""
    shift: str | None = None
    """``rotate`` or ``labels``; by default MNIST and CIFAR-10 are rotated."""
    path: str | None = None
    """Folder of the images, or ``hub:NAME``; by default ``$COMINGLE_DATA/images``, else the hub."""
    test_samples: Count | None = None
    """Test samples of a user: the number of new samples in synthetic tasks, the largest number of images in others."""
    valid: Fraction | None = None
    """Share of the train samples for validation; by default 0.1 in FedMerge's tasks and 0 in FLoRAL's."""
    alpha: Positive | None = None
    """Distribute labels among users by Dirichlet shares (needs ``pip install "comingle-papers[flower]"``); by default
    0.1 for ``-personal`` and even shares for ``-cluster``.
    """
    labels_per_cluster: Count | None = None
    """Labels of each cluster in tasks ``-cluster``; by default each label is in one cluster."""


class TaskDataSection(DataSection):
    """A named task, which makes users and their samples."""

    kind: Literal["task"] = "task"
    task: Annotated[TaskSection, BeforeValidator(expand_plain_name)]
    """A task of the papers, with small nets."""

    label: ClassVar[str] = "data.task"
    marks: ClassVar[tuple[str, ...]] = ("task",)
    implementation: ClassVar[str] = "comingle_papers.tasks.kind:KIND"
    has_base: ClassVar[bool] = True
    accepted: ClassVar[Mapping[str, str]] = {"task": "a name, or a mapping with name"}
    unread: ClassVar[Mapping[str, str]] = {
        **UNREAD,
        **unread_keys_of_text(
            add_bos_token="a task has samples, which have no tokens",
            split="a task has its own train and test samples",
            held_out="a task has its own test samples",
            on_small_user=NO_WINDOWS,
            limits=(
                "use data.task.fraction to reduce train samples",
                "a task has its own samples",
                "use data.task.test_samples to reduce test samples",
            ),
        ),
    }


SETTINGS = ("loss", "classes", "clusters", "augment", "input_shape", "net", "shift")
"""Attributes of a task besides its users."""


class TaskKind(NetKind):
    """Samples with targets, and the net that a paper trains on them."""

    name = "task"

    def read(self, request: DataRequest) -> RunData:
        """Return the users and the net of the task that the recipe names; no base model is loaded.

        Raises:
            DataError: A caller of the Python interface passes data of its own, which tasks do not take.
        """
        if request.given is not None:
            raise DataError(f"users: {self.name} takes its users from the recipe; a program cannot pass them")
        recipe = request.recipe
        section = cast(TaskDataSection, recipe.data).task
        return self.run_data(prepare_task(section, recipe.data_seed))

    def run_data(self, task: Task) -> RunData:
        """Return what a run trains on: the users of a task; warn of users with test labels that they cannot train on.

        There is no base model, since tasks train nets from scratch.
        """
        has_labels = task.loss == "cross_entropy"
        if has_labels:
            warn_unseen(task.users)
        return RunData(kind=self, base=None, users=task.users, common=task)

    def with_num_users(self, recipe: Recipe, users: int) -> Recipe:
        """Return the recipe with another number of users."""
        return recipe.with_changes({"data.task.users": users})

    def settings(self, run_data: RunData) -> dict[str, object]:
        """Return the attributes of the task besides its users, for the run folder."""
        return {key: getattr(run_data.common, key) for key in SETTINGS}

    def reopened(
        self, base: Base | None, users: Sequence[Any], settings: Mapping[str, Any], *, net: Any = None
    ) -> RunData:
        """Return the data of a finished run's task from what the run folder stores.

        Args:
            base: The base model; None for a net.
            users: The users, whose samples are read from disk on first use.
            settings: The task's attributes besides its users, as :meth:`settings` returned them.
            net: Ignored, since the settings name the net.
        """
        input_shape = tuple(settings["input_shape"])  # a list in JSON
        task = Task(users=as_users(users), **{**settings, "input_shape": input_shape})
        return RunData(kind=self, base=base, users=task.users, common=task, unread=True)  # on disk until used


def prepare_task(section: TaskSection, seed: int) -> Task:
    """Return the task that a recipe names, with its users and their samples.

    Args:
        section: The recipe's section ``data.task``.
        seed: Seed of the samples and of their division among users.
    """
    # Keys that the recipe does not give keep the defaults of the task.
    options = section.model_dump(exclude={"name"}, exclude_unset=True)
    return make_task(section.name, **options, seed=seed)


KIND = TaskKind()
