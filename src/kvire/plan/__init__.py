"""What models keep, what computing and loading it costs, and which of the two to do or to buy.

Imports core only.

Read first: families/ for what layers keep (the engine uses it too), cost.py for the choice that the
engine makes, shape.py and report.py for the planner. The tables (cards.json, hardware.json,
prices.json) are read through cards.py, hardware.py and prices.py.
"""
