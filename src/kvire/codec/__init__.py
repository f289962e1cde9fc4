"""Bytes of a block: the frame of a tier (docs/format.md), checksums or seal, lossless codecs.

Read first: frame.py. Imports core only, no torch: a store process starts at once.
"""
