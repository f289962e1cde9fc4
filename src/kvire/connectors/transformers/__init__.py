"""The store under transformers' own generate(). Read first: stored.py, then docs/transformers.md.

For a model in memory, arguments.py checks a call, identity.py and weights.py name its blocks,
blocks.py converts its KV to blocks and back.
"""

from kvire.connectors.transformers.stored import StoredCache

__all__ = ["StoredCache"]
