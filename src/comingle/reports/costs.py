"""Tables of ``comingle cost``. MB are 10^6 bytes, GB 10^9."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from rich.text import Text

from comingle.config.settings import protects_examples
from comingle.reports.formatting import Table
from comingle.reports.tables import megabytes
from comingle.utils.terminal import printable, words


class FlopsRecord(TypedDict):
    """Total FLOPs of a pass, and the overhead over the base as a fraction."""

    total: float
    overhead: float
    naive_overhead: float


class UserCostRecord(TypedDict):
    """Costs of users with equal costs. FLOPs have further keys that contain the plan's unit."""

    names: Sequence[str]
    experts: int
    parameters: Mapping[str, int]
    trainable_parameters: int
    upload_bytes: float
    download_bytes: float
    upload_bytes_per_user_round: float
    training_flops_per_round: FlopsRecord


class PrivacyRecord(TypedDict):
    """Forecast of the privacy budget that a run spends."""

    mechanism: str
    epsilon: float
    delta: float
    noise_multiplier: float
    clip_norm: float
    releases: int
    planned_releases: int
    accountant: str


class _MethodCost(TypedDict):
    method: str
    users: Sequence[UserCostRecord]
    machine: Mapping[str, int]
    own_device: Mapping[str, int]
    exchanges: int
    users_per_step: int
    micro_batch: int
    fits: bool
    advice: str
    store_bytes: int


class MethodCostRecord(_MethodCost, total=False):
    """Costs of one method, as :meth:`comingle.cost.records.MethodCost.as_dict` returns them."""

    privacy: PrivacyRecord


class DifferenceRecord(TypedDict):
    """One column of the paper's Table 3, and the same of this plan."""

    what: str
    unit: str
    paper: str
    theirs: float | None
    theirs_share: float | None
    true: float
    true_share: float
    why: str


class ChoiceRecord(TypedDict):
    """Settings that ``runtime.memory`` may choose, as :class:`comingle.cost.records.MemoryChoice`."""

    settings: str
    changes: Mapping[str, Any]
    needed_bytes: int
    slowdown: float


class ChoicesRecord(TypedDict):
    """All settings that ``runtime.memory`` may choose, the first that fits within the limit is chosen."""

    limit_bytes: int
    choices: Sequence[ChoiceRecord]


class _Plan(TypedDict):
    """A plan as JSON, as :meth:`comingle.cost.records.Plan.as_dict` returns it."""

    base: str
    base_parameters: int
    dtype: str
    device: str
    users: Sequence[str]
    rounds: int
    local_steps: int
    batch_size: int
    context: int
    free_bytes: int
    unit: str
    note: str
    methods: Sequence[MethodCostRecord]
    comigs_1g1s_minus_fedavg: Sequence[DifferenceRecord]


class PlanRecord(_Plan, total=False):
    """A plan as JSON; the choices of ``runtime.memory`` are there if the recipe sets it."""

    memory: ChoicesRecord


class TimeRow(TypedDict):
    """Seconds of a round for a population of one size, in all and by part."""

    users: int
    present: int
    compute_seconds: float
    server_seconds: float
    network_seconds: float
    disk_seconds: float
    round_seconds: float
    run_seconds: float
    state_bytes: float
    money: float | None
    binds: str


class TimePartsRecord(TypedDict):
    """Measurements of one method on this machine."""

    user_seconds: float
    """Time of one core for a user's local steps in a round."""
    handling_seconds: float
    """Time of one core for the messages that a user receives and sends."""
    evaluation_seconds: float
    """Time of one core for an evaluation on a user's test data."""
    hop_seconds: float
    """Latency of a small message between processes."""
    hops: float
    """Number of such messages in a round, one after another."""
    bus: float | None
    """Bytes per second between processes; None for one process."""
    disk: float
    """Bytes per second of the disk."""


class MethodTimeRecord(TypedDict):
    """Rounds of one method for populations of several sizes."""

    method: str
    rows: Sequence[TimeRow]
    parts: TimePartsRecord


class TimesRecord(TypedDict):
    """Times as JSON, as :func:`comingle.cost.machines.plan_times` returns them."""

    machines: int
    processes: int
    cores: int
    gpus: bool
    price: float | None
    link: float
    latency: float
    step_given: bool
    methods: Sequence[MethodTimeRecord]


def render_plan(plan: PlanRecord) -> Iterator[Table | Text | str]:
    """Yield the tables and lines of a plan.

    They are a heading, parameters and bytes, compute, memory, users' bytes on disk, and, where they apply, the privacy
    budget and a comparison with the CoMiGS paper.
    """
    yield _plan_heading(plan)
    for table in (_parameters_table(plan), _compute_table(plan), _memory_table(plan)):
        yield table
        yield ""
    if "memory" in plan:
        yield _choices_table(plan["memory"])
        yield ""
    yield from _store_lines(plan)
    if any("privacy" in method for method in plan["methods"]):
        yield from _privacy_lines(plan)
        yield ""
    if plan["comigs_1g1s_minus_fedavg"]:
        yield from _paper_tables(plan)


def memory_verdicts(plan: PlanRecord) -> Iterator[tuple[str, bool]]:
    """Yield for each method a line on whether it fits into the memory of this machine, and the answer as a boolean.

    The line of a method that does not fit names settings to try, or says that there are none. With ``runtime.memory``
    there is one line, on its limit.
    """
    if "memory" in plan:
        limit, chosen = _megabytes_number(plan["memory"]["limit_bytes"]), _chosen(plan["memory"])
        if chosen is None:
            yield f"runtime.memory {limit} MB: none of the settings fits", False
        else:
            yield f"runtime.memory {limit} MB: {chosen['settings']}", True
        return
    free = plan["free_bytes"]
    for method in plan["methods"]:
        needs = f"needs {_gigabytes(method['machine']['total_bytes'])}, {_gigabytes(free)} free on {plan['device']}"
        if method["fits"]:
            yield f"{method['method']}: fits: {needs}", True
        else:
            advice = method["advice"]
            hint = advice if advice.startswith("no ") else f"try {advice}"  # "no smaller pass fits; ..." is a sentence
            yield f"{method['method']}: does not fit: {needs}; {hint}", False


def _privacy_lines(plan: PlanRecord) -> Iterator[str]:
    """Yield a heading, and for each private method a line with the privacy budget that its run would spend.

    The line also has the noise and how often it is added: in each optimiser step if the mechanism protects single
    examples, else in each exchange of messages with the server.
    """
    yield f"Privacy: bound on what the run reveals about any {_privacy_unit(plan)}"
    for method in plan["methods"]:
        if not (spent := method.get("privacy")):
            continue
        occasions = "steps" if protects_examples(spent["mechanism"]) else "exchanges"
        # A release is one publication with noise. There are fewer if the budget is spent before the last round.
        planned = "" if spent["releases"] == spent["planned_releases"] else f" of {spent['planned_releases']}"
        yield (
            f"{method['method']}: epsilon {spent['epsilon']:.3g} at delta {spent['delta']:g}, {spent['mechanism']} "
            f"noise of {spent['noise_multiplier']:.4g} times the clip norm ({spent['clip_norm']}), "
            f"{spent['releases']}{planned} {occasions}, by {spent['accountant'].upper()}"
        )


def _privacy_unit(plan: PlanRecord) -> str:
    """Return the unit of privacy: a user or an example."""
    mechanisms = {method["privacy"]["mechanism"] for method in plan["methods"] if "privacy" in method}
    return "example" if mechanisms and all(map(protects_examples, mechanisms)) else "user"


def _plan_heading(plan: PlanRecord) -> Text:
    """Return the text above the tables: base, dtype, device, users, and the work of a run."""
    names = ", ".join(plan["users"][:8]) + (" ..." if len(plan["users"]) > 8 else "")
    if plan["unit"] == "token":
        size = f"{plan['base_parameters'] / 1e6:,.1f}M"
        work = f"{plan['local_steps']} steps with {plan['batch_size']} x {plan['context']} tokens"
        not_done = "No weights were loaded and no model was trained."
    else:
        size = f"{plan['base_parameters']:,}"
        work = f"up to {plan['local_steps']} steps with {plan['batch_size']} samples"
        not_done = "No model was trained."
    after_base = (
        f", {size} parameters, {plan['dtype']} on "
        f"{plan['device']}; {len(plan['users'])} users: {names}\n"
        f"{plan['rounds']} rounds of {work} for each user. {not_done} MB = 10^6 bytes.\n"
    )
    if plan["note"]:
        after_base += f"{plan['note']}\n"
    return Text.assemble(words(plan["base"], "bold"), printable(after_base, keep="\n"))


def _captioned_table(title: str, caption: str = "") -> Table:
    """Return an empty table with a title above and a caption below."""
    return Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=None)


def _add_columns(table: Table, *names: str, left: int = 2) -> Table:
    """Add columns and return the table; the first ``left`` columns are left-aligned and do not wrap."""
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=i < left)
    return table


def _user_rows(plan: PlanRecord) -> Iterator[tuple[str, str, UserCostRecord]]:
    """Yield the rows of a table of users: for each method, one for each group of users with equal costs.

    Yields:
        The method's name in its first row, empty in the others; the users' names, "each" for all users; and the costs
        of one user of the group.
    """
    for method in plan["methods"]:
        for i, group in enumerate(method["users"]):
            has_all_users = len(method["users"]) == 1 and len(group["names"]) > 1
            label = "each" if has_all_users else ", ".join(group["names"])
            yield (method["method"] if i == 0 else ""), label, group


def _parameters_table(plan: PlanRecord) -> Table:
    """Return the table of trained parameters by role, bytes per exchange, and exchanges."""
    roles = list(dict.fromkeys(role for _, _, user in _user_rows(plan) for role in user["parameters"]))
    table = _captioned_table(
        "Trained parameters of one user, and bytes it sends and receives per exchange",
        "Tensors travel as float32; an exchange is an upload and the aggregation at the end of a round.\n"
        "Upload / round: mean over all rounds, with or without an exchange, as in comingle compare.",
    )
    _add_columns(table, "method", "user", *roles, "trained", "upload", "download", "exchanges", "upload / round")
    exchanges = {method["method"]: method["exchanges"] for method in plan["methods"]}
    for name, label, user in _user_rows(plan):
        counts = [f"{user['parameters'].get(role, 0):,}" for role in roles]
        sent = [_bytes_text(user[key]) for key in ("upload_bytes", "download_bytes")]
        per_round = _bytes_text(user["upload_bytes_per_user_round"])
        cells = [*counts, f"{user['trainable_parameters']:,}", *sent, str(exchanges.get(name, "")), per_round]
        table.add_row(name, words(label), *cells)
    return table


def _compute_table(plan: PlanRecord) -> Table:
    """Return the table of FLOPs of each user's forward pass and training, and the overhead over the base."""
    unit, base = plan["unit"], "frozen base" if plan["unit"] == "token" else "net"
    rows = list(_user_rows(plan))
    has_experts = any(user["experts"] for _, _, user in rows)
    all_have_experts = all(user["experts"] for _, _, user in rows)
    counted = "Matrix products and convolutions" if unit == "sample" else "Matrix products"
    # Client-level mixtures and nets have no experts. They may make several passes in a step, which count as overhead
    # over one pass of the base.
    exception = "" if all_have_experts else "; of mixtures and nets, in one pass a step"
    caption = (
        f"{counted}, 2 FLOPs for a multiply-add, padding and evaluation left out. Overhead is over the base in "
        f"the same passes{exception}."
    )
    if has_experts:
        caption += "\nNaive: a whole MLP per expert, instead of one product with base weights for all experts."
    base_flops = _mega_flops(plan[f"base_forward_flops_per_{unit}"])
    table = _captioned_table(f"Compute of one user (the {base} alone: {base_flops} a {unit} forward)", caption)
    overheads = ("overhead", "naive") if has_experts else ("overhead",)
    names = (f"forward / {unit}", *overheads, f"training / {unit}", "training / round", *overheads)
    _add_columns(table, "method", "user", *names)
    for name, label, user in rows:
        forward, training = user[f"forward_flops_per_{unit}"], user[f"training_flops_per_{unit}"]
        whole_round = user["training_flops_per_round"]
        table.add_row(
            name,
            words(label),
            _mega_flops(forward["total"]),
            *_overheads(user, forward, has_experts),
            _mega_flops(training["total"]),
            _tera_flops(whole_round["total"]),
            *_overheads(user, whole_round, has_experts),
        )
    return table


def _overheads(user: UserCostRecord, flops: FlopsRecord, has_experts: bool) -> list[str]:
    """Return the cells of a user's overhead: FLOPs beyond those of the base, as a fraction of the base's.

    If any user has experts, a second cell has the overhead of a naive implementation, which computes a whole MLP for
    each expert.

    Args:
        user: Costs of the user.
        flops: FLOPs of a pass or a round of the user.
        has_experts: Whether any user of the table has experts, so that it has the second column.
    """
    overhead = _signed_percent(flops["overhead"])
    if not has_experts:
        return [overhead]
    return [overhead, _signed_percent(flops["naive_overhead"]) if user["experts"] else "–"]


_COMPILED = ", without compilation (runtime.compile: false); compiled code needs less"


def _memory_table(plan: PlanRecord) -> Table:
    """Return the table of peak memory by purpose, with two rows for each method.

    One row is for this machine, which trains all users, the other for a device that trains one user.
    """
    has_samples = plan["unit"] == "sample"
    # Without _bytes, keys of the record; some have other names in the table.
    keys = (
        "process",
        "data" if has_samples else "weights",
        "adapters",
        "moments",
        "gradients",
        "activations",
        "exchange",
        "allocator",
    )
    other_names = {"exchange": "messages"} | ({"adapters": "nets"} if has_samples else {})
    names = [other_names.get(key, key) for key in keys]
    table = _captioned_table(
        "Peak memory in MB",
        "Process: Python and its libraries, measured on this machine; unknown for a GPU.\n"
        f"Activations: memory of one pass without gradients{'' if has_samples else _COMPILED}."
        "\nMessages: uploads of a round while they are made, which is not during a pass; the larger one counts."
        "\nAllocator: estimate of its fragmentation on a CPU, not a bound; unknown for a GPU.",
    )
    pass_heading = f"users x {'samples' if has_samples else 'sequences'} in a pass"
    _add_columns(table, "method", "where", pass_heading, *names, "total")

    def cells(memory: Mapping[str, int]) -> list[str]:
        """Return the cells of the columns of megabytes."""
        return [_megabytes_number(memory[f"{key}_bytes"]) for key in (*keys, "total")]

    for method in plan["methods"]:
        here, pass_here = f"here, {len(plan['users'])} users", f"{method['users_per_step']} x {method['micro_batch']}"
        table.add_row(method["method"], here, pass_here, *cells(method["machine"]))
        table.add_row("", "a device of one user", f"1 x {method['micro_batch']}", *cells(method["own_device"]))
    return table


def _chosen(memory: ChoicesRecord) -> ChoiceRecord | None:
    """Return the first settings that fit; None if none do."""
    return next((choice for choice in memory["choices"] if choice["needed_bytes"] <= memory["limit_bytes"]), None)


def _choices_table(memory: ChoicesRecord) -> Table:
    """Return the table of the settings that ``runtime.memory`` may choose, with the first that fits marked."""
    table = _captioned_table(
        f"runtime.memory: {_megabytes_number(memory['limit_bytes'])} MB",
        "time of a step relative to full passes; quantised bases are other models; * chosen",
    )
    _add_columns(table, "settings", "memory MB", "time", left=1)
    chosen = _chosen(memory)
    for choice in memory["choices"]:
        mark = " *" if choice is chosen else ""
        needed, slowdown = _megabytes_number(choice["needed_bytes"]), f"{choice['slowdown']:.1f}"
        table.add_row(choice["settings"] + mark, needed, slowdown)
    return table


def _store_lines(plan: PlanRecord) -> Iterator[str]:
    """Yield the bytes of users on disk."""
    for method in plan["methods"]:
        if method["store_bytes"]:
            yield f"{method['method']}: users on disk take {megabytes(method['store_bytes'])} there at most\n"


def _paper_tables(plan: PlanRecord) -> Iterator[Table | str]:
    """Yield a table that compares costs with Table 3 of the CoMiGS paper, and lines that say why they differ.

    Each row is one column of Table 3, for example the upload of a round, and shows how much more CoMiGS-1G1S costs than
    FedAvg: the paper's figure, the paper's way of counting applied to this base ("theirs"; empty if the paper does not
    count it), and the difference that comingle counts ("true"). The last two are also given as fractions.
    """
    columns = plan["comigs_1g1s_minus_fedavg"]
    table = _captioned_table(
        "CoMiGS-1G1S against FedAvg: Table 3 of the paper (GPT2-124M), and this base with these adapters"
    )
    _add_columns(table, "for one user", "the paper", "counted its way", "what is true here", left=1)
    for column in columns:
        show = _scaled_flops if column["unit"] == "FLOPs" else _precise_megabytes
        value, share = column["theirs"], column["theirs_share"]
        theirs = "" if value is None or share is None else _difference_text(value, share, show)
        table.add_row(
            column["what"], column["paper"], theirs, _difference_text(column["true"], column["true_share"], show)
        )
    yield table
    yield "\n".join(f"  {column['what']}: {column['why']}" for column in columns) + "\n"


def _difference_text(value: float, share: float, show: Callable[[float], str]) -> str:
    """Return a difference as text, with its fraction.

    Args:
        value: The difference.
        share: The difference as a fraction of the amount that it is added to.
        show: Formats an amount with its unit.
    """
    return f"{'+' if value >= 0 else '-'}{show(abs(value))} ({share:+.2%})"


def _signed_percent(value: float) -> str:
    return f"{value:+.2%}"


def _mega_flops(flops: float) -> str:
    """Return FLOPs as text in MFLOPs, small ones in kFLOPs."""
    return f"{flops / 1e6:,.1f} MFLOPs" if flops >= 5e4 or not flops else f"{flops / 1e3:,.2f} kFLOPs"


def _tera_flops(flops: float) -> str:
    """Return FLOPs as text in TFLOPs, small ones as by :func:`_mega_flops`."""
    return f"{flops / 1e12:,.3f} TFLOPs" if flops >= 5e8 or not flops else _mega_flops(flops)


def _scaled_flops(flops: float) -> str:
    """Return FLOPs as text in TFLOPs, fewer than 10^11 as by :func:`_mega_flops`."""
    return _mega_flops(flops) if flops < 1e11 else f"{flops / 1e12:,.2f} TFLOPs"


def _bytes_text(count: float) -> str:
    """Return bytes as text in MB, small ones in kB."""
    return megabytes(count) if count >= 1e5 or not count else f"{count / 1e3:,.2f} kB"


def _megabytes_number(count: float) -> str:
    """Return bytes in megabytes without unit, with more digits for small ones."""
    return f"{count / 1e6:,.1f}" if count >= 1e6 or not count else f"{count / 1e6:.3f}"


def _precise_megabytes(count: float) -> str:
    """Return bytes as text in MB with three digits."""
    return f"{count / 1e6:,.3f} MB"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


_TIME_PARTS = ("compute", "server", "network", "disk")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def render_times(times: TimesRecord) -> Iterator[Table | str]:
    """Yield a heading, for each method the table of times and the measurements behind it, and notes on assumptions."""
    yield _times_head(times)
    for method in times["methods"]:
        yield _times_table(method, priced=times["price"] is not None)
        yield f"  {_measurements_line(method['parts'])}\n"
    yield from _times_notes(times)


def _times_head(times: TimesRecord) -> str:
    """Return the line above the tables of times: machines, their price and the link between them."""
    machines, processes = times["machines"], times["processes"]
    has_several = machines > 1
    equipment = f"{processes} GPUs" if times["gpus"] else f"{processes} processes on {times['cores']} cores"
    each = " each" if has_several else ""
    price = "" if times["price"] is None else f", {times['price']:g} an hour{each}"
    link = f"; {times['link'] / 1e9:g} GB/s and {seconds(times['latency'])} between them" if has_several else ""
    return f"Time on {machines} machine{'s' if has_several else ''} with {equipment}{each}{price}{link}\n"


def _times_table(method: MethodTimeRecord, *, priced: bool) -> Table:
    """Return the table of a method's times, one row for each size of the population.

    Columns: users, participants of a round, the seconds of a round by part and in all, the time of the run, its price
    if ``priced``, the part that takes longest ("binds"), and the bytes of the users' tensors on one machine.

    Args:
        method: Name of the method, and a row of times for each size of the population.
        priced: Whether a machine's price is known.
    """
    table = Table(title=f"{method['method']}: seconds of a round", title_justify="left", box=None)
    names = [
        "users",
        "in a round",
        *_TIME_PARTS,
        "round",
        "run",
        *(["money"] if priced else []),
        "binds",
        "users' bytes",
    ]
    for name in names:
        table.add_column(name, justify="right")
    for row in method["rows"]:
        parts = (row["compute_seconds"], row["server_seconds"], row["network_seconds"], row["disk_seconds"])
        spent = [seconds(part) for part in parts]
        cost = [f"{row['money']:,.2f}"] if priced else []
        times = [seconds(row["round_seconds"]), seconds(row["run_seconds"])]
        state = f"{row['state_bytes'] / 1e9:,.3g} GB"
        table.add_row(f"{row['users']:,}", f"{row['present']:,}", *spent, *times, *cost, row["binds"], state)
    return table


def _measurements_line(parts: TimePartsRecord) -> str:
    """Return the measurements behind a method's times as one line.

    They are the seconds that one core needs for a user's steps, messages and evaluation, and the disk's speed; with
    several processes also the speed of data between them, and the number of messages of a round whose latency counts
    (``hops``).
    """
    line = (
        f"a user's local steps {seconds(parts['user_seconds'])} of a core, its messages "
        f"{seconds(parts['handling_seconds'])}, its evaluation {seconds(parts['evaluation_seconds'])}; disk "
        f"{parts['disk'] / 1e6:,.0f} MB/s"
    )
    if parts["bus"] is None:  # one process
        return line
    return (
        f"{line}; between processes {parts['bus'] / 1e6:,.0f} MB/s, {parts['hops']:,.0f} small messages a round of "
        f"{seconds(parts['hop_seconds'])}"
    )


def _times_notes(times: TimesRecord) -> Iterator[str]:
    """Yield sentences on what the tables of times assume."""
    step = "The time of local steps was given" if times["step_given"] else "Local steps were measured here"
    yield f"{step}; a process is assumed to speed up linearly with its cores. Start-up is not included."
    yield "Users' bytes: their tensors and moments on each machine, in memory or with runtime.store: disk there."


def seconds(value: float) -> str:
    """Return a duration as text, in the largest unit (days to microseconds) that makes it 1 or more."""
    for unit_seconds, unit in _UNITS:
        if value >= unit_seconds:
            return f"{value / unit_seconds:,.3g} {unit}"
    return f"{value * 1e6:,.3g} us" if value else "0"
