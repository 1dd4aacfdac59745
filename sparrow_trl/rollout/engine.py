"""The rollout engine: token ids in, completions out."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..attention import TeacherForced
from ..memory import free_memory
from ..processes import is_main_process
from ..sparsity import SparsitySchedule
from ..validation import boolean, fraction, integer
from .arguments import check_prompts, checked_config, checked_tokens, stop_ids
from .backend import BACKENDS, KVShape, choose_backend
from .cache import PageAllocator, PagedKVCache
from .device_loop import DeviceLoop, num_columns
from .host_loop import HostLoop
from .isolation import on_device_of, rollout_mode
from .output import RolloutOutput, RolloutStats
from .runner import ModelRunner
from .sampler import Sampler
from .scheduler import Scheduler
from .sequence import Prompt, Sequence, random_stream
from .support import check_layers, check_model_config, probe
from .weights import copied_bytes


logger = logging.get_logger(__name__)

PROGRESS_BAR_DELAY = 10.0  # seconds after which a rollout counts as long


class RolloutEngine:
    """
    Samples completions with sparse paged attention, in process, from the model as it is at that moment.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model, possibly a `PeftModel`, not wrapped for distributed training.
        schedule (`SparsitySchedule`):
            How many pages a query keeps. May be replaced between rollouts (`engine.schedule = ...`).
        stop_token_ids (`Iterable[int]`, *optional*):
            Tokens that end a completion (the tokenizer's), beside those of the model's config, of its generation config
            and of the generation config of a call.
        memory_fraction (`float`, *optional*, defaults to `0.5`):
            Share of the memory that is free when a rollout starts, which its KV cache may take.
        max_num_seqs (`int`, *optional*, defaults to `256`):
            Sequences that are decoded at the same time, at most.
        prefill_chunk_size (`int`, *optional*, defaults to `1024`):
            Prompt tokens in one forward, at most.
        max_pages (`int`, *optional*):
            Pages of the KV cache, at most, whatever the memory.
        progress_bar (`bool`, *optional*):
            Whether to show one; by default on rollouts that take longer than ten seconds.
        check_support (`bool`, *optional*, defaults to `True`):
            Whether to compare a short paged decode with the model's own forward now, and refuse the model where they
            differ.
        decode_backend (`str`, *optional*, defaults to `"auto"`):
            What decodes: `"triton"` (kernels) or `"torch"` (PyTorch operations), in bursts of steps that stay on the
            device, or `"host"` (PyTorch operations, every step planned and read on the host). `"auto"` is `"host"` on a
            CPU; on a CUDA device it is `"triton"`, or `"torch"` with a warning where Triton does not run.

    Raises:
        UnsupportedModelError: for models that paged attention would run wrongly.
        ValueError: for arguments out of range.

    Example:

    ```python
    >>> engine = RolloutEngine(model, SparsitySchedule.fixed(64), stop_token_ids=[tokenizer.eos_token_id])
    >>> config = GenerationConfig(max_new_tokens=512, do_sample=True, temperature=1.0)
    >>> output = engine.generate(tokenizer(prompts)["input_ids"], config, seed=0)
    >>> output.completion_ids[0], output.logprobs[0], output.stats.kv_share
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: SparsitySchedule,
        *,
        stop_token_ids: Iterable[int] = (),
        memory_fraction: float = 0.5,
        max_num_seqs: int = 256,
        prefill_chunk_size: int = 1024,
        max_pages: int | None = None,
        progress_bar: bool | None = None,
        check_support: bool = True,
        decode_backend: str = "auto",
    ):
        self.memory_fraction = fraction("memory_fraction", memory_fraction)
        self.max_num_seqs = integer("max_num_seqs", max_num_seqs, low=1)
        self.prefill_chunk_size = integer("prefill_chunk_size", prefill_chunk_size, low=1)
        self.max_pages = None if max_pages is None else integer("max_pages", max_pages, low=1)
        boolean("progress_bar", progress_bar, or_none=True)
        boolean("check_support", check_support)
        if decode_backend not in BACKENDS:
            raise ValueError(f"decode_backend={decode_backend!r} must be one of {', '.join(map(repr, BACKENDS))}.")
        self.decode_backend = decode_backend
        check_model_config(model)
        self.model, self.progress_bar = model, progress_bar
        self.schedule = schedule
        sources = (model.config.get_text_config(), getattr(model, "generation_config", None))
        self.stop_token_ids = stop_ids(stop_token_ids, *(getattr(source, "eos_token_id", None) for source in sources))
        self._footprint = probe(model, compare=check_support)
        self._warned_length = False

    @property
    def schedule(self) -> SparsitySchedule:
        """How many pages a query keeps. It may be replaced between rollouts."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: SparsitySchedule) -> None:
        if not isinstance(schedule, SparsitySchedule):
            raise TypeError(
                f"schedule={schedule!r} is a {type(schedule).__name__}, not a SparsitySchedule; see "
                "`SparsitySchedule.resolve`, which makes one from a name, a path or a dict."
            )
        check_layers(schedule, self.model.config.get_text_config().num_hidden_layers)
        self._schedule = schedule

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        generation_config: GenerationConfig | None = None,
        *,
        seed: int = 0,
        max_new_tokens: SequenceOf[int] | None = None,
        top_logprobs: int = 0,
        top_logprobs_for: Collection[int] | None = None,
    ) -> RolloutOutput:
        """
        Sample a completion for each prompt. A prompt that occurs several times is computed once and its pages are
        shared. What a prompt's completion is depends on `seed` and its place in the list alone, not on the batch.

        Args:
            prompts (`list[list[int]]`):
                Token ids, without padding; lengths may differ.
            generation_config (`GenerationConfig`, *optional*):
                Sampling options, as in `generate`; without `max_new_tokens` and `max_length`, up to 512 new tokens. An option that is `None` is off.
                Without a config: sampling at temperature 1 from the full distribution.
            seed (`int`, *optional*, defaults to `0`):
                Seed of the random streams.
            max_new_tokens (`list[int]`, *optional*):
                A limit for each prompt's completion; by default that of `generation_config` holds for all.
            top_logprobs (`int`, *optional*, defaults to `0`):
                How many of the most likely tokens to report at each position.
            top_logprobs_for (`Collection[int]`, *optional*):
                Prompts (by place in the list) to report them for; by default all.

        Returns:
            `RolloutOutput`.

        Raises:
            ValueError: for an empty or too long prompt, token ids outside the vocabulary, or options the engine does
                not know; before anything is computed.
        """
        started = time.perf_counter()
        config = checked_config(generation_config)
        seed = integer("seed", seed, low=0)
        top_logprobs = integer("top_logprobs", top_logprobs, low=0)
        check_prompts(prompts)
        if max_new_tokens is None:
            if config.max_new_tokens is None and config.max_length is not None:
                max_new_tokens = [config.max_length - len(prompt) for prompt in prompts]
            else:
                max_new_tokens = [512 if config.max_new_tokens is None else config.max_new_tokens] * len(prompts)
        sampler = Sampler(config, stop_ids(self.stop_token_ids, config.eos_token_id))
        keep_top: set[int] = set()
        if top_logprobs:
            keep_top.update(range(len(prompts)) if top_logprobs_for is None else top_logprobs_for)
        if not keep_top <= set(range(len(prompts))):
            raise ValueError(f"top_logprobs_for={sorted(keep_top)} names prompts outside 0..{len(prompts) - 1}.")
        sequences = self._make_sequences(prompts, max_new_tokens, seed, keep_top)
        stats = RolloutStats(prompt_tokens=sum(len(prompt) for prompt in prompts))
        if not sequences:
            return RolloutOutput([], [], [], stats)

        dtype = self._cache_dtype()
        num_pages = self._num_pages(sequences, dtype)
        self._check_fits(sequences, num_pages)
        cache = PagedKVCache(num_pages, self.schedule.page_size, dtype)
        allocator = PageAllocator(num_pages)
        scheduler = Scheduler(cache, allocator, sequences, self.max_num_seqs)
        with on_device_of(self.model):
            backend = self._backend(sequences, sampler, dtype)
        runner = ModelRunner(self.model, self.schedule, cache, backend)
        make_loop = HostLoop if backend == "host" else partial(DeviceLoop, backend=backend)
        by_index = sorted(sequences, key=lambda sequence: sequence.index)
        bar = tqdm(
            total=len(sequences),
            desc="rollout",
            unit="seq",
            disable=self.progress_bar is False,
            delay=0 if self.progress_bar else PROGRESS_BAR_DELAY,
            leave=False,
        )
        with rollout_mode(self.model, packed=True), bar:
            loop = make_loop(
                runner,
                scheduler,
                sampler,
                stats,
                prefill_chunk_size=self.prefill_chunk_size,
                top_logprobs=top_logprobs,
                bar=bar,
            )
            loop.run()
        stats.preemptions = scheduler.preemptions
        stats.pages_peak, stats.pages_total = allocator.peak, num_pages
        stats.kv_bytes_read, stats.kv_bytes_dense = runner.reads.read, runner.reads.dense
        stats.seconds = time.perf_counter() - started
        return RolloutOutput(
            completion_ids=[sequence.completion_ids for sequence in by_index],
            logprobs=[sequence.logprobs for sequence in by_index],
            finish_reasons=[sequence.finish_reason or "" for sequence in by_index],
            stats=stats,
            top_ids=[sequence.top_ids for sequence in by_index] if top_logprobs else None,
            top_logprobs=[sequence.top_logprobs for sequence in by_index] if top_logprobs else None,
        )

    def logprobs(
        self, sequences: SequenceOf[SequenceOf[int]], prompt_lengths: SequenceOf[int], temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """
        Log-probabilities that decoding would have given to completions that are already there, each sequence in one
        forward (teacher-forced, sparse by the schedule).

        Args:
            sequences (`list[list[int]]`): token ids, prompt and completion.
            prompt_lengths (`list[int]`): how many of them are the prompt.
            temperature (`float`, *optional*, defaults to `1.0`): sampling temperature.

        Returns:
            `list[torch.Tensor]`: float32, one number per completion token.
        """
        if isinstance(temperature, (bool, str)) or not 0 < temperature < float("inf"):
            raise ValueError(f"temperature={temperature!r} must be a number above 0.")
        vocab_size = self.model.get_input_embeddings().num_embeddings
        for index, (token_ids, prompt_length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
            checked_tokens(token_ids, vocab_size, f"The sequence at index {index}")
            if not 0 < prompt_length < len(token_ids):
                raise ValueError(
                    f"The sequence at index {index} has {len(token_ids)} tokens and prompt_length={prompt_length}; both "
                    "prompt and completion need at least one token."
                )
        device = next(self.model.parameters()).device
        results = []
        with rollout_mode(self.model):
            for token_ids, prompt_length in zip(sequences, prompt_lengths, strict=True):
                state = TeacherForced(self.schedule, [len(token_ids)], [prompt_length])
                ids = torch.tensor([list(token_ids)], device=device)
                logits = self.model(
                    input_ids=ids,
                    position_ids=torch.arange(ids.shape[1], device=device)[None],
                    use_cache=False,
                    sparrow=state,
                ).logits[0, prompt_length - 1 : -1]
                scaled = logits.float() / temperature
                tokens = ids[0, prompt_length:, None]
                results.append(scaled.gather(-1, tokens)[:, 0] - scaled.logsumexp(-1))
        return results

    def _make_sequences(
        self, prompts: SequenceOf[SequenceOf[int]], limits: SequenceOf[int], seed: int, keep_top: set[int]
    ) -> list[Sequence]:
        """Check the prompts, and group equal ones together."""
        if len(limits) != len(prompts):
            raise ValueError(f"max_new_tokens has {len(limits)} entries for {len(prompts)} prompts.")
        limits = [integer(f"max_new_tokens[{index}]", limit) for index, limit in enumerate(limits)]
        if limits and min(limits) < 1:
            raise ValueError(f"max_new_tokens={min(limits)} must be at least 1 (see `max_completion_length`).")
        vocab_size = self.model.get_input_embeddings().num_embeddings
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        groups: dict[tuple[int, ...], list[Sequence]] = {}
        for index, (token_ids, max_new_tokens) in enumerate(zip(prompts, limits, strict=True)):
            token_ids = checked_tokens(token_ids, vocab_size, f"The prompt at index {index}")
            length, allowed = len(token_ids), max_new_tokens
            if limit is not None and length + 1 > limit:
                raise ValueError(
                    f"The prompt at index {index} has {length} tokens; with a completion it does not fit in the model's "
                    f"{limit} positions (`max_position_embeddings`). Shorten or filter the prompts."
                )
            if limit is not None and length + max_new_tokens > limit:
                allowed = limit - length
                if not self._warned_length and is_main_process():
                    self._warned_length = True
                    logger.warning(
                        f"A prompt of {length} tokens and max_new_tokens={max_new_tokens} (`max_completion_length`) "
                        f"exceed the model's {limit} positions; completions end at {allowed} tokens there."
                    )
            group = groups.setdefault(tuple(token_ids), [])
            prompt = group[0].prompt if group else Prompt(token_ids)
            group.append(
                Sequence(index, prompt, allowed, random_stream(seed, index, allowed), keep_top=index in keep_top)
            )
        return [sequence for group in groups.values() for sequence in group]

    def _cache_dtype(self) -> torch.dtype:
        device_type = next(self.model.parameters()).device.type
        return (
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else self._footprint.dtype
        )

    def _backend(self, sequences: list[Sequence], sampler: Sampler, dtype: torch.dtype) -> str:
        """What decodes (see [`~sparrow_trl.rollout.backend.choose_backend`])."""
        most = max(len(sequence.prompt.token_ids) + sequence.max_new_tokens for sequence in sequences)
        config, layers = self.model.config.get_text_config(), self._footprint.layers
        shape = KVShape(
            num_heads=getattr(config, "num_attention_heads", None) or max(heads for heads, _, _ in layers),
            layers=layers,
            page_size=self.schedule.page_size,
            max_pages=num_columns(-(-most // self.schedule.page_size)),
            dtype=dtype,
        )
        backend = choose_backend(self.decode_backend, next(self.model.parameters()).device, shape)
        if backend != "host" and sampler.uses_history:
            logger.warning_once(
                "Sampling options that look at the tokens so far (repetition_penalty, no_repeat_ngram_size, min_new_tokens "
                "and the like) are applied on the host: every decode step waits for it, which is slower."
            )
            return "host"
        return backend

    def _num_pages(self, sequences: list[Sequence], dtype: torch.dtype) -> int:
        """Pages of the pool: what the sequences need at most, within the memory that the rollout may take."""
        page_size = self.schedule.page_size
        prompt_pages, own_pages = {}, []
        for sequence in sequences:
            length = len(sequence.prompt.token_ids)
            prompt_pages[sequence.prompt] = -(-length // page_size)
            own_pages.append(-(-(length + sequence.max_new_tokens) // page_size) - length // page_size)
        # No more than `max_num_seqs` run at the same time.
        largest = [sorted(counts, reverse=True)[: self.max_num_seqs] for counts in (prompt_pages.values(), own_pages)]
        wanted = sum(largest[0]) + sum(largest[1])
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the last backward left to PyTorch's allocator counts as free
            autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
            free = max(0, free_memory(device) - copied_bytes(self.model, autocast))
        else:
            free = free_memory(device)
        page_bytes = (self._footprint.token_numel * page_size + self._footprint.page_numel) * dtype.itemsize
        affordable = int(free * self.memory_fraction / page_bytes)
        return min(wanted, affordable, wanted if self.max_pages is None else self.max_pages)

    def _check_fits(self, sequences: list[Sequence], num_pages: int) -> None:
        page_size = self.schedule.page_size
        for sequence in sequences:
            length = len(sequence.prompt.token_ids)
            needed = -(-(length + sequence.max_new_tokens) // page_size) + bool(length % page_size)
            if needed > num_pages:
                raise ValueError(
                    f"The sequence at index {sequence.index} cannot fit in the KV cache: {length} prompt tokens and up "
                    f"to {sequence.max_new_tokens} new ones need {needed} pages of {page_size} tokens, the cache has "
                    f"{num_pages}. Raise `rollout_memory_fraction` (now {self.memory_fraction}) or `max_pages` (now "
                    f"{self.max_pages}), or lower `max_completion_length` or the prompt's length."
                )
