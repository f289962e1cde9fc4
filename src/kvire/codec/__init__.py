"""Bytes of a block: the frame that a tier keeps (docs/format.md), its checksums or seal, and
lossless codecs.

Read first: frame.py. Imports core only, no torch: a store process starts at once.
"""
