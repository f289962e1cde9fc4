"""One planner of reuse, for every engine: names, looks, worth, loads, saves, and why not.

No torch, no device.

Engines bring blocks and a measured prefill speed, nothing else. Read planner.py first.
"""
