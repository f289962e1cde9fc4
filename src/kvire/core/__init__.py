"""Terms shared by every folder: shape and name of a block, errors, config. No torch here.

Read first: spec.py (the shape of a block), then keys.py (its name). Nothing in this folder imports
another folder of Kvire.
"""
