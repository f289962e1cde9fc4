"""Words shared by every folder: what a block is, how it is named, what can go wrong. No torch here.

Read first: spec.py (the shape of a block), then keys.py (its name). Nothing in this folder imports
another folder of Kvire.
"""
