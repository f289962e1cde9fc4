"""How KV becomes a payload: a codec per file, in a class called CODEC. Read first: codec.py beside
this folder.
"""
