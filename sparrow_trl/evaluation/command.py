"""The command `sparrow eval`. Nothing heavy is imported before it runs: `sparrow --help` reads the options here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .benchmarks import BENCHMARKS, find_benchmarks


DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sparrow eval`."""
    parser.add_argument(
        "model", metavar="MODEL", help="model name or path; SmolLM2-135M-Instruct is the embedded model"
    )
    parser.add_argument(
        "--suite", required=True, metavar="NAME,...", help=f"benchmarks, with commas: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for completions and results.json; continues there"
    )
    parser.add_argument(
        "--decode",
        default="dense",
        metavar="KIND,...",
        help="dense, which judges the policy, and sparse beside it: dense,sparse (default: dense)",
    )
    parser.add_argument("--schedule", help="of the sparse decode: fixed:64, a preset, a file, a Hub repository")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first so many problems of each suite")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="SUITE=PATH",
        help="read a suite's problems from a file or folder",
    )
    parser.add_argument("--json", metavar="PATH", help="also write the results there; - is standard output")

    sampling = parser.add_argument_group("sampling", "by default that of each suite")
    sampling.add_argument("--num-samples", type=int, metavar="N", help="completions for each problem")
    sampling.add_argument("--max-new-tokens", type=int, metavar="TOKENS", help="limit of a completion")
    sampling.add_argument("--temperature", type=float, help="0 decodes greedily")
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int, default=0, help="0 (the default): all tokens")
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="options of the chat template: '{\"enable_thinking\": false}'"
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument("--batch-size", type=int, default=64, help="completions in a batch (default: %(default)s)")
    machine.add_argument("--dtype", choices=DTYPES, default="auto")
    machine.add_argument("--device", help="default: the GPU if there is one, else the CPU")
    machine.add_argument(
        "--memory-fraction", type=float, default=0.8, help="of the free memory (default: %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    """
    Run `sparrow eval`.

    Returns:
        `int`: exit status: 0; 1 for a model that is not supported or programs that cannot be isolated; 2 for a mistake
        in the options, or a model or dataset that cannot be had.
    """
    try:
        find_benchmarks(args.suite)
        template = _template_options(args.chat_template_kwargs)
        data = _data(args.data)
    except ValueError as error:
        return _mistake(error)
    from rich.console import Console

    from ..rewards.sandbox import SandboxUnavailableError
    from ..rollout.support import UnsupportedModelError
    from ..sparsity.schedule import RECORD_FOLDER
    from .models import load_model
    from .report import table
    from .run import Sampling, evaluate_model, resolve_schedules

    console = Console(file=sys.stderr if args.json == "-" else None)
    if not console.is_terminal:
        console.width = 140
    decode = [kind.strip() for kind in args.decode.split(",") if kind.strip()]
    try:
        sampling = Sampling(args.num_samples, args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed)
        resolve_schedules(decode, args.schedule, args.model)  # before the model is loaded
        model, tokenizer = load_model(args.model, args.dtype, args.device)
        evaluation = evaluate_model(
            model,
            tokenizer,
            args.suite,
            decode=decode,
            schedule=args.schedule,
            out=args.out,
            sampling=sampling,
            limit=args.limit,
            batch_size=args.batch_size,
            data=data,
            chat_template_kwargs=template,
            model_name=args.model,
            engine_options={"memory_fraction": args.memory_fraction},
            on_progress=lambda suite, kind, done, total: print(f"{suite}, {kind}: {done} of {total}", file=sys.stderr),
        )
    except (UnsupportedModelError, SandboxUnavailableError) as error:
        print(f"sparrow eval: {error}", file=sys.stderr)
        return 1
    except (ImportError, OSError, ValueError) as error:
        return _mistake(error)
    console.print(table(evaluation))
    if (Path(args.model) / RECORD_FOLDER).is_dir():  # a model that this package trained
        print(f"for the model card: {evaluation.save_beside_model(args.model)}", file=sys.stderr)
    text = json.dumps(evaluation.to_dict(), indent=2)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _mistake(error: Exception) -> int:
    print(f"sparrow eval: {error}", file=sys.stderr)
    return 2


def _template_options(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--chat-template-kwargs {text!r} is not JSON: {error}.") from error
    if not isinstance(options, dict):
        raise ValueError(f"--chat-template-kwargs {text!r} is not a JSON object.")
    return options


def _data(pairs: list[str]) -> dict[str, str]:
    data = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or not path:
            raise ValueError(f"--data {pair!r} is not of the form SUITE=PATH.")
        data[name] = path
    return data
