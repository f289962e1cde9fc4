"""What request logs say about caching: what could have been reused, where prompts part, and what
that costs.

Needs no model and no GPU, and sends nothing anywhere; only `live.py` speaks to a server, the one it
is pointed at. No engine here, and no reading of options: `cli/doctor.py` does that. Read
`prompt.py` first, then `diagnose.py`.

A line becomes a request in `lines.py`, `logs.py`, `bodies.py` and `render.py`; `usage.py` reads
the counted tokens. `tree.py` and `rules.py` say what a cache would have; `likeness.py`,
`structure.py` and `passages.py` why not more.
"""
