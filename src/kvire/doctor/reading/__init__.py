"""From the lines of a request log to prompts and counted tokens.

Lines (lines.py) become requests (logs.py) by the API of their body (bodies.py), with its text in
the provider's order (render.py). usage.py reads the counts. Imports nothing of the examination, and
of the folder above only prompt.py.
"""
