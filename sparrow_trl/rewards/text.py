"""Reading completions: their text, what follows the reasoning, the boxed answer, the code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_CODE_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")

Completion = str | Sequence[Mapping[str, Any]]


def completion_text(completion: Completion) -> str:
    """Text of a completion: itself, or the content of its last message of the assistant (the last, if none is)."""
    if isinstance(completion, str):
        return completion
    messages = [message for message in completion if message.get("role") in ("assistant", None)] or completion
    if not messages:
        return ""
    content = messages[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def opens_thinking(prompt: Completion) -> bool:
    """Whether a prompt ends inside the reasoning, as those of chat templates that pre-fill `<think>`."""
    return completion_text(prompt).rstrip().endswith(THINK_OPEN) if prompt else False


def prefills_thinking(tokenizer: Any, **template_options: Any) -> bool:
    """
    Whether a tokenizer's chat template writes `<think>` at the start of an answer, so that completions lack it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): tokenizer with a chat template.
        template_options: what `apply_chat_template` takes for training, such as `enable_thinking`.
    """
    messages = [{"role": "user", "content": "?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_options)
    return opens_thinking(text)


def final_text(text: str, thinking_opened: bool = False) -> str | None:
    """
    What a completion says after its reasoning.

    Args:
        text (`str`): the completion.
        thinking_opened (`bool`, *optional*, defaults to `False`): whether the prompt opened the reasoning already.

    Returns:
        `str`: the text after the last `</think>`, all of it if there is no reasoning; `None` while the reasoning is not
        closed.
    """
    before, closed, after = text.rpartition(THINK_CLOSE)
    if closed:
        return None if THINK_OPEN in after else after
    return None if thinking_opened or THINK_OPEN in text else text


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{...}` of a text, with braces matched; `None` if there is none."""
    for match in reversed(list(_BOX.finditer(text))):
        depth, escaped = 1, False
        for end in range(match.end(), len(text)):
            character = text[end]
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character in "{}":
                depth += 1 if character == "{" else -1
                if depth == 0:
                    return text[match.end() : end].strip()
    return None


def last_code_block(text: str) -> str | None:
    """The last fenced block of Python in a text, or the last fenced one that names no language; `None` if none."""
    blocks = [(language.lower(), code) for language, code in _CODE_BLOCK.findall(text)]
    for languages in (("python", "python3", "py"), ("",)):
        found = [code for language, code in blocks if language in languages]
        if found:
            return found[-1]
    return None
