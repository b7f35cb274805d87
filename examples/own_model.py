"""Train your own net on your own images: any ``nn.Module``, any data set of PyTorch.

The images are synthetic, with 28 x 28 grey pixels and ten classes, like Fashion-MNIST. Half of the users see them
upside down, so there are two clusters, which FLoRAL's mixture may find.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import comingle

CLASSES, SIDE = 10, 28


def images(count: int, seed: int, *, turned: bool) -> TensorDataset:
    """Return noisy pictures of ten patterns, with their classes.

    Args:
        count: Number of pictures.
        seed: Seed of the classes and the noise.
        turned: Whether the pictures are upside down.
    """
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1 + seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    pictures = patterns[labels] + 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=draw)
    return TensorDataset(pictures.flip(2) if turned else pictures, labels)


def make_net() -> nn.Module:
    """Return a small convolutional net."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, CLASSES),
    )


def main() -> None:
    """Compare methods, then predict with a user's model."""
    users = {
        name: {"train": images(60, 2 * n, turned=n % 2 == 1), "test": images(100, 2 * n + 1, turned=n % 2 == 1)}
        for n, name in enumerate(("ada", "ben", "cem", "dora"))
    }
    sgd = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.0}
    router = {"learning_rate": 0.1}
    recipe = {"training": {"rounds": 10, "local_epochs": 2, "batch_size": 20, "experts": sgd, "router": router}}
    mixture = {"floral": {"budget": 0.25}}
    for method, more in (("local", {}), ("fedavg", {}), ({"name": "floral", "clusters": 2}, mixture)):
        run = comingle.run({**recipe, **more}, users=users, base=make_net, method=method)
        print(run)
    pictures, labels = users["ada"]["test"].tensors
    right = (run.user("ada").predict(pictures[:20]).argmax(1) == labels[:20]).sum()
    print(f"ada's own model names {right} of 20 new pictures")


if __name__ == "__main__":
    main()
