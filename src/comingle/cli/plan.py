"""Commands before a run: ``comingle data``, ``methods``, ``cost`` and ``advise``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from comingle.cli.compare import split_names, split_seeds
from comingle.cli.options import (
    Quiet,
    RecipePath,
    Sets,
    console,
    finite,
    method_settings,
    parse_sets,
    read_recipe,
    require_flower,
    status,
)
from comingle.runs import METHODS, METHODS_FOR_NETS, ROUNDS, shortened
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.terminal import literal_text

if TYPE_CHECKING:
    from comingle.config import Recipe
    from comingle.cost.timing import Cluster
    from comingle.methods.base import Method, Placement


LINK, LATENCY = 1.25e9, 1e-4
"""Defaults: 10 Gbit/s in bytes per second, and 0.1 ms in seconds, as usual between machines of one data centre."""

Machines = Annotated[
    int | None, typer.Option("--machines", min=1, help="Estimate time and price on N machines, from measurements here.")
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Start N processes per machine (default: 1).")
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="Use N GPUs per machine, with one process each.")]
Cores = Annotated[int | None, typer.Option("--cores", min=1, help="Assume N cores per machine (default: as here).")]
Price = Annotated[float | None, typer.Option("--price", min=0, callback=finite, help="Price per machine and hour.")]
Link = Annotated[
    float, typer.Option("--link", min=1, callback=finite, help="Bandwidth between two machines, in bytes/s.")
]
Latency = Annotated[
    float, typer.Option("--latency", min=0, callback=finite, help="Latency between two machines, in seconds.")
]
Disk = Annotated[
    float | None,
    typer.Option(
        "--disk", min=1, callback=finite, help="Bandwidth of a machine's disk, in bytes/s (default: measured here)."
    ),
]
Step = Annotated[
    float | None,
    typer.Option(
        "--step",
        min=0,
        callback=finite,
        help="Duration of a local step of one user, in seconds (default: measured here).",
    ),
]


def cluster_of(
    machines: int | None,
    *,
    gpus: int | None,
    processes: int | None,
    threads: int | None,
    step: float | None,
    cores: int | None,
    price: float | None,
    link: float,
    latency: float,
    disk: float | None,
) -> Cluster | None:
    """Return the machines that the options of ``comingle cost`` describe; None without ``--machines``.

    Args:
        machines: Number of machines.
        gpus: GPUs per machine, with a process for each.
        processes: Processes per machine.
        threads: Threads per process.
        step: Seconds of a local step; None if it is measured later, which with ``gpus`` needs a GPU on this machine.
        cores: Cores per machine; None for those of this machine.
        price: Price of a machine per hour.
        link: Bandwidth between machines, in bytes per second.
        latency: Latency between machines, in seconds.
        disk: Bandwidth of a machine's disk, in bytes per second; None to measure it later.

    Raises:
        RecipeError: Options need ``--machines``, contradict each other, or need a GPU that this machine does not have.
    """
    if machines is None:
        options = {
            "gpus": gpus,
            "processes": processes,
            "step": step,
            "cores": cores,
            "price": price,
            "link": link,
            "latency": latency,
            "disk": disk,
        }
        defaults = (None, LINK, LATENCY)  # an option with another value was given
        given_options = [name for name, value in options.items() if value not in defaults]
        if given_options:
            raise RecipeError(f"--{given_options[0]}: is used only with --machines N")
        return None
    if gpus is not None and processes is not None:
        raise RecipeError("--gpus and --processes: got both; each GPU has a process, so give one of them")
    from comingle.cost.machines import on_gpu
    from comingle.cost.timing import Cluster
    from comingle.runs.distributed import cores as cores_here

    if gpus is not None and step is None and not on_gpu():
        raise RecipeError("--gpus: no GPU here to measure a local step on; give --step SECONDS")
    return Cluster(
        machines=machines,
        processes=gpus or processes or 1,
        gpus=gpus is not None,
        threads=threads,
        cores=cores or cores_here(),
        price=price,
        link=link,
        latency=latency,
        disk=disk or 0.0,  # 0: measured later
    )


def read_recipe_or_plan(path: Path, sets: list[str] | None) -> tuple[Recipe, tuple[str, ...]]:
    """Read a recipe, or the file of a federation's server, and apply the changes of ``--set``.

    Args:
        path: A recipe file, a run folder, or a server's file, which has the key ``participants``.
        sets: Values of ``--set``.

    Returns:
        The recipe, and the names of the participants in a server's file, whose data is elsewhere: ``("ann", "bob")``.

    Raises:
        RecipeError: The file or a change is wrong, or costs depend on the participants' data.
    """
    from comingle.config.files import read_yaml

    content = read_yaml(path) if path.is_file() else None
    is_file_of_server = isinstance(content, Mapping) and "participants" in content
    if not is_file_of_server:
        return read_recipe(path, sets), ()
    require_flower()
    from comingle.config.settings import protects_examples
    from comingle.federation.files import load_plan
    from comingle.training.kinds.base import kind_of

    plan = load_plan(path)
    recipe = plan.recipe
    overrides = parse_sets(sets)
    if overrides:
        recipe = recipe.with_changes(overrides, where="--set")
    if not kind_of(recipe).needs_base:
        raise RecipeError(
            f"{path}: the clients have the data; got data.kind {recipe.data.kind}, whose costs depend on it; use a "
            "recipe with data.users"
        )
    if recipe.privacy is not None and protects_examples(recipe.privacy.mechanism):
        raise RecipeError(
            f"{path}: the clients have the data; got privacy.mechanism {recipe.privacy.mechanism}, whose epsilon "
            "depends on it; count the other costs with --set privacy=null"
        )
    return recipe, plan.users


def cost(
    recipe: RecipePath,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Count this method (repeatable, or separated by commas).")
    ] = None,
    users: Annotated[
        int | None, typer.Option("--users", help="Assume N users, if their text is not available.")
    ] = None,
    sets: Sets = None,
    machines: Machines = None,
    processes: Processes = None,
    gpus: Gpus = None,
    cores: Cores = None,
    price: Price = None,
    link: Link = LINK,
    latency: Latency = LATENCY,
    disk: Disk = None,
    step: Step = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count parameters, bytes, FLOPs and memory of a recipe before training, and say whether it fits.

    RECIPE may also be the file of `comingle server`, whose participants' data is not needed.

    With --machines, also estimate time and price of a round and of a run, for populations of several sizes.
    """
    loaded_recipe, participants = read_recipe_or_plan(recipe, sets)
    if participants and machines is not None:
        raise RecipeError("--machines: got a server's file, whose clients have their own machines; leave it out")
    cluster = cluster_of(
        machines,
        gpus=gpus,
        processes=processes,
        threads=loaded_recipe.runtime.threads,
        step=step,
        cores=cores,
        price=price,
        link=link,
        latency=latency,
        disk=disk,
    )
    from comingle.cost.machines import plan_times
    from comingle.cost.planning import plan
    from comingle.reports.costs import PlanRecord, TimesRecord, memory_verdicts, render_plan, render_times

    names = split_names(",".join(method)) if method else []  # empty for the recipe's method
    for_all = method_settings(sets, names or [loaded_recipe.method.name])  # --set method.KEY=VALUE
    if users is not None:  # --users replaces the participants of a server's file
        participants = ()
    with status("counting"):
        costs = plan(loaded_recipe, names, users=users, participants=participants, for_all=for_all)
    record = costs.as_dict()
    times = None
    if cluster is not None:
        with status("measuring"):
            times = plan_times(loaded_recipe, costs, cluster, step=step, for_all=for_all)
    if as_json:
        if times is not None:
            record = {**record, "time": times}
        print(json.dumps(record, indent=2))
        return
    plan_record = cast(PlanRecord, record)
    for part in render_plan(plan_record):
        console.print(part, highlight=False)
    for line, fits in memory_verdicts(plan_record):
        console.print(line, style="green" if fits else "bold red", highlight=False)
    if times is not None:
        for part in render_times(cast(TimesRecord, times)):
            console.print(part, highlight=False)


def advise(
    recipe: RecipePath,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="Compare these methods with local, separated by commas (default: "
            f"{','.join(METHODS)}; for samples {','.join(METHODS_FOR_NETS)}).",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds", help="Use these seeds, separated by commas; intervals need two (default: 3 or 5, by data)."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Train N rounds in each run.")] = ROUNDS,
    sets: Sets = None,
    quiet: Quiet = False,
) -> None:
    """Estimate from short runs which users gain from training together, and with which method.

    Trains all users with local and each method. To see which users gain from which, also trains smaller groups with the
    first method: each pair of 3 to 5 users, or all but one of 6 to 12 users. Writes nothing.
    """
    full_recipe = read_recipe(recipe, sets)
    method_names = split_names(methods) if methods is not None else None
    seed_numbers = split_seeds(seeds) if seeds is not None else None
    from comingle.reports.advice import paragraph, render_advice
    from comingle.runs.advise import advise_runs
    from comingle.runs.progress import reporting

    changes = shortened(rounds)  # train ``rounds`` rounds, then evaluate once
    short_recipe = full_recipe.with_changes(changes)
    with reporting(quiet=quiet) as reporter:
        advice = advise_runs(short_recipe, method_names, seed_numbers, reporter)
    console.print(paragraph(advice), highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(render_advice(advice))


def data(
    recipe: RecipePath,
    sets: Sets = None,
    all_users: Annotated[bool, typer.Option("--all", help="Show all users, even if there are more than 24.")] = False,
) -> None:
    """Preview a recipe's users.

    Text and conversations: token counts, split sizes, overlaps and two excerpts per user. Samples: the number in each
    split. For more than 24 users the table has quantiles, and the users with the least and the most data.
    """
    loaded_recipe = read_recipe(recipe, sets)
    from comingle.cli.training import preview, warn_overlaps
    from comingle.data.conversations.encoding import UserAnswers, check_nonempty
    from comingle.data.row_files import BAD_ROWS_ADVICE, BadRowsError
    from comingle.runs.session import prepare

    try:
        with status("reading and tokenising"):
            run_data = prepare(loaded_recipe)
    except BadRowsError as error:
        for problem in error.problems:
            console.print(literal_text(problem), highlight=False, soft_wrap=True)
        raise DataError(f"{len(error.problems)} rows cannot be used; {BAD_ROWS_ADVICE}") from None
    for part in preview(loaded_recipe, run_data, all_users=all_users):
        console.print(part, highlight=False)
    warn_overlaps(run_data)
    if run_data.users.sizes is None and issubclass(run_data.kind.user, UserAnswers):
        check_nonempty(run_data.users)


def _describe_placement(method: Method) -> str:
    """Return the placement of a method: "shared: attention, generalist; local: router, specialist; frozen: base".

    Shared parts of a role are named as "attention.a", the LoRA factor A.
    """
    trained, shared = method.client.trained, method.shared  # names such as "router" or "attention.a"
    trained_roles = {_role_of(name) for name in trained}
    shared_roles = {_role_of(name) for name in shared}  # wholly or in parts
    partly_shared_roles = {_role_of(name) for name in shared if "." in name}
    is_language_model = "language" in method.applies_to and method.placement.mixture is None
    if is_language_model and (trained or shared):
        roles = _roles_of_language_model(method.placement)
    else:
        roles = sorted(trained_roles | shared_roles)

    shared_texts = [name for name in sorted(shared) if _role_of(name) in roles]
    unshared_roles = [role for role in roles if role not in shared_roles]
    local_texts = [role for role in unshared_roles if role in trained_roles]
    local_texts += [f"other parts of {role}" for role in roles if role in partly_shared_roles and role not in shared]
    frozen_texts = [role for role in unshared_roles if role not in trained_roles]
    if "base" not in roles:
        frozen_texts.append("base")
    texts_by_placement = {"shared": shared_texts, "local": local_texts, "frozen": frozen_texts}
    return "; ".join(f"{name}: {', '.join(texts) or 'none'}" for name, texts in texts_by_placement.items())


def _roles_of_language_model(placement: Placement) -> list[str]:
    """Return the roles of adapters in a language model, such as ``["attention", "generalist", "router"]``."""
    roles = ["attention"]
    if placement.generalists > 0:
        roles.append("generalist")
    if placement.specialists != 0:  # one number for all users, or one for each
        roles.append("specialist")
    if placement.routed:
        roles.append("router")
    return roles


def _role_of(name: str) -> str:
    """Return the role of a tensor name: "attention" for "attention.a"."""
    return name.partition(".")[0]


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
) -> None:
    """List the methods, or print a method's source, placement, client, server and deviations."""
    import inspect

    from rich.table import Table

    from comingle.methods import REGISTRY, make, settings_of
    from comingle.methods.settings import allowed_values
    from comingle.utils.errors import PluginError

    if name is not None:
        settings = settings_of(name)  # raises for an unknown name
        console.print(name, style="bold", highlight=False)
        console.print(inspect.getdoc(REGISTRY[name]) or "", highlight=False)
        console.print(f"Placement: {_describe_placement(make(name))}", highlight=False, soft_wrap=True)
        allowed = allowed_values(REGISTRY[name])
        ranges = [f"{key}: {allowed[key][0]}" for key in settings if key in allowed]
        if ranges:
            console.print(f"Allowed: {'; '.join(ranges)}", highlight=False, soft_wrap=True)
        defaults = [f"{key}: {value}" for key, value in settings.items()]
        console.print(f"Settings: {', '.join(defaults) or 'none'}", highlight=False, soft_wrap=True)
        return
    table = Table("method", "description", box=None, pad_edge=False)
    for method_name in REGISTRY:
        try:
            docstring = inspect.getdoc(REGISTRY[method_name]) or ""
            table.add_row(method_name, docstring.partition("\n")[0])
        except PluginError as error:
            table.add_row(method_name, literal_text(str(error), "red"))
    console.print(table)
