"""`kvire chat`: talk in the terminal and watch the cache fill."""

import sys
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvire.cli import options as opt
from kvire.cli.conversation import WARN_SHARE, Conversation
from kvire.cli.display import LoadProgress, console, seconds
from kvire.core.memory import format_size

HELP = """\
/new       start over; the old turns stay in the cache until their memory is needed
/compare   answer the last question at this length and in a fresh chat, side by side
/help      this list
/exit      leave (so does the end of input)"""

LIMIT_CHOICES = "[s]top, [n]ew chat, or [d]rop the oldest turns?"


def chat(
    model: opt.Model,
    system: Annotated[
        str | None, typer.Option(help="A system message that comes before every chat.", show_default=False)
    ] = None,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = None,
    kv_dtype: opt.KvDtype = "float32",
    kv_memory: opt.KvMemory = "auto",
    block_size: opt.BlockSize = 16,
    prefix_cache: opt.PrefixCache = True,
    max_model_len: opt.MaxModelLen = None,
    attention: opt.Attention = "auto",
    deterministic: opt.Deterministic = False,
    kv_cache: opt.KvCache = "paged",
    device: opt.Device = "auto",
) -> None:
    """Talk with a model. A line after each answer shows how full the context is and what was reused."""
    engine = opt.engine_options(locals())
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    from kvire.llm import LLM  # noqa: PLC0415  (torch takes seconds; --help must not wait for it)

    with LoadProgress() as progress:
        llm = LLM(model, progress=progress, **engine)
    with llm:
        llm.encode_chat([{"role": "user", "content": "?"}])  # refuses a model without a chat template at once
        console.print(f"[dim]{escape(model)}, {llm.max_model_len} tokens of context. /help lists commands.[/]")
        Terminal(llm, Conversation(llm, system, max_tokens), sampling).run()


class Terminal:
    """Reads lines, prints answers. sampling: SamplingParams of every answer."""

    def __init__(self, llm: Any, conversation: Conversation, sampling: dict[str, Any]) -> None:
        self.llm = llm
        self.conversation = conversation
        self.sampling = sampling

    def run(self) -> None:
        """Until /exit or the end of input."""
        while (line := self._read("> ")) is not None and line != "/exit":
            if line == "/help":
                console.print(HELP, markup=False)
            elif line == "/new":
                self.conversation.clear()
            elif line == "/compare":
                self._compare()
            elif line.startswith("/"):
                console.print(f"no command {line}; /help lists them", markup=False)
            elif line and not self._say(line):
                return

    def _read(self, prompt: str) -> str | None:
        """The next line without surrounding space; None at the end of input."""
        try:
            if sys.stdin.isatty():
                return input(prompt).strip()
            line = sys.stdin.readline()
            return line.strip() if line else None
        except (EOFError, KeyboardInterrupt):
            return None

    def _say(self, text: str) -> bool:
        """Answer one line; False when the user chose to stop."""
        talk = self.conversation
        talk.messages.append({"role": "user", "content": text})
        if not talk.fits(talk.messages):
            if not self._make_room():
                return False
            if not talk.fits(talk.messages):
                talk.messages.pop()
                console.print("[red]That message alone does not fit; it was not sent.[/]")
                return True
        result = self._answer(talk.encoded(), show=True)
        if result is None:
            talk.messages.pop()
            return True
        talk.messages.append({"role": "assistant", "content": result.text})
        self._status(result)
        return True

    def _answer(self, ids: tuple[int, ...], *, show: bool, **params: Any) -> Any:
        """Stream an answer; Ctrl-C ends the answer, not the chat. None if it ended before the first token."""
        from kvire.engine.result import Collector  # noqa: PLC0415  (loaded by now; see above)

        request = self.llm.request(ids, self.llm.params(**{**self.sampling, **params}))
        collector = Collector(request)
        try:
            for output in self.llm.client.stream(request):
                collector.add(output)
                if show:
                    print(output.text, end="", flush=True)
        except KeyboardInterrupt:
            console.print(" [dim](interrupted)[/]", end="")
        if show:
            print(flush=True)
        return collector.result() if collector.started else None

    def _status(self, result: Any) -> None:
        """One line: how full the context is, what was reused, how fast it was."""
        context = result.usage.total_tokens
        limit = self.conversation.limit
        speed = 1 / result.timing.tpot_s if result.timing.tpot_s else 0.0
        console.print(
            f"[dim]context {context}/{limit} tokens, KV {format_size(context * self._bytes_per_token())}, "
            f"reused {result.usage.cached_tokens} of {result.usage.prompt_tokens}, "
            f"first token {seconds(result.timing.ttft_s)}, {speed:.1f} tok/s[/]",
            soft_wrap=True,
        )
        if context >= WARN_SHARE * limit:
            console.print(f"[yellow]{context / limit:.0%} of the context is used; /new starts over.[/]")

    def _bytes_per_token(self) -> int:
        return int(self.llm.engine.paged.spec.bytes_per_token)

    def _make_room(self) -> bool:
        """The context is full: let the user choose. False to stop."""
        talk = self.conversation
        last = talk.messages[-1]
        kept, dropped, lost = talk.without_oldest_turns()
        console.print(
            f"[yellow]The context of {talk.limit} tokens is full.[/] Dropping the {dropped} oldest turns would cost "
            f"{lost} cached tokens, which are computed again.",
            soft_wrap=True,
        )
        while True:
            console.print(LIMIT_CHOICES, markup=False, end=" ")
            choice = self._read("")
            if choice is None or choice[:1] == "s":
                return False
            if choice[:1] in ("n", "d"):
                break
        if choice[:1] == "d":
            talk.messages = kept
        else:
            talk.clear()
            talk.messages.append(last)
        return True

    def _compare(self) -> None:
        """What length costs: the same question here and in a fresh chat."""
        talk = self.conversation
        question = next((m for m in reversed(talk.messages) if m["role"] == "user"), None)
        if question is None:
            console.print("ask something first")
            return
        upto = talk.messages[: len(talk.messages) - 1 - talk.messages[::-1].index(question)]
        fresh = [*[m for m in talk.messages[:1] if m["role"] == "system"], question]
        for name, messages in (("this chat", [*upto, question]), ("fresh chat", fresh)):
            ids = talk.encoded(messages)
            result = self._answer(ids, show=False, max_tokens=16, ignore_eos=True)
            if result is None:
                return
            console.print(
                f"{name:<11}{len(ids):>7} tokens, KV {format_size(len(ids) * self._bytes_per_token()):>9}, "
                f"reused {result.usage.cached_tokens:>6}, first token {seconds(result.timing.ttft_s):>8}, "
                f"{seconds(result.timing.tpot_s):>7} per token",
                markup=False,
                soft_wrap=True,
            )
