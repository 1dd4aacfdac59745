"""MkDocs hook: links of the API pages. Docstrings name objects as TRL's do: [`SparsitySchedule`], [`~trl.GRPOConfig`]."""

import re


_PAGES = {
    "SparrowGRPOConfig": "configuration.html",
    "SparrowGRPOTrainer": "api.html#sparrow_trl.trainer.SparrowGRPOTrainer",
    "SparsitySchedule": "api.html#sparrow_trl.sparsity.schedule.SparsitySchedule",
    "RolloutEngine": "api.html#sparrow_trl.rollout.engine.RolloutEngine",
    "RolloutOutput": "api.html#sparrow_trl.rollout.output.RolloutOutput",
    "RolloutStats": "api.html#sparrow_trl.rollout.output.RolloutStats",
    "UnsupportedModelError": "api.html#sparrow_trl.rollout.support.UnsupportedModelError",
}


def _link(match: re.Match) -> str:
    name = match[1].removeprefix("~")
    if name in _PAGES:
        return f'<a href="{_PAGES[name]}"><code>{name}</code></a>'
    return f"<code>{name}</code>"


def on_page_content(html: str, **kwargs: object) -> str:
    return re.sub(r"\[<code>(~?[\w.]+)</code>\]", _link, html)
