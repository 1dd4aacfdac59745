"""
Draw the figures of the docs into docs/figures, each once for light and once for dark pages.

    python docs/figures.py             # from the published schedules, the cost model and docs/figures/measured.json
    python docs/figures.py --measure   # measures SmolLM2-135M anew before, in a few minutes on two cores

The drawings are committed, so that they are seen without a build. Each names a hash of the numbers in it: tests compute
them again and compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow_trl import SparsitySchedule
from sparrow_trl.sparsity.cost import CHIPS, ModelShape, crossover, speedup, step_cost


if TYPE_CHECKING:
    from matplotlib.figure import Figure


ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("figures")
MEASURED = FOLDER / "measured.json"

MODELS = {
    "Qwen3-1.7B": "qwen3-1.7b",
    "Qwen3-4B": "qwen3-4b",
    "Qwen3-8B": "qwen3-8b",
    "Qwen3-14B": "qwen3-14b",
}
TARGET = 0.86
BATCH = 16
BATCHES = (1, 4, 16, 64)
WORTH = 1.1
CONTEXTS = tuple(int(context) for context in np.geomspace(512, 32768, 49).round())

# Colours by Okabe and Ito, which the colour-blind tell apart; lighter ones on dark pages.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "ground": "white",  # so that it is legible where there is no other
        "text": "#24292f",
        "faint": "#d5d8dd",
        "colours": ("#0072b2", "#d55e00", "#008a63", "#a8518a"),
    },
    "dark": {
        "ground": "none",
        "text": "#dfe3ea",
        "faint": "#4a5060",
        "colours": ("#56b4e9", "#f0a830", "#2fc495", "#e29ac6"),
    },
}


# Numbers


def load_shape(name: str) -> ModelShape:
    """Of one of the models whose configuration is in examples/configs."""
    return ModelShape.from_pretrained(ROOT / "examples" / "configs" / name)


def pages_data() -> dict[str, Any]:
    """Scores of the pages for one query, which of them it reads, and how dense attention spreads over them."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))["pages"]


def acceptance_data() -> dict[str, Any]:
    """Two next-token distributions, and the rates of many tokens."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {"token": measured["token"], "rates": measured["rates"]}


def schedules_data() -> dict[str, Any]:
    """Tokens that a sparse layer keeps, by bin, of each published schedule for the target."""
    kept = {}
    for label, name in MODELS.items():
        schedule = SparsitySchedule.from_preset(name, TARGET)
        always = schedule.sink_pages + schedule.recent_pages
        kept[label] = [(budget + always) * schedule.page_size for budget in schedule.budgets]
    return {"kept": kept, "bin_tokens": schedule.bin_tokens}


def speedup_data() -> dict[str, Any]:
    """Predicted speed-up of a step against the context, of the models at one batch and of one model at several."""
    chip = CHIPS["h200"]

    def curve(shape: ModelShape, schedule: SparsitySchedule, batch: int) -> dict[str, Any]:
        dense = SparsitySchedule.dense(page_size=schedule.page_size)
        values = [
            speedup(step_cost(shape, dense, context, batch), step_cost(shape, schedule, context, batch), chip)
            for context in CONTEXTS
        ]
        return {
            "speedup": [round(value, 3) for value in values],
            "crossover": crossover(shape, schedule, chip, batch, longest=CONTEXTS[-1]),
            "worth": crossover(shape, schedule, chip, batch, longest=CONTEXTS[-1], margin=WORTH),
        }

    models, batches = {}, {}
    for label, name in MODELS.items():
        shape, schedule = load_shape(name), SparsitySchedule.from_preset(name, TARGET)
        models[label] = curve(shape, schedule, BATCH)
        if not batches:
            batches = {f"batch {batch}": curve(shape, schedule, batch) for batch in BATCHES}
    return {"contexts": list(CONTEXTS), "models": models, "batches": batches}


# Drawings


def draw_pages(data: Mapping[str, Any], theme: Mapping[str, Any]) -> Figure:
    figure = new_figure(4.2)
    top, bottom = figure.subplots(2, 1, sharex=True)
    sink, recent, chosen = data["sink_pages"], data["recent_pages"], set(data["chosen"])
    count = len(data["attention"])
    kinds = [
        "sink" if page < sink else "recent" if page >= count - recent else "scored" if page in chosen else "left out"
        for page in range(count)
    ]
    blue, orange, green, _ = theme["colours"]
    shades = {"sink": orange, "scored": blue, "recent": green, "left out": theme["faint"]}
    heights = [score - min(data["scores"]) for score in data["scores"]]
    for axes, values in ((top, heights), (bottom, data["attention"])):
        for kind, shade in shades.items():
            places = [page for page in range(count) if kinds[page] == kind]
            axes.bar(places, [values[page] for page in places], width=0.82, color=shade, label=kind)
    kept = sum(data["attention"][page] for page in range(count) if kinds[page] != "left out")
    read = sum(kind != "left out" for kind in kinds)
    top.set_ylabel("score above the lowest")
    bottom.set_ylabel("dense attention")
    bottom.set_xlabel(f"page of {data['page_size']} tokens")
    bottom.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    top.set_title(f"budget {data['budget']}: {read} of {count} pages are read, with {kept:.0%} of the attention")
    top.legend(ncols=4, loc="upper left", handlelength=1.0)
    top.set_ylim(top=1.25 * max(heights))
    return figure


def draw_acceptance(data: Mapping[str, Any], theme: Mapping[str, Any]) -> Figure:
    figure = new_figure(3.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    blue, orange, green, _ = theme["colours"]
    token, rates = data["token"], data["rates"]
    places = np.arange(len(token["tokens"]))
    left.bar(places - 0.2, token["dense"], 0.4, color=blue, label="dense policy p")
    left.bar(places + 0.2, token["sparse"], 0.4, color=orange, label="sparse actor q")
    shared = np.minimum(token["dense"], token["sparse"])
    left.hlines(shared, places - 0.46, places + 0.46, color=theme["text"], linewidth=1.6, label="min(p, q)")
    left.set_xticks(places, [repr(text)[1:-1] for text in token["tokens"]], rotation=35, ha="right")
    left.set_ylabel("probability")
    left.set_title(f"one token: α = {token['alpha']:.2f}")
    left.legend()
    edges = np.linspace(0, 1, len(rates["counts"]) + 1)
    shades = [orange if edge < rates["tail"] else blue for edge in edges[:-1]]
    right.bar(edges[:-1], rates["counts"], width=edges[1], align="edge", color=shades)
    right.set_yscale("log")
    right.axvline(rates["tail"], color=theme["text"], linestyle="--", linewidth=1.2)
    right.annotate(
        f"tail {rates['tail']:.2f}",
        (rates["tail"], 0.86),
        xycoords=("data", "axes fraction"),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
    )
    right.set_xlim(edges[np.flatnonzero(rates["counts"])[0]] - 0.02, 1)
    right.set_xlabel("acceptance rate α")
    right.set_ylabel("tokens")
    right.set_title(f"{sum(rates['counts']):,} tokens: mean {rates['mean']:.2f}")
    return figure


def draw_schedules(data: Mapping[str, Any], theme: Mapping[str, Any]) -> Figure:
    figure = new_figure(3.6)
    axes = figure.subplots()
    styles = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1, 1.5)))
    for (label, kept), shade, style in zip(data["kept"].items(), theme["colours"], styles, strict=True):
        edges = np.arange(len(kept) + 1) * data["bin_tokens"]
        axes.stairs(kept, edges, baseline=None, color=shade, linestyle=style, linewidth=1.8, label=label)
    end = data["bin_tokens"] * max(map(len, data["kept"].values()))
    high = 1.08 * max(max(kept) for kept in data["kept"].values())
    axes.plot([0, high], [0, high], color=theme["text"], linewidth=1, linestyle=":", label="dense")
    axes.set_xlim(0, end)
    axes.set_ylim(0, high)
    axes.set_xlabel("position of the query (tokens)")
    axes.set_ylabel("tokens that a sparse layer reads")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="lower right")
    return figure


def draw_speedup(data: Mapping[str, Any], theme: Mapping[str, Any]) -> Figure:
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    titles = (f"models, batch {BATCH}", f"{next(iter(data['models']))}, several batches")
    for axes, curves, title in zip((left, right), (data["models"], data["batches"]), titles, strict=True):
        styles = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1, 1.5)))
        for (label, curve), shade, style in zip(curves.items(), theme["colours"], styles, strict=True):
            axes.plot(data["contexts"], curve["speedup"], color=shade, linestyle=style, linewidth=1.8, label=label)
            if curve["worth"] is not None:
                axes.plot(curve["worth"], WORTH, "o", color=shade, markersize=5)
        axes.axhline(1, color=theme["text"], linewidth=0.8)
        axes.axvline(min(curve["crossover"] for curve in curves.values()), color=theme["text"], linewidth=0.8, ls=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks([512 << doublings for doublings in range(7)], ["512", *(f"{1 << k}K" for k in range(6))])
        axes.minorticks_off()
        axes.set_xlabel("context (tokens)")
        axes.set_title(title)
        axes.legend(loc="upper left")
    left.set_ylabel("predicted speed-up of a step")
    return figure


def new_figure(height: float) -> Figure:
    """An empty figure, as wide as the text of a page."""
    from matplotlib.figure import Figure

    return Figure(figsize=(7.6, height), layout="constrained")


FIGURES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Mapping[str, Any], Mapping[str, Any]], Figure]]] = {
    "pages": (pages_data, draw_pages),
    "acceptance": (acceptance_data, draw_acceptance),
    "schedules": (schedules_data, draw_schedules),
    "speedup": (speedup_data, draw_speedup),
}


def digest(data: Mapping[str, Any]) -> str:
    """A hash of the numbers of a figure."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def draw(name: str, folder: Path) -> list[Path]:
    """Write the drawings of a figure, one for each theme, into `folder`."""
    import matplotlib

    make_data, draw_data = FIGURES[name]
    data, paths = make_data(), []
    for mode, theme in THEMES.items():
        settings = {
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": theme["text"],
            "axes.facecolor": "none",
            "axes.labelcolor": theme["text"],
            "figure.facecolor": theme["ground"],
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "svg.fonttype": "none",  # letters stay letters: small files, the reader's font
            "svg.hashsalt": name,  # the same file from the same numbers
            "text.color": theme["text"],
            "xtick.color": theme["text"],
            "ytick.color": theme["text"],
        }
        with matplotlib.rc_context(settings):
            path = folder / f"{name}-{mode}.svg"
            source = f"docs/figures.py, numbers {digest(data)}"
            draw_data(data, theme).savefig(path, metadata={"Date": None, "Creator": None, "Source": source})
        paths.append(path)
    return paths


# Measurement


PICTURED_TOKENS, PICTURED_BUDGET, PICTURED_WORDS = 640, 8, 6
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS, BUDGET = 6, 1500, 160, 16


def measure() -> dict[str, Any]:
    """What the figures of the method show, of SmolLM2-135M on the topics of Python's `help()`."""
    import torch
    import transformers
    from transformers import GenerationConfig

    from sparrow_trl import RolloutEngine
    from sparrow_trl.benchmark.text import cut, token_stream
    from sparrow_trl.embedded import MODEL_NAME, load_smollm2
    from sparrow_trl.monitor import LazyLogits, Scorer, acceptance_rate

    model, tokenizer = load_smollm2()
    stream = token_stream(tokenizer)
    scorer, schedule, dense = Scorer(model), SparsitySchedule.fixed(BUDGET), SparsitySchedule.dense()
    prompts = cut(stream, SEQUENCES, PROMPT_TOKENS)
    config = GenerationConfig(do_sample=True, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    output = RolloutEngine(model, schedule).generate(prompts, config, seed=0)
    rates, states = [], []
    for prompt, completion in zip(prompts, output.completion_ids, strict=True):
        pair = [
            LazyLogits(scorer.hidden_states(chosen, [*prompt, *completion], len(prompt)), scorer.logits)
            for chosen in (dense, schedule)
        ]
        rates.append(acceptance_rate(*pair))
        states.append(pair)
    alpha = torch.cat(rates)
    tail = alpha.quantile(0.05).item()
    # A token whose rate is about the tail, and whose likeliest successors can be read
    for sequence, place in [divmod(index, NEW_TOKENS) for index in (alpha - tail).abs().argsort().tolist()]:
        p, q = (logits[place : place + 1].softmax(-1)[0] for logits in states[sequence])
        words = torch.maximum(p, q).topk(PICTURED_WORDS).indices
        texts = [tokenizer.decode([word]).strip() for word in words.tolist()]
        if len({text for text in texts if text.isprintable() and text}) == PICTURED_WORDS:
            break
    return {
        "model": MODEL_NAME,
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "schedule": f"fixed:{BUDGET}",
        "pages": _choice_of_pages(model, stream[:PICTURED_TOKENS]),
        "token": {
            "tokens": [*texts, "all others"],
            "dense": [*_rounded(p[words]), round(1 - p[words].sum().item(), 4)],
            "sparse": [*_rounded(q[words]), round(1 - q[words].sum().item(), 4)],
            "alpha": round(rates[sequence][place].item(), 4),
        },
        "rates": {
            "counts": np.histogram(alpha.numpy(), bins=50, range=(0, 1))[0].tolist(),
            "tail": round(tail, 4),
            "mean": round(alpha.mean().item(), 4),
        },
    }


def _choice_of_pages(model: Any, token_ids: list[int]) -> dict[str, Any]:
    """
    The choice of the last token, by the definition of the operation: in the layer and KV head whose scored pages draw the
    most attention, since the picture is of them.
    """
    import torch

    from sparrow_kernels import reference
    from sparrow_trl.attention import TeacherForced
    from sparrow_trl.rollout.isolation import rollout_mode

    schedule = SparsitySchedule.fixed(PICTURED_BUDGET)
    pages, found = len(token_ids) // schedule.page_size, []

    class Recorder(TeacherForced):
        def attend(self, layer, query, key, value, *, scaling, **options):
            if layer not in schedule.dense_layers:
                found.extend(choices(layer, query[-1:], key.transpose(0, 1), scaling))
            return super().attend(layer, query, key, value, scaling=scaling, **options)

    def choices(layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float) -> Iterator[dict[str, Any]]:
        """`query` is `(1, num_heads, head_dim)`, `keys` are `(num_kv_heads, num_tokens, head_dim)`."""
        landmarks = keys.unflatten(1, (pages, schedule.page_size)).mean(2)
        chosen = reference.select_pages(
            query,
            landmarks,
            torch.arange(pages)[None],
            torch.tensor([len(token_ids) - 1]),
            torch.tensor([PICTURED_BUDGET]),
            schedule.page_size,
            schedule.sink_pages,
            schedule.recent_pages,
        )[0]
        for head, group in enumerate(query[0].unflatten(0, (len(keys), -1))):
            attention = (group @ keys[head].T * scaling).softmax(-1).mean(0)
            yield {
                "layer": layer,
                "kv_head": head,
                "scores": _rounded(group.mean(0) @ landmarks[head].T),
                "attention": _rounded(attention.unflatten(0, (pages, schedule.page_size)).sum(1)),
                "chosen": chosen[head].nonzero()[:, 0].tolist(),
            }

    with rollout_mode(model):
        model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.arange(len(token_ids))[None],
            use_cache=False,
            sparrow=Recorder(schedule, [len(token_ids)], [len(token_ids)]),
        )
    sizes = {name: getattr(schedule, name) for name in ("page_size", "sink_pages", "recent_pages")}

    def scored(choice: dict[str, Any]) -> float:
        pages_scored = [
            page for page in choice["chosen"] if sizes["sink_pages"] <= page < pages - sizes["recent_pages"]
        ]
        return sum(choice["attention"][page] for page in pages_scored)

    return {"budget": PICTURED_BUDGET, **sizes, **max(found, key=scored)}


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the docs.")
    parser.add_argument("--measure", action="store_true", help="measure SmolLM2-135M anew before")
    if parser.parse_args(argv).measure:
        MEASURED.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    for name in FIGURES:
        draw(name, FOLDER)


if __name__ == "__main__":
    main()
