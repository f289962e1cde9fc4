"""The store under transformers' own generate(). Read first: stored.py, then docs/transformers.md.

Of a model in memory: arguments.py says what a call may ask for, identity.py and weights.py whose
blocks it may read, blocks.py how its KV becomes blocks and back.
"""

from kvire.connectors.transformers.stored import StoredCache

__all__ = ["StoredCache"]
