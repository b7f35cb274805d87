"""What the tasks are unless a recipe says otherwise: users, clusters, images, how these are dealt out, and the net.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shift = Literal["rotate", "labels"]
Partition = Literal["personal", "cluster", "domain"]

CIFAR10_COLOURS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
"""Mean and standard deviation by which everybody normalises CIFAR."""
_CIFAR100_COLOURS = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
_IMAGENET_COLOURS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

Colours = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a task is unless told otherwise; ``hub`` is empty for synthetic ones.

    ``train`` and ``test`` are the samples of a user where the task alone decides: of synthetic tasks, and on average
    where images are dealt unevenly. Images without ``colours`` are grey and stay in [0, 1].
    """

    users: int
    clusters: int
    net: str
    train: int = 0
    test: int = 0
    hub: str = ""
    images: str = ""
    """Name of the images' files, where it is not the task's own."""
    classes: int = 0
    shift: Shift | None = None
    colours: Colours | None = None
    partition: Partition | None = None
    alpha: float | None = None
    valid: float = 0.0
    augment: bool = False

    @property
    def coloured(self) -> bool:
        """Whether images have three channels."""
        return self.colours is not None


def _fedmerge(
    images: str, partition: Partition, hub: str, pooled: int, classes: int, colours: Colours | None
) -> Setting:
    """Users, net, alpha and splits of FedMerge's section 4.1 and public code; ``pooled`` images in all."""
    users = 4 if partition == "domain" else 50
    each = pooled / users
    return Setting(
        users=users,
        clusters={"personal": 1, "cluster": 5, "domain": 4}[partition],
        net="resnet9",
        train=round(each * (1 - TEST_SHARE) * (1 - VALID_SHARE)),
        test=round(each * TEST_SHARE),
        hub=hub,
        images=images,
        classes=classes,
        colours=colours,
        partition=partition,
        alpha=0.1 if partition == "personal" else None,
        valid=VALID_SHARE,
    )


TEST_SHARE = 1 / 6
"""How much of a user's images are held out for testing (FedMerge's public code)."""
VALID_SHARE = 0.1
"""How much of the others for validation, likewise."""

REDUCED_MINIMUM = 10
"""Train samples that a fraction leaves each user (FLoRAL, section 5), if the user had as many."""

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
    "mnist-personal": _fedmerge("mnist", "personal", _MNIST, 70_000, 10, None),
    "mnist-cluster": _fedmerge("mnist", "cluster", _MNIST, 70_000, 10, None),
    "cifar10-personal": _fedmerge("cifar10", "personal", _CIFAR10, 60_000, 10, CIFAR10_COLOURS),
    "cifar10-cluster": _fedmerge("cifar10", "cluster", _CIFAR10, 60_000, 10, CIFAR10_COLOURS),
    "cifar100-personal": _fedmerge("cifar100", "personal", _CIFAR100, 60_000, 100, _CIFAR100_COLOURS),
    "cifar100-cluster": _fedmerge("cifar100", "cluster", _CIFAR100, 60_000, 100, _CIFAR100_COLOURS),
    "pacs": _fedmerge("pacs", "domain", "hub:flwrlabs/pacs", 9_991, 7, _IMAGENET_COLOURS),
}
