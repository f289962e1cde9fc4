"""A plan as tables for people."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvire.cli.display import seconds
from kvire.core.memory import format_size
from kvire.plan.check import WITHIN, Checked
from kvire.plan.verdict import LEAST_SAVING


def print_plan(plan: dict[str, Any], out: Console) -> None:
    """Print the record that plan/report.py builds, section by section."""
    for section in (_model, _layers, _growth, _capacity, _break_even, _ttft, _verdict, _money):
        section(plan, out)
    for note in plan["notes"]:
        out.print(f"[dim]- {escape(note)}[/]", soft_wrap=True)


def show_check(rows: list[Checked], out: Console) -> None:
    """Prediction beside measurement."""
    title = "Time to the first token, predicted and measured"
    table = Table("workload", "state", "tokens", "n", "measured", "predicted", "error", title=title)
    for row in rows:
        error = escape(row.why) if row.error is None else f"{row.error:+.0%}{'' if row.within else ' (!)'}"
        predicted = "" if row.predicted_s is None else seconds(row.predicted_s)
        size, count = f"{row.tokens:,}", str(row.samples)
        table.add_row(row.workload, row.state, size, count, seconds(row.measured_s), predicted, error)
    out.print(table)
    told = [row for row in rows if row.within is not None]
    good = sum(bool(row.within) for row in told)
    out.print(f"{good} of {len(told)} predictions are within {WITHIN:.0%}; {len(rows) - len(told)} rows had none")


def _model(plan: dict[str, Any], out: Console) -> None:
    model, kv = plan["model"], plan["kv"]
    total, active = (_figure(model[name] / 1e9) for name in ("parameters", "active_parameters"))
    some = f", {active} B active" if model["active_parameters"] < model["parameters"] else ""
    weights = format_size(model["weights_bytes"])
    out.print(f"[bold]{escape(model['title'])}[/]: {total} B parameters{some}, {weights} of weights", soft_wrap=True)
    fixed = kv["window_bytes_per_sequence"] + kv["state_bytes_per_sequence"]
    more = f" + up to {format_size(fixed)} fixed per sequence" if fixed else ""
    growing, whole = f"{kv['growing_bytes_per_token']:,} bytes per token", format_size(kv["sequence_bytes"])
    at = f"{whole} at {kv['context_tokens']:,} tokens"
    out.print(f"KV in {kv['dtype']}: [bold]{growing}[/]{more}; {at}", soft_wrap=True)
    _allocation(kv, out)
    if kv["window_bytes_per_sequence"]:
        stored = f"{kv['stored_bytes_per_token']:,} bytes per token"
        out.print(f"In a store: {stored}, since it keeps what has left the windows, too", soft_wrap=True)
    _parity(plan, out)


def _allocation(kv: dict[str, Any], out: Console) -> None:
    """The engine of these bytes: engines without windows reserve more."""
    exact, whole = kv["all_users_bytes"], kv["without_window_groups"]["all_users_bytes"]
    if whole > exact:
        out.print(
            f"That is what attention still reads, {format_size(exact)} for all users; an engine without groups for "
            f"windows reserves {format_size(whole)}",
            soft_wrap=True,
        )


def _parity(plan: dict[str, Any], out: Console) -> None:
    parity, context = plan["parity"], plan["kv"]["context_tokens"]
    if (tokens := parity["tokens_of_one_sequence"]) is None:
        out.print("KV of one sequence stops growing and never equals the weights")
        return
    beyond = " (beyond the model's context)" if parity["within_context"] is False else ""
    many = f"{parity['users_at_context']:,} users at {context:,}"
    out.print(f"KV equals the weights at {tokens:,} tokens of one sequence{beyond}, or with {many}", soft_wrap=True)


def _layers(plan: dict[str, Any], out: Console) -> None:
    rows = plan["kv"]["layers"]
    if len(rows) < 2:
        return
    table = Table("layers", "kind", "keeps", "bytes/token", "bytes/sequence", title="What is kept")
    for row in rows:
        token, sequence = f"{row['bytes_per_token']:,}", f"{row['bytes_per_sequence']:,}"
        table.add_row(str(row["layers"]), row["kind"], _keeps(row), token, sequence)
    out.print(table)


def _keeps(row: dict[str, Any]) -> str:
    if "state_bytes" in row:
        return f"{format_size(row['state_bytes'])} state + {format_size(row['conv_bytes'])} convolution"
    if "kv_heads" not in row:
        return f"a key of {row['key_width']}"
    window = f", last {row['window_tokens']:,} tokens" if row["window_tokens"] else ""
    return f"{row['kv_heads']} x ({row['key_width']} + {row['value_width']}){window}"


def _growth(plan: dict[str, Any], out: Console) -> None:
    weights = plan["model"]["weights_bytes"]
    table = Table("direction", "what", "KV", "times", "of weights", title="How KV grows")
    for row in plan["growth"]:
        shared = "" if row["shared_bytes"] is None else f" ({format_size(row['shared_bytes'])} if shared)"
        size, times = format_size(row["to_bytes"]) + shared, _figure(row["factor"])
        table.add_row(row["direction"], row["what"], size, times, _figure(row["to_bytes"] / weights))
    out.print(table)


def _capacity(plan: dict[str, Any], out: Console) -> None:
    if (capacity := plan["capacity"]) is None:
        out.print("[dim]How many users fit: say on what, with --hardware or --memory[/]")
        return
    total, weights, kv = (format_size(capacity[name]) for name in ("total_bytes", "weights_bytes", "kv_bytes"))
    title = f"{total} - {capacity['reserve']:.0%} reserve - {weights} weights = {kv} for KV"
    if not capacity["kv_bytes"]:
        out.print(f"[bold red]The weights do not fit[/]: {title}")
        return
    table = Table("context", "KV each", "users", "least time per step", title=title)
    for row in capacity["users"]:
        step = "" if row["least_step_s"] is None else f"{1e3 * row['least_step_s']:.3g} ms"
        table.add_row(f"{row['context_tokens']:,}", format_size(row["sequence_bytes"]), f"{row['users']:,}", step)
    out.print(table)
    out.print(f"One user has room for {capacity['longest_context_of_one']:,} tokens")


def _break_even(plan: dict[str, Any], out: Console) -> None:
    rows = plan["break_even"]
    title = f"Loading or computing {rows[0]['context_tokens']:,} tokens"
    table = Table("machine", "prefill tok/s", "break-even GB/s", "tiers that load faster", title=title)
    for row in rows:
        speed, rate = _figure(row["prefill_tokens_per_s"]), _figure(row["bytes_per_s"] / 1e9)
        table.add_row(row["title"], speed, rate, ", ".join(row["faster_tiers"]) or "none")
    out.print(table)


def _ttft(plan: dict[str, Any], out: Console) -> None:
    if not plan["ttft"]:
        out.print("[dim]Times, and what to buy: say on what, with --hardware, or measure this machine: --calibrate[/]")
        return
    table = Table("state", "kept in", "TTFT", "between", "how", title="Predicted time to the first token, alone")
    for row in plan["ttft"]:
        between = f"{seconds(row['low_s'])} - {seconds(row['high_s'])}"
        table.add_row(row["state"], row["tier"], seconds(row["seconds"]), between, row["way"])
    out.print(table)


def _verdict(plan: dict[str, Any], out: Console) -> None:
    if (verdict := plan["verdict"]) is None:
        if plan["machine"] is not None:
            out.print("[dim]What to buy: say what is reused, with --hit-curve FILE or --reuse 0.6[/]")
        return
    source = "assumed" if verdict["assumed_reuse"] else verdict["policy"]
    found, ideal = f"{verdict['device_hit_rate']:.1%}", f"{verdict['ideal_hit_rate']:.1%}"
    title = f"Reuse ({source}): the device finds {found}, of at most {ideal}"
    table = Table("tier", "size", "finds more", "TTFT", "saves", "USD/month", title=title)
    for row in _worth_showing(verdict["offers"]):
        price = "not known" if row["usd_per_month"] is None else f"{row['usd_per_month']:,.2f}"
        size, more, saves = format_size(row["size_bytes"]), f"{row['added_hit_rate']:.1%}", f"{row['saving']:.0%}"
        table.add_row(row["tier"], size, more, seconds(row["ttft_s"]), saves, price)
    out.print(table)
    out.print(f"[bold]{verdict['sentence']}[/]", soft_wrap=True)
    certain = "It holds over the range of what machine and tiers may do."
    out.print(certain if verdict["certain"] else f"Uncertain: {verdict['doubt']}.", soft_wrap=True)


def _worth_showing(offers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Useful rows, and the best row of a tier that never helps: no tier is missing."""
    best = {offer["tier"]: offer for offer in sorted(offers, key=lambda offer: float(offer["saving"]))}
    return [offer for offer in offers if offer["saving"] >= LEAST_SAVING or best[offer["tier"]] is offer]


def _money(plan: dict[str, Any], out: Console) -> None:
    money = plan["money"]
    title = (
        f"USD per 1,000 requests of {money['prompt_tokens']:,} + {money['output_tokens']:,} tokens, "
        f"{money['shared_tokens']:,} sent before (prices of {money['prices_date']}, verify before relying)"
    )
    table = Table("hosted model", "not cached", "cached", "saves", "pays after", "kept", title=title)
    for row in money["hosted"]:
        hits = {None: "never", 0: "at once", 1: "1 hit"}.get(row["hits_until_paid"], f"{row['hits_until_paid']} hits")
        plain, cached = f"{1e3 * row['plain_usd']:,.2f}", f"{1e3 * row['cached_usd']:,.2f}"
        table.add_row(row["model"], plain, cached, f"{row['saving']:.0%}", hits, f"{row['ttl_s'] // 60} min")
    out.print(table)
    if money["own"]:
        parts = ", ".join(f"{row['tier']} {_figure(row['usd_per_million'])}" for row in money["own"])
        out.print(f"This machine, USD per million prompt tokens by where they are kept: {parts}", soft_wrap=True)
    if wear := money["disk_wear"]:
        years = "" if wear["years"] is None else f": the disk lasts {_figure(wear['years'])} years"
        out.print(f"Kept on disk, {format_size(wear['bytes_per_day'])} are written a day{years}", soft_wrap=True)


def _figure(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
