"""Which blocks make room.

No bytes and no tiers here: the memory tier and `kvire replay` run the same code.

Read first: policy.py (which block is worth least), then order.py (what goes, given that).
"""
