"""The documentation says what the code does: links, options, metrics, error texts and examples."""

import ast
import re
import runpy
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import griffe
import pytest
from trl import DatasetMixtureConfig, ModelConfig

import sparrow_trl
from sparrow_trl import SparrowGRPOConfig, SparsitySchedule
from sparrow_trl.cli import _parser
from sparrow_trl.sparsity.cost.options import CostOptions
from sparrow_trl.sparsity.cost.report import compute
from sparrow_trl.train.arguments import TrainArguments


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
SOURCES = [*(ROOT / "sparrow_trl").rglob("*.py"), *(ROOT / "kernels" / "torch-ext").rglob("*.py")]


PACKAGES = (
    "",
    "rollout",
    "sparsity",
    "sparsity.calibration",
    "sparsity.cost",
    "monitor",
    "distill",
    "rewards",
    "evaluation",
    "hub",
)


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
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))  # where links lead is no name
    for name in re.findall(r"\b((?:sparse|rollout|vllm|distill)_\w+)=?", text):
        if name not in (
            "rollout_func",
            "rollout_engine",
            "distill_frozen_policy",
            "distill_training",
            "distill_overhead",
        ):
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


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_on_the_api_page(package):
    module = import_module(f"sparrow_trl.{package}".rstrip("."))
    documented = set(re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    code = griffe.load("sparrow_trl", search_paths=[ROOT], submodules=True)
    where = dict(getattr(module, "_EXPORTS", {}))  # what is imported on first use
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            where |= {alias.name: node.module for alias in node.names}
    for name in set(module.__all__) - {"__version__", "SparrowGRPOConfig"}:  # whose fields have a page of their own
        item = code[".".join(part for part in (package, where.get(name), name) if part)]
        while item.is_alias:
            item = item.final_target
        assert {item.path, item.parent.path} & documented, f"{item.path} is not in docs/api.md"
        assert item.docstring, f"{item.path} has no docstring, so the page leaves it out"


def commands():
    """Every `sparrow ...` of the docs, as arguments."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = re.sub(r"\$\w+", "16", block.replace("\\\n", " "))
            for line in re.findall(r"(?:\bsparrow|-m sparrow_trl\.cli) ((?:[a-z]+\b|--)[^;\n]*)", lines):
                yield pytest.param(shlex.split(line, comments=True), id=f"{page.stem}: {line[:60]}")


@pytest.mark.parametrize("arguments", commands())
def test_commands_are_understood(arguments):
    if arguments[-1] == "--help":
        with pytest.raises(SystemExit, match="^0$"):
            _parser().parse_args(arguments)
        return
    if arguments[0] != "train":
        _parser().parse_args(arguments)
        return
    kinds = (TrainArguments, SparrowGRPOConfig, ModelConfig, DatasetMixtureConfig)
    known = {"config"} | {field.name for kind in kinds for field in fields(kind)}
    flags = [argument[2:].replace("-", "_") for argument in arguments if argument.startswith("--")]
    assert flags and set(flags) <= known


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


def test_generated_speedups_are_those_of_the_command():
    page = runpy.run_path(str(DOCS / "generate.py"))
    rows = [row.strip("| ").split(" | ") for row in page["speedups"]().splitlines()[2:]]
    assert len(rows) == 20
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert found["Qwen3-14B", "T4"][0] == "none fits"  # 28 GB of weights, 16 GB of memory

    def at(context, batch=5):
        model = str(ROOT / "examples/configs/qwen3-1.7b")
        options = CostOptions(model, chip="l4", batch=batch, contexts=[context], prompt_length=512, page_sizes=[])
        return compute(options)["contexts"][0]

    batch, rollout, step, *starts = found["Qwen3-1.7B", "L4"]
    assert batch == "5" and at(32768)["fits"] and not at(32768, batch=6)["fits"]
    assert rollout == f"{at(32768)['rollout_speedup']:.2f}x" and step == f"{at(32768)['speedup']:.2f}x"
    for start, margin in zip(starts, (1.1, 1.5), strict=True):
        tokens = int(start.replace(",", ""))
        assert at(tokens - 16)["speedup"] <= margin < at(tokens)["speedup"]


def test_generated_sizes_of_the_cache():
    [row] = [row for row in runpy.run_path(str(DOCS / "generate.py"))["kv_cache"]().splitlines() if "1.7B" in row]
    token = 28 * 8 * 128 * 2 * (2 + 1 / 16)  # layers, KV heads, head dim, bytes; key, value and its part of a landmark
    assert row == (
        f"| Qwen3-1.7B | 28 x 8 x 128 | {token / 1024:.0f} KiB | {token * 8192 / 2**30:.2f} GiB | {token / 2**15:.2f} GiB |"
    )


FIGURES = runpy.run_path(str(DOCS / "figures.py"))


@pytest.mark.parametrize("name", FIGURES["FIGURES"])
def test_figures_show_the_present_numbers(name, tmp_path):
    number = FIGURES["digest"](FIGURES["FIGURES"][name][0]())
    for path in FIGURES["draw"](name, tmp_path):
        assert f"numbers {number}" in path.read_text(encoding="utf-8")
        committed = (FIGURES["FOLDER"] / path.name).read_text(encoding="utf-8")
        assert f"numbers {number}" in committed, f"{path.name} is out of date: python docs/figures.py"


def test_figures_are_shown_and_described():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = dict(re.findall(r"!\[([^\]]*)\]\(figures/(\w+)-light\.svg\)", pages))
    assert sorted(shown.values()) == sorted(FIGURES["FIGURES"])
    assert all(len(text.split()) > 20 for text in shown)
