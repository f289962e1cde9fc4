"""What the layers of each family keep per token, and what they weigh: the one table for planner and
engine.

Read first: table.py, a line per family. layouts.py has the rules for what layers keep (which see
everything, which slide, which share, how wide they are), blocks.py those for the parameters beside
attention, mixers.py what one layer is, fields.py how a config.json is read. wrappers.py finds the
language model in a config that holds more than one.

Not here: torch, transformers, weights. Which forms of a family the engine refuses is
models/refusal.py's.
"""
