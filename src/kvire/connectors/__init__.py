"""The store under other engines, one module or folder each.

Read first: identity.py (which blocks an engine may read), then the page of the engine:
docs/vllm.md. Each connector takes names from here, keeps blocks through `kvire.store`, and imports
its engine and nothing of ours above the store.
"""
