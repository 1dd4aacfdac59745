"""The documentation says what the code does: links, options, metrics, error texts and examples."""

import ast
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

import sparrow_trl
from sparrow_trl import SparrowGRPOConfig, SparsitySchedule


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
SOURCES = [*(ROOT / "sparrow_trl").rglob("*.py"), *(ROOT / "kernels" / "torch-ext").rglob("*.py")]


def named(paths):
    return [pytest.param(path, id=path.name) for path in paths]


def texts_of(source):
    """Every string of a Python file, with "…" in the place of what is filled in."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("page", named(PAGES))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", named(PAGES))
def test_python_examples_compile_and_import_what_exists(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "sparrow_trl":
                for alias in node.names:
                    assert hasattr(sparrow_trl, alias.name), f"{page.name} imports {alias.name}"


def test_schedule_example_does_what_its_comments_say():
    block = re.search(r"```python\n(.*?)```", (DOCS / "schedules.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    namespace = {}
    exec(block, namespace)
    calls = re.findall(r"^(schedule\.budget_at\(.+?\))\s+# (\d+)", block, re.MULTILINE)
    assert len(calls) == 4
    assert [eval(call, namespace) for call, _ in calls] == [int(expected) for _, expected in calls]


def test_schedule_page_lists_the_fields():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (DOCS / "schedules.md").read_text(encoding="utf-8"), re.MULTILINE)
    schedule = SparsitySchedule(budgets=())
    assert [name for name, _ in rows] == [field.name for field in fields(SparsitySchedule)]
    for name, default in rows[1:]:
        assert default.strip("`") == str(getattr(schedule, name))


@pytest.mark.parametrize("page", named(PAGES))
def test_options_named_in_the_docs_exist(page):
    options = {field.name for field in fields(SparrowGRPOConfig)}
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\b((?:sparse|rollout|vllm|distill)_\w+)=?", text):
        if name not in ("rollout_func", "rollout_engine", "distill_frozen_policy", "distill_training"):
            known = name in options or f"sparrow/{name}" in text
            assert known, f"{page.name} names the option {name}"


def test_logged_metrics_are_the_documented_ones():
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    documented = set()
    for cell in re.findall(r"^\| (`sparrow/.*?) \|", page, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", cell)
        documented.add(first)
        documented |= {first.rpartition("/")[0] + other if other.startswith("/") else other for other in others}
    sources = ("rollout_metrics.py", "distill/update.py", "monitor/tail_monitor.py")
    source = "".join((ROOT / "sparrow_trl" / name).read_text(encoding="utf-8") for name in sources)
    logged = set()
    for name in re.findall(r'metrics\[f?"([\w/{}]+)"\] =', source):
        name = name.replace("bin_{index}", "bin_0")  # standing for every bin
        bounds = ("lower", "upper") if "{name}" in name else ("",)
        logged |= {f"sparrow/{name.replace('{name}', bound)}" for bound in bounds}
    assert len(logged) >= 30
    assert documented == logged


def test_troubleshooting_headings_are_error_texts_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.+)`", page, re.MULTILINE)
    assert len(headings) >= 10
    texts = [text for source in SOURCES for text in texts_of(source)]
    for heading in headings:
        assert any(heading in text for text in texts), f"no error says {heading!r}"


def test_generated_configuration_has_every_option_of_ours_with_its_default():
    text = runpy.run_path(str(DOCS / "generate.py"))["configuration"]()
    own, changed, inherited = (section for section in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:])
    assert "| `sparse_schedule` | `'auto'` | How many pages" in own
    assert "| `rollout_memory_fraction` | `0.5` |" in own
    assert re.findall(r"^\| `(\w+)`", changed, re.MULTILINE) == [
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
    ]
    assert "| `num_generations` | `8` |" in inherited
    for row in filter(None, text.splitlines()):
        if row.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", row)) == 4, row
