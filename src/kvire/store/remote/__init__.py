"""Tiers that other machines share: Redis and Valkey, object stores.

Read first: tier.py, then backend.py.
"""
