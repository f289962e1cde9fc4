"""The disk tier: one folder of segments and an index, shared by processes, bounded, crash-safe.

It is warm after kill -9. Read first: tier.py, then segments.py (bytes of a slot) and allocator.py
(slot allocation and eviction).
"""
