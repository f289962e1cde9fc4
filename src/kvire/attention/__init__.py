"""Attention over the paged cache: queries of one step against blocks of KV.

Nothing here knows of models, engines or stores; kvire.models connects a model's layers to it.

Read first: reference.py, which is complete and runs anywhere; cpu.py does the same with the C++
kernels of kvire/native if they were built, and picks between the two.
"""
