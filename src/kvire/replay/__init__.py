"""What a cache of a given size and policy would have hit on a trace of requests.

No model, no bytes, no torch.

Read first: trace.py (what a request is), then simulate.py. Imported by the command line, and
by kvire.bench, which reads traces with it.
"""
