"""Persistent blocks: tiers that keep frames, and the TieredStore over them.

Read first: tier.py (what a tier promises), then tiered.py. No torch here and no engine: a store
sees keys and host buffers, never block ids, tensors or devices.
"""
