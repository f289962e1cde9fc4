"""What is asked of real engines at any size (checks.py): that it can tell a wrong answer."""

from connectors.vllm.checks import Comparison, compare, overlapping


class Parrot:
    """Answers 1, 2, 3 whatever it is asked."""

    def __call__(self, do: str, *, prompts: list[list[int]], max_tokens: int) -> dict[str, list]:
        assert do == "generate"
        return {"tokens": [[1, 2, 3][:max_tokens] for _ in prompts], "cached": [None] * len(prompts)}


def test_another_answer_is_wrong_unless_two_tokens_were_all_but_equal() -> None:
    found = Comparison()
    asked = [
        ([7] * 10, [1, 2, 3], [1.0, 1.0, 1.0]),
        ([7] * 10, [1, 5, 3], [0.0, 0.5, 0.0]),  # apart where there was no doubt
        ([7] * 10, [1, 5, 9], [1.0, 0.0001, 1.0]),  # and where there was; all that follows is another text
    ]
    compare(Parrot(), asked, found, at_once=2, max_tokens=3)
    assert (found.requests, found.wrong, found.near_ties) == (3, 1, 1)
    assert [one["token"] for one in found.worst] == [1, 1]


def test_prompts_overlap_and_differ() -> None:
    prompts = overlapping(100, seed=1, longest=50)
    assert len({tuple(prompt) for prompt in prompts}) == 100
    assert max(map(len, prompts)) <= 50
    begun = sum(any(other[:8] == prompt[:8] for other in prompts[:i]) for i, prompt in enumerate(prompts))
    assert 40 < begun < 95
