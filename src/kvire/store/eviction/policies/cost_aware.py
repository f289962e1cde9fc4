"""GDSF with the cost of computing a block again, which grows along a prompt."""

from typing import ClassVar

# A token's attention costs as much as its linear layers at this position of Llama-3.1-8B: 2 x 8.0e9
# parameters over 4 x 32 layers x 4096 (FLOPs per earlier token), after the prefill formula of
# docs/plan.md.
PARITY_TOKENS = 30_500


class CostAware:
    """See EvictionPolicy."""

    name: ClassVar[str] = "cost-aware"
    about: ClassVar[str] = "gdsf with the cost of recomputing, which grows along a prompt"

    def rank(self, uses: int, start_tokens: int, last: float) -> float:
        """See EvictionPolicy."""
        return last + uses * (1 + start_tokens / PARITY_TOKENS)


POLICY = CostAware
