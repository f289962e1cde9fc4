"""Attention over the paged cache: queries of one step against blocks of KV. Nothing here knows of
models, engines or stores; how a model's layers reach it is the business of kvire.models.

Read first: reference.py, which is complete and runs anywhere; cpu.py does the same with the C++
kernels of kvire/native where they were built, and picks between the two.
"""
