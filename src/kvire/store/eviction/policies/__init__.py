"""Eviction policies, one per file, in a class called POLICY.

Read first: policy.py beside this folder.
"""
