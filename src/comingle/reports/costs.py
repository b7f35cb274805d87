"""Tables of ``comingle cost``. MB are 10^6 bytes, GB 10^9."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from rich.text import Text

from comingle.config.settings import protects_examples
from comingle.reports.formatting import Table
from comingle.reports.tables import megabytes
from comingle.utils.terminal import literal_text, printable


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
    """Yield the tables and lines of ``comingle cost``: parameters and bytes, compute, memory, privacy, and so on.

    A plan with the methods fedavg and comigs-1g1s ends with a comparison with Table 3 of the CoMiGS paper.
    """
    yield _plan_heading(plan)
    for table in (_parameters_table(plan), _compute_table(plan), _memory_table(plan)):
        yield table
        yield ""
    if "memory" in plan:  # the recipe sets runtime.memory
        yield _memory_choices_table(plan["memory"])
        yield ""
    yield from _disk_lines(plan)
    has_privacy = any("privacy" in method for method in plan["methods"])
    if has_privacy:
        yield from _privacy_lines(plan)
        yield ""
    if plan["comigs_1g1s_minus_fedavg"]:
        yield from _paper_tables(plan)


def memory_verdicts(plan: PlanRecord) -> Iterator[tuple[str, bool]]:
    """Yield for each method a line on whether it fits into the memory of this machine, and the answer as a boolean.

    If the recipe sets ``runtime.memory``, yield a single line instead, on whether some settings fit within its limit.
    """
    if "memory" in plan:
        limit = f"{_megabytes_number(plan['memory']['limit_bytes'])} MB"
        chosen = _chosen_settings(plan["memory"])
        if chosen is None:
            yield f"runtime.memory {limit}: none of the settings fits", False
        else:
            yield f"runtime.memory {limit}: {chosen['settings']}", True
        return
    for method in plan["methods"]:
        needed, free = _gigabytes(method["machine"]["total_bytes"]), _gigabytes(plan["free_bytes"])
        needs = f"needs {needed}, {free} free on {plan['device']}"
        if method["fits"]:
            yield f"{method['method']}: fits: {needs}", True
            continue
        advice = method["advice"]
        if not advice.startswith("no "):  # such as "no smaller pass fits"
            advice = f"try {advice}"
        yield f"{method['method']}: does not fit: {needs}; {advice}", False


def _privacy_lines(plan: PlanRecord) -> Iterator[str]:
    """Yield a heading, and for each private method a line with the privacy budget that its run would spend.

    A release is one publication with noise: a local step if the mechanism protects examples, else an exchange (the
    uploads and the aggregation at the end of a round).
    """
    yield f"Privacy: bound on what the run reveals about any {_privacy_unit(plan)}"
    for method in plan["methods"]:
        privacy = method.get("privacy")
        if privacy is None:
            continue
        releases = str(privacy["releases"])
        if privacy["releases"] != privacy["planned_releases"]:  # the budget is spent before the last round
            releases += f" of {privacy['planned_releases']}"
        releases += " steps" if protects_examples(privacy["mechanism"]) else " exchanges"
        yield (
            f"{method['method']}: epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g}, "
            f"{privacy['mechanism']} noise of {privacy['noise_multiplier']:.4g} times the clip norm "
            f"({privacy['clip_norm']}), {releases}, by {privacy['accountant'].upper()}"
        )


def _privacy_unit(plan: PlanRecord) -> str:
    """Return "example" if all private methods protect single examples, else "user"."""
    mechanisms = {method["privacy"]["mechanism"] for method in plan["methods"] if "privacy" in method}
    if mechanisms and all(protects_examples(mechanism) for mechanism in mechanisms):
        return "example"
    return "user"


def _plan_heading(plan: PlanRecord) -> Text:
    """Return the text above the tables: base, dtype, device, users, and the work of a run."""
    names = ", ".join(plan["users"][:8])
    if len(plan["users"]) > 8:
        names += " ..."
    if plan["unit"] == "token":
        num_parameters = f"{plan['base_parameters'] / 1e6:,.1f}M"
        work = f"{plan['local_steps']} steps with {plan['batch_size']} x {plan['context']} tokens"
        note_on_work = "No weights were loaded and no model was trained."
    else:
        num_parameters = f"{plan['base_parameters']:,}"
        work = f"up to {plan['local_steps']} steps with {plan['batch_size']} samples"
        note_on_work = "No model was trained."
    rest = (
        f", {num_parameters} parameters, {plan['dtype']} on {plan['device']}; {len(plan['users'])} users: {names}\n"
        f"{plan['rounds']} rounds of {work} for each user. {note_on_work} MB = 10^6 bytes.\n"
    )
    if plan["note"]:
        rest += f"{plan['note']}\n"
    return Text.assemble(literal_text(plan["base"], "bold"), printable(rest, keep="\n"))


def _captioned_table(title: str, caption: str = "") -> Table:
    """Return an empty table with a title above and a caption below."""
    return Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=None)


def _add_columns(table: Table, *names: str, num_left: int = 2) -> None:
    """Add columns to a table; the first ``num_left`` ones are left-aligned and do not wrap."""
    for i, name in enumerate(names):
        is_left = i < num_left
        table.add_column(name, justify="left" if is_left else "right", no_wrap=is_left)


def _user_rows(plan: PlanRecord) -> Iterator[tuple[str, str, UserCostRecord]]:
    """Yield a row for each method and group of users with equal costs.

    Yields:
        Method, users and costs of one of the users: ``("fedavg", "ann, bob", {...})``, ``("", "cem", {...})``. Only the
        first row of a method has its name; "each" stands for all users.
    """
    for method in plan["methods"]:
        groups = method["users"]
        for number, group in enumerate(groups):
            is_first = number == 0
            method_name = method["method"] if is_first else ""
            has_all_users = len(groups) == 1 and len(group["names"]) > 1
            user_names = "each" if has_all_users else ", ".join(group["names"])
            yield method_name, user_names, group


def _parameters_table(plan: PlanRecord) -> Table:
    """Return the table of trained parameters by role, bytes per exchange, and number of exchanges.

    An exchange is an upload and the aggregation at the end of a round; some methods have none in some rounds.
    """
    roles: dict[str, None] = {}  # each once, in order
    for _, _, user in _user_rows(plan):
        roles.update(dict.fromkeys(user["parameters"]))
    table = _captioned_table(
        "Trained parameters of one user, and bytes it sends and receives per exchange",
        "Tensors travel as float32; an exchange is an upload and the aggregation at the end of a round.\n"
        "Upload / round: mean over all rounds, with or without an exchange, as in comingle compare.",
    )
    _add_columns(table, "method", "user", *roles, "trained", "upload", "download", "exchanges", "upload / round")
    exchanges_by_method = {method["method"]: str(method["exchanges"]) for method in plan["methods"]}
    for method_name, user_names, user in _user_rows(plan):
        table.add_row(
            method_name,
            literal_text(user_names),
            *(f"{user['parameters'].get(role, 0):,}" for role in roles),
            f"{user['trainable_parameters']:,}",
            _bytes_text(user["upload_bytes"]),
            _bytes_text(user["download_bytes"]),
            exchanges_by_method.get(method_name, ""),  # only in the first row of a method
            _bytes_text(user["upload_bytes_per_user_round"]),
        )
    return table


def _compute_table(plan: PlanRecord) -> Table:
    """Return the table of FLOPs of each user's forward pass and training, and the overhead over the base."""
    unit = plan["unit"]
    is_text = unit == "token"
    rows = list(_user_rows(plan))
    has_experts = any(user["experts"] for _, _, user in rows)
    all_have_experts = all(user["experts"] for _, _, user in rows)
    operations = "Matrix products" if is_text else "Matrix products and convolutions"
    # Users without experts have a client-level mixture or a net, which may make several passes in a step. Their
    # overhead is over one pass of the base.
    exception_of_mixtures = "" if all_have_experts else "; of mixtures and nets, in one pass a step"
    caption = (
        f"{operations}, 2 FLOPs for a multiply-add, padding and evaluation left out. Overhead is over the base in "
        f"the same passes{exception_of_mixtures}."
    )
    if has_experts:
        caption += "\nNaive: a whole MLP per expert, instead of one product with base weights for all experts."
    base = "frozen base" if is_text else "net"
    base_flops = _mega_flops(plan[f"base_forward_flops_per_{unit}"])
    table = _captioned_table(f"Compute of one user (the {base} alone: {base_flops} a {unit} forward)", caption)
    overheads = ("overhead", "naive") if has_experts else ("overhead",)
    headings = (f"forward / {unit}", *overheads, f"training / {unit}", "training / round", *overheads)
    _add_columns(table, "method", "user", *headings)
    for method_name, user_names, user in rows:
        forward, training = user[f"forward_flops_per_{unit}"], user[f"training_flops_per_{unit}"]
        whole_round = user["training_flops_per_round"]
        table.add_row(
            method_name,
            literal_text(user_names),
            _mega_flops(forward["total"]),
            *_overhead_cells(user, forward, has_experts),
            _mega_flops(training["total"]),
            _tera_flops(whole_round["total"]),
            *_overhead_cells(user, whole_round, has_experts),
        )
    return table


def _overhead_cells(user: UserCostRecord, flops: FlopsRecord, has_naive_column: bool) -> list[str]:
    """Return the cells of a user's overhead: ``["+3.20%"]``, or with the naive one ``["+3.20%", "+98.00%"]``.

    Args:
        user: Costs of the user.
        flops: FLOPs of a pass or a round of the user.
        has_naive_column: Whether the table has the column "naive".
    """
    overhead = _signed_percent(flops["overhead"])
    if not has_naive_column:
        return [overhead]
    naive_overhead = _signed_percent(flops["naive_overhead"]) if user["experts"] else "–"
    return [overhead, naive_overhead]


_NOTE_ON_COMPILATION = ", without compilation (runtime.compile: false); compiled code needs less"


def _memory_table(plan: PlanRecord) -> Table:
    """Return the table of peak memory by purpose: for each method on this machine, and on a device of one user."""
    is_text = plan["unit"] == "token"
    key_by_heading = {
        "process": "process_bytes",
        **({"weights": "weights_bytes"} if is_text else {"data": "data_bytes"}),
        "adapters" if is_text else "nets": "adapters_bytes",
        "moments": "moments_bytes",
        "gradients": "gradients_bytes",
        "activations": "activations_bytes",
        "messages": "exchange_bytes",
        "allocator": "allocator_bytes",
        "total": "total_bytes",
    }
    table = _captioned_table(
        "Peak memory in MB",
        "Process: Python and its libraries, measured on this machine; unknown for a GPU.\n"
        f"Activations: memory of one pass without gradients{_NOTE_ON_COMPILATION if is_text else ''}."
        "\nMessages: uploads of a round while they are made, which is not during a pass; the larger one counts."
        "\nAllocator: estimate of its fragmentation on a CPU, not a bound; unknown for a GPU.",
    )
    pass_heading = f"users x {'sequences' if is_text else 'samples'} in a pass"
    _add_columns(table, "method", "where", pass_heading, *key_by_heading)

    def memory_cells(memory: Mapping[str, int]) -> list[str]:
        """Return the cells of the columns of megabytes."""
        return [_megabytes_number(memory[key]) for key in key_by_heading.values()]

    for method in plan["methods"]:
        here = f"here, {len(plan['users'])} users"
        pass_here = f"{method['users_per_step']} x {method['micro_batch']}"
        pass_on_device = f"1 x {method['micro_batch']}"
        table.add_row(method["method"], here, pass_here, *memory_cells(method["machine"]))
        table.add_row("", "a device of one user", pass_on_device, *memory_cells(method["own_device"]))
    return table


def _chosen_settings(memory: ChoicesRecord) -> ChoiceRecord | None:
    """Return the settings for ``runtime.memory``: the first choice that fits into the memory limit; None if none does.

    Choices are in order of preference: first settings that change results by rounding at most, then a base in fewer and
    fewer bits; each group fastest first.
    """
    for choice in memory["choices"]:
        if choice["needed_bytes"] <= memory["limit_bytes"]:
            return choice
    return None


def _memory_choices_table(memory: ChoicesRecord) -> Table:
    """Return the table of the settings that ``runtime.memory`` may choose; "*" marks the chosen ones."""
    table = _captioned_table(
        f"runtime.memory: {_megabytes_number(memory['limit_bytes'])} MB",
        "time of a step relative to full passes; quantised bases are other models; * chosen",
    )
    _add_columns(table, "settings", "memory MB", "time", num_left=1)
    chosen = _chosen_settings(memory)
    for choice in memory["choices"]:
        settings = choice["settings"]
        if choice is chosen:
            settings += " *"
        table.add_row(settings, _megabytes_number(choice["needed_bytes"]), f"{choice['slowdown']:.1f}")
    return table


def _disk_lines(plan: PlanRecord) -> Iterator[str]:
    """Yield a line on the disk space of each method that stores its users on disk."""
    for method in plan["methods"]:
        if method["store_bytes"]:  # the recipe stores users on disk
            yield f"{method['method']}: users on disk take {megabytes(method['store_bytes'])} there at most\n"


def _paper_tables(plan: PlanRecord) -> Iterator[Table | str]:
    """Yield how much more CoMiGS-1G1S costs than FedAvg, beside Table 3 of the CoMiGS paper, and why they differ.

    Each row is a quantity of Table 3, such as the upload of a round, with three differences: that of the paper, that of
    this base counted as in the paper ("theirs"), and that of this base as comingle counts it ("true").
    """
    table = _captioned_table(
        "CoMiGS-1G1S against FedAvg: Table 3 of the paper (GPT2-124M), and this base with these adapters"
    )
    _add_columns(table, "for one user", "the paper", "counted its way", "what is true here", num_left=1)
    reasons = []
    for difference in plan["comigs_1g1s_minus_fedavg"]:
        format_amount = _scaled_flops if difference["unit"] == "FLOPs" else _precise_megabytes
        theirs = ""
        if difference["theirs"] is not None and difference["theirs_share"] is not None:  # the paper counts it
            theirs = _difference_text(difference["theirs"], difference["theirs_share"], format_amount)
        true = _difference_text(difference["true"], difference["true_share"], format_amount)
        table.add_row(difference["what"], difference["paper"], theirs, true)
        reasons.append(f"  {difference['what']}: {difference['why']}")
    yield table
    yield "\n".join(reasons) + "\n"


def _difference_text(difference: float, fraction: float, format_amount: Callable[[float], str]) -> str:
    """Return an absolute and a relative difference as text, such as "+1.180 MB (+33.33%)".

    Args:
        difference: The absolute difference.
        fraction: The relative difference, such as 0.3333.
        format_amount: Formats an amount with its unit.
    """
    sign = "+" if difference >= 0 else "-"
    return f"{sign}{format_amount(abs(difference))} ({fraction:+.2%})"


def _signed_percent(value: float) -> str:
    return f"{value:+.2%}"


def _mega_flops(flops: float) -> str:
    """Return FLOPs as text in MFLOPs, or in kFLOPs if less than 50,000, which would be printed as 0.0 MFLOPs."""
    return f"{flops / 1e6:,.1f} MFLOPs" if flops >= 5e4 or not flops else f"{flops / 1e3:,.2f} kFLOPs"


def _tera_flops(flops: float) -> str:
    """Return FLOPs as text in TFLOPs, or by :func:`_mega_flops` if so few that "0.000 TFLOPs" would be printed."""
    return f"{flops / 1e12:,.3f} TFLOPs" if flops >= 5e8 or not flops else _mega_flops(flops)


def _scaled_flops(flops: float) -> str:
    """Return FLOPs as text in TFLOPs, fewer than 10^11 as by :func:`_mega_flops`."""
    return _mega_flops(flops) if flops < 1e11 else f"{flops / 1e12:,.2f} TFLOPs"


def _bytes_text(num_bytes: float) -> str:
    """Return bytes as text in MB, or in kB if fewer than 100,000."""
    return megabytes(num_bytes) if num_bytes >= 1e5 or not num_bytes else f"{num_bytes / 1e3:,.2f} kB"


def _megabytes_number(num_bytes: float) -> str:
    """Return bytes in megabytes without unit: one decimal, or three below one megabyte."""
    return f"{num_bytes / 1e6:,.1f}" if num_bytes >= 1e6 or not num_bytes else f"{num_bytes / 1e6:.3f}"


def _precise_megabytes(num_bytes: float) -> str:
    """Return bytes as text in MB with three decimals."""
    return f"{num_bytes / 1e6:,.3f} MB"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


_TIME_PARTS = ("compute", "server", "network", "disk")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def render_times(times: TimesRecord) -> Iterator[Table | str]:
    """Yield a heading, for each method the table of times and the measurements behind it, and notes on assumptions."""
    yield _times_heading(times)
    for method in times["methods"]:
        yield _times_table(method, has_price=times["price"] is not None)
        yield f"  {_measurements_line(method['parts'])}\n"
    yield from _times_notes(times)


def _times_heading(times: TimesRecord) -> str:
    """Return the line above the tables of times, such as "Time on 1 machine with 4 processes on 8 cores"."""
    hardware = f"{times['processes']} processes on {times['cores']} cores"
    if times["gpus"]:
        hardware = f"{times['processes']} GPUs"
    price = "" if times["price"] is None else f", {times['price']:g} an hour"
    if times["machines"] == 1:
        return f"Time on 1 machine with {hardware}{price}\n"
    if price:
        price += " each"
    link = f"{times['link'] / 1e9:g} GB/s and {seconds(times['latency'])} between them"
    return f"Time on {times['machines']} machines with {hardware} each{price}; {link}\n"


def _times_table(method: MethodTimeRecord, *, has_price: bool) -> Table:
    """Return the table of a method's times, one row for each size of the population.

    Args:
        method: Name of the method, and a row of times for each size of the population; ``binds`` is the slowest part,
            such as "compute".
        has_price: Whether a machine's price is known, so that there is a column "money".
    """
    table = Table(title=f"{method['method']}: seconds of a round", title_justify="left", box=None)
    headings = ["users", "in a round", *_TIME_PARTS, "round", "run"]
    if has_price:
        headings.append("money")
    headings += ["binds", "users' bytes"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in method["rows"]:
        cells = [
            f"{row['users']:,}",
            f"{row['present']:,}",
            seconds(row["compute_seconds"]),
            seconds(row["server_seconds"]),
            seconds(row["network_seconds"]),
            seconds(row["disk_seconds"]),
            seconds(row["round_seconds"]),
            seconds(row["run_seconds"]),
        ]
        if has_price:
            cells.append(f"{row['money']:,.2f}")
        cells += [row["binds"], f"{row['state_bytes'] / 1e9:,.3g} GB"]
        table.add_row(*cells)
    return table


def _measurements_line(measured: TimePartsRecord) -> str:
    """Return the measurements behind a method's times as one line.

    Args:
        measured: The measurements, as in :class:`TimePartsRecord`; ``bus`` is the speed of transfers between processes,
            and ``hops`` the number of small messages that a round waits for, one after another.
    """
    line = (
        f"a user's local steps {seconds(measured['user_seconds'])} of a core, its messages "
        f"{seconds(measured['handling_seconds'])}, its evaluation {seconds(measured['evaluation_seconds'])}; disk "
        f"{measured['disk'] / 1e6:,.0f} MB/s"
    )
    if measured["bus"] is None:  # one process
        return line
    return (
        f"{line}; between processes {measured['bus'] / 1e6:,.0f} MB/s, {measured['hops']:,.0f} small messages a round "
        f"of {seconds(measured['hop_seconds'])}"
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
    if value == 0:
        return "0"
    return f"{value * 1e6:,.3g} us"
