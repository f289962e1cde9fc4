"""The scheduler's side alone, in a process without torch: names of a prompt's first blocks, and how much it finds.

python scheduler_process.py FOLDER TOKENS_IN_PROMPT
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from kvire.codec.frame import Frames
from kvire.connectors.vllm.groups import Group
from kvire.connectors.vllm.messages import Facts
from kvire.connectors.vllm.scheduler import SchedulerSide
from kvire.core.config import StoreConfig
from kvire.core.keys import Namespace
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.tiered import TieredStore

TOKENS = 4
NAMESPACE = Namespace("weights", "config", "test", "float64", "test", TOKENS)  # as of a small engine


def main() -> None:
    folder, tokens = Path(sys.argv[1]), list(range(int(sys.argv[2])))
    keyring = Keyring(folder / "keys" / "keyring.json")
    request = SimpleNamespace(
        request_id="a", all_token_ids=tokens, num_tokens=len(tokens), cache_salt=None, mm_features=(),
        prompt_embeds=None, lora_request=None,
    )  # fmt: skip
    with TieredStore([(DiskTier(folder / "disk"), Frames(keyring.tenant))], keyring, StoreConfig()) as store:
        side = SchedulerSide(
            store, (Group(("layer.0", "layer.1"), "full", None),), TOKENS,
            namespace=NAMESPACE, facts=Facts("test", "float64", "test", (1,)),
        )  # fmt: skip
        found = side.match(request, 0)
        print(*(key.hex() for key in side._tracked["a"].chain.keys[:5]), found)
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
