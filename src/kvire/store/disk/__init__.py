"""The disk tier: one folder of segment files and an index, shared by processes, bounded, warm after
kill -9.

Read first: tier.py, then segments.py (bytes of a slot) and allocator.py (slot allocation and
eviction).
"""
