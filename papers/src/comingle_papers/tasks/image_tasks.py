"""Image tasks of FLoRAL and FedMerge, and their settings.

FLoRAL's tasks (section 5, appendix G; users, clusters and numbers of samples are those of its public code):

    task                 users / clusters   train samples a user   net
    linear               10 / 2             7                      linear
    mlp, mlp-norm        20 / 4             97                     mlp, mlp-norm
    mnist                300 / 4            200                    mnist
    cifar10              20 / 4             2,500                  cifar10
    cifar100             100 / 10           500                    vgg8

FedMerge's (section 4.1; it has CIFAR-100 and PACS, the others are for smaller runs of the same kind):

    task                 users / clusters   train, valid, test images a user   net
    cifar100-personal    50 / none          900, 100, 200 on average           resnet9
    cifar100-cluster     50 / 5             as many, by cluster                resnet9
    cifar10-personal, cifar10-cluster, mnist-personal, mnist-cluster: the same
    pacs                 4 / 4 domains      1,252 to 2,947, 139 to 327, 278 to 655   resnet9

Random ones act on each sample by itself, without a loop; what they draw comes from the given generator, on the
generator's device, so that a CPU generator gives the same images on every device.

User k is in cluster k mod C. Images of cluster c are turned by 360 / C * c degrees (shift "rotate"), or their labels
become y + c modulo the number of classes ("labels"); test images are shifted as train images are. Without a shift
(cifar100) cluster c holds the labels that are c modulo C, and they stay numbers out of 100: a net that can fit 10
labels but not 100, which must find out whose labels it will be asked for, is what the task is about. Mapped to 10, the
labels of different clusters would contradict each other, which is the label shift of the other tasks.

Source: FedMerge, section 4.1; what it leaves open is as in its public code. The data set's own train and test images
are pooled, dealt out (:mod:`.groups`), and each user's are split: a sixth is for testing, a tenth of the
others for validation, label by label, so that train, validation and test images of a user have the same distribution
and every label is trained on (:mod:`comingle.data.samples.samples`).

    personal   50 users; the images of each label are parted by shares drawn from Dir(0.1)
    cluster    the labels are drawn into five clusters of equally many; 6, 5, 8, 13 and 18 of 50 consecutive users have
               one each, dealt evenly, as in the paper. Its public code draws sizes at random, gives each cluster 30 of
               100 labels, so that clusters overlap, and parts each label by Dir(10): ``labels_per_cluster: 30`` and
               ``alpha: 10`` do the latter two
    domain     PACS, one domain a user; more users than domains share a domain evenly

Differs from the public code: it holds out test and validation images of the personal setting regardless of labels, and
in the cluster setting keeps the data set's own test images for testing; it has no validation images of PACS, and no
partition of it. Images are not augmented, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from comingle.data.samples.samples import Samples, UserSamples, copy_into_one, hold_out, list_labels
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.seeds import generator
from comingle_papers.tasks.images import Images, Key, choose_labels, cluster_sizes, deal_images, group_by_labels

Shift = Literal["rotate", "labels"]
Partition = Literal["personal", "cluster", "domain"]

CIFAR10_COLOURS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
"""Mean and standard deviation of CIFAR's channels, used for normalisation."""
_CIFAR100_COLOURS = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
_IMAGENET_COLOURS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

Colours = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Defaults of a task; ``hub`` is empty for synthetic tasks.

    ``train`` and ``test`` are samples per user: exact for synthetic tasks, the average where images are dealt unevenly.
    Images without ``colours`` are grey and stay in [0, 1].
    """

    users: int
    clusters: int
    net: str
    train: int = 0
    test: int = 0
    hub: str = ""
    images: str = ""
    """Name of the image files, where it differs from the task's."""
    classes: int = 0
    shift: Shift | None = None
    colours: Colours | None = None
    """Mean and standard deviation of each channel."""
    partition: Partition | None = None
    alpha: float | None = None
    valid: float = 0.0
    augment: bool = False

    @property
    def is_synthetic(self) -> bool:
        """True if samples are generated; only tasks with images have a data set on the hub."""
        return not self.hub

    @property
    def is_skewed(self) -> bool:
        """True if users have different labels or domains, as ``partition`` says."""
        return self.partition is not None

    @property
    def coloured(self) -> bool:
        """True if images have three channels."""
        return self.colours is not None


def _fedmerge_setting(
    images: str, partition: Partition, hub: str, total_images: int, classes: int, colours: Colours | None
) -> Setting:
    """Return the setting of one of FedMerge's tasks, as in its section 4.1 and public code.

    Args:
        images: Name of the image files.
        partition: How images are dealt out to users.
        hub: The data set on the hub.
        total_images: Number of train and test images together.
        classes: Number of labels.
        colours: Mean and standard deviation of each channel; None for grey images.
    """
    num_users = 4 if partition == "domain" else 50  # one user for each domain
    num_clusters = {"personal": 1, "cluster": 5, "domain": 4}[partition]  # personal: no clusters, one group of users
    images_per_user = total_images / num_users
    return Setting(
        users=num_users,
        clusters=num_clusters,
        net="resnet9",
        train=round(images_per_user * (1 - TEST_SHARE) * (1 - VALID_SHARE)),
        test=round(images_per_user * TEST_SHARE),
        hub=hub,
        images=images,
        classes=classes,
        colours=colours,
        partition=partition,
        alpha=0.1 if partition == "personal" else None,
        valid=VALID_SHARE,
    )


TEST_SHARE = 1 / 6
"""Share of a user's images that are held out for testing (FedMerge's public code)."""
VALID_SHARE = 0.1
"""Share of the remaining images that are held out for validation (FedMerge's public code)."""

REDUCED_MINIMUM = 10
"""Smallest number of train samples that a fraction leaves a user who had as many (FLoRAL, section 5)."""

_MNIST, _CIFAR10, _CIFAR100 = "hub:ylecun/mnist", "hub:uoft-cs/cifar10", "hub:uoft-cs/cifar100"

TASKS: dict[str, Setting] = {
    "linear": Setting(users=10, clusters=2, net="linear", train=7, test=1),
    "mlp": Setting(users=20, clusters=4, net="mlp", train=97, test=23),
    "mlp-norm": Setting(users=20, clusters=4, net="mlp-norm", train=97, test=23),
    "mnist": Setting(users=300, clusters=4, net="mnist", hub=_MNIST, classes=10, shift="rotate"),
    "cifar10": Setting(
        users=20,
        clusters=4,
        net="cifar10",
        hub=_CIFAR10,
        classes=10,
        shift="rotate",
        colours=CIFAR10_COLOURS,
        augment=True,
    ),
    "cifar100": Setting(
        users=100, clusters=10, net="vgg8", hub=_CIFAR100, classes=100, colours=CIFAR10_COLOURS, augment=True
    ),
    "mnist-personal": _fedmerge_setting("mnist", "personal", _MNIST, 70_000, 10, None),
    "mnist-cluster": _fedmerge_setting("mnist", "cluster", _MNIST, 70_000, 10, None),
    "cifar10-personal": _fedmerge_setting("cifar10", "personal", _CIFAR10, 60_000, 10, CIFAR10_COLOURS),
    "cifar10-cluster": _fedmerge_setting("cifar10", "cluster", _CIFAR10, 60_000, 10, CIFAR10_COLOURS),
    "cifar100-personal": _fedmerge_setting("cifar100", "personal", _CIFAR100, 60_000, 100, _CIFAR100_COLOURS),
    "cifar100-cluster": _fedmerge_setting("cifar100", "cluster", _CIFAR100, 60_000, 100, _CIFAR100_COLOURS),
    "pacs": _fedmerge_setting("pacs", "domain", "hub:flwrlabs/pacs", 9_991, 7, _IMAGENET_COLOURS),
}


CROP_PADDING = 4
"""Largest shift of a crop in pixels, as is usual for CIFAR."""


def rotate_quarters(images: Float[Tensor, "n c h w"], turns: int) -> Float[Tensor, "n c _ _"]:
    """Rotate counter-clockwise by ``turns`` times 90 degrees, without changing a pixel's value."""
    return torch.rot90(images, turns, (-2, -1))


def rotate_freely(images: Float[Tensor, "n c h w"], degrees: float) -> Float[Tensor, "n c h w"]:
    """Rotate counter-clockwise about the centre, with bilinear interpolation and zeros outside of the image.

    Args:
        images: The images.
        degrees: Angle in degrees.
    """
    height, width = images.shape[-2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # ``affine_grid`` says where each output pixel comes from, so it takes the inverse rotation. Its axes run from -1 to
    # 1, so that a height has the length of a width (hence the ratios), and y points down.
    inverse_rotation = [[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]
    matrices = torch.tensor(inverse_rotation, dtype=images.dtype, device=images.device).expand(len(images), 2, 3)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def rotate(images: Float[Tensor, "n c h w"], degrees: float) -> Float[Tensor, "n c h w"]:
    """Rotate counter-clockwise by any angle.

    Multiples of 180 degrees, and of 90 degrees for square images, are exact; other angles need interpolation.

    Args:
        images: The images.
        degrees: Angle in degrees.
    """
    quarter_turns, rest = divmod(degrees, 90)
    is_square = images.shape[-1] == images.shape[-2]
    is_half_turn = quarter_turns % 2 == 0  # 0, 180 or 360 degrees, which keep height and width
    if rest == 0 and (is_half_turn or is_square):
        return rotate_quarters(images, int(quarter_turns))
    return rotate_freely(images, degrees)


def flip_some(
    images: Float[Tensor, "n c h w"],
    generator: torch.Generator,
    *,
    probability: float = 0.5,
    vertically: Sequence[bool] | None = None,
) -> Float[Tensor, "n c h w"]:
    """Flip each image left to right or top to bottom with some probability.

    Args:
        images: The images.
        generator: Source of the draws.
        probability: Probability of a flip.
        vertically: For each image, whether its flip is top to bottom; None if all flips are left to right.
    """
    draws = torch.rand(len(images), generator=generator, device=generator.device)
    is_flipped = (draws < probability).to(images.device)
    flipped = images.flip(-1)  # left to right
    if vertically is not None:
        is_vertical = torch.tensor(list(vertically), dtype=torch.bool, device=images.device)
        flipped = torch.where(is_vertical[:, None, None, None], images.flip(-2), flipped)
    return torch.where(is_flipped[:, None, None, None], flipped, images)


def crop_randomly(
    images: Float[Tensor, "n c h w"],
    generator: torch.Generator,
    *,
    padding: int = CROP_PADDING,
    fill: Sequence[float] | float = 0.0,
) -> Float[Tensor, "n c h w"]:
    """Shift each image by up to ``padding`` pixels in each direction: pad with ``fill``, cut out the old size.

    Args:
        images: The images.
        generator: Source of the draws.
        padding: Largest shift in pixels.
        fill: One value, or one per channel: black is not zero once images are normalised.
    """
    num_images, channels, height, width = images.shape
    corners = torch.randint(2 * padding + 1, (2, num_images, 1), generator=generator, device=generator.device)
    top, left = corners.to(images.device)
    rows = top + torch.arange(height, device=images.device)  # (n, h)
    columns = left + torch.arange(width, device=images.device)  # (n, w)
    padded = _pad(images, padding, fill)
    padded_width = padded.shape[-1]
    # Each image keeps its ``height`` rows from ``top`` on, then its ``width`` columns from ``left`` on.
    with_cut_rows = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded_width))
    return with_cut_rows.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


def _pad(images: Float[Tensor, "n c h w"], padding: int, fill: Sequence[float] | float) -> Float[Tensor, "n c _ _"]:
    """Return images with a border of ``fill`` on all sides.

    Args:
        images: The images, shape (n, c, h, w).
        padding: Width of the border in pixels.
        fill: One value, or one per channel.
    """
    num_images, channels, height, width = images.shape
    padded = images.new_empty(num_images, channels, height + 2 * padding, width + 2 * padding)
    padded[:] = images.new_tensor(fill).view(-1, 1, 1)
    padded[:, :, padding : padding + height, padding : padding + width] = images
    return padded


def normalise(
    images: Float[Tensor, "n c h w"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "n c h w"]:
    """Return ``(images - mean) / std`` for each channel.

    Args:
        images: The images.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """
    mean_of_channels = images.new_tensor(mean).view(-1, 1, 1)
    std_of_channels = images.new_tensor(std).view(-1, 1, 1)
    return (images - mean_of_channels) / std_of_channels


def make_shifted(
    name: str,
    setting: Setting,
    images_of_split: Mapping[str, Images],
    *,
    seed: int,
    users: int,
    clusters: int,
    shift: Shift | None,
    test_samples: int | None,
) -> tuple[UserSamples, ...]:
    """Divide images among users in clusters, and make the clusters' data differ; user k is in cluster k mod C.

    With the shift "rotate" the images of cluster c are rotated by ``360 c / C`` degrees; with "labels" c is added to
    the labels. Without a shift each cluster gets images of its own labels only.

    Args:
        name: Name of the learning task, such as "cifar10".
        setting: The task's defaults, such as its numbers of users, clusters and labels.
        images_of_split: The images of the splits "train" and "test".
        seed: Seed of the partition.
        users: Number of users.
        clusters: Number of clusters C.
        shift: How clusters differ: "rotate" or "labels"; None if each has labels of its own.
        test_samples: Largest number of test images per user; None for no limit.

    Raises:
        RecipeError: There are more users than images.
    """
    max_users = min(len(images) for images in images_of_split.values())
    if users > max_users:
        raise RecipeError(f"task {name!r}: users={users}; allowed: 1 to {max_users}, one image per split and user")
    samples_of_split: dict[str, list[Samples]] = {}
    for split, images in images_of_split.items():
        stream = generator("task", name, seed, split)
        if shift is None:
            indices_of_users = _deal_labels_of_clusters(images.labels, users, clusters, stream)
        else:
            indices_of_users = _deal_evenly(len(images), users, stream)
        if split == "test":
            indices_of_users = [indices[:test_samples] for indices in indices_of_users]
        samples = (
            _shifted_samples(images, indices, k % clusters, clusters, shift, setting)
            for k, indices in enumerate(indices_of_users)
        )
        samples_of_split[split] = copy_into_one(samples, [len(indices) for indices in indices_of_users])
    users_with_samples = []
    for k, (train, test) in enumerate(zip(samples_of_split["train"], samples_of_split["test"], strict=True)):
        no_samples = train.first(0)  # validation samples are held out later
        user = UserSamples(name=f"user-{k}", train=train, valid=no_samples, test=test, cluster=k % clusters)
        users_with_samples.append(user)
    return tuple(users_with_samples)


def _deal_evenly(num_images: int, users: int, generator: torch.Generator) -> list[Int64[Tensor, " _"]]:
    """Deal all images out to users evenly in random order; return the image indices of each user.

    Args:
        num_images: Number of images.
        users: Number of users.
        generator: Source of the order.
    """
    order = torch.randperm(num_images, generator=generator)
    return list(order.tensor_split(users))


def _deal_labels_of_clusters(
    labels: Int64[Tensor, " n"], users: int, clusters: int, generator: torch.Generator
) -> list[Int64[Tensor, " _"]]:
    """Deal the images of each label y out to the users of cluster y mod C, evenly in random order.

    Args:
        labels: The label of each image.
        users: Number of users; user k is in cluster k mod C.
        clusters: Number of clusters C.
        generator: Source of the order.

    Returns:
        The image indices of each user.
    """
    order = torch.randperm(len(labels), generator=generator)
    images_of_users = [order[:0]] * users  # empty; each is replaced below
    for cluster in range(clusters):
        cluster_images = order[labels[order] % clusters == cluster]
        cluster_users = range(cluster, users, clusters)
        for user, part in zip(cluster_users, cluster_images.tensor_split(len(cluster_users)), strict=True):
            images_of_users[user] = part
    return images_of_users


def _shifted_samples(
    images: Images, indices: Int64[Tensor, " m"], cluster: int, clusters: int, shift: Shift | None, setting: Setting
) -> Samples:
    """Return a user's normalised images and its labels, after its cluster's rotation or change of labels.

    Args:
        images: All images of the split.
        indices: Indices of the user's images.
        cluster: The user's cluster.
        clusters: Number of clusters.
        shift: "rotate" by the cluster's share of 360 degrees, "labels" to add the cluster's number to labels; or None.
        setting: The task's defaults, such as its numbers of users, clusters and labels.
    """
    pixels, labels = images.as_floats(indices), images.labels[indices]
    if shift == "rotate":
        pixels = rotate(pixels, 360 * cluster / clusters)  # before normalising: corners become black
    elif shift == "labels":
        labels = (labels + cluster) % setting.classes
    if setting.colours is not None:
        pixels = normalise(pixels, *setting.colours)
    return Samples(inputs=pixels, targets=labels)


def pool_images(parts: Sequence[Images], where: str) -> Images:
    """Concatenate images to one data set.

    Args:
        parts: Images of the same kind, such as the splits of a data set.
        where: Name of the data set, for error messages.

    Raises:
        DataError: Images differ in size.
    """
    shapes = dict.fromkeys(tuple(part.pixels.shape[1:]) for part in parts)  # without duplicates
    if len(shapes) > 1:
        raise DataError(f"{where}: images of sizes {', '.join(map(str, shapes))}; allowed: one size in train and test")
    return Images(pixels=torch.cat([part.pixels for part in parts]), labels=torch.cat([part.labels for part in parts]))


def make_skewed(
    name: str,
    setting: Setting,
    images: Images,
    *,
    seed: int,
    users: int,
    clusters: int,
    alpha: float | None,
    labels_per_cluster: int | None,
    fraction: float,
    test_samples: int | None,
) -> tuple[UserSamples, ...]:
    """Deal images out to users that differ in their labels or domain, and hold out each user's test images.

    The images are first divided into groups: the clusters, the domains, or a single group of all images. The images of
    a group are then dealt out to the users of that group.

    Args:
        name: Name of the learning task, such as "cifar10".
        setting: The task's defaults, such as its numbers of users, clusters and labels.
        images: All images.
        seed: Seed of the partition.
        users: Number of users.
        clusters: Number of clusters.
        alpha: Concentration of the Dirichlet distribution of each label's shares among users; None deals evenly.
        labels_per_cluster: Number of labels of each cluster; None divides all labels among the clusters.
        fraction: Share of their train images that users keep, at least one of each label.
        test_samples: Largest number of test images per user; None for no limit.

    Returns:
        The users, ordered by cluster or domain, with empty validation splits.

    Raises:
        RecipeError: Numbers of users, clusters or labels do not fit.
        DataError: A user has no images, or too few of each label to hold any out.
    """
    stream_key: Key = (name, seed)  # seeds all random streams
    groups, users_per_group, group_names = _group_images(
        setting, images, users, clusters, labels_per_cluster, stream_key
    )
    indices_of_users = deal_images(
        groups, users_per_group, images.labels, alpha=alpha, key=stream_key, names=group_names
    )
    user_names = _user_names(images, users_per_group)
    group_of_user = [group for group, num_users in enumerate(users_per_group) for _ in range(num_users)]
    groups_are_clusters = setting.partition != "personal"  # "personal": a single group of all users
    users_with_samples = []
    for user_name, group, indices in zip(user_names, group_of_user, indices_of_users, strict=True):
        train, test = _split_images(images.labels, indices, fraction, user_name)
        no_images = train[:0]  # validation samples are held out later
        users_with_samples.append(
            UserSamples(
                name=user_name,
                train=_samples_at(images, train, setting),
                valid=_samples_at(images, no_images, setting),
                test=_samples_at(images, test[:test_samples], setting),
                cluster=group if groups_are_clusters else None,
            )
        )
    return tuple(users_with_samples)


def _group_images(
    setting: Setting, images: Images, users: int, clusters: int, labels_per_cluster: int | None, key: Key
) -> tuple[list[Int64[Tensor, " _"]], list[int], list[str]]:
    """Group images by cluster or domain; the images of a group will be dealt out to users of that group only.

    Args:
        setting: The task's defaults, such as its numbers of users, clusters and labels.
        images: All images.
        users: Number of users.
        clusters: Number of clusters.
        labels_per_cluster: Number of labels of each cluster; None divides all labels among the clusters.
        key: Key of the random stream by which labels are drawn: the name of the task and the seed.

    Returns:
        For each group the indices of its images and its number of users; and the groups' names for error messages,
        empty if there is a single group.
    """
    if setting.partition == "personal":  # a single group; users differ by their shares of the labels
        all_images = torch.arange(len(images))
        return [all_images], [users], []
    if setting.partition == "domain":
        task, _ = key
        return _group_by_domain(images, users, str(task))
    users_per_group = cluster_sizes(users, clusters)
    labels_of_clusters = choose_labels(setting.classes, clusters, labels_per_cluster, key)
    groups = group_by_labels(images.labels, labels_of_clusters, users_per_group, key)
    group_names = [f"cluster {c} (labels {list_labels(labels)})" for c, labels in enumerate(labels_of_clusters)]
    return groups, users_per_group, group_names


def _group_by_domain(images: Images, users: int, task: str) -> tuple[list[Int64[Tensor, " _"]], list[int], list[str]]:
    """Group images by domain, with about the same number of users for each.

    Args:
        images: All images, with domains.
        users: Number of users.
        task: Name of the task, for the error message.

    Returns:
        For each domain the indices of its images and its number of users, and the domains' names for error messages.

    Raises:
        RecipeError: There are fewer users than domains.
    """
    assert images.domains is not None
    num_domains = len(images.domain_names)
    if users < num_domains:
        raise RecipeError(f"task {task!r}: users={users}; allowed: from {num_domains}, one per domain")
    groups = [(images.domains == domain).nonzero().flatten() for domain in range(num_domains)]
    users_of_domains = torch.arange(users).tensor_split(num_domains)
    users_per_group = [len(users_of_domain) for users_of_domain in users_of_domains]
    group_names = [f"domain {name!r}" for name in images.domain_names]
    return groups, users_per_group, group_names


def _user_names(images: Images, users_per_group: Sequence[int]) -> list[str]:
    """Return the users' names: "user-0", or their images' domain, as "photo", "photo-1" if it has several users.

    Args:
        images: All images.
        users_per_group: Number of users of each group of images.
    """
    if not images.domain_names:
        return [f"user-{k}" for k in range(sum(users_per_group))]
    names: list[str] = []
    for domain, num_users in zip(images.domain_names, users_per_group, strict=True):
        if num_users == 1:
            names.append(domain)
        else:
            names += [f"{domain}-{k}" for k in range(num_users)]
    return names


def _split_images(
    labels: Int64[Tensor, " n"], indices: Int64[Tensor, " m"], fraction: float, name: str
) -> tuple[Int64[Tensor, " train"], Int64[Tensor, " test"]]:
    """Split a user's images into train and test images, label by label, and keep a fraction of the train images.

    Args:
        labels: Labels of the images of all users.
        indices: Indices of this user's images.
        fraction: Share of the train images that the user keeps, but at least ten and one of each label.
        name: The user's name, for error messages.

    Returns:
        Indices of the train and test images among all images.

    Raises:
        DataError: No image can be held out for testing.
    """
    train_positions, test_positions = hold_out(labels[indices], TEST_SHARE)
    if not len(test_positions):
        got = f"no two of {len(indices)} images share a label, so none can be held out for testing"
        raise DataError(
            f"user {name!r}: {got}; allowed: more images, fewer users, or a larger alpha where there is one"
        )
    train, test = indices[train_positions], indices[test_positions]
    num_kept = max(REDUCED_MINIMUM, round(fraction * len(train)))
    dropped_share = 1 - num_kept / len(train)  # negative if there are fewer than ``num_kept``; then none is dropped
    kept_positions, _ = hold_out(labels[train], dropped_share)  # keeps the labels' proportions
    return train[kept_positions], test


def _samples_at(images: Images, indices: Int64[Tensor, " m"], setting: Setting) -> Samples:
    """Return the images at these indices as normalised floats, with their labels.

    Args:
        images: All images.
        indices: Indices of the images.
        setting: The task's defaults, with mean and deviation of each channel.
    """
    inputs = images.as_floats(indices)
    if setting.colours is not None:
        inputs = normalise(inputs, *setting.colours)
    return Samples(inputs=inputs, targets=images.labels[indices])
