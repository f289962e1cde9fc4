"""An OpenAI-compatible server over one engine.

Imports kvire.core, engine and llm; imported by cli alone.

Read first: service.py (the common part of all handlers), then endpoints/: chat.py and
completions.py are each a line of parse -> encode -> answers -> reply. The guards come before them
and know no model: protocol.py (connections), auth.py (callers), limits.py (bytes and JSON),
schemas.py (fields). run.py starts it all; `create_app` in app.py serves tests. No prompt text in
logs, metrics or server errors.
"""
