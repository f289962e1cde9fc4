"""`kvire chat`: talk in the terminal and watch the cache fill."""

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvire.cli import options as opt
from kvire.cli.chat.conversation import WARN_SHARE, Conversation
from kvire.cli.display import LoadProgress, console, seconds
from kvire.cli.lazy import deferred
from kvire.cli.store_config import store_config
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError, StoreError
from kvire.core.memory import format_size
from kvire.engine.result import Collector
from kvire.sessions.session_file import check_name

engine_api = deferred("kvire.llm")

HELP = """\
/new       start over, and empty the session if there is one; computed blocks stay in the cache while there is room
/compare   answer the last question at this length and in a fresh chat, side by side
/help      this list
/exit      leave (so does the end of input)"""

LIMIT_CHOICES = "[s]top, [n]ew chat, or [d]rop the oldest turns?"


@opt.with_options(engine=opt.ENGINE, sampling=opt.SAMPLING, store=opt.STORE)
def chat(
    model: opt.ModelName,
    system: Annotated[
        str | None, typer.Option(help="A system message that comes before every chat.", show_default=False)
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            help="Go on with the chat of this name, and keep it after each answer: its history is stored, sealed.",
            show_default=False,
        ),
    ] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    store: dict[str, Any],
) -> None:
    """Talk with a model.

    A line after each answer shows how full the context is and what was reused.
    """
    config = store_config(store, engine, default=True)
    if session is not None:
        config = _with_folder(config, session)

    with LoadProgress() as progress:
        llm = engine_api.LLM(model, progress=progress, store=config, **engine)
    with llm:
        llm.encode_chat([{"role": "user", "content": "?"}])  # refuses a model without a chat template at once
        console.print(f"[dim]{escape(model)}, {llm.max_model_len} tokens of context. /help lists commands.[/]")
        if llm.store_line is not None:
            console.print(f"[dim]{escape(llm.store_line)}[/]", soft_wrap=True)
        talk, kept = Conversation(llm, system, sampling["max_tokens"]), None
        if session is not None:
            kept = llm.session(session)
            _resume(talk, kept)
            _say_what_is_kept(kept)
        Terminal(llm, talk, sampling, kept).run()


def _with_folder(config: StoreConfig | None, session: str) -> StoreConfig:
    """The store's options.

    Raises ConfigError or StoreError if a session of this name cannot be kept there.
    """
    check_name(session)
    if config is None or config.path is None:
        raise ConfigError(
            "--session needs a store on this machine's disk: leave out --no-store and what turns the cache off, and "
            "name a folder with --store if there is --ram or --remote"
        )
    return replace(config, required=True)


def _resume(talk: Conversation, kept: Any) -> None:
    """Continue where the session was left."""
    if not kept.messages:
        return
    if talk.system is not None and talk.messages[0] != kept.messages[0]:
        raise ConfigError(
            "this session began without this system message: leave out --system, or take another name for --session"
        )
    talk.messages, talk.known = kept.messages, kept.token_ids


def _say_what_is_kept(kept: Any) -> None:
    history = f"{len(kept.messages)} messages, {len(kept.token_ids)} tokens" if kept.messages else "new"
    how = "sealed" if kept.sessions.sealed else "NOT sealed"
    console.print(
        f"[dim]session {escape(kept.name)}: {history}. The history of this chat is stored, {how}, in "
        f"{escape(str(kept.sessions.store))}; /new empties it, `kvire store forget` removes all there is.[/]",
        soft_wrap=True,
    )


class Terminal:
    """Reads lines, prints answers.

    sampling: SamplingParams of every answer.
    session: a ChatSession that keeps the chat.
    """

    def __init__(self, llm: Any, conversation: Conversation, sampling: dict[str, Any], session: Any = None) -> None:
        self.llm = llm
        self.conversation = conversation
        self.sampling = sampling
        self.session = session

    def run(self) -> None:
        """Until /exit or the end of input."""
        while (line := self._read("> ")) is not None and line != "/exit":
            if line == "/help":
                console.print(HELP, markup=False)
            elif line == "/new":
                self._start_over()
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
        prompt = talk.prompt()
        result = self._answer(prompt.token_ids, show=True)
        if result is None:
            talk.messages.pop()
            return True
        talk.messages.append({"role": "assistant", "content": result.text})
        talk.known = (*prompt.token_ids, *result.token_ids)
        self._status(result, prompt.tokens_lost)
        self._keep()
        return True

    def _keep(self) -> None:
        if self.session is None:
            return
        try:
            self.session.keep(self.conversation.messages, self.conversation.known)
        except StoreError as error:
            console.print(f"[red]This turn is not kept:[/] {escape(str(error))}", soft_wrap=True)

    def _start_over(self) -> None:
        self.conversation.clear()
        if self.session is not None:
            try:
                self.session.delete()
            except StoreError as error:
                console.print(f"[red]The session was not emptied:[/] {escape(str(error))}", soft_wrap=True)

    def _answer(self, ids: tuple[int, ...], *, show: bool, **params: Any) -> Any:
        """Stream an answer; Ctrl-C ends the answer, not the chat.

        None if it ended before the first token.
        """
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

    def _status(self, result: Any, tokens_lost: int) -> None:
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
        if tokens_lost:
            console.print(
                f"[dim]{tokens_lost} tokens of earlier turns not reused: the chat template writes them otherwise[/]",
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
        """The cost of length: the same question here and in a fresh chat."""
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
