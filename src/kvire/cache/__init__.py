"""The paged KV cache on the device: block allocation (block_pool), memory layout (paged), and the
batch of one step (batch).

Nothing here knows of models, engines or stores. Read first: block_pool.py, the whole allocator and
prefix index.
"""
