"""The prompts that are sent: words and their tokens, workloads, traces, and the reuse that an
endless cache could give them.

Imports nothing of the measuring but the client's messages. Read prompts.py first.
"""
