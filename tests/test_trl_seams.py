"""The contract with TRL: every private name that `sparrow_trl/trl_seams.py` relies on, against the installed version.

A failure here means that TRL has changed under a seam. Read what the message points at, adapt `trl_seams.py`, then this
file. Nothing else in the package names private symbols of TRL, which the last tests see to.
"""

import ast
import functools
import inspect
import textwrap
from pathlib import Path

import pytest
import transformers
import trl
from trl import GRPOTrainer
from trl.extras import profiling

import sparrow_trl
from sparrow_trl.trainer import SparrowGRPOTrainer
from sparrow_trl.trl_seams import SeamedGRPOTrainer


PACKAGE = Path(sparrow_trl.__file__).parent
SEAMS = PACKAGE / "trl_seams.py"
ADVICE = f"TRL {trl.__version__} differs from what sparrow_trl/trl_seams.py was written for: "


@functools.cache
def source_tree(function) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def methods_that_use(attribute: str) -> set[str]:
    """The methods of TRL's trainer that read or write `self.<attribute>`."""
    users = set()
    for method in source_tree(GRPOTrainer).body[0].body:
        if isinstance(method, ast.FunctionDef):
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and node.attr == attribute and ast.unparse(node.value) == "self":
                    users.add(method.name)
    return users


def methods_that_call(owner, name: str) -> set[str]:
    """The methods of a class that call `self.<name>`."""
    found = set()
    for method in source_tree(owner).body[0].body:
        if isinstance(method, ast.FunctionDef) and f"self.{name}(" in ast.unparse(method):
            found.add(method.name)
    return found


OVERRIDDEN = {
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ],
    "_generate": ["self", "prompts"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_compute_loss": ["self", "model", "inputs"],
    # Of the trainer of transformers:
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_finish_current_push": ["self"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_method_has_the_same_parameters(name):
    assert hasattr(GRPOTrainer, name), f"{ADVICE}GRPOTrainer.{name} is gone."
    for owner in (GRPOTrainer, SeamedGRPOTrainer):
        found = list(inspect.signature(getattr(owner, name)).parameters)
        assert found == OVERRIDDEN[name], f"{ADVICE}{owner.__name__}.{name} takes {found}."


def test_seams_override_no_other_private_method():
    overridden = {name for name in vars(SeamedGRPOTrainer) if name.startswith("_") and not name.startswith("__")}
    overridden -= {"_awaits_policy_pass"}  # an attribute of ours
    assert overridden == {*OVERRIDDEN, "_get_per_token_logps_and_entropies"}


def test_pass_over_a_batch_takes_the_batch_first():
    """We pass on what follows as it comes."""
    found = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert found[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"], f"{ADVICE}{found}"


def test_first_pass_over_a_batch_is_the_policys_where_there_is_a_correction():
    tree = source_tree(GRPOTrainer._generate_and_score_completions)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._get_per_token_logps_and_entropies"
    ]
    first = min(calls, key=lambda call: call.lineno)
    conditions = [
        ast.unparse(node.test)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and any(child is first for part in node.body for child in ast.walk(part))
    ]
    assert ast.unparse(first.args[0]) == "self.model"
    assert len(conditions) == 1
    assert conditions[0].endswith("or (self.use_vllm and self.vllm_importance_sampling_correction)"), (
        f"{ADVICE}the policy's log-probabilities are computed if {conditions}."
    )


def test_fused_head_calls_the_backbone_with_its_hooks():
    """The hidden states of the policy's pass are taken by a forward hook."""
    source = inspect.getsource(trl.trainer.utils.add_fused_lm_head)
    assert "getattr(self, backbone_attr)(*args, **kwargs)" in source, f"{ADVICE}the fused head is called differently."
    assert 'backbone_attr = "base_model"' in source


def test_generation_of_a_turn_returns_ids_and_logprobs():
    returns = [n for n in ast.walk(source_tree(GRPOTrainer._generate_single_turn)) if isinstance(n, ast.Return)]
    assert [ast.unparse(node.value) for node in returns] == ["(completion_ids, logprobs)"], (
        f"{ADVICE}_generate_single_turn returns something else than completion ids and log-probabilities."
    )


def test_all_generation_of_trl_goes_through_the_overridden_method():
    users = methods_that_use("_generate_single_turn")
    assert users == {"_generate", "_tool_call_loop"}, f"{ADVICE}_generate_single_turn is called in {users}."
    generating = set()
    for method in source_tree(GRPOTrainer).body[0].body:
        if isinstance(method, ast.FunctionDef):
            for node in ast.walk(method):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".generate", ".generate_batch")):
                    generating.add(method.name)
    assert generating == {"_generate_single_turn"}, f"{ADVICE}completions are also generated in {generating}."


# Where each attribute that `take_over_generation` sets, or that only vLLM's engine has, is used. In each of these
# methods the use was read and found to work without vLLM:
#   __init__: runs before we set it. _generate_single_turn: overridden. _tool_call_loop: asks the engine in "colocate"
#   mode alone. _generate: updates the engine's weights with a rollout function alone, and then we have unset it.
#   _generate_and_score_completions, _compute_loss: the correction, which is what we want.
USES = {
    "use_vllm": {
        "__init__",
        "_generate_single_turn",
        "_tool_call_loop",
        "_generate",
        "_generate_and_score_completions",
        "_compute_loss",
    },
    "vllm_mode": {"__init__", "_tool_call_loop"},
    "vllm_generation": {"__init__", "_generate_single_turn", "_tool_call_loop", "_generate"},
    "_last_loaded_step": {"__init__", "_generate_single_turn", "_generate"},
    "eos_token_ids": {"__init__", "_generate_single_turn", "_generate", "_generate_and_score_completions"},
    "generation_config": {"__init__", "_generate_single_turn"},
    # Counts the forwards of the training; `has_finished_batch` compares it as `_prepare_inputs` does
    "_step": {"__init__", "training_step", "_prepare_inputs"},
}


@pytest.mark.parametrize("attribute", USES)
def test_attribute_is_used_only_where_we_have_looked(attribute):
    found = methods_that_use(attribute)
    assert found == USES[attribute], (
        f"{ADVICE}self.{attribute} is now used in {sorted(found)}; see whether that works without vLLM."
    )


def test_tool_loop_asks_vllms_engine_in_colocate_mode_alone():
    conditions = [
        ast.unparse(node.test)
        for node in ast.walk(source_tree(GRPOTrainer._tool_call_loop))
        if isinstance(node, ast.If) and "vllm_generation" in ast.unparse(node.body[0])
    ]
    assert conditions == ["self.use_vllm and self.vllm_mode == 'colocate'"], f"{ADVICE}{conditions}"


BATCH_KEYS = {
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "advantages",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
}


def test_keys_of_a_scored_batch():
    strings = {
        node.value
        for node in ast.walk(source_tree(GRPOTrainer._generate_and_score_completions))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    missing = BATCH_KEYS - strings
    assert not missing, f"{ADVICE}a scored batch has no {sorted(missing)}."
    used = {
        node.value
        for node in ast.walk(ast.parse(SEAMS.read_text()))
        if isinstance(node, ast.Constant) and node.value in BATCH_KEYS
    }
    assert used == BATCH_KEYS


def test_loss_is_weighted_where_the_batch_has_ratios():
    conditions = [
        ast.unparse(node.test)
        for node in ast.walk(source_tree(GRPOTrainer._compute_loss))
        if isinstance(node, ast.If) and "inputs['importance_sampling_ratio']" in ast.unparse(node.body[0])
    ]
    expected = ["self.use_vllm and self.vllm_importance_sampling_correction and (self.loss_type != 'vespo')"]
    assert conditions == expected, f"{ADVICE}the loss is weighted if {conditions}."


def test_metrics_are_lists_by_mode():
    assert methods_that_use("_metrics") >= {"__init__", "log", "_compute_loss"}
    assert "self._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}" in ast.unparse(
        source_tree(GRPOTrainer.__init__)
    ), f"{ADVICE}metrics are kept in another way."
    log = ast.unparse(source_tree(GRPOTrainer.log))
    assert "mode = 'train' if self.model.training else 'eval'" in log, f"{ADVICE}log() finds its mode in another way."


def test_generation_batches_begin_at_multiples_of_their_forwards():
    prepare = ast.unparse(source_tree(GRPOTrainer._prepare_inputs))
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in prepare, ADVICE
    assert "if self._step % generate_every == 0 or" in prepare, ADVICE
    assert "self._step += 1" in ast.unparse(source_tree(GRPOTrainer.training_step)), ADVICE


def test_a_model_is_saved_before_its_checkpoint_and_a_checkpoint_loaded_with_its_optimizer():
    assert list(inspect.signature(GRPOTrainer.save_model).parameters) == ["self", "output_dir", "_internal_call"]
    save = ast.unparse(source_tree(transformers.Trainer._save_checkpoint))
    assert "self.save_model(output_dir, _internal_call=True)" in save, ADVICE
    assert "self._save_optimizer_and_scheduler(output_dir)" in save, ADVICE
    assert methods_that_call(transformers.Trainer, "_load_optimizer_and_scheduler"), ADVICE
    # The step's callbacks run after the optimizer and before a checkpoint is saved
    calls = {}
    for method in source_tree(transformers.Trainer).body[0].body:
        text = ast.unparse(method)
        for name in ("callback_handler.on_step_end(", "self.optimizer.step(", "self._maybe_log_save_evaluate("):
            if name in text:
                calls.setdefault(name, []).append((method.name, text.index(name)))
    (step,) = calls["callback_handler.on_step_end("]
    assert any(place[0] == step[0] and place[1] < step[1] for place in calls["self.optimizer.step("]), ADVICE
    assert any(place[0] == step[0] and place[1] > step[1] for place in calls["self._maybe_log_save_evaluate("]), ADVICE


def test_uploads_in_the_background_are_kept_as_jobs():
    push = ast.unparse(source_tree(transformers.Trainer._push_from_checkpoint))
    assert "self.push_in_progress = PushInProgress(push_jobs)" in push, f"{ADVICE}{push}"
    assert "run_as_future=True" in push
    assert transformers.utils.PushInProgress(["job"]).jobs == ["job"]


def test_profiling_context():
    assert list(inspect.signature(profiling.profiling_context).parameters) == ["trainer", "name"], ADVICE


def test_trainer_takes_exactly_trls_arguments():
    theirs = inspect.signature(GRPOTrainer.__init__).parameters
    ours = inspect.signature(SparrowGRPOTrainer.__init__).parameters
    assert list(ours) == list(theirs), f"{ADVICE}the arguments of the trainer."
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
        assert name == "self" or f"\n        {name} (" in SparrowGRPOTrainer.__doc__, f"{name} is not documented"


# --- the other files of the package ---


@functools.cache
def private_names_of_trl() -> set[str]:
    """Private methods, class attributes and instance attributes of TRL's trainer and of the trainers it derives from."""
    names = set()
    for owner in GRPOTrainer.__mro__[:-1]:
        names.update(vars(owner))
        if owner in (GRPOTrainer, *GRPOTrainer.__mro__[1:3], transformers.Trainer):
            for node in ast.walk(source_tree(owner)):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                    names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


OTHER_FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != SEAMS)


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_seams_name_private_symbols_of_trl(path):
    private = private_names_of_trl()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl"):
            named = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not named, f"{path.name} imports {named} of {node.module}"
        # In a trainer this would also clash with TRL's own attribute of that name
        if path.name == "trainer.py" and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            assert node.attr not in private, f"{path.name} uses self.{node.attr}, which is TRL's"
