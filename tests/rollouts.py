"""What the tests of the rollout engine share: prompts, sampling options, and log-probabilities found another way."""

import torch
from transformers import GenerationConfig

from sparrow_trl.rollout import RolloutEngine
from sparrow_trl.sparsity import SparsitySchedule
from tiny import VOCAB_SIZE, tiny_model


SPARSE = SparsitySchedule.fixed(1, page_size=4, dense_layers=(0,))


def endless(model_type="llama", **overrides):
    """A tiny model without a stop token: completions are as long as they may be."""
    return tiny_model(model_type, eos_token_id=None, **overrides)


def engine_of(model, schedule=SPARSE, **options):
    options = {"progress_bar": False, "check_support": False, **options}
    return RolloutEngine(model, schedule, **options)


def random_prompts(*lengths, seed=0):
    """The tokens of a prompt depend on its place in the list and on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def sampling(max_new_tokens, **options):
    return GenerationConfig(max_new_tokens=max_new_tokens, **{"do_sample": True, "temperature": 1.0, **options})


def greedy(max_new_tokens, **options):
    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, **options)


@torch.no_grad()
def distributions(model, prompt, completion, temperature=1.0, **forward_options):
    """`(len(completion), vocab_size)` log-probabilities at each token of the completion, from one forward."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False, **forward_options).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def logprobs(model, prompt, completion, temperature=1.0, **forward_options):
    """`(len(completion),)` log-probabilities of a completion's tokens, from one forward."""
    rows = distributions(model, prompt, completion, temperature, **forward_options)
    return rows.gather(-1, torch.tensor(completion)[:, None])[:, 0]
