"""Answers prompts with an engine that has no server, for field.py.

    python field_worker.py transformers|openvino GGUF

Runs in that engine's own environment. A line in: {"contents": [a user's message, ...],
"max_tokens": n}; a line out: {"seconds": for all answers, "texts": [...]}. The first line out says
{"version": ...}. Answers are greedy and go on for max_tokens; the chat template is the model's own.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

Answer = Callable[[list[str], int], list[str]]


def main() -> None:
    engine, gguf = sys.argv[1:]
    version, answer = {"transformers": with_transformers, "openvino": with_openvino}[engine](gguf)
    replies = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no reply
    print(json.dumps({"version": version}), file=replies, flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        started = perf_counter()
        texts = answer(wanted["contents"], wanted["max_tokens"])
        print(json.dumps({"seconds": perf_counter() - started, "texts": texts}), file=replies, flush=True)


def with_transformers(gguf: str) -> tuple[str, Answer]:
    """float32, the cache that generate() makes by default; it keeps nothing from one call to the
    next.
    """
    import torch  # noqa: PLC0415  (each engine lives in an environment of its own)
    import transformers  # noqa: PLC0415

    file = Path(gguf)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()

    def answer(contents: list[str], max_tokens: int) -> list[str]:
        texts = []
        for content in contents:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt"
            )["input_ids"]
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            texts.append(tokenizer.decode(out[0, ids.shape[1] :]))
        return texts

    return transformers.__version__, answer


def with_openvino(gguf: str) -> tuple[str, Answer]:
    """Four-bit weights as they are in the file, continuous batching, prefix caching on."""
    import openvino_genai  # noqa: PLC0415

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = 2, True, 4096
    pipeline = openvino_genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU")
    tokenizer = pipeline.get_tokenizer()

    def answer(contents: list[str], max_tokens: int) -> list[str]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = max_tokens, False, True
        config.apply_chat_template = False
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            for content in contents
        ]
        answers = pipeline.generate(prompts, [config] * len(prompts))
        return [answer.m_generation_ids[0] for answer in answers]

    return openvino_genai.__version__, answer


if __name__ == "__main__":
    main()
