"""One planner of reuse, for every engine: names, lookups, choices, loads, saves, and misses.

Engines bring blocks and a measured prefill speed, nothing else. No torch, no device. Read
planner.py first.
"""
