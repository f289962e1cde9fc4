"""The engine: requests in, tokens out, over a paged KV cache. One visible loop, Engine.step().

Read first: engine.py, then scheduler.py. The engine belongs to one thread; only the records of
request.py cross it.
"""
