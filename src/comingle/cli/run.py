"""Commands on one run: ``comingle run``, ``join``, ``leave``, ``export``, ``evaluate`` and ``audit``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.options import (
    AllUsers,
    ContinueFrom,
    Force,
    Out,
    Quiet,
    RecipePath,
    Resume,
    Seed,
    Sets,
    console,
    default_folder,
    line_printer,
    out_option,
    parse_path,
    read_recipe,
    require_flower,
    status,
    with_continuation,
)
from comingle.training.backends.launched import find_place
from comingle.utils.errors import RecipeError, list_names, require_user
from comingle.utils.names import as_folder

if TYPE_CHECKING:
    from comingle.models.personal import Exported

Processes = Annotated[
    int | None,
    typer.Option(
        "--processes", metavar="<n>", min=1, max=1024, help="Split the users among N processes on this machine."
    ),
]


def run(
    recipe: RecipePath,
    sets: Sets = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    continue_from: ContinueFrom = None,
    processes: Processes = None,
    all_users: AllUsers = False,
    quiet: Quiet = False,
) -> None:
    """Train the users of a recipe together and write a run folder."""
    sets = with_continuation(sets, continue_from)
    place = find_place()  # rank and number of processes; None if this is the only process
    if place is None and processes is not None and processes > 1:
        from comingle.cli.training import launch

        loaded_recipe = read_recipe(recipe, sets, seed)  # reports mistakes once, before any process starts
        folder = out or default_folder(recipe, loaded_recipe.method.name, loaded_recipe.seed)
        launch(processes, folder)  # runs this same command in each process
        return
    if place is not None and processes not in (None, place.size):
        raise RecipeError(f"--processes: got {processes}, but a launcher has started {place.size}; omit the option")
    from comingle.cli.training import train_here
    from comingle.reports.tables import render_run
    from comingle.utils.terminal import literal_text

    folder_and_run = train_here(place, recipe, sets, seed, out, resume=resume, force=force, quiet=quiet)
    if folder_and_run is not None:  # None in all processes but the first
        folder, trained_run = folder_and_run
        console.print(render_run(trained_run.metrics, all_users=all_users))
        console.print(literal_text(f"{folder}/  metrics.json · events.jsonl · checkpoints/ · tensorboard/", "dim"))


def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; it is only read.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the new user.")],
    data: Annotated[
        str,
        typer.Option(
            "--data", metavar="<path>", help="Read the new user's data from here, of the same kind as in the run."
        ),
    ],
    out: Out = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Train alone for N rounds (default: the run's number).")
    ] = None,
    local_step: Annotated[
        bool, typer.Option("--local-step", help="Add a round that trains the copied tensors, too.")
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="ADAPTER",
            help="Start the user's own LoRAs from this PEFT adapter: a folder, or OWNER/NAME on the hub.",
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train a model for a new user of a finished federation, without training other users again.

    Shared tensors are copied from the run; the user's own tensors are trained on the new user's data alone. The table
    compares the result with the base model, with training alone, and with the copied tensors before training.
    """
    from comingle.reports.tables import render_joined
    from comingle.runs.api import load
    from comingle.runs.given import NOTHING
    from comingle.runs.join import join_run, prepare_newcomer
    from comingle.runs.progress import reporting
    from comingle.training.kinds.base import kind_of
    from comingle.utils.terminal import literal_text

    with status("opening the run"):
        opened = load(run)
    folder = out or Path("runs") / f"{run.resolve().name}-{as_folder(name)}"
    new_user = prepare_newcomer(opened, name, data, rounds=rounds, local_step=local_step, adapter=adapter)
    with reporting(quiet=quiet) as reporter:
        joined = join_run(opened, new_user, folder, reporter, given=NOTHING, force=force)
    console.print(render_joined(name, joined.measure, joined.rows))
    has_language_model = kind_of(new_user.recipe).needs_base
    use = "export, chat and serve" if has_language_model else "comingle.load in Python"
    console.print(literal_text(f"{folder}/  a run with {name} only, for {use}", "dim"))


def leave(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run folder, the folder of a federation's server, or a user's state folder."
        ),
    ],
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="Name of the user who leaves.")],
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="exact: train the others again, as if the user had never taken part; forward: delete what is the "
            "user's alone, and keep the shared tensors.",
        ),
    ] = "exact",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without this option only show what would be done.")
    ] = False,
    certificates: Annotated[
        Path | None,
        typer.Option("--certificates", metavar="FOLDER", help="Delete the user's key in this folder of a server, too."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Remove a user from a run and from the runs that it continues; their folders are replaced.

    Without --yes nothing is changed: the command lists the files that would be deleted and the rounds to train again.
    In a federation the server's folder is named there, and the user's state folder on the user's machine.
    """
    from comingle.federation.client_store import (
        STATEMENT_OF_CLIENT,
        delete_runs_of_user,
        files_of_user,
        replaced_copies,
    )
    from comingle.runs.folders import is_server_folder
    from comingle.runs.leaving import NOT_SEARCHED, STATEMENTS, plan_removal, remove_user
    from comingle.utils.terminal import literal_text

    if mode not in STATEMENTS:
        raise RecipeError(f"--mode: got {mode}; allowed: {', '.join(STATEMENTS)}")
    say, notes, statement = line_printer(quiet=quiet), list[str](), f"{mode}: {STATEMENTS[mode]}"
    branches: list[Path] = []
    is_of_server = is_server_folder(run)
    if certificates is not None and not is_of_server:
        raise RecipeError(f"--certificates: got {certificates} with {run}; allowed: with the folder of a server")
    if files := files_of_user(run, user):
        carry_out: Callable[[], object] = partial(delete_runs_of_user, run, user)
        statement, kept = STATEMENT_OF_CLIENT, replaced_copies(run)
        notes = [f"not deleted: {path} is no copy of {user}'s text" for path in kept]
    elif is_of_server:
        require_flower()
        from comingle.federation.server_app import plan_server_removal, remove_from_server

        server_removal = plan_server_removal(run, user, mode, certificates)
        files, notes, branches = server_removal.files, server_removal.notes, server_removal.branches
        carry_out = partial(remove_from_server, server_removal, say)
    else:
        removal = plan_removal(run, user, mode)
        files, branches = removal.files, removal.branches
        carry_out = partial(remove_user, removal, say, progress=not quiet)
        if removal.rounds:
            minutes = removal.seconds / 60
            notes = [f"train again: {removal.rounds} rounds; with {user} they took {minutes:.1f} min"]
        notes += [f"not deleted: {path} has no documents of {user}" for path in removal.unrelated]
    if yes:
        carry_out()
    else:
        for path in files:
            console.print(literal_text(f"delete {path}", "dim"))
    notes += [f"not changed: {branch} continues a run with {user}; let {user} leave it first" for branch in branches]
    lines = [*notes, statement, f"not searched: {NOT_SEARCHED}"]
    if yes:
        lines.append(f"{user} has left {run}: {len(files)} files deleted; left.json in the folder is the certificate")
    else:
        with_key = [] if certificates is None else ["--certificates", str(certificates)]
        command = shlex.join(["comingle", "leave", str(run), "--user", user, "--mode", mode, *with_key, "--yes"])
        lines.append(f"nothing is changed; to do it: {command}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of a comparison.")],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="<path>", help="Write to this folder; with --user all, to a folder in it per user."
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Upload to this repository of the Hugging Face hub, which is created as a private one.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: let everyone read the repository.")] = False,
    user: Annotated[
        str | None,
        typer.Option(
            "--user", metavar="NAME", help='Export this user\'s model; "all" for all users (default: the only user).'
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Write this format: transformers, peft, gguf, gguf-adapter or merged-approximately.",
            show_default=True,
        ),
    ] = "transformers",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Use float32, bfloat16, float16 or float64; for gguf float32, bfloat16, q8_0 or q4_k_m "
            "(default: the run's).",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option("--method", help="Export this method's run of a comparison.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Export this seed's run of a comparison (default: the first).")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a user's model for transformers, PEFT or llama.cpp, with a model card and the tokenizer."""
    import comingle
    from comingle.runs.views import generating_model
    from comingle.serving.export import exporting
    from comingle.serving.models import find_run

    if to is None and push is None:
        raise RecipeError("--to: got none; allowed: a folder, or --push OWNER/NAME")
    if public and push is None:
        raise RecipeError("--public: got it without --push; allowed: with --push OWNER/NAME")
    folder = find_run(run, method, seed)
    repository = "" if push is None else exporting.check_push(push, public=public, force=force)
    with status("opening the run"):
        opened = comingle.load(folder)
    with TemporaryDirectory() as temporary_folder:
        # A folder is named in its model card, so it has the repository's name.
        targets = target_by_user(user, opened.users, to or Path(temporary_folder) / Path(repository).name)
        if repository and len(targets) > 1:
            raise RecipeError(f"--push: got {len(targets)} users; allowed: one, with --user NAME")
        for target in targets.values():  # all are checked before the first is written
            exporting.check_target(target, force=force)
        for name, target in targets.items():
            with status(f"exporting {name}"):
                exported = generating_model(opened, name).export(
                    target, format=format, dtype=dtype, force=force, repository=repository
                )
            url = ""
            if repository:
                with status(f"uploading {name} to {repository}"):
                    url = exporting.push(target, repository, public=public)
            if not quiet:
                _print_export(name, exported, url if to is None else str(target), url)


def _print_export(name: str, exported: Exported, place: str, url: str) -> None:
    """Print where a user's model was written, and what was written.

    Args:
        name: Name of the user.
        exported: The export.
        place: The folder, or the address on the hub if there is no folder.
        url: The address on the hub; empty if nothing was uploaded.
    """
    console.print(f"{name}: {place}", highlight=False, markup=False, soft_wrap=True)
    if url not in ("", place):
        console.print(f"  uploaded to {url}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"  {exported.form}", highlight=False, markup=False)
    for key, value in exported.lost.items():  # scores before and after an approximation; empty for exact formats
        console.print(f"  {key.replace('_', ' ')}: {value:.4g}", highlight=False, markup=False)


def target_by_user(user: str | None, users: Sequence[str], to: Path) -> dict[str, Path]:
    """Return the folder to which each exported user's model is written: ``{"ann": Path("out/ann")}``.

    Args:
        user: Name of a user, or "all" for all users; None for the only user of the run.
        users: All users of the run.
        to: Folder to write to; with "all" each user has a folder in it.

    Raises:
        RecipeError: No user is named, and the run has several.
        DataError: There is no such user.
    """
    if user is None:
        if len(users) > 1:
            raise RecipeError(f"--user: got none for {len(users)} users; allowed: {list_names(users)}, or all")
        return dict.fromkeys(users, to)
    means_all_users = user == "all" and "all" not in users  # not a user with this name
    if means_all_users:
        return {name: to / as_folder(name) for name in users}
    name = require_user(user, users, "--user: ")
    return {name: to}


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of a comparison.")],
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", metavar="FOLDER", help="Use the task files (*.yaml) of lm-eval in this folder."),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="NAME",
            help="Score on this task (repeatable; default: all of the folder); without --tasks one of lm-eval itself.",
            show_default=False,
        ),
    ] = None,
    users: Annotated[
        list[str] | None,
        typer.Option("--user", metavar="NAME", help="Score this user's model (repeatable; default: all users)."),
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Score the base without adapters, too.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use only the first N documents of each task.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Compute N texts in one pass.")] = 8,
    chat: Annotated[bool, typer.Option("--chat", help="Put each document into the tokenizer's chat template.")] = False,
    method: Annotated[str | None, typer.Option("--method", help="Take this method's run of a comparison.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Take this seed's run of a comparison (default: the first).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.json", parser=parse_path, help="Write the scores to this file."),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Score users' models with lm-eval, on its own tasks or on local task files, without an export."""
    from comingle.reports.tables import render_task_scores
    from comingle.runs.api import load
    from comingle.runs.harness import Tasks, find_tasks, score_on_tasks
    from comingle.runs.views import generating_model
    from comingle.serving.models import find_run
    from comingle.serving.rows import without_adapters
    from comingle.utils.files import check_target
    from comingle.utils.records import write_json

    chosen = Tasks(folder=tasks, names=tuple(names or ()), limit=limit, batch_size=batch_size, chat=chat)
    find_tasks(chosen)  # raises before the run is opened, which takes a while
    if out is not None:
        check_target(out, force=force)
    with status("opening the run"):
        opened = load(find_run(run, method, seed))
    models = {
        name: generating_model(opened, require_user(name, opened.users, "--user: ")) for name in users or opened.users
    }
    if pretrained:
        models = {"pretrained": without_adapters(next(iter(models.values()))), **models}
    scores = {}
    for name, model in models.items():
        with status(f"scoring {name}"):
            scores[name] = score_on_tasks(model, chosen, progress=not quiet)
    if out is not None:
        write_json(out, scores)
    console.print(render_task_scores(scores))


def _check_shadows(context: object, option: object, num_runs: int) -> int:
    """Check the number of reference runs that ``--shadows`` gives, and return it unchanged; the option's callback.

    Args:
        context: Not used; click passes it.
        option: Not used; click passes it.
        num_runs: Number of reference runs, whose models membership inference needs; 0 for no membership inference with
            reference models.

    Raises:
        RecipeError: The number is not 0, but less than membership inference needs.
    """
    if num_runs == 0:
        return num_runs
    from comingle.audits.canaries import MIN_REFERENCE_RUNS

    if num_runs < MIN_REFERENCE_RUNS:
        raise RecipeError(f"--shadows: got {num_runs}; allowed: 0, or a whole number from {MIN_REFERENCE_RUNS}")
    return num_runs


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Start N runs with canaries (default: enough for about 40 canaries)."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Train N rounds in each of these runs.")] = 3,
    shadows: Annotated[
        int,
        typer.Option(
            "--shadows",
            min=0,
            callback=_check_shadows,
            help="Start N reference runs on half of each user's data, at least 3; 0 for none.",
        ),
    ] = 8,
    out: Annotated[Path | None, out_option("Write to this folder (default: RUN).")] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Attack a run with the messages that the server and other users see, and report what leaks.

    Text and conversations: bound epsilon from below with canaries, and guess which texts a user's model was trained on.
    Text: recover tokens from one upload. Samples: reconstruct an input from one upload. Write audit.json and audit.md.
    """
    from comingle.audits import auditing
    from comingle.reports.audit import check_targets, conclusions, render_audit
    from comingle.runs.api import load
    from comingle.utils.terminal import literal_text

    folder = out or run
    if run.is_dir():
        check_targets(folder, force=force)  # before the run is opened, which takes a while
    with status("opening the run"):
        opened = load(run)
    results = auditing.audit(
        opened, trials=trials, rounds=rounds, shadows=shadows, out=folder, force=force, progress=not quiet
    )
    for sentence in conclusions(results):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    for table in render_audit(results):
        console.print()
        console.print(table)
    console.print(literal_text(f"{folder / 'audit.md'}  {folder / 'audit.json'}", "dim"))
