"""The remote tiers that a URL can name, one kind per file; the protocol is ../scheme.py.

Read redis.py first.
"""
