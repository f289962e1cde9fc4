"""How KV becomes a payload: one codec per file, in a class called CODEC.

Read first: codec.py beside this folder.
"""
