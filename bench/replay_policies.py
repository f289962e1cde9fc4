"""Eviction policies on recorded traces: hit rates at 1, 5 and 25 % of the working set.

A hit rate is the share of prompt tokens that hit.

    python bench/replay_policies.py FOLDER_OF_TRACES [--out docs/results/replay_policies.json]

What has parameters is tuned on one half of each trace (every second session, or the first half of
the requests) and judged on the other. "store" is the store's own code; the optimum knows the
future. Claude Code sessions are replayed in blocks of 512 tokens, as the other traces are, not 64:
eight times faster, and at most 0.2 % less to hit.
"""

import argparse
import itertools
import time
from pathlib import Path

from reporting import describe, write

from kvire.replay.caches import RankCache
from kvire.replay.formats import read_trace
from kvire.replay.policies import policy_named
from kvire.replay.simulate import ideal, run_store, simulate
from kvire.replay.store_tiers import StoreTier, StoreTiers

TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
    "claude-code": "claude_code",
}
SHARES = (0.01, 0.05, 0.25)
POLICIES = ("lru", "store", "lfu", "gdsf", "cost-aware", "s3-fifo", "sieve", "optimum")
MOST_USES, HOLD_S = (1, 3, 8), (0, 40, 120)


class CappedUses:
    """Frequency with aging, in which more than so many uses count no more."""

    name, about = "capped-uses", "for tuning"

    def __init__(self, most_uses):
        self._most_uses = most_uses

    def rank(self, uses, start_tokens, last):  # noqa: ARG002 - the protocol's
        """See EvictionPolicy."""
        return last + min(uses, self._most_uses)


class TunedCache(RankCache):
    """Frequency with aging, and a hold.

    most_uses: beyond which a use counts no more (1: LRU); what continues a prompt at its end
        inherits its uses.
    hold_s: within so long of its last use nothing goes; then new blocks are not kept.
    """

    def __init__(self, trace, capacity_blocks, most_uses, hold_s):
        super().__init__(trace, capacity_blocks, CappedUses(most_uses))
        self.hold_s = hold_s
        self.used_s = [0.0] * len(trace.parents)

    def _used(self, blocks, hits):
        super()._used(blocks, hits)
        continues = 0 < hits < len(blocks) and self._children[blocks[hits - 1]] == 1
        for place, block in enumerate(blocks):
            self.used_s[block] = self.now_s
            if continues and place >= hits:
                self._uses[block] = self._uses[blocks[hits - 1]]

    def _victim(self):
        victim = super()._victim()
        if victim is None or self.now_s - self.used_s[victim] >= self.hold_s:
            return victim
        self._aside.append(victim)
        return None


def rates(trace, runs):
    """Hit rates of functions from a capacity in blocks, at each share of the working set."""
    blocks = [max(1, int(trace.working_set_tokens * share) // trace.block_tokens) for share in SHARES]
    return {name: [call(size) / trace.input_tokens for size in blocks] for name, call in runs.items()}


def named(trace, name):
    return lambda blocks: policy_named(name)(trace, blocks, lambda _: None).tokens


def tuned(trace, most_uses, hold_s):
    return lambda blocks: simulate(trace, TunedCache(trace, blocks, most_uses, hold_s)).tokens


def closed(rate, low, high):
    """Share of the gap from LRU to the optimum, at each size."""
    return [(r - a) / (b - a) if b > a else 0.0 for r, a, b in zip(rate, low, high, strict=True)]


def measure(folder):
    grid = list(itertools.product(MOST_USES, HOLD_S))
    tables, gains = {}, {}
    for name, file in TRACES.items():
        trace = read_trace(folder / file)
        trace = trace if trace.block_tokens == 512 else trace.coarse(512 // trace.block_tokens)
        tuning, judging = trace.halves()
        for half, part in (("tuning", tuning), ("judging", judging)):
            started = time.perf_counter()
            runs = {policy: named(part, policy) for policy in POLICIES}
            runs["store, disk"] = lambda blocks, part=part: (
                run_store(part, StoreTiers([StoreTier(part, blocks)])).tokens
            )
            runs |= {f"uses {most}, hold {hold} s": tuned(part, most, hold) for most, hold in grid}
            found = rates(part, runs)
            tables[name, half] = {
                "trace": name, "half": half, "requests": len(part.requests), "shares": SHARES,
                "working_set_tokens": part.working_set_tokens, "ideal": ideal(part).tokens / part.input_tokens,
                "hit_rates": found,
                "gap_closed": {p: closed(r, found["lru"], found["optimum"]) for p, r in found.items()},
            }  # fmt: skip
            print(f"{name}, {half}: {time.perf_counter() - started:.0f} s", flush=True)
            for policy, rate in found.items():
                gap = tables[name, half]["gap_closed"][policy]
                print(f"  {policy:22}", " ".join(f"{r:.4f} ({g:+.2f})" for r, g in zip(rate, gap, strict=True)))
        for most, hold in grid:
            gains[name, most, hold] = tables[name, "tuning"]["gap_closed"][f"uses {most}, hold {hold} s"]
    best = {name: max(grid, key=lambda pair, name=name: sum(gains[(name, *pair)])) for name in TRACES}
    safest = max(grid, key=lambda pair: min(min(gains[(name, *pair)]) for name in TRACES))
    return {
        "tables": list(tables.values()),
        "chosen_on_tuning_halves": {name: f"uses {most}, hold {hold} s" for name, (most, hold) in best.items()},
        "best_worst_case_on_tuning_halves": f"uses {safest[0]}, hold {safest[1]} s",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/replay_policies.json"))
    given = parser.parse_args()
    result = {"schema": "kvire.bench.replay_policies/1", "machine": describe(), **measure(given.traces)}
    write(given.out, result)
    print(result["chosen_on_tuning_halves"], result["best_worst_case_on_tuning_halves"])


if __name__ == "__main__":
    main()
