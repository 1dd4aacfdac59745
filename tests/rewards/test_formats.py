"""Rewards for form, and reading completions."""

import pytest

from sparrow_trl.rewards import (
    ThinkFormatReward,
    boxed_format_reward,
    extract_code,
    overlong_reward,
    prefills_thinking,
    think_format_reward,
)
from tiny import tiny_tokenizer


MESSAGES = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("prompt", "completion", "reward"),
    [
        ("?", "<think>a</think>b", 1.0),
        ("?<think>\n", "a</think>b", 1.0),
        ("?<think>", "<think>a</think>b", 0.0),
        ("?", "a</think>b", 0.0),
        ("?", "<think>a</think>", 0.0),
        ("?", "<think></think>b", 0.0),
        ("?", "<think>a", 0.0),
        ("?", "b", 0.0),
        ("?", "<think>a</think>b</think>c", 0.0),
        ("?", "<think>a<think>b</think>c", 0.0),
        ("?", "\n<think>a</think>b", 1.0),
        (MESSAGES, "<think>a</think>b", 1.0),
        (MESSAGES, "a</think>b", 1.0),
        (MESSAGES, "b", 0.0),
    ],
)
def test_think_format(prompt, completion, reward):
    assert think_format_reward([prompt], [completion]) == [reward]
    message = [{"role": "assistant", "content": completion}]
    assert think_format_reward(prompts=[prompt], completions=[message]) == [reward]


def test_think_format_may_be_told_what_the_template_does():
    assert ThinkFormatReward(True)([MESSAGES] * 2, ["a</think>b", "<think>a</think>b"]) == [1.0, 0.0]
    assert ThinkFormatReward(False)([MESSAGES] * 2, ["a</think>b", "<think>a</think>b"]) == [0.0, 1.0]


def test_boxed_format():
    texts = [r"\boxed{1}", r"\boxed{}", "1", r"<think>\boxed{1}</think> yes", r"<think>a</think>\boxed{2}"]
    assert boxed_format_reward(completions=texts) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert boxed_format_reward(prompts=["?<think>"], completions=[r"\boxed{1}"]) == [0.0]


def test_overlong_is_the_formula_of_dapo():
    reward = overlong_reward(100, 20)
    lengths = [1, 80, 81, 90, 100, 101, 500]
    expected = [0.0 if n <= 80 else -1.0 if n > 100 else (80 - n) / 20 for n in lengths]
    assert reward(prompts=None, completions=None, completion_ids=[[1] * n for n in lengths]) == pytest.approx(expected)
    for slope in (0, 101):
        with pytest.raises(ValueError, match=f"soft_tokens={slope} must be above 0 and at most max_completion_length"):
            overlong_reward(100, slope)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\noutput:\n```\n5\n```", "a\n"),
        ("```bash\nls\n```", None),
        ("a = 1", None),
        ("<think>```python\na\n```", None),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("text  \n  ```python  \na\n  ```", "a\n"),
        ("```python\na", None),
    ],
)
def test_the_program_of_a_completion(text, code):
    assert extract_code(text) == code


def test_templates_that_open_the_reasoning_are_seen():
    tokenizer = tiny_tokenizer()
    assert not prefills_thinking(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\\n' }}\n{%- endif", "assistant\\n<think>\\n' }}\n{%- endif"
    )
    assert prefills_thinking(tokenizer)
