"""An OpenAI-compatible server over one engine; imports kvire.core, engine and llm, nothing imports
it but cli.

Read first: service.py (what every handler works with), then chat.py and completions.py, each a line
of parse -> encode -> answers -> reply. Everything that guards comes before them and knows no model:
protocol.py (connections), auth.py (who), limits.py (bytes and JSON), schemas.py (fields). run.py
starts it all; `create_app` in app.py serves tests. No prompt text in logs, metrics or server
errors.
"""
