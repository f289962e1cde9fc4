"""What the server answers, one file per endpoint: a module with a `router` is in.

Read completions.py first. No path here matches another one's, so their order does not matter.
"""
