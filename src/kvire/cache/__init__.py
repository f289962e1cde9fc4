"""The paged KV cache on the device: allocation (block_pool), layout (paged), one step (batch).

Nothing here knows of models, engines or stores. Read first: block_pool.py, the whole allocator and
prefix index.
"""
