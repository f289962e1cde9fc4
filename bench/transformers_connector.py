"""Gain of a stored cache for transformers' own generate(): SmolLM2, float32, on this machine.

    python bench/transformers_connector.py [--prompts 20] [--tokens 2000]
        [--python INTERPRETER ...] [--json FILE]

One process answers every prompt twice, in turns: as the model does by itself, and through a stored
cache that has nothing yet. The next process answers them again from the store. Prompts are
stretches of this repository's sources. Time to first token is from the call of generate() to the
first token that a streamer gets; it includes the check of all weights and the load. --python: of
environments with other versions of transformers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import reporting
import torch
import transformers
from reporting import Bar, figure, medians, ratios

from kvire.connectors.transformers import StoredCache
from kvire.connectors.transformers.blocks import CacheLayout
from kvire.connectors.transformers.identity import ModelIdentity
from kvire.core.config import StoreConfig
from kvire.models.resolve import resolve

ANSWER = 16


def main() -> None:
    options = _options()
    if options.part:
        print(json.dumps(answer(options.part, options.folder, options.model, options.prompts, options.tokens)))
        return
    parts = {python: measure(python, options) for python in options.python}
    versions = ", ".join(found["cold"]["versions"]["transformers"] for found in parts.values())
    table = [row for found in parts.values() for row in rows(options, **found)]
    reporting.write(options.json, {"machine": reporting.describe() | {"transformers": versions}, "table": table})


def measure(python: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both processes of one interpreter, and how many prompts were answered otherwise."""
    with tempfile.TemporaryDirectory(prefix="kvire-bench-") as folder:
        cold, warm = (in_a_process(part, python, folder, options) for part in ("cold", "warm"))
    wrong = sum(
        not plain == first == again
        for plain, first, again in zip(cold["plain answers"], cold["answers"], warm["answers"], strict=True)
    )
    assert all(reused == 0 for reused in cold["reused"]), cold["reused"]
    assert all(reused == (options.tokens - 1) // 16 * 16 for reused in warm["reused"]), warm["reused"]
    return {"cold": cold, "warm": warm, "wrong": wrong}


def in_a_process(part: str, python: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part, by an interpreter of its own."""
    command = [python, __file__, "--part", part, "--folder", folder, "--model", str(resolve("smollm2"))]
    command += ["--prompts", str(options.prompts), "--tokens", str(options.tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def answer(part: str, folder: Path, place: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Answer all prompts; cold: without a stored cache as well."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    config = StoreConfig(path=folder / "store", disk_bytes=8 << 30, key_file=folder / "keys" / "keyring.json")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    found: dict[str, Any] = {"versions": versions, "ttft": [], "answers": [], "reused": []}
    found |= {"plain ttft": [], "plain answers": [], "check": []}
    identity, layout = ModelIdentity(model), CacheLayout.probe(model, 16)
    begin = perf_counter()
    with StoredCache.open(model, config) as stored:
        found["open"] = [perf_counter() - begin]
        for number, ids in enumerate([warm_up(), *documents(tokenizer, prompts, tokens, folder / "documents.json")]):
            turns: dict[str, Callable[..., Any]] = {"": stored.generate}
            if part == "cold":
                turns["plain "] = model.generate
            for name, generate in sorted(turns.items(), reverse=bool(number % 2)):
                seconds, out = first_token(generate, torch.tensor([ids]))
                if number:
                    found[f"{name}ttft"].append(seconds)
                    found[f"{name}answers"].append(out)
            begin = perf_counter()
            identity.namespace(layout)
            if number:
                found["reused"].append(stored.report.reused_tokens)
                found["check"].append(perf_counter() - begin)
            stored.store.flush(60)
    return found


def warm_up() -> list[int]:
    """The first call touches everything for the first time."""
    return list(range(1000, 1032))


def documents(tokenizer: Any, count: int, tokens: int, kept: Path) -> list[list[int]]:
    """Stretches of this repository's sources, none of which begins as another does; the same in
    both processes.
    """
    if not kept.exists():
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((reporting.ROOT / "src").rglob("*.py")))
        ids = tokenizer(text[: 12 * count * tokens], add_special_tokens=False).input_ids
        assert len(ids) >= count * tokens, "more text is needed"
        kept.write_text(json.dumps([ids[i * tokens : (i + 1) * tokens] for i in range(count)]), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def first_token(generate: Callable[..., Any], ids: Any) -> tuple[float, list[int]]:
    """Seconds to the first token, and all."""
    times: list[float] = []

    class Streamer:
        def put(self, _: Any) -> None:
            times.append(perf_counter())

        def end(self) -> None:
            pass

    begin = perf_counter()
    out = generate(
        input_ids=ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=None,
        streamer=Streamer(),
    )
    return times[1] - begin, out[0, ids.shape[1] :].tolist()  # times[0]: the prompt


def rows(options: argparse.Namespace, cold: dict[str, Any], warm: dict[str, Any], wrong: int) -> list[dict[str, Any]]:
    def ms(values: list[float]) -> list[float]:
        return [1e3 * value for value in values]

    name = f"{options.tokens} tokens, transformers {cold['versions']['transformers']}"
    plain = ms(cold["plain ttft"])
    beside = medians({"generate by itself": plain, "stored cache, nothing stored": ms(cold["ttft"])}, "ms")
    return [
        figure(f"{name}: TTFT in the next process", "ms", ms(warm["ttft"]), baseline=beside),
        figure(
            f"{name}: TTFT by itself over TTFT in the next process",
            "x",
            ratios(cold["plain ttft"], warm["ttft"]),
            bar=Bar(">=", 8),
        ),
        figure(f"{name}: TTFT with nothing stored over TTFT by itself", "x", ratios(cold["ttft"], cold["plain ttft"])),
        figure(f"{name}: check of all weights, each call", "ms", ms(warm["check"])),
        figure(f"{name}: opening (one token, and SHA-256 of the weights)", "ms", ms(cold["open"] + warm["open"])),
        figure(f"{name}: prompts answered otherwise", "of all", [wrong], bar=Bar("<=", 0)),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=("cold", "warm"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
