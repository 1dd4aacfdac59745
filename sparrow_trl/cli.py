"""The command `sparrow`. Imports stay inside the commands, so that `--help` and mistakes answer at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import __version__
from .benchmark.options import RolloutOptions, add_arguments
from .evaluation.command import add_arguments as add_eval_arguments
from .sparsity.calibration.options import (
    CalibrationOptions,
    MeasureOptions,
    add_calibrate_arguments,
    add_tail_arguments,
    options_from_args,
)
from .sparsity.cost.options import CostOptions
from .sparsity.cost.options import add_arguments as add_cost_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point of `sparrow`.

    Args:
        argv (`list[str]`, *optional*): arguments; by default those of the process.

    Returns:
        `int`: exit status: 0; 1 for a refusal or a failed check; 2 for a mistake in the arguments; 130 if
        interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args, rest = _parser().parse_known_args(argv)
    if args.run is _run_train:
        return _run_train(args, argv[argv.index("train") + 1 :])
    if rest:
        _parser().parse_args(argv)  # says what it does not know
    json_path = getattr(args, "json", None)
    if json_path not in (None, "-") and (
        os.path.isdir(json_path) or not os.path.isdir(os.path.dirname(json_path) or ".")
    ):
        # Now, and not when all has been computed
        print(f"sparrow: --json {json_path} is no file in a folder that exists.", file=sys.stderr)
        return 2
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: bars of transformers, between our lines
    try:
        return args.run(args, argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparrow", description="Sparse rollouts for GRPO: tools.")
    parser.add_argument("--version", action="version", version=f"sparrow-trl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, what runs here, and what a model supports",
        description="Versions, devices and kernels; with a model also whether sparse rollouts support it, which layers "
        "would be sparse, and what its KV cache takes. The exit status is not 0 where something is refused.",
    )
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="model name or path")
    doctor.add_argument("--probe", action="store_true", help="load the model, and compare a short decode with it")
    doctor.set_defaults(run=_run_doctor)

    bench = commands.add_parser("bench", help="measure speed: sparse against dense rollouts")
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    rollout = benchmarks.add_parser(
        "rollout",
        usage="%(prog)s [options]",
        help="sparse against dense rollouts: decode steps, and completions of unequal length",
        description="HF generate, transformers' continuous batching and this package's engine, dense and sparse, side "
        "by side in one run. Nothing is printed unless all of them compute the same.",
    )
    add_arguments(rollout)
    rollout.set_defaults(run=_run_bench_rollout, parser=rollout)

    train = commands.add_parser(
        "train",
        add_help=False,  # its options are those of the trainer, which are slow to import
        help="train a model with GRPO and sparse rollouts, from flags or a YAML file",
    )
    train.set_defaults(run=_run_train)

    push = commands.add_parser(
        "push",
        help="upload a trained model, its card and its evidence to the Hub",
        description="Write the model card from what lies in the folder, and upload both. A fault of the network is tried "
        "again; what has arrived is not sent again.",
    )
    push.add_argument("folder", metavar="DIR", help="output folder of a training, or one of its checkpoints")
    push.add_argument("repo_id", metavar="REPO", help="repository on the Hub, user/name; made if missing")
    push.add_argument(
        "--private", action="store_true", default=None, help="make the repository private, if it is made"
    )
    push.add_argument("--revision", help="branch to commit to")
    push.add_argument("--token", help="token with write permission (default: the one you are logged in with)")
    push.add_argument("--message", default="Upload model", help="commit message (default: %(default)s)")
    push.add_argument("--keep-card", action="store_true", help="leave README.md as it is")
    push.set_defaults(run=_run_push)
    cost = commands.add_parser(
        "cost",
        usage="%(prog)s [options]",
        help="predict the speed-up of a schedule for a model, a chip and a batch",
        description="Bytes, FLOPs and equivalent FLOPs of dense and sparse decode steps, from the model's configuration "
        "and the chip's data sheet alone. Nothing is run.",
    )
    add_cost_arguments(cost)
    cost.set_defaults(run=_run_cost, parser=cost)

    calibrate = commands.add_parser(
        "calibrate",
        usage="%(prog)s [MODEL] --out DIR [options]",
        help="find the schedule of a model: the cheapest one that keeps the tail",
        description="Generates with the sparse model at several budgets, scores with the dense one, takes per length bin "
        "the cheapest budget that keeps the tail, and checks the schedule on its own trajectories. An interrupted run "
        "goes on where it was when called again with the same options.",
    )
    add_calibrate_arguments(calibrate)
    calibrate.set_defaults(run=_run_calibrate, parser=calibrate)

    tail = commands.add_parser(
        "tail",
        usage="%(prog)s [MODEL] --schedule SCHEDULE [options]",
        help="measure the tail of a schedule, bin by bin",
        description="Generates with the schedule, its own past behind it, and scores with the dense model.",
    )
    add_tail_arguments(tail)
    tail.set_defaults(run=_run_tail, parser=tail)

    evaluation = commands.add_parser(
        "eval",
        help="evaluate a model on maths and code, dense and sparse",
        description="Accuracy of a model on benchmarks, sampled by the rollout engine. Dense decode judges the policy; "
        "sparse decode beside it shows what the sampler of a sparse rollout loses.",
    )
    add_eval_arguments(evaluation)
    evaluation.set_defaults(run=_run_eval)
    return parser


def _run_train(args: argparse.Namespace, argv: list[str]) -> int:
    from .train.run import main as run

    return run(argv)


def _run_push(args: argparse.Namespace, argv: list[str]) -> int:
    from .hub.push import main as run

    return run(
        args.folder,
        args.repo_id,
        token=args.token,
        private=args.private,
        revision=args.revision,
        message=args.message,
        keep_card=args.keep_card,
    )


def _checked(args: argparse.Namespace, make: Callable[[argparse.Namespace], Any]) -> Any:
    """The options that `make` gets from the arguments; ends with what is wrong with them."""
    try:
        return make(args)
    except ValueError as error:
        args.parser.error(str(error))


def _run_doctor(args: argparse.Namespace, argv: list[str]) -> int:
    from .doctor import main as run

    return run(args.model, probe_model=args.probe)


def _run_bench_rollout(args: argparse.Namespace, argv: list[str]) -> int:
    options = _checked(args, RolloutOptions.from_args)
    from .benchmark.rollout import main as run

    return run(options, args.json, ["sparrow", *argv])


def _run_cost(args: argparse.Namespace, argv: list[str]) -> int:
    options = _checked(args, CostOptions.from_args)
    from .sparsity.cost.report import main as run

    return run(options, args.json)


def _run_calibrate(args: argparse.Namespace, argv: list[str]) -> int:
    options = _checked(args, partial(options_from_args, CalibrationOptions))
    from .sparsity.calibration.report import calibrate_main

    return calibrate_main(options, args, ["sparrow", *argv])


def _run_tail(args: argparse.Namespace, argv: list[str]) -> int:
    options = _checked(args, partial(options_from_args, MeasureOptions))
    from .sparsity.calibration.report import tail_main

    return tail_main(options, args, ["sparrow", *argv])


def _run_eval(args: argparse.Namespace, argv: list[str]) -> int:
    from .evaluation.command import main as run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
