"""Answers one question over a folder's store, prints the result as JSON, and waits to be killed.

python demo/one_life.py FOLDER MESSAGES.json
"""

import json
import sys
import time
from pathlib import Path

from kvire import LLM
from kvire.core.config import StoreConfig

folder, messages = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
llm = LLM("smollm2", store=StoreConfig(path=folder / "store", key_file=folder / "keys" / "keyring.json"))
result = llm.chat(messages, max_tokens=40, temperature=0)
found = {"text": result.text, "token_ids": result.token_ids, "ttft_s": result.timing.ttft_s}
print(json.dumps({**found, "cache": result.cache.as_dict()}), flush=True)
time.sleep(600)
