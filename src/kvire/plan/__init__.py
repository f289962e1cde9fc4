"""What things cost: bytes, seconds, load or recompute. Imports core only; pure functions. Read first: cost.py."""
