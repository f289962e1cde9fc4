"""Hit rates of caches, by size and policy, on a trace of requests.

No model, no bytes, no torch.

Read first: trace.py (requests), then simulate.py. Imported by the command line, and by kvire.bench,
which reads traces with it.
"""
