"""
Griffe extension: read the types in docstrings written as TRL's are.

    value (`str` or [`~trl.GRPOConfig`], *optional*, defaults to `3`):   ->   value (str | GRPOConfig):
    `ValueError`: why                                                    ->   ValueError: why

Defaults need not be told twice: the signature holds them.
"""

import re

from griffe import Extension, Object


_PARAMETER = re.compile(r"^(\s+)([\w*, ]+) \((.+)\):", re.MULTILINE)
_ITEM = re.compile(r"^(\s+)\[?`([^`\n]+)`\]?((?:, \*optional\*)?): ", re.MULTILINE)


def _plain(types: str) -> str:
    types = re.sub(r",? \*optional\*|, defaults to `.*`|\*optional\*", "", types)
    types = re.sub(r"\[`~?([\w.]+)`\]", lambda match: match[1].rpartition(".")[2], types)
    return types.replace("`", "").replace(" or ", " | ").replace(", ", " | " if "[" not in types else ", ")


class TRLDocstrings(Extension):
    def on_object(self, *, obj: Object, **kwargs: object) -> None:
        if obj.docstring is None:
            return
        text = _PARAMETER.sub(lambda m: f"{m[1]}{m[2]} ({_plain(m[3])}):", obj.docstring.value)
        obj.docstring.value = _ITEM.sub(lambda m: f"{m[1]}{m[2]}: ", text)
