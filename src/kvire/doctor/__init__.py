"""Caching as request logs show it: possible reuse, the places where prompts part, and the cost.

Needs no model and no GPU, and sends nothing anywhere; only `live.py` speaks to a server, the one it
is pointed at. No engine here, and no reading of options: `cli/doctor.py` does that. Read
`prompt.py` first, then `diagnose.py`.

`reading/` turns a log's lines into requests. `tree.py` and `rules.py` simulate a cache;
`likeness.py`, `structure.py` and `passages.py` find the causes of misses. `values.py` makes plain
values of the result, `text.py` the words for the terminal and the browser.
"""
