"""`kvire doctor` as people run it: text, JSON, page; what it refuses; and that prompts stay where they are."""

import gzip
import json
import re
import socket
from pathlib import Path

import pytest
from doctor.examining import OFFERS, examine
from doctor.made_logs import RULES, as_lines, chat, time_stamp, words
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvire.cli.main import cli
from kvire.core.errors import ConfigError
from kvire.doctor.diagnose import Doctor
from kvire.doctor.reading.logs import read_log
from kvire.doctor.rules import CacheOffers
from kvire.doctor.tokens import Tokenized
from kvire.doctor.values import diagnosis_values
from kvire.models.resolve import resolve
from kvire.plan.prices import price_table

runner = CliRunner()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join([*as_lines(time_stamp().bodies), b"{broken", b"{}"])))
    return path


def run(*arguments: str | Path) -> str:
    done = runner.invoke(cli, ["doctor", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_report_names_cause_place_and_what_was_skipped(log: Path) -> None:
    text = " ".join(run(log).split())
    assert "1. time stamp: system prompt" in text
    assert "line 2 against line 1: system prompt, character 6, token 2" in text
    assert "2 malformed lines skipped, first: 5 (no JSON), 6 (no messages" in text
    assert "Put the time at the end" in text


def test_no_word_of_a_prompt_is_shown_unless_asked_for(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hidden = run(log, "--html", page) + run(log, "--json") + page.read_text()
    assert RULES.split()[3] not in hidden
    assert "2026-11-30T10" not in hidden
    assert "2026-11-30T10:00:01Z" in run(log, "--show-text")


def test_names_that_are_no_utf_8_are_printed(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\n".join(as_lines([chat(RULES, ("user", "What?"), model=model) for model in ("\ud800", "two")])))
    (finding,) = json.loads(run(log, "--json", "--html", tmp_path / "page.html"))["findings"]
    assert (finding["example"]["piece"], finding["example"]["other_piece"]) == ("two", "\N{MIDDLE DOT}")


def test_nothing_is_sent_anywhere(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    run(log, "--html", tmp_path / "page.html", "--json")


def test_the_page_is_complete_in_itself(log: Path, tmp_path: Path) -> None:
    run(log, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#)|@import|<script|url\((?!#)', page)
    for part in ("time stamp", "line 2 against line 1", "malformed", "gpt-", "<svg"):
        assert part in page


def test_money_and_seconds_equal_a_hand_calculation() -> None:
    """Four prompts of 2,009 tokens each share 2,002 without their time: see made_logs.time_stamp."""
    values = diagnosis_values(examine(as_lines(time_stamp().bodies)), OFFERS, prefill_tok_s=1000)
    (finding,) = values["findings"]
    stepwise, marked = finding["saved"]
    # In steps of 128 a prompt gets 1,920 of 2,002 tokens instead of none, each 2.00 - 0.50 dollars a million cheaper.
    assert stepwise["tokens"] == 3 * 1920
    assert stepwise["usd"] == pytest.approx(3 * 1920 * 1.5e-6)
    assert stepwise["usd_per_1000_requests"] == pytest.approx(3 * 1920 * 1.5e-6 / 4 * 1000)
    # With a breakpoint behind the system prompt, which ends at byte 8,028 (token 2,007), less the 20 bytes of the time
    # (5 tokens): found three times at 0.30 instead of 3.00, once it is written at 3.75.
    assert marked["tokens"] == 3 * 2002
    assert marked["usd"] == pytest.approx((3 * 2002 * (3 - 0.3) - 2002 * (3.75 - 3)) * 1e-6)
    assert finding["prefill_s_per_1000_requests"] == pytest.approx(3 * 1996 / 1000 / 4 * 1000)
    assert values["ideal"]["tokens"] == 3 * 6
    assert values["after_fixes"]["tokens"] == 3 * 2002


def test_what_was_really_cached_stands_beside_what_could_have_been() -> None:
    bodies = [{"prompt": words(4096) + end * 4, "usage": _usage(cached)} for end, cached in (("a", 0), ("b", 512))]
    values = diagnosis_values(examine(as_lines(bodies)), OFFERS)
    assert values["measured"] == {
        "requests": 2, "cached_tokens": 512, "written_tokens": 0, "share": 512 / 2050, "ideal_share": 1024 / 2050
    }  # fmt: skip
    assert "100%" in values["token_method"]


def _usage(cached: int) -> dict[str, object]:
    return {"prompt_tokens": 1025, "prompt_tokens_details": {"cached_tokens": cached}}


def test_usage_of_one_request_calibrates_the_next() -> None:
    bodies = [{"prompt": words(3000), "usage": {"prompt_tokens": 1000}}, {"prompt": words(6000)}]
    assert examine(as_lines(bodies)).totals.prompt_tokens == 1000 + 2000


def test_limits_of_the_figures_are_said() -> None:
    stored = {"model": "m", "input": "Hej", "previous_response_id": "r"}
    lines = [
        *as_lines([chat(words(900, i), ("user", words(3000, i))) for i in range(100)], None),
        *as_lines([stored], None),
    ]
    said = " ".join(diagnosis_values(examine(lines, memory_bytes=1 << 18), OFFERS)["notes"])
    assert "100 of 100 requests without a time" in said
    assert "limited to 0.25 MiB and forgot" in said
    assert "1 request of a conversation that the provider keeps" in said


def test_one_of_a_kind_is_singular(tmp_path: Path) -> None:
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    asked = {"role": "user", "content": [image, *[marked] * 5]}
    bodies = [
        {"ts": 9, "body": {"model": "claude-x", "max_tokens": 1, "system": "s", "messages": [asked]}},
        {"body": {"model": "m", "input": "Hej", "previous_response_id": "r"}},
    ]
    log, page = tmp_path / "log.jsonl", tmp_path / "page.html"
    log.write_text("\n".join([*map(json.dumps, bodies), "{broken"]))
    text = run(log, "--html", page) + page.read_text()
    for said in (
        "1 request over 0 min, ",
        "1 malformed line skipped",
        "1 image or file:",
        "1 request of a",
        "1 request that the API refuses",
    ):
        assert said in " ".join(text.split()), said
    assert not re.search(r"\b1 (?:\w+ )?(?:requests|tokens|lines|images)\b", text)
    log.write_text("{broken")
    with pytest.raises(ConfigError, match="1 malformed line,"):
        run(log)


def test_a_small_index_still_finds_what_comes_back_soon() -> None:
    bodies = [chat(RULES, ("user", words(3000, i))) for i in range(150)]
    diagnosis = examine(as_lines(bodies), memory_bytes=1 << 17)
    assert diagnosis.forgotten_bytes > 300_000
    assert diagnosis.totals.ideal_tokens == 149 * 2001


def test_models_of_the_log_come_first_and_every_provider_once() -> None:
    offers = CacheOffers(price_table())
    chosen = offers.choose(["openai/gpt-4.1-2025-04-14", "unheard-of"])
    assert (chosen[0].price.model, chosen[0].in_log) == ("gpt-4.1", True)
    assert len({one.price.provider for one in chosen}) == len(chosen)
    (price, *_) = offers.choose(["arn:x/us.anthropic.claude-opus-5-20260401-v1:0"])
    assert (price.price.model, price.in_log) == ("claude-opus-5", True)
    assert [one.price.model for one in offers.choose([], ["gpt-4.1"])] == ["gpt-4.1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a log file"),
        (["{log}", "--url", "http://x"], "not both"),
        (["--html", "x.html", "--url", "http://x"], "--html is for logs"),
        (["{folder}/none"], "cannot read"),
        (["{log}", "--price", "gpt-0"], "no price for 'gpt-0'"),
        (["{log}", "--prefill-tok-s", "0"], "above 0"),
        (["{log}", "--memory", "much"], "--memory"),
        (["{folder}/other.json"], "one JSON array"),
        (["{folder}/empty"], "empty"),
        (["{log}", "--html", "{folder}/no/where.html"], "cannot write"),
    ],
)
def test_mistakes_are_explained(log: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "other.json").write_text(json.dumps([{"a": 1}], indent=1))
    (tmp_path / "empty").write_text("\n")
    given = [one.format(log=log, folder=tmp_path) for one in arguments]
    with pytest.raises(ConfigError, match=re.escape(said)):
        runner.invoke(cli, ["doctor", *given], catch_exceptions=False)


def test_a_tokenizer_counts_and_places_tokens_exactly() -> None:
    """Words as tokens: the system prompt has four, the time is the third, and é is two bytes of one."""
    bodies = [
        chat(f"Café is {stamp} {'open ' * 40}", ("user", q)) for stamp, q in (("10:15", "When?"), ("10:16", "So?"))
    ]
    counter = Tokenized("words", lambda text: [found.end() for found in re.finditer(r"\S+", text)])
    diagnosis = Doctor([], counter).examine(read_log(as_lines(bodies))).diagnosis()
    assert diagnosis.totals.prompt_tokens == 2 * (3 + 40 + 1)
    (finding,) = diagnosis.findings
    assert (finding.example.token, finding.example.character) == (2, 8)
    assert finding.tokens == 40
    assert "tokenizer of words" in diagnosis.token_method


@pytest.mark.model
def test_a_real_models_tokenizer(log: Path) -> None:
    values = json.loads(run(log, "--tokenizer", "smollm2", "--json"))
    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2"))
    texts = [message["content"] for body in time_stamp().bodies for message in body["messages"]]
    assert values["prompt_tokens"] == sum(len(tokenizer(text).input_ids) for text in texts)
    assert values["findings"][0]["cause"] == "time stamp"
