"""The prefix tree finds to the byte what any earlier prompt began with, within its memory."""

from hypothesis import given
from hypothesis import strategies as st

from kvire.doctor.tree import NODE_BYTES, PrefixTree, common_prefix

TEXTS = st.lists(st.text("ab\x1e", min_size=1, max_size=12).map(str.encode), max_size=40)


def shared(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(TEXTS)
def test_depth_times_and_texts_equal_a_comparison_with_every_earlier_prompt(texts: list[bytes]) -> None:
    tree = PrefixTree(1 << 30)
    for now, text in enumerate(texts):
        known, _ = tree.depth("m", text)
        match = tree.observe("m", text, now, now)
        earlier = [(shared(text, old), when) for when, old in enumerate(texts[:now])]
        assert match.depth == known == max((depth for depth, _ in earlier), default=0)
        for step in match.steps:
            assert step.used_s == max(when for depth, when in earlier if depth >= step.end)
        assert match.node.text() == text
        if match.beside is not None:
            beside = match.beside.text()
            assert beside in texts[:now] or any(old.startswith(beside) for old in texts[:now])
            assert shared(beside, text) == match.depth


@given(TEXTS, st.integers(600, 4000))
def test_memory_is_bounded_and_what_was_forgotten_is_told(texts: list[bytes], capacity_bytes: int) -> None:
    tree, endless = PrefixTree(capacity_bytes), PrefixTree(1 << 30)
    for now, text in enumerate(texts):
        found, all_there_is = tree.observe("m", text, now, now), endless.observe("m", text, now, now)
        assert found.depth <= all_there_is.depth
        assert found.node.text() == text
        assert tree.used_bytes <= max(capacity_bytes, len(text) * (NODE_BYTES + 1))
        assert tree.forgotten_bytes or found.depth == all_there_is.depth


def test_the_latest_prompts_are_kept() -> None:
    tree = PrefixTree(20 * (NODE_BYTES + 1000))
    for i in range(100):
        tree.observe("m", b"%3d" % i + b"x" * 997, i, i)
        assert tree.observe("m", b"often" + b"y" * 500, i, i).depth == (505 if i else 0)
    assert tree.depth("m", b" 99" + b"x" * 997)[0] == 1000
    assert tree.depth("m", b"often" + b"y" * 500)[0] == 505
    assert tree.depth("m", b"  0" + b"x" * 997)[0] < 3


def test_scopes_share_nothing() -> None:
    tree = PrefixTree(1 << 20)
    tree.observe("one", b"hello", 0, 1)
    assert tree.observe("two", b"hello", 0, 2).depth == 0


@given(st.binary(max_size=700), st.integers(0, 700), st.binary(max_size=9), st.integers(0, 9))
def test_common_prefix(base: bytes, cut: int, tail: bytes, start: int) -> None:
    a, b = b"#" * start + base, base[:cut] + tail
    assert common_prefix(a, start, b, 0) == shared(base, b)
