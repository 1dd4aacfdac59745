"""
Write the pages that come from the code into docs/_generated (run by `make docs`):

- configuration.md, from the dataclass `SparrowGRPOConfig` and TRL's `GRPOConfig`;
- presets.md, from the published schedules.

support_matrix.md, the table of models, is written by tests/test_support_matrix.py and committed. Where it is missing a
note takes its place.
"""

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path

from transformers import TrainingArguments
from trl import GRPOConfig

from sparrow_trl import SparrowGRPOConfig, SparsitySchedule


FOLDER = Path(__file__).with_name("_generated")


def default_of(field: Field) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def cell(text: object) -> str:
    """Text as one cell of a Markdown table; what stands between backticks is kept as it is."""
    parts = " ".join(str(text).split()).replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_<\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def option_table(options: list[Field]) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in options:
        default = "required" if default_of(option) is MISSING else f"`{default_of(option)!r}`".replace("|", "\\|")
        rows.append(f"| `{option.name}` | {default} | {cell(option.metadata.get('help', ''))} |")
    return "\n".join(rows)


def configuration() -> str:
    trl_defaults = {field.name: default_of(field) for field in fields(GRPOConfig)}
    transformers_names = {field.name for field in fields(TrainingArguments)}
    ours = [field for field in fields(SparrowGRPOConfig) if field.name not in trl_defaults]
    changed = [
        field
        for field in fields(SparrowGRPOConfig)
        if field.name in trl_defaults and default_of(field) != trl_defaults[field.name]
    ]
    inherited = [field for field in fields(GRPOConfig) if field.name not in transformers_names]
    return "\n".join(
        [
            "## Options of this package\n",
            option_table(ours),
            "\n## Options of TRL with another default\n",
            option_table(changed),
            "\n## Options of TRL\n",
            "They have the meaning that TRL gives them; the defaults are TRL's.\n",
            option_table(inherited),
        ]
    )


def presets() -> str:
    rows = ["| preset | target | scored pages in bin 0, 1, 2, ... |", "|---|---|---|"]
    for name, targets in SparsitySchedule.presets().items():
        for target in targets:
            budgets = SparsitySchedule.from_preset(name, target).budgets
            rows.append(f"| `{name}` | {target:.2f} | {', '.join(map(str, budgets))} |")
    return "\n".join(rows)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in (("configuration.md", configuration()), ("presets.md", presets())):
        (FOLDER / name).write_text(text + "\n", encoding="utf-8")
    matrix = FOLDER / "support_matrix.md"
    if not matrix.exists():
        matrix.write_text(
            "The table of models is written by tests/test_support_matrix.py, see there.\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
