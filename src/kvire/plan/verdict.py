"""What to buy, or nothing: the least money that brings most of the time that a cache can save."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvire.core.memory import format_size
from kvire.plan.hardware import Machine, break_even_bytes_per_s
from kvire.plan.hits import HitCurve
from kvire.plan.serve import PromptShape, from_device, from_tier
from kvire.plan.shape import Shape, Storage
from kvire.plan.tiers import PlannedTier

LEAST_SAVING = 0.05  # of the time to the first token: below this, nobody notices and much can go wrong
ENOUGH = 0.75  # of the best option's saving: beyond it, each further second costs many times as much
SIZES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of a tier without a given size, against the curve's end


@dataclass(frozen=True, slots=True)
class Demand:
    """What the cache is for.

    device_tokens: that the device itself has room to keep.
    requests_per_hour, usd_per_hour: of the machine; None where not known, and then money saved is
        not known either.
    """

    curve: HitCurve
    prompt: PromptShape
    device_tokens: int = 0
    requests_per_hour: float | None = None
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """One tier of one size beside the device.

    added_hit_rate: share of prompt tokens that it finds and the device does not.
    ttft_s: mean time to the first token with it, against without_s with the device alone.
    usd_per_month: of the tier; None where not known.
    saved_usd_per_month: the same of machine time not spent.
    """

    tier: PlannedTier
    size_bytes: int
    tokens: int
    hit_rate: float
    added_hit_rate: float
    ttft_s: float
    without_s: float
    break_even_bytes_per_s: float
    usd_per_month: float | None
    saved_usd_per_month: float | None

    @property
    def saving(self) -> float:
        """Share of the time to the first token that it takes away."""
        return 1 - self.ttft_s / self.without_s

    @property
    def worth_usd(self) -> float | None:
        """What it saves beyond its cost, a month; None where either is not known."""
        if self.usd_per_month is None or self.saved_usd_per_month is None:
            return None
        return self.saved_usd_per_month - self.usd_per_month


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to buy, and how sure that is.

    buy: the offer to take; None for nothing.
    reason: one sentence.
    certain: the answer is the same at both ends of what machine and tiers may do; doubt says what
        changes where it is not.
    """

    buy: Offer | None
    reason: str
    certain: bool
    doubt: str = ""


def offers(shape: Shape, storage: Storage, who: Machine, tiers: Sequence[PlannedTier], demand: Demand) -> list[Offer]:
    """Every tier at its size, or at several if it has none, cheapest first; unknown prices last."""
    found = [
        _offer(shape, storage, who, tier, size, demand)
        for tier in tiers
        for size in _sizes(shape, storage, tier, demand)
    ]
    return sorted(found, key=lambda o: (o.usd_per_month is None, o.usd_per_month or 0.0, o.size_bytes))


def decide(shape: Shape, storage: Storage, who: Machine, tiers: Sequence[PlannedTier], demand: Demand) -> Verdict:
    """What to buy, and whether that holds if the machine is faster and tiers slower, or the machine
    slower.
    """
    buy, reason = _pick(offers(shape, storage, who, tiers, demand), demand)
    slow, fast = who.span
    halved = [replace(tier, bytes_per_s=tier.bytes_per_s / 2) for tier in tiers]
    for when, factor, others in (
        (f"if prefill is {fast:g} times as fast and tiers half", fast, halved),
        (f"if prefill reaches only {slow:g} of what is assumed", slow, tiers),
    ):
        other, why = _pick(offers(shape, storage, who.scaled(factor), others, demand), demand)
        if _what(other) != _what(buy):
            instead = f"it is {_what(other)}" if other else f"nothing pays: {why}"
            return Verdict(buy, reason, certain=False, doubt=f"{when}, {instead}")
    return Verdict(buy, reason, certain=True)


def _what(offer: Offer | None) -> str:
    """To buy, in words; empty for nothing."""
    return "" if offer is None else f"{format_size(offer.size_bytes)} of {offer.tier.title}"


def mean_ttft_s(
    shape: Shape, storage: Storage, who: Machine, prompt: PromptShape, share: float, tier: PlannedTier | None
) -> float:
    """Of a prompt of which that share is found again, on the device or (tier) loaded from there."""
    found = min(int(share * prompt.tokens), prompt.tokens - 1)
    asked = PromptShape(prompt.tokens, prompt.tokens - found)
    if tier is None:
        return from_device(shape, who, asked).seconds
    return from_tier(shape, who, asked, storage, tier).seconds


def _offer(shape: Shape, storage: Storage, who: Machine, tier: PlannedTier, size: int, demand: Demand) -> Offer:
    each = stored_bytes_per_token(shape, storage, demand.prompt.tokens)
    tokens = int(size / each)
    base = demand.curve.hit_rate(demand.device_tokens)
    # Not the sum: every block is written to every tier, so a tier has what the device has, as far
    # as it reaches.
    rate = demand.curve.hit_rate(max(demand.device_tokens, tokens))
    without = mean_ttft_s(shape, storage, who, demand.prompt, base, None)
    # Where tier and device both have a part, the mean of the two, by their shares: an estimate
    # between bounds.
    share = (rate - base) / rate if rate else 0.0
    loaded = mean_ttft_s(shape, storage, who, demand.prompt, rate, tier)
    kept = mean_ttft_s(shape, storage, who, demand.prompt, rate, None)
    with_tier = min(without, share * loaded + (1 - share) * kept)
    saved = None
    if demand.requests_per_hour is not None and demand.usd_per_hour is not None:
        saved = (without - with_tier) / 3600 * demand.usd_per_hour * demand.requests_per_hour * 730
    return Offer(
        tier=tier,
        size_bytes=size,
        tokens=tokens,
        hit_rate=rate,
        added_hit_rate=rate - base,
        ttft_s=with_tier,
        without_s=without,
        break_even_bytes_per_s=break_even_bytes_per_s(shape, storage, who, demand.prompt.tokens),
        usd_per_month=tier.usd_per_month(size),
        saved_usd_per_month=saved,
    )


def kept_bytes_per_token(shape: Shape, storage: Storage, context: int) -> float:
    """Mean bytes of a token kept on the device, of sequences of that length: windows and states
    shared out.
    """
    return shape.sequence_bytes(context, storage) / context


def stored_bytes_per_token(shape: Shape, storage: Storage, context: int) -> float:
    """Mean bytes of a token in a store, of sequences of that length: layers with windows in full, a
    state for each.
    """
    return shape.stored_bytes(storage) + shape.state_bytes(storage) / context


def _sizes(shape: Shape, storage: Storage, tier: PlannedTier, demand: Demand) -> list[int]:
    if tier.capacity_bytes is not None:
        return [tier.capacity_bytes]
    end = demand.curve.points[-1][0] * stored_bytes_per_token(shape, storage, demand.prompt.tokens)
    return [max(1, int(end * share)) for share in SIZES]


def _pick(found: Sequence[Offer], demand: Demand) -> tuple[Offer | None, str]:
    """The cheapest tier that brings nearly as much as the best, or None, and why."""
    if not found:
        return None, "no tier was given to look at"
    helpful = [offer for offer in found if offer.saving >= LEAST_SAVING]
    if not helpful:
        return None, _why_nothing(found, demand)
    valued = [(offer.worth_usd, offer) for offer in helpful if offer.worth_usd is not None]
    if valued:
        known = "" if len(valued) == len(helpful) else " whose price is known"
        worth, best = max(valued, key=lambda pair: pair[0])
        if worth <= 0:
            return None, (
                f"the best{known}, {best.tier.title}, costs {best.usd_per_month:,.2f} USD a month, and the machine "
                f"time that it saves is worth {best.saved_usd_per_month:,.2f}"
            )
        return best, f"it saves {worth:,.2f} USD a month beyond its cost, more than any other size or tier{known}"
    goal = ENOUGH * max(offer.saving for offer in helpful)
    enough = next(offer for offer in helpful if offer.saving >= goal)
    price = ", as far as prices are known," if any(offer.usd_per_month is None for offer in found) else ""
    return enough, (
        f"it is{price} the cheapest that takes away at least {ENOUGH:.0%} of the time that the best would, "
        f"{enough.saving:.0%} of the time to the first token. Whether that is worth its price is not known without "
        "--requests-per-hour, --usd-per-hour and a tier's price"
    )


def _why_nothing(found: Sequence[Offer], demand: Demand) -> str:
    fastest = max(found, key=lambda offer: offer.tier.bytes_per_s)
    if max(offer.added_hit_rate for offer in found) < LEAST_SAVING:
        base = demand.curve.hit_rate(demand.device_tokens)
        return (
            f"the device alone finds {base:.1%} of the prompts' tokens again, and none of the tiers adds as much as "
            f"{LEAST_SAVING:.0%}"
        )
    return (
        f"computing is faster: a tier would have to give {fastest.break_even_bytes_per_s / 1e9:,.3g} GB/s, and "
        f"{fastest.tier.title} gives {fastest.tier.bytes_per_s / 1e9:,.3g}"
        if fastest.tier.bytes_per_s < fastest.break_even_bytes_per_s
        else f"no tier takes {LEAST_SAVING:.0%} off the time to the first token, {fastest.without_s:,.3g} s"
    )
