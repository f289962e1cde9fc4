"""`kvire bench`: what a KV cache is worth, measured from outside, in tier states that are proved
and not assumed.

A *work* is a set of prompts in two parts: the fill, which puts KV somewhere, and the probe, whose
prompts begin like the fill's. A *state* says where that KV is when the probe is sent. A *pass*
sends one part once; the answers and the server's counters then prove the state, or the row is named
unproved. Read `states.py` first, then `run.py`; `work/` has the prompts, `arms/` the servers.
Everything talks to servers over HTTP; nothing here touches an engine.
"""
