"""The paged KV cache on the device: who owns which block (block_pool), where its bytes lie (paged),
and what one step computes (batch). Nothing here knows of models, engines or stores.

Read first: block_pool.py, the whole allocator and prefix index.
"""
