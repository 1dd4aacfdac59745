"""
MkDocs hooks:

- links of the API pages: docstrings name objects as TRL's do, [`SparsitySchedule`], [`~trl.GRPOConfig`];
- figures on dark pages: Markdown names the drawing for light ones, which is legible everywhere.
"""

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
    html = re.sub(
        r'<img alt="([^"]*)" src="(figures/\w+)-light\.svg" />',
        r'<img alt="\1" src="\2-light.svg#only-light" /><img alt="\1" src="\2-dark.svg#only-dark" />',
        html,
    )
    return re.sub(r"\[<code>(~?[\w.]+)</code>\]", _link, html)
