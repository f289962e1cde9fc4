"""`kvire store`: look at a store, check it, tidy it, and remove what should not be kept.

A command per file.
"""
