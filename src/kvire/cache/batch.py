"""The input of one step, as plain tensors: several sequences packed one after the other."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T tokens of S sequences; sequence s owns rows cu_seqlens[s] : cu_seqlens[s + 1].

    Sequences that compute one token come first: rows 0 .. num_decodes - 1 are theirs.

    token_ids, positions: int64 [T].
    slots: per group int64 [T], block_id * block_size + offset of each token.
    block_tables: per group int32 [S, M], unused entries 0.
    context_lens: [S], tokens whose KV is in the cache once this step has written its own.
    cu_seqlens: [S + 1].
    logits_rows: int64 [R], the rows whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    context_lens: tuple[int, ...]
    cu_seqlens: tuple[int, ...]
    logits_rows: Tensor

    def __post_init__(self) -> None:
        total, sequences = self.token_ids.numel(), len(self.context_lens)
        assert self.positions.shape == (total,)
        assert all(s.shape == (total,) for s in self.slots)
        assert all(t.shape[0] == sequences for t in self.block_tables)
        assert len(self.cu_seqlens) == sequences + 1 and self.cu_seqlens[-1] == total

    @property
    def query_lens(self) -> list[int]:
        """Tokens that each sequence computes in this step."""
        return [b - a for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)]

    @property
    def num_decodes(self) -> int:
        """Leading sequences that compute exactly one token."""
        lens = self.query_lens
        return next((i for i, n in enumerate(lens) if n != 1), len(lens))
