"""What a plan says. FLOPs are those of matrix products, 2 for a multiply-add."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from comingle.costing.flops import Flops
from comingle.costing.paper import Difference


@dataclass(frozen=True, kw_only=True)
class UserCost:
    """What a user trains, sends and computes; ``names`` are the users for whom this is the same.

    ``parameters`` are those that are trained, by role. Bytes are of one exchange, a mean where users' names, which go
    with every message, differ in length. ``forward`` is one token's forward pass, ``training`` one token's forward and
    backward pass (experts, mean over what a round does), ``round`` a round's training. The naive figures are for one
    whole MLP per expert. ``unit`` is what data is counted in where it is not tokens; without token-level experts
    ``experts`` is 0.
    """

    names: tuple[str, ...]
    experts: int
    parameters: dict[str, int]
    upload_bytes: int
    download_bytes: int
    forward: Flops
    training: Flops
    round: Flops
    unit: str = "token"

    @property
    def trainable_parameters(self) -> int:
        """All that are trained."""
        return sum(self.parameters.values())

    def as_dict(self) -> dict[str, Any]:
        """As nested dictionaries, with totals."""
        flops = {
            name: {
                **asdict(spent),
                "base": spent.base,
                "total": spent.total,
                "overhead": spent.overhead,
                "naive_total": spent.naive(self.experts),
                "naive_overhead": _over(spent.naive(self.experts), spent.base),
            }
            for name, spent in (
                (f"forward_flops_per_{self.unit}", self.forward),
                (f"training_flops_per_{self.unit}", self.training),
                ("training_flops_per_round", self.round),
            )
        }
        plain = {key: value for key, value in asdict(self).items() if key not in ("forward", "training", "round")}
        return plain | {"trainable_parameters": self.trainable_parameters} | flops


def _over(total: float, base: float) -> float:
    return total / base - 1 if base else 0.0


@dataclass(frozen=True, kw_only=True)
class MemoryCost:
    """Bytes at the worst moment of a run.

    ``adapters_bytes`` are the trainable tensors of all users with padding and masks, ``moments_bytes`` the optimiser's,
    ``gradients_bytes`` those of the users of one pass, ``activations_bytes`` everything else that the pass holds,
    ``allocator_bytes`` what the memory allocator keeps in gaps, ``data_bytes`` a task's samples, ``process_bytes``
    Python and its libraries. ``exchange_bytes`` are messages while all who take part in a round send theirs, which is
    not at the same time as a pass. With users on disk ``adapters_bytes`` and ``moments_bytes`` are those of the cohorts
    that are in memory.
    """

    weights_bytes: int
    adapters_bytes: int
    moments_bytes: int
    gradients_bytes: int
    activations_bytes: int
    allocator_bytes: int
    data_bytes: int = 0
    process_bytes: int = 0
    exchange_bytes: int = 0

    @property
    def pass_bytes(self) -> int:
        """What a pass holds at its worst moment."""
        return self.gradients_bytes + self.activations_bytes

    @property
    def fixed_bytes(self) -> int:
        """What is there all the time."""
        held = self.weights_bytes + self.adapters_bytes + self.moments_bytes + self.data_bytes
        return held + self.process_bytes

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.fixed_bytes + max(self.pass_bytes, self.exchange_bytes) + self.allocator_bytes

    def as_dict(self) -> dict[str, int]:
        """With totals."""
        return asdict(self) | {"pass_bytes": self.pass_bytes, "total_bytes": self.total_bytes}


_PLAIN = ("exchanges", "users_per_step", "micro_batch", "fits", "advice", "store_bytes")


@dataclass(frozen=True, kw_only=True)
class MethodCost:
    """One method: its users, its exchanges over the whole run, and its memory.

    ``machine`` is this machine with all users, ``users_per_step`` at once with ``micro_batch`` sequences each;
    ``own_device`` is a device that holds the one user who has most. ``advice`` says how to make it fit; empty where it
    does.
    """

    method: str
    users: tuple[UserCost, ...]
    exchanges: int
    users_per_step: int
    micro_batch: int
    machine: MemoryCost
    own_device: MemoryCost
    fits: bool
    advice: str
    store_bytes: int = 0
    """What users' records take on disk at most; 0 where they are in memory."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """What a run will have revealed, by :func:`comingle.costing.promises.promise`; empty without privacy."""

    def as_dict(self) -> dict[str, Any]:
        """As nested dictionaries."""
        users = {"users": [user.as_dict() for user in self.users]}
        memory = {"machine": self.machine.as_dict(), "own_device": self.own_device.as_dict()}
        plain = {key: getattr(self, key) for key in _PLAIN}
        revealed = {"privacy": self.privacy} if self.privacy else {}
        return {"method": self.method, **users, **memory, **plain, **revealed}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe's costs. ``base_flops`` is a token's forward pass through the frozen base alone.

    For a task the base is its net, ``unit`` is "sample", ``local_steps`` are those of the user who takes most, and
    there is no context and no Table 3. ``note`` says what the numbers leave out.
    """

    base: str
    base_parameters: int
    dtype: str
    device: str
    users: tuple[str, ...]
    rounds: int
    local_steps: int
    batch_size: int
    context: int
    base_flops: float
    free_bytes: int
    methods: tuple[MethodCost, ...]
    table3: tuple[Difference, ...]
    unit: str = "token"
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As nested dictionaries, for JSON."""
        plain = {
            key: getattr(self, key)
            for key in (
                "base", "base_parameters", "dtype", "device", "users", "rounds", "local_steps", "batch_size", "context",
                "free_bytes", "unit", "note",
            )
        }  # fmt: skip
        return {
            **plain,
            f"base_forward_flops_per_{self.unit}": self.base_flops,
            "methods": [method.as_dict() for method in self.methods],
            "comigs_1g1s_minus_fedavg": [asdict(column) for column in self.table3],
        }
