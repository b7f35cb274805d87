"""Start a run from the users' models at the end of another run (``continue_from``).

Users of both runs keep their tensors, and the server keeps its state. New users have initial local tensors and download
the shared ones. Users who are not in the new recipe are dropped.

With ``evaluation.model: local`` a run does not exchange the tensors of its last round. Users then keep their
own tensors, and their next upload includes that round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from comingle.config import Recipe, load_recipe
from comingle.config.settings import ACCOUNT, MEMORY, TrainingSection
from comingle.data.text.streams import draw_windows
from comingle.privacy.accounting import read_account
from comingle.privacy.base import CLIP_NORM, REFERENCE
from comingle.privacy.mechanisms import BOUND, DifferentialPrivacy
from comingle.training.backends.local import InProcess
from comingle.training.batch_sources import AnySplit, AnyUser
from comingle.training.checkpoints import Progress, digest_of_checkpoint, read_progress, read_state, rows_of_names
from comingle.training.client import Clients, finetuned
from comingle.training.evaluation import measured
from comingle.training.kinds.base import RunData
from comingle.training.server import VERSION, ServerHalf
from comingle.training.state import KEPT_PREFIX, STEP_STATE
from comingle.utils.errors import ComingleError, RecipeError, RunError, list_names
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import Inputs, read_inputs, recorded_date
from comingle.utils.records import JsonObject, is_server, logger, read_events, read_metrics
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree

WHERE = "continue_from.run"
"""Key with which messages about the earlier run begin."""

MAX_EARLIER_RUNS = 12
"""Number of earlier runs whose data is replayed and scored, so that a run takes no longer after a hundred others."""

_ALLOWED = "allowed: the ranks, experts and method settings of the earlier run (continue_from)"
"""End of errors of tensors that do not fit."""


@dataclass(frozen=True, kw_only=True)
class EarlierData:
    """Data of an earlier run, as far as users of this run had other data then than now."""

    run: Path
    """Folder of the earlier run."""
    train_users: Mapping[str, AnyUser]
    """Users, by name, whose training data differs from that of this run and of later runs."""
    train_digests: Mapping[str, str]
    """Digests of the training data of these users."""
    test_splits: Mapping[str, AnySplit]
    """Test data by user, where it differs from that of this run and of later runs."""


def read_earlier_data(
    recipe: Recipe, run_data: RunData, read: Callable[[Recipe, str], RunData]
) -> Sequence[EarlierData]:
    """Read the data of the runs that a run continues, for replay and to measure forgetting.

    Data that cannot be read, or has changed since its run, is left out; with ``data.replay`` a warning names it. Splits
    that the new run or a later one has, too, are left out without a warning.

    Args:
        recipe: The recipe of the new run, with ``continue_from``.
        run_data: Base and data of the new run.
        read: Reads the data of a recipe, given the date that chat templates write, with the base of the new run.

    Returns:
        The data of each of the latest :data:`MAX_EARLIER_RUNS` runs, the latest first.
    """
    assert recipe.continue_from is not None
    log = logger.warning if recipe.data.replay else logger.info
    # Digests of the splits that the new run or a later run has.
    known_digests: dict[tuple[str, str], set[str]] = {}
    for name, digests in run_data.digests.items():
        for split, digest in digests.items():
            known_digests[name, split] = {digest}
    collected: list[EarlierData] = []
    run = Path(recipe.continue_from.run)
    earlier_runs = [run, *(Path(ancestor["run"]) for ancestor in reversed(ancestors_of(run)))]
    for folder in earlier_runs[:MAX_EARLIER_RUNS]:
        try:
            recorded_users = read_inputs(folder).users
            data = read(load_recipe(folder), recorded_date(folder))
        except ComingleError as error:
            log("continue_from: the data of %s is not there (%s)", folder, error)
            continue
        # Of the users who are in both runs: data that neither the new run nor a later one has.
        train_users: dict[str, AnyUser] = {}
        test_splits: dict[str, AnySplit] = {}
        changed: list[str] = []
        for user in data.users:
            if user.name not in run_data.digests or user.name not in recorded_users:
                continue
            digests = data.digests[user.name]
            if digests != recorded_users[user.name].digests:
                changed.append(user.name)
                continue
            if digests["train"] not in known_digests[user.name, "train"]:
                train_users[user.name] = user
            if digests["test"] not in known_digests[user.name, "test"]:
                test_splits[user.name] = user.test
            for split, digest in digests.items():
                known_digests[user.name, split].add(digest)
        if changed:
            log("continue_from: data has changed since %s, so it is not used again: %s", folder, list_names(changed))
        train_digests = {name: data.digests[name]["train"] for name in train_users}
        collected.append(
            EarlierData(run=folder, train_users=train_users, train_digests=train_digests, test_splits=test_splits)
        )
    return collected


def add_replay(recipe: Recipe, run_data: RunData, earlier: Sequence[EarlierData]) -> tuple[RunData, dict[str, int]]:
    """Add data of earlier runs to users' training data, so that it is the fraction ``data.replay`` of the result.

    Users whose training data is the same as before are unchanged. With too little earlier data the fraction is smaller.

    Args:
        recipe: The recipe of the new run.
        run_data: Base and data of the new run.
        earlier: Data of earlier runs, from :func:`read_earlier_data`.

    Returns:
        The data with which the run trains, and the number of added tokens, conversations or samples by user.
    """
    kind, share = run_data.kind, recipe.data.replay
    added: dict[str, int] = {}
    users = list(run_data.users) if share else []
    for number in run_data.numbers if share else ():  # users whose data is on this machine
        user = users[number]
        earlier_users = [data.train_users[user.name] for data in earlier if user.name in data.train_users]
        if not earlier_users:
            continue
        pooled = kind.pooled(earlier_users)
        drawn = draw_examples(
            pooled.train,
            round(len(user.train) * share / (1 - share)),
            width=recipe.training.context + 1,
            generator=generator(recipe.data_seed, user.name, "replay"),
        )
        users[number] = replace(user, train=kind.pooled([user, replace(pooled, train=drawn)]).train)
        added[user.name] = len(drawn)
    return (run_data.with_users(users) if added else run_data), added


def replayed_digests(earlier: Sequence[EarlierData], names: Iterable[str]) -> dict[str, str]:
    """Return a digest of the earlier data from which examples are replayed, by user.

    Args:
        earlier: Data of earlier runs, from :func:`read_earlier_data`.
        names: Users with replayed data.
    """
    digests: dict[str, str] = {}
    for name in names:
        sources = [data.train_digests[name] for data in earlier if name in data.train_digests]
        digests[name] = hashlib.sha256(" ".join(sources).encode()).hexdigest()
    return digests


def draw_examples(split: AnySplit, count: int, *, width: int, generator: torch.Generator) -> AnySplit:
    """Return at most ``count`` random examples of training data, in their order, to train on them again.

    Args:
        split: Token stream, conversations or samples.
        count: Number of tokens, conversations or samples to draw.
        width: Tokens that a stream is drawn by; conversations and samples are drawn one by one.
        generator: Source of randomness.
    """
    if isinstance(split, Tensor):  # a token stream
        return draw_windows(split, count, width=width, generator=generator)
    if len(split) <= count:
        return split
    return split.select(torch.randperm(len(split), generator=generator)[:count].sort().values)


def check_replay(folder: Path, replayed: Mapping[str, int], digests: Mapping[str, str]) -> None:
    """Check that a resumed run replays the same earlier data as when it was started.

    Args:
        folder: The run folder.
        replayed: Number of tokens, conversations or samples by user, from :func:`add_replay`.
        digests: Digests of the earlier data, from :func:`replayed_digests`.

    Raises:
        RunError: The data of an earlier run was there when the run was started, and is not now, or the reverse.
    """
    for event in read_events(folder):
        if event["event"] != "start":
            continue
        continues = event.get("continues", {})
        recorded = continues.get("replayed", {})
        recorded_digests = continues.get("replayed_digests", digests)  # an earlier version has not recorded them
        if recorded != replayed or recorded_digests != digests:
            raise RunError(
                f"{folder}: earlier data that the run replays has changed since it was started: now {dict(replayed)}, "
                f"then {recorded}; restore the files of the earlier runs, or start again with --force"
            )


def forgetting(federation: InProcess, earlier: Sequence[EarlierData]) -> list[JsonObject]:
    """Score the final models on the test data of earlier runs.

    With several processes, each one calls this function and the first one gets the scores of all users.

    Args:
        federation: The federation after its last round.
        earlier: Data of earlier runs, from :func:`read_earlier_data`.

    Returns:
        For each earlier run whose test data was scored, its folder (``run``), and by user the test measures ``before``,
        at the end of that run, and ``after``, now.
    """
    entries: list[JsonObject] = []
    for data in earlier:
        after = federation.merge_users(partial(_score_test_splits, federation.clients, data.test_splits))
        try:
            recorded = read_metrics(data.run)["users"]
        except RunError as error:  # a run that was interrupted has no metrics
            logger.warning("continue_from: the earlier test data of %s is not scored (%s)", data.run, error)
            continue
        users = {
            name: {"before": {measure: recorded[name][measure] for measure in scores}, "after": scores}
            for name, scores in after.items()
            if name in recorded
        }
        if users:
            entries.append({"run": str(data.run.resolve()), "users": users})
    return entries


def _score_test_splits(clients: Clients, test_splits: Mapping[str, AnySplit]) -> JsonObject:
    """Return the test measures of the evaluated users of this process on other test data, by user.

    Args:
        clients: The users of this process with their final models.
        test_splits: Test data by user; users without any are left out.
    """
    rows_by_name = {
        user.name: row
        for user, row in zip(clients.scored_users, clients.scored_rows, strict=True)
        if user.name in test_splits
    }
    if not rows_by_name:
        return {}
    splits = [test_splits[name] for name in rows_by_name]
    with finetuned(clients):  # for methods that fine-tune before they are scored
        scores = clients.scorer.examine(clients.models, splits, list(rows_by_name.values()))
    return {name: measured(score) for name, score in zip(rows_by_name, scores, strict=True)}


def check_earlier_run(recipe: Recipe) -> None:
    """Check that the run in ``continue_from``, if there is one, can be continued; reads neither base nor data.

    Raises:
        RecipeError: The folder has no checkpoint of a run in one process, or the run has another method.
    """
    if recipe.continue_from is None:
        return
    run = Path(recipe.continue_from.run)
    newest_checkpoint(run)  # raises an error if there is none
    earlier = load_recipe(run)
    check_equal({"method": (recipe.method.name, earlier.method.name)}, run)
    if isinstance(recipe.adapters.rank, int) and isinstance(earlier.adapters.rank, int):
        check_equal({"adapters.rank": (recipe.adapters.rank, earlier.adapters.rank)}, run)
    check_private_continuation(recipe, earlier, run)


def keeps_earlier_best(recipe: Recipe) -> bool:
    """Return whether the state at the end of the earlier run is a candidate for the best one of a run, as its round 0.

    All rounds are compared by the validation data of the new run, which the earlier one may not have had.
    """
    return recipe.continue_from is not None and recipe.evaluation.select == "best"


def start_from_run(federation: InProcess, recipe: Recipe, inputs: Inputs) -> JsonObject:
    """Start a run from the final models of an earlier run (``continue_from``), before its first round.

    Users who are in both runs, and the server, get the tensors of the earlier run's last checkpoint; new users keep
    their initial ones. Optimiser moments and step counts are copied only with ``continue_from.moments``.

    Args:
        federation: The federation, changed in place. In a run of several processes, the shard of this process.
        recipe: The recipe of the new run.
        inputs: Record of the base and the data that the new run reads.

    Returns:
        Changes since the earlier run, for the start event: its folder ``run``, the digest of its
        ``checkpoint``, its number of ``rounds``, and the names of the users who are in both runs (``kept``), in both
        with changed data (``changed``), only in this one (``new``) and only in the earlier one (``dropped``).
        ``ancestors`` has folder, checkpoint and rounds of the runs that the earlier one continued, oldest first.

    Raises:
        RecipeError: The recipe cannot continue the run, because it has another method, for example.
        RunError: The run has no checkpoint, or it is damaged.
    """
    section = recipe.continue_from
    assert section is not None
    run, clients = Path(section.run), federation.clients
    checkpoint, progress = newest_checkpoint(run)
    earlier_inputs, earlier_recipe = read_inputs(run), load_recipe(run)
    _check_same_model(run, recipe, earlier_recipe, inputs, earlier_inputs)
    check_same_ranks(recipe, clients.population_names, earlier_recipe, list(earlier_inputs.users), run)
    check_private_continuation(recipe, earlier_recipe, run)
    if section.moments:
        check_constant_rates(recipe.training)

    users_state, server_state = read_state(checkpoint, progress, clients.model.layout)
    continue_account(federation.server, run, server_state)
    earlier_names = progress.trainers
    copy_users_state(clients, users_state, earlier_names, checkpoint, moments=section.moments)
    # Versions count from 0 again: users without the newest shared tensors have -1 and download them.
    was_newest = users_state["versions"] == int(server_state[VERSION])
    new_versions = clients.state.versions.fill_(-1)
    versions = was_newest.long() - 1  # 0 for users with the newest shared tensors, else -1
    if lacks_references(clients, users_state):
        versions.fill_(-1)
    copy_rows(versions, new_versions, earlier_names, clients.names, "versions")
    restore_server(federation.server, server_state, earlier_names, checkpoint)

    entry = continuation_entry(checkpoint, progress, clients.population_names)
    entry["changed"] = [name for name in entry["kept"] if _has_changed_data(name, inputs, earlier_inputs)]
    return entry


def copy_users_state(
    clients: Clients,
    users_state: Mapping[str, Tensor],
    earlier_names: Sequence[str],
    checkpoint: Path,
    *,
    moments: bool,
) -> None:
    """Copy the tensors of users at the end of an earlier run, except for the versions of shared tensors.

    Args:
        clients: The users of the new run, changed in place; users who are new keep their initial tensors.
        users_state: The earlier tensors by name, with rows in the order of ``earlier_names``.
        earlier_names: Names of the earlier run's users.
        checkpoint: Checkpoint with these tensors, for the error.
        moments: Whether the optimisers' moments and step counts are copied too.

    Raises:
        RecipeError: A tensor has another shape, or is not kept with the new recipe.
    """
    new_tensors = clients.state.tensors()
    not_copied = {"versions"} if moments else {"versions", *STEP_STATE}
    privacy = clients.plan.privacy
    if privacy is None or not privacy.adaptive:  # the clip norm of the new recipe applies
        not_copied.add(KEPT_PREFIX + CLIP_NORM)
    for name, old_tensor in users_state.items():
        where = f"{checkpoint}: tensor {name!r}"
        if name in not_copied:
            continue
        if name not in new_tensors:  # other settings of the method keep other tensors
            raise RecipeError(f"{where} is not kept with this recipe; {_ALLOWED}")
        copy_rows(old_tensor, new_tensors[name], earlier_names, clients.names, where)
    clients.update_masks()  # LoRA ranks, which methods may change in training, are in the state


def lacks_references(clients: Clients, users_state: Mapping[str, Tensor]) -> bool:
    """Return whether users measure their changes from a download that the earlier run has not stored.

    Such users need a download before their first upload.

    Args:
        clients: The users of the new run.
        users_state: Tensors of users at the end of the earlier run.
    """
    names = [name for name in clients.state.tensors() if name.startswith(KEPT_PREFIX + REFERENCE)]
    return any(name not in users_state for name in names)


def continuation_entry(checkpoint: Path, progress: Progress, names: Sequence[str]) -> JsonObject:
    """Return the entry "continues" of a run's start event; callers may add users with changed data.

    Args:
        checkpoint: Checkpoint of the earlier run.
        progress: Progress of the training at that checkpoint.
        names: Names of the new run's users.
    """
    run = checkpoint.parent.parent
    old_users, new_users = set(progress.trainers), set(names)
    return {
        "run": str(run.resolve()),
        "checkpoint": digest_of_checkpoint(checkpoint),
        "rounds": progress.round,
        "ancestors": ancestors_of(run),
        "kept": [name for name in names if name in old_users],
        "changed": [],
        "new": [name for name in names if name not in old_users],
        "dropped": [name for name in progress.trainers if name not in new_users],
    }


def newest_checkpoint(run: Path, *, of_server: bool = False) -> tuple[Path, Progress]:
    """Return the newest checkpoint of a run and its progress.

    Args:
        run: The run folder.
        of_server: Whether the run must be that of a federation's server, instead of one in this process.

    Raises:
        RecipeError: The folder is not a run that can be continued.
    """
    if is_server(run) != of_server:
        got = "a federation's server" if is_server(run) else "no federation's server"
        command = "comingle server` or `comingle federate" if of_server else "comingle run"
        raise RecipeError(f"{WHERE}: got {run}, {got}; allowed: a folder of `{command}`")
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise RecipeError(f"{WHERE}: got {run}, which has no checkpoint; allowed: the folder of a run that has trained")
    progress = read_progress(checkpoints[-1])
    if progress.population:
        raise RecipeError(f"{WHERE}: got {run}, a run with runtime.store: disk; allowed: a run with users in memory")
    return checkpoints[-1], progress


def _check_same_model(run: Path, recipe: Recipe, earlier: Recipe, inputs: Inputs, earlier_inputs: Inputs) -> None:
    """Check that a new run can start from an earlier run's models: that method, kind of data and base are the same.

    Args:
        run: Folder of the earlier run.
        recipe: Recipe of the new run.
        earlier: Recipe of the earlier run.
        inputs: Base and users of the new run.
        earlier_inputs: Base and users of the earlier run.

    Raises:
        RecipeError: One of them differs, or the new run keeps its users on disk, which is not supported.
    """
    if recipe.runtime.store != MEMORY:
        raise RecipeError(f"continue_from: got runtime.store: {recipe.runtime.store}; allowed: {MEMORY}")
    compared = {
        "method": (recipe.method.name, earlier.method.name),
        "data.kind": (inputs.kind, earlier_inputs.kind),
        "base": (inputs.base, earlier_inputs.base),
    }
    check_equal(compared, run)


def check_same_ranks(
    recipe: Recipe, names: Sequence[str], earlier: Recipe, earlier_names: Sequence[str], run: Path
) -> None:
    """Check that users of both runs have the same LoRA rank in both recipes.

    Args:
        recipe: Recipe of the new run.
        names: Names of its users.
        earlier: Recipe of the earlier run.
        earlier_names: Names of its users.
        run: Folder of the earlier run.

    Raises:
        RecipeError: The rank of a user differs.
    """
    ranks, earlier_ranks = _ranks_of(recipe, names), _ranks_of(earlier, earlier_names)
    for name in names:
        if name in earlier_ranks:
            check_equal({"adapters.rank": (ranks[name], earlier_ranks[name])}, run)


def _ranks_of(recipe: Recipe, names: Sequence[str]) -> dict[str, object]:
    """Return the LoRA rank of each user in a recipe, by name."""
    ranks = recipe.for_users(names).adapters.rank
    if isinstance(ranks, list):
        return dict(zip(names, ranks, strict=True))
    return dict.fromkeys(names, ranks)


def check_equal(compared: Mapping[str, tuple[object, object]], run: Path) -> None:
    """Raise a :class:`RecipeError` for the first key whose value differs between the new and the earlier run.

    Args:
        compared: Value of the new run and value of the earlier run, by key.
        run: Folder of the earlier run.
    """
    for key, (value, earlier_value) in compared.items():
        if value != earlier_value:
            raise RecipeError(f"{key}: got {value!r}; allowed: as in {run}, {earlier_value!r} (continue_from)")


def check_private_continuation(recipe: Recipe, earlier: Recipe, run: Path) -> None:
    """Check that the privacy account of an earlier run can be continued: its budget is that of all runs together.

    Args:
        recipe: Recipe of the new run.
        earlier: Recipe of the earlier run.
        run: Folder of the earlier run.

    Raises:
        RecipeError: Only one of the runs has noise, or settings of the new run do not allow an account of both.
    """
    privacy = recipe.privacy
    is_private = privacy is not None and privacy.noisy
    was_private = earlier.privacy is not None and earlier.privacy.noisy
    if is_private != was_private:
        got = privacy.mechanism if privacy is not None else "none"
        allowed = "one with noise, as" if was_private else "none, as users took part without noise"
        raise RecipeError(f"privacy.mechanism: got {got}; allowed: {allowed} in {run} (continue_from)")
    if privacy is None or not is_private:
        return
    check_open_ended(recipe)
    if privacy.noise == "reproducible" and recipe.seed in _reproducible_seeds(run):
        raise RecipeError(
            f"privacy.noise: got reproducible with the seed {recipe.seed} of an earlier run, so both would draw the "
            "same users; allowed with continue_from: another seed, or secret"
        )


def check_open_ended(recipe: Recipe, where: str = "") -> None:
    """Check that a private run may be one of several runs that continue each other, whose privacy losses add up.

    Args:
        recipe: Settings of one of the runs.
        where: Beginning of the error, such as the path of a file.

    Raises:
        RecipeError: The noise is to be computed for one run, or an example may be in a user's data more than once.
    """
    privacy = recipe.privacy
    if privacy is None or not privacy.noisy:
        return
    if privacy.noise_multiplier is None:
        raise RecipeError(
            f"{where}privacy.noise_multiplier: got null; allowed for runs that follow one another: a number, as "
            "epsilon is the budget of all of them (`comingle cost` shows the epsilon of a multiplier)"
        )
    if privacy.protects == "example" and recipe.data.replay:
        raise RecipeError(
            f"{where}data.replay: got {recipe.data.replay:g} with privacy.mechanism {privacy.mechanism}; allowed: 0, "
            "as an example could be in the training data more than once"
        )


def check_endless(recipe: Recipe, where: str = "") -> None:
    """Check settings of differential privacy for runs that follow one another without an end.

    Args:
        recipe: The recipe of all runs.
        where: Beginning of the error, such as the path of a file.

    Raises:
        RecipeError: See :func:`check_open_ended`; or participants are drawn in a way that not all runs can have.
    """
    check_open_ended(recipe, where)
    privacy, participation = recipe.privacy, recipe.training.participation
    is_fixed = privacy is not None and privacy.noise_at == "server" and privacy.sampling == "fixed"
    if is_fixed and isinstance(participation, float) and participation < 1:
        raise RecipeError(
            f"{where}privacy.sampling: got fixed; allowed for runs that follow one another: poisson, as a run may "
            "train all users with new data"
        )


def users_without_budget(run: Path, recipe: Recipe) -> frozenset[str]:
    """Return the users whose privacy budget allowed no further round at the end of a run.

    Args:
        run: Folder of the run.
        recipe: Recipe of the next run; with other settings of privacy the budget is not known, and none is returned.
    """
    if recipe.privacy is None or not recipe.privacy.noisy or load_recipe(run).privacy != recipe.privacy:
        return frozenset()
    record = read_account(run)
    return frozenset() if record is None else record.without_budget


def _reproducible_seeds(run: Path) -> set[int]:
    """Return the seeds of those runs with reproducible noise, among a run and those that it continues."""
    seeds: set[int] = set()
    for folder in (run, *(Path(ancestor["run"]) for ancestor in ancestors_of(run))):
        if (folder / "recipe.yaml").exists():
            recipe = load_recipe(folder)
            if recipe.privacy is not None and recipe.privacy.noise == "reproducible":
                seeds.add(recipe.seed)
    return seeds


def continue_account(server: ServerHalf, run: Path, state: Tree) -> None:
    """Continue the privacy account of an earlier run, and its adaptive clip norm; do nothing without noise.

    Args:
        server: The server of the new run, changed in place.
        run: Folder of the earlier run.
        state: State of the earlier run's server.

    Raises:
        RecipeError: The two runs have different notions of neighbouring data sets, for which no common epsilon exists.
        RunError: The earlier run has no account, or it is damaged.
    """
    account = server.mechanisms.account
    if account is None:
        return
    record = read_account(run)
    if record is None:
        raise RunError(f"{run / ACCOUNT}: missing; an earlier version has not written it, so {run} cannot be continued")
    if record.neighbours != account.neighbours:
        raise RecipeError(
            f"privacy: got the guarantee for {account.neighbours!r}; allowed: as in {run}, {record.neighbours!r}, "
            "since they have no common epsilon; set mechanism and sampling as there (continue_from)"
        )
    account.earlier = record.composed
    for mechanism in server.mechanisms:
        if isinstance(mechanism, DifferentialPrivacy) and mechanism.privacy.adaptive:
            mechanism.bound = float(state[BOUND])


def restore_account(server: ServerHalf, folder: Path) -> None:
    """Restore what a resumed run knows of earlier runs' releases, and of users who have not joined again.

    Args:
        server: The server of the run, changed in place.
        folder: Its run folder.

    Raises:
        RunError: The account is damaged.
    """
    account, record = server.mechanisms.account, read_account(folder)
    if account is not None and record is not None:
        account.recorded = record.now
        account.earlier = {name: releases for name, releases in record.earlier.items() if releases}


def check_constant_rates(training: TrainingSection) -> None:
    """Check that learning rates are constant, if a run continues with the moments and step counts of an earlier run.

    A cosine schedule ended with the earlier run, so it has no learning rate for later steps.

    Args:
        training: The section ``training`` of the new run's recipe.

    Raises:
        RecipeError: A schedule is not constant.
    """
    for key, optimizer in (("experts", training.experts), ("router", training.router)):
        if optimizer.schedule != "constant":
            raise RecipeError(
                f"training.{key}.schedule: got {optimizer.schedule!r} with continue_from.moments: true; allowed: "
                "constant, or continue_from.moments: false, which begins the schedule again"
            )


def copy_rows(old: Tensor, new: Tensor, old_names: Sequence[str], new_names: Sequence[str], where: str) -> None:
    """Copy the rows of those users that two tensors have in common.

    A method may train several copies of each user's model. Then row ``copy * users + i`` belongs to one copy of user
    ``i``; both tensors must have the same number of copies per user.

    Args:
        old: Tensor to copy from.
        new: Tensor to copy to.
        old_names: Names of the users of ``old``, in order.
        new_names: Names of the users of ``new``, in order.
        where: Name of the tensor, for the error.

    Raises:
        RecipeError: Rows have different shapes, for example as LoRA ranks differ.
    """
    num_copies = len(new) // len(new_names)
    if len(old) != num_copies * len(old_names) or old.shape[1:] != new.shape[1:]:
        raise RecipeError(
            f"{where} has shape {tuple(old.shape)} for {len(old_names)} users, here {tuple(new.shape)} for "
            f"{len(new_names)}; {_ALLOWED}"
        )
    old_users = set(old_names)
    common_names = [name for name in new_names if name in old_users]
    old_rows = rows_of_names(old_names, common_names, num_copies)
    new[rows_of_names(new_names, common_names, num_copies)] = old[old_rows].to(new.device, new.dtype)


def restore_server(server: ServerHalf, state: Tree, earlier_names: Sequence[str], checkpoint: Path) -> None:
    """Continue with the server's state of the earlier run, such as the global model and the momentum of its optimiser.

    Some tensors have a row per user, such as merging weights. Users that the earlier run did not have keep their
    initial values in them.

    Args:
        server: The server of the new run, changed in place.
        state: State of the earlier run's server.
        earlier_names: Names of the earlier run's users, in the order of the rows of such tensors.
        checkpoint: Checkpoint with this state, for the error.

    Raises:
        RecipeError: A tensor has another shape.
    """
    kept: dict[str, Tensor] = {}
    for name, initial in server.kept.items():
        where = f"{checkpoint}: tensor {'server/' + name!r}"
        if name not in state:
            raise RecipeError(f"{where} is missing; {_ALLOWED}")
        if name in server.by_user:  # a tensor with a row per user
            kept[name] = initial.clone()
            copy_rows(state[name], kept[name], earlier_names, server.users, where)
            continue
        if state[name].shape != initial.shape:
            raise RecipeError(f"{where} has shape {tuple(state[name].shape)}, here {tuple(initial.shape)}; {_ALLOWED}")
        kept[name] = state[name].to(initial.device, initial.dtype)
    server.kept = kept


def ancestors_of(run: Path) -> list[JsonObject]:
    """Return folder, checkpoint and rounds of each run that a run continues, directly or indirectly, oldest first."""
    for event in read_events(run):
        if event["event"] == "start" and "continues" in event:
            parent = event["continues"]
            return [*parent["ancestors"], {key: parent[key] for key in ("run", "checkpoint", "rounds")}]
    return []


def _has_changed_data(name: str, inputs: Inputs, earlier_inputs: Inputs) -> bool:
    """Return whether a user's data differs between two runs.

    Args:
        name: The user; for a method that pools the data of all users, the one model that is trained on it.
        inputs: The users' data in the new run, with digests.
        earlier_inputs: The same of the earlier run.
    """
    is_pooled = name not in inputs.users or name not in earlier_inputs.users
    if is_pooled:  # compare the data of all users
        return inputs.users != earlier_inputs.users
    return inputs.users[name].digests != earlier_inputs.users[name].digests
