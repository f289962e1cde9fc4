"""`kvire store`: look at a store, check it, tidy it, and remove blocks or tenants.

A command per file.
"""
