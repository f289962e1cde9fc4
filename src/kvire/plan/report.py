"""The whole plan as one record: what `kvire plan --json` prints, and what its tables show."""

import json
from dataclasses import asdict
from math import isinf
from typing import Any

from kvire.core.memory import format_size
from kvire.plan.hardware import break_even_bytes_per_s, hardware_table, machine
from kvire.plan.plan import Plan, device_tokens, ttfts
from kvire.plan.prices import bill, own_usd_per_million, price_table, years_until_worn
from kvire.plan.shape import Shape, Storage
from kvire.plan.sizing import CONTEXTS, MemoryUse, growth, longest_context, parity_tokens, parity_users, users
from kvire.plan.verdict import Demand, Offer, decide, offers, stored_bytes_per_token

SCHEMA = "kvire.plan/1"
LEAST_YEARS = 3.0  # that a disk should last: over so long the tiers' prices are written off


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as plain values for JSON; sections without what they need are None."""
    return {
        "schema": SCHEMA,
        "model": _model(plan),
        "kv": _kv(plan),
        "parity": _parity(plan),
        "capacity": _capacity(plan),
        "growth": [asdict(g) | {"factor": g.factor} for g in growth(plan.shape, plan.storage, plan.use)],
        "machine": None if plan.who is None else asdict(plan.who),
        "break_even": break_even(plan),
        "ttft": [asdict(t) for t in ttfts(plan)],
        "verdict": _verdict(plan),
        "money": _money(plan),
        "notes": plan_notes(plan),
    }


def as_text(record: dict[str, Any]) -> str:
    """The record as JSON, which has no infinity: null stands for what has no limit."""
    return json.dumps(_finite(record), ensure_ascii=False, indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and isinf(value) else value


def plan_notes(plan: Plan) -> list[str]:
    """What a reader must know before relying on the figures."""
    found = list(plan.shape.notes)
    if not plan.verified:
        found.append(f"the model card is not verified: {plan.source}")
    if not plan.shape.weights.counted:
        found.append("parameters are counted by formula from the config, not from the weight files")
    if draft := plan.shape.draft:
        size = draft.elements_per_token
        more = "" if size == 0 else f"; an engine that uses them keeps {size:,} more numbers a token"
        found.append(f"{draft.layers} draft layer(s) ({draft.field}) are not counted{more}")
    if plan.shape.states:
        found.append(
            "what a store keeps has one recurrent state for each sequence; whether an engine stores more of them, or "
            "any, is not known (Kvire's engine refuses such models)"
        )
    if plan.storage.tp > 1:
        found.append(f"KV is the sum over {plan.storage.tp} ranks: what does not divide among them is kept by each")
    if (limit := plan.shape.context_tokens) is not None and plan.use.context > limit:
        found.append(f"the model was made for {limit:,} tokens, fewer than the {plan.use.context:,} planned for")
    if plan.who is not None:
        found.append(f"speeds are {'' if plan.who.measured_on else 'estimates: '}{plan.who.source}")
    return found


def break_even(plan: Plan) -> list[dict[str, Any]]:
    """Of the machine, or of every device in the table: prefill speed, and the rate at which loading
    is as fast.
    """
    whose = [plan.who] if plan.who else [machine(row["name"]) for row in hardware_table()["devices"]]
    tokens = plan.use.context
    size = plan.shape.sequence_bytes(tokens, plan.storage)
    return [
        {
            "machine": who.name,
            "title": who.title,
            "context_tokens": tokens,
            "prefill_tokens_per_s": who.prefill_tokens_per_s(plan.shape, tokens),
            "bytes_per_s": break_even_bytes_per_s(plan.shape, plan.storage, who, tokens),
            "faster_tiers": [t.name for t in plan.tiers if t.load_s(size) < who.prefill_s(plan.shape, 0, tokens)],
        }
        for who in whose
    ]


def _model(plan: Plan) -> dict[str, Any]:
    weights = plan.shape.weights
    return {
        "title": plan.title,
        "model_type": plan.shape.model_type,
        "source": plan.source,
        "verified": plan.verified,
        "layers": plan.shape.layers,
        "context_tokens": plan.shape.context_tokens,
        "parameters": weights.total,
        "active_parameters": weights.active,
        "parameters_counted": weights.counted,
        "weights_dtype": plan.weights_dtype or weights.dtypes,
        "weights_bytes": plan.weights_bytes,
    }


def _kv(plan: Plan) -> dict[str, Any]:
    shape, storage, context = plan.shape, plan.storage, plan.use.context
    return {
        "dtype": storage.dtype,
        "block_tokens": storage.block_tokens,
        "tp": storage.tp,
        "layers": layer_rows(shape, storage),
        "growing_bytes_per_token": shape.growing_bytes(storage),
        "window_bytes_per_sequence": shape.window_bytes(storage),
        "state_bytes_per_sequence": shape.state_bytes(storage),
        "stored_bytes_per_token": shape.stored_bytes(storage),
        "context_tokens": context,
        "sequence_bytes": shape.sequence_bytes(context, storage),
        "all_users_bytes": plan.use.users * shape.sequence_bytes(context, storage),
        "without_window_groups": {
            "sequence_bytes": shape.whole_bytes(context, storage),
            "all_users_bytes": plan.use.users * shape.whole_bytes(context, storage),
        },
    }


def layer_rows(shape: Shape, storage: Storage) -> list[dict[str, Any]]:
    """One row for each kind of layer: its bytes per token, or per sequence."""
    flat = Storage(storage.dtype, 1, storage.tp, storage.index_dtype)
    rows = []
    for group in shape.groups:
        only = Shape(shape.model_type, 0, (group,), (0,), (None,), shape.weights)
        fixed = group.window is not None
        rows.append({
            "kind": str(group.kind), "layers": len(group.layers), "kv_heads": group.kv_heads,
            "key_width": group.key_width, "value_width": group.value_width, "window_tokens": group.window,
            "bytes_per_token": 0 if fixed else only.growing_bytes(flat),
            "bytes_per_sequence": only.window_bytes(flat) if fixed else 0,
        })  # fmt: skip
    rows += [
        {
            "kind": "state", "layers": len(state.layers), "bytes_per_token": 0,
            "bytes_per_sequence": state.state_bytes + state.conv_bytes, "state_bytes": state.state_bytes,
            "conv_bytes": state.conv_bytes,
        }
        for state in shape.states
    ]  # fmt: skip
    if shape.index is not None:
        each = shape.index.bytes_per_token(storage.index_dtype or storage.dtype)
        rows.append({
            "kind": "index", "layers": len(shape.index.layers), "key_width": shape.index.width,
            "bytes_per_token": storage.tp * each, "bytes_per_sequence": 0,
        })  # fmt: skip
    return rows


def _parity(plan: Plan) -> dict[str, Any]:
    tokens, limit = parity_tokens(plan.shape, plan.storage, plan.weights_bytes), plan.shape.context_tokens
    return {
        "tokens_of_one_sequence": tokens,
        "within_context": None if limit is None or tokens is None else tokens <= limit,
        "users_at_context": parity_users(plan.shape, plan.storage, plan.weights_bytes, plan.use.context),
    }


def _capacity(plan: Plan) -> dict[str, Any] | None:
    if (memory := plan.memory) is None:
        return None
    limit = plan.shape.context_tokens or CONTEXTS[-1]
    contexts = sorted({plan.use.context, *(c for c in CONTEXTS if c <= limit)})
    return {
        **asdict(memory),
        "kv_bytes": memory.kv_bytes,
        "longest_context_of_one": longest_context(plan.shape, plan.storage, memory),
        "longest_context_of_all_users": longest_context(plan.shape, plan.storage, memory, plan.use.users),
        "users": [_capacity_row(plan, memory, context) for context in contexts],
    }


def _capacity_row(plan: Plan, memory: MemoryUse, context: int) -> dict[str, Any]:
    count = users(plan.shape, plan.storage, memory, context)
    row: dict[str, Any] = {
        "context_tokens": context,
        "sequence_bytes": plan.shape.sequence_bytes(context, plan.storage),
        "users": count,
        "least_step_s": None,
    }
    if plan.who is not None and plan.who.memory_bytes_per_s and count:
        row["least_step_s"] = plan.who.decode_s(plan.shape, plan.storage, context, count, plan.weights_dtype)
    return row


def _verdict(plan: Plan) -> dict[str, Any] | None:
    if plan.who is None or plan.curve is None:
        return None
    demand = Demand(plan.curve, plan.prompt, device_tokens(plan), plan.money.requests_per_hour, plan.money.usd_per_hour)
    args = (plan.shape, plan.storage, plan.who, plan.tiers, demand)
    verdict = decide(*args)
    doubt = _too_small(plan) or verdict.doubt or _worn_out(plan, verdict.buy)
    return {
        "policy": plan.curve.policy,
        "assumed_reuse": plan.curve.assumed,
        "ideal_hit_rate": plan.curve.ideal,
        "device_tokens": demand.device_tokens,
        "device_hit_rate": plan.curve.hit_rate(demand.device_tokens),
        "offers": [_offer(offer) for offer in offers(*args)],
        "buy": None if verdict.buy is None else _offer(verdict.buy),
        "sentence": _sentence(verdict.buy, verdict.reason),
        "certain": not doubt,
        "doubt": doubt,
    }


def _too_small(plan: Plan) -> str:
    """Empty where the weights fit, or where it is not known."""
    if plan.memory is None or plan.memory.kv_bytes:
        return ""
    return "the weights do not fit into the machine's memory, and all times are as if they did"


def _worn_out(plan: Plan, buy: Offer | None) -> str:
    """What stands against a disk that all of this is written to; empty if nothing does, or it is
    not known.
    """
    wear = _wear(plan)
    if buy is None or buy.tier.state != "D" or wear is None or wear["years"] is None or wear["years"] >= LEAST_YEARS:
        return ""
    return f"written everything, the disk is worn out after {wear['years']:.2g} years: keep only what comes back"


def _sentence(buy: Offer | None, reason: str) -> str:
    if buy is None:
        return f"Buy nothing: {reason}."
    return f"Buy {format_size(buy.size_bytes)} of {buy.tier.title}: {reason}."


def _offer(offer: Offer) -> dict[str, Any]:
    return {
        "tier": offer.tier.name,
        "title": offer.tier.title,
        "size_bytes": offer.size_bytes,
        "tokens": offer.tokens,
        "hit_rate": offer.hit_rate,
        "added_hit_rate": offer.added_hit_rate,
        "ttft_s": offer.ttft_s,
        "without_s": offer.without_s,
        "saving": offer.saving,
        "usd_per_month": offer.usd_per_month,
        "saved_usd_per_month": offer.saved_usd_per_month,
    }


def _money(plan: Plan) -> dict[str, Any]:
    table, shared = price_table(), plan.prompt.tokens - plan.prompt.new_tokens
    bills = [bill(p, plan.prompt.tokens, shared, plan.money.output_tokens) for p in plan.money.prices]
    return {
        "prices_date": table.date,
        "about": table.about,
        "prompt_tokens": plan.prompt.tokens,
        "shared_tokens": shared,
        "output_tokens": plan.money.output_tokens,
        "hosted": [
            {
                "provider": b.price.provider, "model": b.price.model, "plain_usd": b.plain_usd,
                "first_usd": b.first_usd, "cached_usd": b.cached_usd, "cached_tokens": b.cached_tokens,
                "saving": b.saving, "hits_until_paid": b.hits_until_paid, "ttl_s": b.price.ttl_s,
                "read": b.price.read, "source": b.price.source, "note": b.price.note,
            }
            for b in bills
        ],
        "own": _own(plan),
        "disk_wear": _wear(plan),
    }  # fmt: skip


def _own(plan: Plan) -> list[dict[str, Any]] | None:
    """Own hardware, USD per million prompt tokens: computed, and found on the device or in a tier;
    one at a time.
    """
    if plan.who is None or plan.money.usd_per_hour is None:
        return None
    price, tokens = plan.money.usd_per_hour, plan.prompt.tokens
    return [
        {"state": t.state, "tier": t.tier, "usd_per_million": own_usd_per_million(price, t.seconds, tokens)}
        for t in ttfts(plan)
    ]


def _wear(plan: Plan) -> dict[str, Any] | None:
    if plan.money.requests_per_hour is None:
        return None
    fresh = plan.prompt.new_tokens + plan.money.output_tokens
    if plan.curve is not None:
        fresh = round(plan.prompt.tokens * (1 - plan.curve.ideal)) + plan.money.output_tokens
    each = stored_bytes_per_token(plan.shape, plan.storage, plan.use.context)
    per_day = 24 * plan.money.requests_per_hour * fresh * each
    endurance = plan.money.endurance_bytes
    years = None if endurance is None else years_until_worn(per_day, endurance)
    return {"bytes_per_day": per_day, "endurance_bytes": endurance, "years": years}
