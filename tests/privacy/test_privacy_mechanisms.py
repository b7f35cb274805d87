"""What really leaves and arrives: bounded, with noise, and nothing beside it."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from tests.quick import recipe_with

from comingle.config.settings import PrivacySection
from comingle.methods import REGISTRY, make
from comingle.privacy.base import REFERENCE
from comingle.privacy.mechanisms import check_supported
from comingle.privacy.noise import add_noise, norms
from comingle.protocol.messages import Upload, join_uploads
from comingle.protocol.wire import pack, unpack
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Tree
from federations import local_round

USERS = ("ann", "bob", "cem", "dan")
CENTRAL = (
    "fedavg", "ffa-lora", "fedsa-lora", "fdlora", "fedavg-moe", "fedavg-moe-tr", "pfedmoe", "comigs-tr", "comigs",
    "comigs-1g1s", "comigs-2g", "comigs-1gxs", "fedem", "fedavg+", "fedit", "fedlora", "local-adaptor",
    "stacking",
)  # fmt: skip
RIVALS = ("ditto", "fedbn", "feddpa", "fedper", "fedprox", "rolora")
"""The same of plug-ins, whose servers are plain means."""
UNREPORTED = {"name": "floral", "clusters": 2, "report_mixture": False}
"""FLoRAL whose users keep their mixture to themselves."""
LOCAL = (*CENTRAL, "flexlora", "fedmerge", "fedmerge-fixed")
TRAINED = tuple(name for name in CENTRAL if name not in ("fedem", "local-adaptor"))
"""Those that a language model has."""


def private(federate: Any, method: Any = "fedavg", dtype: str = "float64", **privacy: Any) -> InProcess:
    """Four users, of whom nobody has sent anything."""
    training = {key: privacy.pop(key) for key in list(privacy) if key.startswith("training.")}
    settings = {"noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp", **privacy}
    changes = {f"privacy.{key}": value for key, value in settings.items()} | training
    return federate(method, users=USERS, base="random:llama?layers=1&dim=32", dtype=dtype, changes=changes)


def arrived(federation: InProcess, members: list[int], done: int = 1) -> Upload:
    """What these users send, packed and unpacked."""
    losses = {"loss": torch.ones(len(members))}
    parts = [unpack(pack(part)) for part in federation.clients.upload(members, done, losses).split()]
    return join_uploads([part for part in parts if isinstance(part, Upload)])


def changes_in(clients: Clients, upload: Upload) -> Tree:
    """Against what users have downloaded."""
    at = clients.numbers(upload.users)
    return {n: t.double() - clients.state.kept[REFERENCE + n][at].double() for n, t in upload.tensors.items()}


# -------------------------------------------------------------------- sensitivity


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.sampled(2)
def test_no_user_moves_the_sum_by_more_than_the_bound(federate: Any, method: str) -> None:
    """Every population of four, with and without each user, of what users have trained."""
    federation = private(federate, method, clip_norm=0.003)
    local_round(federation, USERS_AT, 0)
    neighbours(federation, arrived(federation, USERS_AT), 0.003)


USERS_AT = [0, 1, 2, 3]


def neighbours(federation: InProcess, upload: Upload, bound: float) -> None:
    """All pairs of neighbouring populations; at least one user is clipped, so the bound is met."""
    central, changes = federation.server.mechanisms[0], changes_in(federation.clients, upload)
    like = {name: t[0] for name, t in changes.items()}
    populations = {
        some: central.clipped_sum({n: t[list(some)] for n, t in changes.items()} if some else {}, like)
        for size in range(5)
        for some in itertools.combinations(USERS_AT, size)
    }
    moved = [
        distance(populations[some], populations[tuple(user for user in some if user != gone)])
        for some in populations
        for gone in some
    ]
    assert len(moved) == 32
    assert max(moved) <= bound * (1 + 1e-9)
    assert max(moved) > 0.99 * bound


def distance(one: Tree, other: Tree) -> float:
    return float(norms({name: (one[name] - other[name]).unsqueeze(0) for name in one}))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_uploaded_the_published_model_moves_by_no_more(federate: Any, seed: int) -> None:
    """Hostile and broken uploads, some users absent, any weights: at the server, not at the user's mercy."""
    draw = torch.Generator().manual_seed(seed)
    federation = private(federate, clip_norm=0.5, **({"training.uploads": "int8"} if seed % 2 else {}))
    present = [user for user in USERS_AT if user == 0 or torch.rand((), generator=draw) < 0.6]
    upload = arrived(federation, present)
    wild = 10.0 ** torch.randint(-6, 30, (len(present),), generator=draw)
    for name, t in upload.tensors.items():
        if t.is_floating_point():
            noise = torch.randn(t.shape, generator=draw) * wild.view(-1, *[1] * (t.dim() - 1))
            t.copy_(noise.abs() if name.endswith(".scale") else noise)
    if seed == 2:
        next(iter(upload.tensors.values()))[0].fill_(math.nan)
    published = [released(federation, of(upload, some)) for some in (range(len(present)), range(1, len(present)))]
    whole, without = (tree for tree, _ in published)
    assert distance(whole, without) <= 0.5 / 4 * (1 + 1e-6)


@pytest.mark.parametrize("method", [*CENTRAL, UNREPORTED], ids=str)
@pytest.mark.sampled(3)
def test_of_every_method_the_sum_is_bounded_whatever_is_uploaded(
    federate: Any, federate_nets: Any, make_user: Any, method: Any
) -> None:
    """Weights, absences and wild uploads drawn by chance; each user who is there is taken away once."""
    draw = torch.Generator().manual_seed([*CENTRAL, UNREPORTED].index(method))
    bound = 10.0 ** float(torch.randint(-4, 3, (), generator=draw))
    weighted = bool(torch.rand((), generator=draw) < 0.5)
    changes = {"privacy.noise_multiplier": 1.0, "privacy.clip_norm": bound, "privacy.accountant": "rdp"}
    changes |= {"training.participation": float(torch.rand((), generator=draw)) * 0.8 + 0.2}
    if method in TRAINED:
        users = [make_user(name, train=40 + 60 * at) for at, name in enumerate(USERS)]
        changes |= {"training.weighting": "tokens", "privacy.weight_cap": 100} if weighted else {}
        federation = federate(method, users=users, changes=changes)
    else:
        changes |= {"data.task.name": "linear"}
        changes |= {"privacy.weight_cap": 50} if weighted else {"training.weighting": "uniform"}
        federation = federate_nets(method, changes=changes)
    present = [user for user in USERS_AT if user == 2 or torch.rand((), generator=draw) < 0.7]
    local_round(federation, present, 0)
    upload = arrived(federation, present)
    for wild in (False, True):
        if wild:
            for t in upload.tensors.values():
                t[-1] = 10.0 ** float(torch.randint(0, 20, (), generator=draw)) * torch.randn(
                    t[0].shape, generator=draw
                )
        whole, moved = summed(federation, upload), list[float]()
        parts = [upload.of_user(at) for at in range(len(present))]
        for gone in range(len(present)):
            rest = [part for at, part in enumerate(parts) if at != gone]
            without = summed(federation, join_uploads(rest) if rest else of(upload, range(0)))
            moved.append(distance(whole, without))
        assert max(moved) <= bound * (1 + 1e-6)
        assert not wild or max(moved) > 0.99 * bound


def summed(federation: InProcess, upload: Upload) -> Tree:
    """What the server adds up for an upload, before its noise."""
    central, seen = federation.server.mechanisms[0], list[Tree]()
    kept, sums = {name: t.clone() for name, t in federation.server.kept.items()}, central.clipped_sum
    central.clipped_sum = lambda *told: seen.append(sums(*told)) or seen[-1]  # type: ignore[method-assign]
    try:
        federation.server.aggregate(upload)
    finally:
        del central.clipped_sum
        federation.server.kept = kept
    return seen[0]


def of(upload: Upload, some: range) -> Upload:
    parts = [upload.of_user(at) for at in some]
    empty = Upload(round=upload.round, users=(), tensors={}, ranks=upload.ranks[:0])
    return join_uploads(parts) if parts else empty


def released(federation: InProcess, upload: Upload) -> tuple[Tree, Tree]:
    """How the model moves for an upload, without its noise; and the noise, divided as the sum is."""
    server = federation.server
    central, kept = server.mechanisms[0], {name: t.clone() for name, t in server.kept.items()}
    seen: list[Tree] = []
    sums = central.clipped_sum
    central.clipped_sum = lambda *told: seen.append(sums(*told)) or seen[-1]  # type: ignore[method-assign]
    try:
        server.aggregate(upload)
    finally:
        del central.clipped_sum
    moved = {n.removeprefix("model."): server.kept[n].double() - t.double() for n, t in kept.items()}
    added = add_noise(
        seen[0], central.privacy.multiplier * central.bound, central.key, upload.round - 1, "central noise"
    )
    noise = {n: (added[n] - t) / central.expected_participants(0) for n, t in seen[0].items()}
    server.kept = kept
    return {name: t - noise[name] for name, t in moved.items()}, noise


def test_weights_never_make_an_upload_longer_than_the_bound(federate: Any, make_user: Any) -> None:
    sizes = (40, 60, 120, 400)
    users = [make_user(name, train=size) for name, size in zip(USERS, sizes, strict=True)]
    changes = {"privacy.noise_multiplier": 1.0, "privacy.clip_norm": 1e-4, "privacy.weight_cap": 100}
    weighted = {"training.weighting": "tokens", "privacy.accountant": "rdp"}
    federation = federate("fedavg", users=users, changes=changes | weighted)
    local_round(federation, USERS_AT, 0)
    upload = arrived(federation, USERS_AT)
    lengths = norms(changes_in(federation.clients, upload))
    assert lengths.tolist() == pytest.approx([4e-5, 6e-5, 1e-4, 1e-4], rel=1e-6)
    assert upload.reports == {}  # neither amounts of data nor losses
    neighbours(federation, upload, 1e-4)


# -------------------------------------------------------------------- noise


@pytest.mark.parametrize("seen", ["central", "local"])
def test_the_noise_on_what_arrives_is_as_large_as_it_says(federate: Any, seen: str) -> None:
    federation = private(federate, "comigs-1g1s", mechanism=seen, clip_norm=0.01, noise_multiplier=3.0)
    before = {name: t.clone() for name, t in federation.server.kept.items()}
    local_round(federation, USERS_AT, 0)
    plain = private(federate, "comigs-1g1s", clip_norm=0.01, noise_multiplier=3.0)
    local_round(plain, USERS_AT, 0)
    clean = changes_in(plain.clients, arrived(plain, USERS_AT))
    upload = arrived(federation, USERS_AT)
    if seen == "local":
        noisy = changes_in(federation.clients, upload)
        found = [torch.cat([(t[i] - clean[n][i]).flatten() for n, t in noisy.items()]) for i in USERS_AT]
        deviation = 0.03
    else:
        federation.server.aggregate(upload)
        kept = federation.server.kept
        found = [
            torch.cat([(kept[f"model.{n}"] - before[f"model.{n}"] - t.mean(0)).flatten() for n, t in clean.items()])
        ]
        deviation = 0.03 / 4
    for noise in found:
        assert kstest((noise / deviation).numpy(), "norm").pvalue > 0.001
    if len(found) > 1:  # the same stream never serves two users
        assert float(torch.corrcoef(torch.stack(found)).fill_diagonal_(0).abs().max()) < 0.1


def test_local_tensors_get_no_noise(federate: Any) -> None:
    """Specialists and routers are what they would have been, to the last bit."""
    rows = []
    for settings in ({}, {"mechanism": "local"}, {"noise_multiplier": 50.0}):
        federation = private(federate, "comigs-1g1s", **settings)
        local_round(federation, USERS_AT, 0)
        federation.upload(USERS_AT, 1, dict.fromkeys(USERS_AT, 0.0))
        federation.aggregate()
        federation.download(USERS_AT)
        clients = federation.clients
        local = ~clients.model.layout.mask(clients.method.shared)
        rows.append(clients.state.rows[:, local])
        assert float((clients.state.rows[:, ~local][0] - clients.state.rows[:, ~local][1]).abs().max()) == 0
    assert all(torch.equal(rows[0], other) for other in rows[1:])


def test_users_of_a_smaller_rank_send_no_noise_in_ranks_that_they_have_not(federate: Any) -> None:
    ranks = {"training.local_steps": 1}
    for mechanism in ("central", "local"):
        changes = {"adapters.rank": [2, 4, 1, 3], "privacy.mechanism": mechanism, "privacy.noise_multiplier": 1.0}
        federation = federate("fedavg", users=USERS, changes=changes | ranks | {"privacy.accountant": "rdp"})
        local_round(federation, USERS_AT, 0)
        upload = federation.clients.upload(USERS_AT, 1, {})
        for name, t in upload.tensors.items():
            if name.endswith((".a", ".b")):
                for i, rank in enumerate((2, 4, 1, 3)):
                    assert not bool(t[i][..., rank:, :].any())
                    assert bool(t[i][..., :rank, :].any())


# -------------------------------------------------------------------- who takes part


def test_each_user_is_drawn_with_its_own_chance_and_sometimes_nobody_is(federate: Any) -> None:
    central = private(federate, **{"training.participation": 0.3}).server.mechanisms[0]
    drawn = [central.draw_participants(number) for number in range(2000)]
    for user in USERS_AT:
        assert abs(sum(user in members for members in drawn) / 2000 - 0.3) < 0.05
    assert 0.15 < sum(not members for members in drawn) / 2000 < 0.35  # 0.7 ** 4
    both = sum({0, 1} <= set(members) for members in drawn) / 2000
    assert abs(both - 0.09) < 0.03


def test_a_fixed_number_is_drawn_evenly(federate: Any) -> None:
    central = private(federate, sampling="fixed", **{"training.participation": 0.5}).server.mechanisms[0]
    drawn = [tuple(central.draw_participants(number)) for number in range(1200)]
    assert {len(members) for members in drawn} == {2}
    assert all(abs(drawn.count(pair) / 1200 - 1 / 6) < 0.05 for pair in itertools.combinations(USERS_AT, 2))


def test_nobody_without_the_key_knows_who_is_drawn_or_what_is_added(federate: Any) -> None:
    found = [
        private(federate, noise="secret", **{"training.participation": 0.5}).server.mechanisms[0] for _ in range(2)
    ]
    assert [found[0].draw_participants(number) for number in range(9)] != [
        found[1].draw_participants(number) for number in range(9)
    ]


def test_a_round_without_anybody_publishes_noise_alone_and_costs_the_same(federate: Any) -> None:
    federation = private(federate, **{"training.participation": 0.3})
    before = {name: t.clone() for name, t in federation.server.kept.items()}
    central = federation.server.mechanisms[0]
    federation.upload([], 1, {})
    federation.aggregate()
    moved = torch.cat([(federation.server.kept[name] - t).flatten() for name, t in before.items()])
    assert kstest((moved * 1.2).numpy(), "norm").pvalue > 0.001
    assert central.account.counts.tolist() == [1] * 4


# -------------------------------------------------------------------- the bound


def test_an_adaptive_bound_finds_the_quantile(federate: Any) -> None:
    """Andrew et al. 2021, without noise worth mentioning: users' norms are 1, 2, 3 and 4."""
    federation = private(federate, clip_norm="adaptive", noise_multiplier=1e-6, first_clip_norm=0.1, clip_rate=0.2)
    central = federation.server.mechanisms[0]
    central._count_noise = lambda users: 1e-3  # type: ignore[method-assign]
    for number in range(60):
        within = torch.tensor([int(length <= central.bound) for length in (1, 2, 3, 4)])
        central._adapt_clip_norm(within, 4.0, number)
    assert 1.5 < central.bound < 3.5


@pytest.mark.parametrize("median", [0.05, 0.3, 2.0, 20.0])
def test_a_start_and_a_rate_of_one_find_a_median_in_few_rounds(federate: Any, median: float) -> None:
    """Forty users with norms around it, and noise, in eight rounds."""
    begun = {"first_clip_norm": 1.0, "clip_rate": 1.0}
    central = private(federate, clip_norm="adaptive", noise_multiplier=1.0, **begun).server.mechanisms[0]
    draw, ends = torch.Generator().manual_seed(0), []
    for number in range(16):
        lengths = median * (0.2 * torch.randn(40, generator=draw)).exp()
        central._adapt_clip_norm((lengths <= central.bound).long(), 40.0, number)
        ends.append(central.bound)
    assert all(0.6 * median < bound < 1.6 * median for bound in ends[7:])


def test_no_noise_makes_a_longer_step_than_the_rate(federate: Any) -> None:
    settings = {"clip_rate": 1.0, "clip_quantile": 0.3}
    central = private(federate, clip_norm="adaptive", noise_multiplier=1e4, **settings).server.mechanisms[0]
    steps = []
    for number in range(50):
        before = central.bound
        central._adapt_clip_norm(torch.tensor([1, 0]), 4.0, number)
        steps.append(math.log(central.bound / before))
    assert min(steps) == pytest.approx(-0.7)
    assert max(steps) == pytest.approx(0.3)


def test_its_noise_is_shared_between_the_model_and_the_count(federate: Any) -> None:
    central = private(federate, clip_norm="adaptive", noise_multiplier=0.8).server.mechanisms[0]
    for users in (4.0, 400.0):
        model, count = central._multiplier_of_sum(users), 2 * central._count_deviation(users)
        assert model**-2 + count**-2 == pytest.approx(0.8**-2)  # two Gaussians are one


def test_users_follow_the_servers_bound_and_report_whether_they_were_within(federate: Any) -> None:
    federation = private(federate, clip_norm="adaptive", first_clip_norm=1e-9)
    for done in (1, 2):
        local_round(federation, USERS_AT, done - 1)
        upload = arrived(federation, USERS_AT, done)
        assert upload.reports.keys() == {"within"}
        assert upload.reports["within"].tolist() == [0] * 4
        central = federation.server.mechanisms[0]
        bound = central.bound
        assert float(norms(changes_in(federation.clients, upload)).max()) == pytest.approx(bound, rel=1e-4)
        federation.upload(USERS_AT, done, dict.fromkeys(USERS_AT, 0.0))
        federation.aggregate()
        assert central.bound != bound


# -------------------------------------------------------------------- what applies


def reason(method: str, mechanism: str) -> str:
    clustered = {"clusters": 2} if method in ("floral", "ensemble") else {}
    try:
        settings = recipe_with(privacy=PrivacySection(mechanism=mechanism, noise_multiplier=1.0))
        check_supported(make(method, **clustered), settings)
    except RecipeError as error:
        return str(error)
    return ""


UNBOUNDED = {
    "centralized", "pcl", "hetlora", "floral", "floral-optimal", "floral-mfl", "ensemble", "ensemble-optimal", "mfl",
    "fml", "ifca", "fedalt", "flora-stacking", "scaffold", "fed-sb",
}  # fmt: skip
"""Methods of which no mechanism of updates covers all that leaves a user."""
LOCAL_ALONE = {
    "flexlora", "fedmerge", "fedmerge-fixed", "fedamole", "fedex-lora", "momentum-clustering", "sdflora",
    "fedlease", "fedtreelora",
}  # fmt: skip
"""Methods whose servers publish no mean."""


def test_every_method_says_what_applies_to_it() -> None:
    """Known methods stay as they are; that a new one keeps what its server says is a law's matter."""
    accepted = {
        mechanism: {name for name in REGISTRY if not reason(name, mechanism)} for mechanism in ("central", "local")
    }
    nothing = {name for name in REGISTRY if not make(name).shared and not make(name).placement.pooled}
    assert {*CENTRAL, *RIVALS} | nothing <= accepted["central"] <= accepted["local"]
    assert accepted["local"] >= LOCAL_ALONE
    assert not accepted["central"] & (UNBOUNDED | LOCAL_ALONE)
    assert not accepted["local"] & UNBOUNDED


@pytest.mark.parametrize(
    ("method", "mechanism", "why"),
    [
        ("centralized", "local", "method centralized pools "),
        ("ifca", "local", "method ifca: .*report choice "),
        ("floral", "central", "method floral: .*report mixture "),
        ("pcl", "local", "method pcl: .*downloads"),
        ("hetlora", "local", "prune: false"),
        ("fedalt", "local", "method fedalt: .*own tensors"),
        ("scaffold", "central", "method scaffold: .*report rates "),
        ("fedmerge", "central", r"\(Merge\).*mechanism: local"),
        ("flexlora", "central", r"\(Redistribute\).*mechanism: local"),
    ],
)
def test_what_does_not_apply_is_refused_with_the_reason(method: str, mechanism: str, why: str) -> None:
    assert re.search(why, reason(method, mechanism))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"training.weighting": "tokens"}, r"privacy\.weight_cap: missing"),
        ({"privacy.weight_cap": 5}, r"privacy\.weight_cap: .*uniform"),
        ({"privacy.mechanism": "local", "privacy.clip_norm": "adaptive"}, r"privacy\.clip_norm: adaptive .*local"),
        ({"evaluation.select": "best"}, r"privacy: evaluation\.select: best"),
        ({"privacy.delta": 0.3}, r"privacy\.delta: got 0\.3 for 4 users"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(federate: Any, changes: dict[str, Any], why: str) -> None:
    from comingle.config import parse_recipe
    from comingle.training.kinds.base import check_recipe

    base = {"data": {"users": {"a": "x"}}, "method": "fedavg", "privacy": {"noise_multiplier": 1.0}}
    with pytest.raises(RecipeError, match=why):  # noqa: PT012
        check_recipe(parse_recipe(base).with_changes(changes))
        private(federate, **{key.removeprefix("privacy."): value for key, value in changes.items()})


def test_statistics_of_batch_norm_are_refused(federate_nets: Any) -> None:
    changes = {"privacy.noise_multiplier": 1.0, "privacy.weight_cap": 40}
    with pytest.raises(RecipeError, match="running statistics of batch norm"):
        federate_nets("fedavg", changes=changes)
