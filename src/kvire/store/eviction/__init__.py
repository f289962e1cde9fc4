"""Eviction. No bytes and no tiers here: the memory tier and `kvire replay` run the same code.

Read first: policy.py (the value of a block), then order.py (the order of eviction, given that).
"""
