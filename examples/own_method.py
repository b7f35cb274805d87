"""Write your own method: users stay near the mean, and the server takes longer steps towards theirs."""

from dataclasses import dataclass

import comingle
from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import MODEL_PREFIX as KEPT
from comingle.methods.server import Mean, Received
from comingle.utils.trees import Tree


@dataclass(frozen=True)
class StayNear(ClientHook):
    """Add ``weight / 2 |theta - theta_0|^2`` to the objective, with theta_0 as downloaded (FedProx)."""

    weight: float
    looks_back = True  # request the tensors that a user had at the start of the round

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Change the gradients of all users of the cohort in place; tensors are stacked by user."""
        for name, gradient in gradients.items():
            gradients[name] = gradient + self.weight * (cohort.tensors[name] - cohort.began[name])


@dataclass(frozen=True, kw_only=True)
class LongSteps(Mean):
    """Server that moves to ``theta + rate (mean - theta)`` instead of the mean."""

    rate: float

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Move the model towards the weighted mean of the uploads, in place.

        Args:
            kept: State of the server.
            sums: Weighted mean of the uploads, by name.
            received: The uploads.
        """
        for name, mean in sums.items():
            kept[KEPT + name].lerp_(mean, self.rate)


def near(*, weight: float = 0.01, rate: float = 1.2) -> Method:
    """Make the method; keyword arguments with defaults are its settings."""
    return Method(
        name="near",
        placement=Placement(generalists=2, shared=MODEL),
        client=Client(phases=joint(routed=False), parts=(StayNear(weight),)),
        server=LongSteps(rate=rate),
    )


if __name__ == "__main__":
    texts = {n: [f"{n} counts {i}, then {i * 7 % 50} and {i % 5}." for i in range(90)] for n in ("ada", "ben", "cem")}
    training = {"rounds": 5, "local_steps": 8, "batch_size": 4, "context": 32}
    recipe = {"base": "random:llama?layers=1&dim=32", "training": training}
    print(comingle.compare(recipe, ["fedavg", near, "local"], seeds=[0, 1], users=texts))
    print(comingle.run(recipe, users=texts, method={"name": near, "rate": 1.0}))
