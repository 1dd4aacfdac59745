"""`SparrowGRPOConfig`: what it takes, what it refuses before any time is spent, and how it is written down."""

import dataclasses
import json
import warnings

import pytest
import yaml
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from sparrow_trl import SparrowGRPOConfig, SparsitySchedule


OWN_FIELDS = {
    "sparse_schedule",
    "sparse_target",
    "rollout_memory_fraction",
    "rollout_max_num_seqs",
    "rollout_prefill_chunk_size",
    "rollout_progress_bar",
    "rollout_check_support",
    "rollout_decode_backend",
    "tail_monitor",
    "tail_threshold",
    "tail_action",
    "tail_share",
    "tail_every",
    "tail_statistic",
    "tail_top_k",
    "tail_min_tokens",
    "tail_confidence",
    "tail_floor_every",
    "tail_min_budget",
    "tail_max_budget",
    "distill_sparse",
    "distill_rank",
    "distill_alpha",
    "distill_target_modules",
    "distill_learning_rate",
    "distill_warmup_steps",
    "distill_max_grad_norm",
    "distill_kl",
    "distill_kl_direction",
    "distill_kl_coef",
    "distill_ppo_coef",
    "distill_top_k",
    "distill_reuse_teacher",
    "distill_every",
    "distill_tokens",
    "distill_steps",
    "distill_micro_tokens",
}
CHANGED_DEFAULTS = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}


def make(tmp_path, **options):
    return SparrowGRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **options)


def parse(parser, tmp_path, *arguments):
    return parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--report_to", "none", "--use_cpu", *arguments]
    )[0]


# --- fields and their documentation ---


def test_fields_are_trls_and_our_own():
    trl = {field.name for field in dataclasses.fields(GRPOConfig)}
    ours = {field.name for field in dataclasses.fields(SparrowGRPOConfig)}
    assert ours - trl == OWN_FIELDS
    assert trl <= ours


def test_defaults_of_trls_fields_are_trls_except_the_documented_two():
    changed = {}
    for field in dataclasses.fields(GRPOConfig):
        default = SparrowGRPOConfig.__dataclass_fields__[field.name].default
        if default != field.default:
            changed[field.name] = default
    assert changed == CHANGED_DEFAULTS
    for name, default in changed.items():
        value = f'"{default}"' if isinstance(default, str) else default
        assert f"`{name}`: Defaults to `{value}`" in SparrowGRPOConfig.__doc__


@pytest.mark.parametrize("name", sorted(OWN_FIELDS))
def test_own_field_is_documented_twice_with_its_default(name):
    field = SparrowGRPOConfig.__dataclass_fields__[name]
    assert field.metadata["help"]
    assert f"\n        {name} (" in SparrowGRPOConfig.__doc__
    if field.default is not None:
        value = f'"{field.default}"' if isinstance(field.default, str) else field.default
        line = next(line for line in SparrowGRPOConfig.__doc__.splitlines() if line.startswith(f"        {name} ("))
        assert f"defaults to `{value}`" in line


# --- forms of the schedule, and how they are written down ---

SCHEDULE = SparsitySchedule(budgets=(8, 16, 32), bin_tokens=512, page_size=8, target=0.9, provenance={"by": "hand"})


def resolved(config):
    return SparsitySchedule.resolve(config.sparse_schedule, target=config.sparse_target)


def test_schedule_object_is_stored_as_a_dictionary(tmp_path):
    config = make(tmp_path, sparse_schedule=SCHEDULE)
    assert isinstance(config.sparse_schedule, dict)
    assert resolved(config) == SCHEDULE


@pytest.mark.parametrize("schedule", ["auto", "dense", "fixed:64", "qwen3-1.7b@0.86", "user/name", SCHEDULE, None])
def test_json_round_trip(tmp_path, schedule):
    config = make(tmp_path, sparse_schedule=schedule)
    written = json.loads(config.to_json_string())
    again = make(tmp_path, **{name: written[name] for name in OWN_FIELDS})
    if isinstance(schedule, SparsitySchedule):
        assert resolved(again) == schedule
    else:
        assert again.sparse_schedule == schedule
    for value in config.to_sanitized_dict().values():
        assert isinstance(value, (bool, int, float, str))  # what trackers take


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_command_line(tmp_path, parser):
    parser = parser(SparrowGRPOConfig)
    assert parse(parser, tmp_path).sparse_schedule == "auto"
    assert parse(parser, tmp_path, "--sparse_schedule", "fixed:64").sparse_schedule == "fixed:64"
    assert parse(parser, tmp_path, "--sparse_schedule", "none").sparse_schedule is None
    assert parse(parser, tmp_path, "--sparse_schedule", "None").sparse_schedule is None
    from_json = parse(parser, tmp_path, "--sparse_schedule", json.dumps(SCHEDULE.to_dict()))
    assert resolved(from_json) == SCHEDULE
    many = parse(
        parser,
        tmp_path,
        *("--sparse_target", "0.92"),
        *("--rollout_memory_fraction", "0.25"),
        *("--rollout_max_num_seqs", "8"),
        *("--rollout_prefill_chunk_size", "64"),
        *("--rollout_progress_bar", "false"),
        *("--rollout_check_support", "false"),
    )
    assert (many.sparse_target, many.rollout_memory_fraction) == (0.92, 0.25)
    assert (many.rollout_max_num_seqs, many.rollout_prefill_chunk_size) == (8, 64)
    assert many.rollout_progress_bar is False
    assert many.rollout_check_support is False
    assert parse(parser, tmp_path).rollout_progress_bar is None


def test_help_can_be_rendered():
    help_text = HfArgumentParser(SparrowGRPOConfig).format_help()
    for name in OWN_FIELDS:
        assert f"--{name}" in help_text


def test_yaml_file_of_trls_parser(tmp_path):
    path = tmp_path / "config.yaml"
    options = {
        "output_dir": str(tmp_path),
        "report_to": "none",
        "use_cpu": True,
        "sparse_schedule": {"budgets": [4, 8], "page_size": 32},
        "rollout_progress_bar": True,
    }
    path.write_text(yaml.safe_dump(options))
    (config,) = TrlParser(SparrowGRPOConfig).parse_args_and_config(["--config", str(path)])
    assert resolved(config) == SparsitySchedule(budgets=(4, 8), page_size=32)
    assert config.rollout_progress_bar is True


def test_schedule_file_and_folder(tmp_path):
    file = SCHEDULE.save_pretrained(tmp_path / "schedule")
    for path in (file, file.parent, str(file), str(file.parent)):
        assert resolved(make(tmp_path, sparse_schedule=path)) == SCHEDULE


# --- bad input ---


def broken_file(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{"budgets": [4, 8')
    return str(path)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"sparse_schedule": "qwen3-99b"}, ["sparse_schedule", "qwen3-99b", "user/name"]),
        ({"sparse_schedule": "qwen3-1.7b@0.5"}, ["sparse_schedule", "0.5", "0.86"]),
        ({"sparse_schedule": "fixed:-4"}, ["sparse_schedule", "fixed:-4"]),
        ({"sparse_schedule": {"budgets": [8, -1]}}, ["sparse_schedule", "budgets[1]=-1", "below 0"]),
        ({"sparse_schedule": {"budgets": [8], "page_size": 24}}, ["sparse_schedule", "page_size=24", "power of two"]),
        ({"sparse_schedule": {"pages": [8]}}, ["sparse_schedule", "pages", "budgets"]),
        ({"sparse_schedule": 64}, ["sparse_schedule", "64", "fixed:64"]),
        ({"sparse_target": 0.0}, ["sparse_target=0.0", "(0, 1]"]),
        ({"sparse_target": 1.5}, ["sparse_target=1.5", "(0, 1]"]),
        ({"rollout_memory_fraction": 0.0}, ["rollout_memory_fraction=0.0", "(0, 1]"]),
        ({"rollout_memory_fraction": 1.01}, ["rollout_memory_fraction=1.01", "(0, 1]"]),
        ({"rollout_max_num_seqs": 0}, ["rollout_max_num_seqs=0", "below 1"]),
        ({"rollout_prefill_chunk_size": -1}, ["rollout_prefill_chunk_size=-1", "below 1"]),
        ({"rollout_max_num_seqs": 2.5}, ["rollout_max_num_seqs=2.5", "not an integer"]),
        ({"rollout_max_num_seqs": True}, ["rollout_max_num_seqs=True", "not an integer"]),
        ({"sparse_target": "0.86"}, ["sparse_target='0.86'", "not a number", "(0, 1]"]),
        ({"sparse_target": True}, ["sparse_target=True", "not a number"]),
        ({"sparse_target": None}, ["sparse_target=None", "not a number"]),
        ({"sparse_target": float("nan")}, ["sparse_target=nan", "(0, 1]"]),
        ({"rollout_memory_fraction": "half"}, ["rollout_memory_fraction='half'", "not a number"]),
        ({"rollout_memory_fraction": float("nan")}, ["rollout_memory_fraction=nan", "(0, 1]"]),
        ({"rollout_check_support": "yes"}, ["rollout_check_support='yes'", "True or False"]),
        ({"rollout_decode_backend": "cuda"}, ["rollout_decode_backend='cuda'", "'auto', 'host'"]),
        ({"distill_sparse": "no"}, ["distill_sparse='no'", "True or False"]),
        ({"rollout_check_support": None}, ["rollout_check_support=None", "True or False"]),
        ({"rollout_progress_bar": 1}, ["rollout_progress_bar=1", "True or False or None"]),
        (
            {"sparse_schedule": '{"budgets": [4, 8'},
            ["sparse_schedule='{\"budgets\": [4, 8'", "not valid JSON", "column"],
        ),
        ({"sparse_schedule": "qwen3-1.7b", "sparse_target": 0.5}, ["target=0.5", "0.86", "option sparse_target"]),
        ({"use_vllm": True}, ["use_vllm=True", "sparse_schedule='auto'", "sparse_schedule=None"]),
        (
            {"use_transformers_continuous_batching": True},
            ["use_transformers_continuous_batching=True", "sparse_schedule=None"],
        ),
        ({"cache_implementation": "static"}, ["cache_implementation='static'", "sparse_schedule=None"]),
        ({"temperature": "1"}, ["temperature='1'", "not a number"]),
        ({"temperature": True}, ["temperature=True", "not a number"]),
        ({"temperature": None}, ["temperature=None", "not a number"]),
        ({"top_p": "0.9"}, ["top_p='0.9'", "not a number or None"]),
        ({"top_k": True}, ["top_k=True", "not a number or None"]),
        ({"min_p": "0.1"}, ["min_p='0.1'", "not a number or None"]),
        ({"repetition_penalty": True}, ["repetition_penalty=True", "not a number"]),
        ({"generation_kwargs": {"typical_p": True}}, ["generation_kwargs['typical_p']=True", "not a number"]),
        ({"generation_kwargs": {"min_length": "2"}}, ["generation_kwargs['min_length']='2'", "not a number"]),
        ({"generation_kwargs": {"max_new_tokens": True}}, ["generation_kwargs['max_new_tokens']=True"]),
        ({"generation_kwargs": {"do_sample": "no"}}, ["generation_kwargs['do_sample']='no'", "True or False"]),
        ({"vllm_importance_sampling_clip_max": "2"}, ["vllm_importance_sampling_clip_max='2'", "not a number"]),
        ({"vllm_importance_sampling_clip_min": True}, ["vllm_importance_sampling_clip_min=True", "not a number"]),
        (
            {"vllm_importance_sampling_correction": "no"},
            ["vllm_importance_sampling_correction='no'", "True or False"],
        ),
        ({"max_completion_length": 0}, ["max_completion_length=0"]),
        ({"max_completion_length": None}, ["max_completion_length=None"]),
        ({"generation_kwargs": {"num_beams": 4}}, ["num_beams=4", "generation_kwargs"]),
        ({"generation_kwargs": {"temperature": 0.5}}, ["temperature=0.5", "temperature=1.0"]),
        ({"generation_kwargs": {"do_sample": False}}, ["do_sample=False"]),
        ({"vllm_importance_sampling_mode": "tokens"}, ["'tokens'", "token_truncate", "sequence_mask"]),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
            ["vespo", "token_truncate", "sequence_mask"],
        ),
        ({"num_generations": 0}, ["num_generations=0", "2"]),
        ({"num_generations": 1}, ["num_generations=1", "2"]),
        ({"num_generations": "4"}, ["num_generations='4'", "not an integer"]),
        ({"num_generations_eval": True}, ["num_generations_eval=True", "not an integer"]),
        ({"generation_batch_size": "8"}, ["generation_batch_size='8'", "not an integer"]),
        ({"steps_per_generation": True}, ["steps_per_generation=True", "not an integer"]),
        ({"num_iterations": "1"}, ["num_iterations='1'", "not an integer"]),
        ({"per_device_train_batch_size": 6, "num_generations": 4}, ["(6)", "(4)", "[2, 3, 6]", "num_generations"]),
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_generations": 4},
            ["(6)", "(4)", "[2, 3, 6]", "gradient_accumulation_steps"],
        ),
        (
            {"per_device_train_batch_size": 4, "generation_batch_size": 10, "num_generations": 2},
            ["(10)", "(4)", "multiple of 4"],
        ),
        (
            {"do_eval": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6},
            ["(8)", "[1, 2, 3, 6]", "num_generations_eval"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_names_value_limit_and_option(tmp_path, options, parts):
    with pytest.raises((ValueError, TypeError)) as caught:
        make(tmp_path, **options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("schedule", ["missing.json", "./missing", broken_file])
def test_broken_or_missing_schedule_file(tmp_path, schedule):
    if callable(schedule):
        schedule = schedule(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        make(tmp_path, sparse_schedule=schedule)
    assert "sparse_schedule" in str(caught.value)
    assert schedule.removeprefix("./") in str(caught.value)


def test_errors_that_are_not_about_divisibility_pass_unchanged(tmp_path):
    with pytest.raises(ValueError, match="auto_find_batch_size is not supported") as caught:
        make(tmp_path, auto_find_batch_size=True)
    assert "num_generations to one of" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"use_transformers_continuous_batching": True},
        {"use_vllm": True},
        {"max_completion_length": None},
        {"generation_kwargs": {"num_beams": 4}},
        {"vllm_importance_sampling_mode": "sequence_mask"},
        {"vllm_importance_sampling_correction": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_without_sparsity_trls_options_are_taken(tmp_path, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config = make(tmp_path, sparse_schedule=None, **options)
    assert config.sparse_schedule is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"vllm_importance_sampling_mode": "sequence_truncate"}, "token_truncate"),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, "token_truncate"),
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=False"),
    ],
)
def test_options_that_end_badly_are_warned_about(tmp_path, options, expected):
    with pytest.warns(UserWarning, match=expected) as caught:
        make(tmp_path, sparse_schedule="fixed:64", **options)
    (warning,) = [warning for warning in caught if issubclass(warning.category, UserWarning)]
    assert warning.filename.endswith("test_config.py")  # it points at the line that made the configuration


def test_no_warning_by_default(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for schedule in ("auto", "dense", "fixed:64", None):
            make(tmp_path, sparse_schedule=schedule)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
        ({"top_p": 1.5}, r"top_p=1.5 is not in \(0, 1\]"),
        ({"temperature": float("nan")}, "temperature=nan must be above 0"),
        ({"max_completion_length": 2.5}, "max_completion_length=2.5 is not a positive integer"),
        ({"generation_kwargs": {"max_new_tokens": None}}, "generation_kwargs sets max_new_tokens=None"),
    ],
)
def test_sampling_options_are_checked_before_anything_is_loaded(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        SparrowGRPOConfig(str(tmp_path), bf16=False, report_to="none", **options)
