"""A plan: parameters, bytes, FLOPs and memory of each method.

Table 3 is for GPT2-124M in bfloat16, 128 tokens. Its figures are those of the routers (18,432 entries: 4.7 MFLOPs,
0.035 MiB) and of one expert's LoRA on the MLPs (737,280 entries: 1.41 MiB); its percentages are shares of the LoRA of
two such experts. So its MB are MiB, and the attention's LoRA is in none of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from comingle.cost.flops import Flops

PAPER_BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Entries of one user's attention LoRA, of one expert's LoRA on all MLPs, and of its routers."""

    attention: int
    expert: int
    router: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one of the two methods really takes: of one user, in one round, with one pass of ``context`` tokens."""

    forward_flops: float
    round_flops: float
    state_bytes: int
    upload_bytes: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One column of Table 3: the paper's words, its way of counting on this model, what is true, and why they differ.

    Values are CoMiGS-1G1S minus FedAvg; shares are fractions. ``theirs`` is None where the paper does not count it.
    """

    what: str
    unit: str
    paper: str
    theirs: float | None
    theirs_share: float | None
    true: float
    true_share: float
    why: str


def table3(sizes: Sizes, context: int, fedavg: Account, comigs: Account) -> list[Difference]:
    """The columns of Table 3 for another model, and training, which it leaves out.

    Values are in FLOPs and bytes; ``theirs`` counts bytes as bfloat16.
    """
    share = sizes.router / (2 * sizes.expert)
    lora = sizes.attention + 2 * sizes.expert
    return [
        Difference(
            what="compute of a forward pass",
            unit="FLOPs",
            paper="+5 MFLOPs (+1.25%)",
            theirs=2.0 * sizes.router * context,
            theirs_share=share,
            **_true(comigs.forward_flops, fedavg.forward_flops),
            why="The paper divides the routers' products by those of the experts' LoRA on the MLPs; against the whole "
            "pass, the base included, the share is far smaller.",
        ),
        Difference(
            what="compute of a round's training",
            unit="FLOPs",
            paper="not counted",
            theirs=None,
            theirs_share=None,
            **_true(comigs.round_flops, fedavg.round_flops),
            why="Routers are trained in passes of their own, which FedAvg does not have.",
        ),
        Difference(
            what="memory for what is trained",
            unit="bytes",
            paper="+0.035 MB (+1.25%)",
            theirs=float(sizes.router * PAPER_BYTES),
            theirs_share=share,
            **_true(comigs.state_bytes, fedavg.state_bytes),
            why="Here routers are float32 and have two moments of the optimiser each; the share is of all LoRA, the "
            "attention's included. The paper's MB are MiB of bfloat16.",
        ),
        Difference(
            what="upload of a round",
            unit="bytes",
            paper="-1.41 MB (-50%)",
            theirs=-float(sizes.expert * PAPER_BYTES),
            theirs_share=-0.5,
            **_true(comigs.upload_bytes, fedavg.upload_bytes),
            why=f"The attention's LoRA travels too: {_millions(sizes.attention + sizes.expert)} of {_millions(lora)} "
            "LoRA parameters, as float32. The paper counts the experts of the MLPs alone, as MiB of bfloat16.",
        ),
    ]


def _true(comigs: float, fedavg: float) -> dict[str, float]:
    return {"true": float(comigs - fedavg), "true_share": comigs / fedavg - 1}


def _millions(count: int) -> str:
    return f"{count / 1e6:.3f}M"


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
    """What a run will have revealed, by :func:`comingle.cost.summaries.promise`; empty without privacy."""

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
