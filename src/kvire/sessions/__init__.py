"""Chat history that survives a restart, beside the store's blocks and sealed like them; not KV.

Read first: folder.py. docs/concepts.md tells the four memories apart.
"""
