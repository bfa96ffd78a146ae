"""Compare the compiled program with the model's own generation before anyone relies on it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from sparse_compile.errors import ValidationError
from sparse_compile.limits import position_limit
from sparse_compile.passes.attention import evaluation_mode
from sparse_compile.passes.probe import vocabulary_size
from sparse_compile.passes.weights import is_plain, named_tensors
from sparse_compile.runtime.memory import USABLE_SHARE, format_bytes, free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sparse_compile.runtime.engine import Engine

PROMPT_TOKENS, NEW_TOKENS = 13, 4

# Largest accepted ||ours - own|| / ||own|| of the logits, where rounding is not amplified. Both sides compute the same
# function in the same dtype in a different order of additions; a program that computes something else is off by a share
# of the logits themselves.
# float64 models compute their rotary angles in float32, which compiled code rounds otherwise: hence 1e-5, not 1e-12.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}

# A deep loop amplifies rounding by a factor that depends on the model and the prompt. The model itself shows it: it
# computes the prompt twice, with its cache and in one forward, and the larger of its errors against the same weights in
# a wider dtype is its noise. Ours may be so many times as far off. Measured on 96 random Ouro models in float32 (2, 8,
# 12, 24 layers x 4 loops): noise of 2e-6 to 4e-1, ours at most 1.9 times that.
NOISE_FACTOR, CEILING = 3, 0.3
WIDER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Verdict:
    """What a comparison found. error: relative, of our logits. limit: the largest accepted. basis: what that rests on,
    for the error message; empty for the fixed limit of the dtype.
    """

    error: float
    limit: float
    basis: str = ""

    @property
    def accepted(self) -> bool:
        return self.error <= self.limit


class MakesEngine(Protocol):
    def __call__(self, rows: int, context: int) -> Engine: ...


def own_logits(
    model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own greedy continuation of `prompt [1, N]`: tokens `[NEW]` and raw logits `[NEW, vocab]`.

    It goes through the model's own `generate`, so that its cache is part of what we compare with; whatever the
    model's generation_config asks for (stop strings, penalties ...) stays out of it. Code written for an older
    transformers takes its cache under another name than `generate` passes, so it loses it or fails: there the plain
    forward, without a cache, is what the model says.
    """
    from transformers import GenerationConfig

    if "cache" not in inspect.signature(model.forward).parameters:
        return _uncached_logits(model, prompt, new_tokens)

    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    try:
        with evaluation_mode(model), _plain_generation(model):
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    except Exception as error:
        raise _generate_failed(model, error) from error
    return out.sequences[0, prompt.shape[1] :], torch.cat(out.logits)


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the model has transformers' default generation settings: its own fill in what a call's
    GenerationConfig leaves open.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _generate_failed(model: PreTrainedModel, error: Exception) -> ValidationError:
    import transformers

    first = (str(error).strip() or "no message").splitlines()[0]
    return ValidationError(
        f"the compiled program cannot be compared: {type(model).__name__}'s own generate failed under the installed "
        f"transformers {transformers.__version__} with {type(error).__name__}: {first}. "
        "Use code of the model that generates by itself, or pass validate=False."
    )


def _uncached_logits(
    model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by one whole forward per token."""
    sequence, rows = prompt, []
    with evaluation_mode(model):
        for _ in range(new_tokens):
            rows.append(model(input_ids=sequence, use_cache=False).logits[:, -1])
            sequence = torch.cat([sequence, rows[-1].argmax(-1, keepdim=True)], dim=1)
    return sequence[0, prompt.shape[1] :], torch.cat(rows)


def _widened(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantised weights as the numbers they stand for: only some of them know other dtypes themselves."""
    if not weight.is_floating_point():
        return weight
    return (weight if is_plain(weight) else weight.dequantize()).to(dtype)


def forward_logits(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` of the model on the same tokens in one forward, no cache.

    dtype: compute with a copy of all weights in this dtype, which is gone afterwards; None: with the weights as they
    are. (Operations that the model's code puts into float32 itself, such as norms, stay there.)
    """
    sequence = torch.cat([prompt[0], tokens.to(prompt.device)])[None]
    arguments = {"input_ids": sequence, "use_cache": False}
    with evaluation_mode(model), torch.no_grad():
        if dtype is None:
            out = model(**arguments)
        else:
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            wide = {name: _widened(value, dtype) for name, value in tensors.items()}
            out = torch.func.functional_call(model, wide, kwargs=arguments)
    return out.logits[0, prompt.shape[1] - 1 : -1]


def compare(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: torch.Tensor, own: torch.Tensor, ours: torch.Tensor
) -> Verdict:
    """Judge our logits. In float64, and in float32 where that suffices: ours against the model's own, a fixed limit.

    Otherwise both against the model in a wider dtype, and what the model's own noise allows. That takes a copy of the
    weights for one forward. Where it does not fit into the memory of the model's device, half
    precision is compared with the model's own logits and the ceiling, and float32 stays refused.
    """
    plain, wide = Verdict(relative_error(ours, own), TOLERANCE[model.dtype]), WIDER.get(model.dtype)
    if wide is None or (model.dtype == torch.float32 and plain.accepted):
        return plain
    name = str(wide).removeprefix("torch.")
    floating = [one for one in named_tensors(model).values() if one.is_floating_point()]
    size = wide.itemsize * sum(one.numel() for one in floating)
    if size > USABLE_SHARE * free_memory(model.device):
        basis = f"a {name} copy of {format_bytes(size)}, to measure the model's own rounding, does not fit into memory"
        return replace(plain, limit=plain.limit if model.dtype == torch.float32 else CEILING, basis=basis)
    try:
        exact = forward_logits(model, prompt, tokens, wide)
    except RuntimeError as error:  # code of the model that insists on a dtype
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return replace(
            plain, basis=f"the model's own rounding is unknown, since it does not run in {name}: {first}"
        )
    noise = max(relative_error(logits, exact) for logits in (own, forward_logits(model, prompt, tokens)))
    limit = min(CEILING, max(plain.limit, NOISE_FACTOR * noise))
    return Verdict(relative_error(ours, exact), limit, f"the model's own error against {name} is {noise:.1e}")


def program_logits(engine: Engine, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` of the dense program on the same tokens: a prompt in two chunks, then decode."""
    from sparse_compile.runtime.plan import Segment

    sequence, half = [*prompt, *tokens], len(prompt) // 2
    chunks = [(0, half), (half, len(prompt))] if half else [(0, len(prompt))]
    steps = [*chunks, *((at, at + 1) for at in range(len(prompt), len(sequence) - 1))]
    pages = engine.pool.allocate(engine.pool.spec.pages_for(len(sequence)))
    seat = engine.plans.seats.take(pages)
    try:
        rows = []
        for start, end in steps:
            segment = Segment(sequence[start:end], start, seat, wants_logits=end >= len(prompt))
            run = engine.executor.decode if start >= len(prompt) else engine.executor.prefill
            rows.append(run(engine.plans.build([segment])).clone())
        return torch.cat(rows)
    finally:
        engine.plans.seats.release(seat)
        engine.pool.free(pages)


def relative_error(ours: torch.Tensor, own: torch.Tensor) -> float:
    """||ours - own|| / ||own|| over the finite logits, in float64; infinite unless the others are equal."""
    ours, own = ours.double(), own.double()
    finite = own.isfinite()
    if not torch.equal(finite, ours.isfinite()) or not torch.equal(ours[~finite], own[~finite]):
        return float("inf")  # a NaN equals nothing; a model may mask ids with -inf
    return float((ours[finite] - own[finite]).norm() / own[finite].norm().clamp_min(1e-30))


def _lengths(positions: int | None) -> tuple[int, int]:
    """(prompt tokens, new tokens) of the comparison, fewer for a model of very few positions."""
    new = NEW_TOKENS if positions is None else max(1, min(NEW_TOKENS, positions - 1))
    prompt = PROMPT_TOKENS if positions is None else max(1, min(PROMPT_TOKENS, positions - new))
    return prompt, new


def check_rotary(model: PreTrainedModel) -> None:
    """Refuse a model whose rotary frequencies are not those of its configuration, as a faulty load leaves them.

    They are in no checkpoint, and the model's own forward is wrong in the same way, so nothing else would show it.

    Raises:
        ValidationError: names the first such buffer.
    """
    from sparse_compile.models.rotary_check import check_rotary_buffers

    damaged = [check for check in check_rotary_buffers(model)[0] if check.damaged]
    if damaged:
        raise ValidationError(
            f"{damaged[0].name} of {type(model).__name__} is {damaged[0].reason}, its configuration's formula: the "
            "model was loaded wrongly. Load it again (sparse_compile.models.load_model), or pass validate=False if "
            "it is meant to differ."
        )


def validate_program(model: PreTrainedModel, make_engine: MakesEngine) -> float:
    """Run a short random prompt both ways and return the relative error of the logits.

    Raises:
        ValidationError: the error is above what `compare` accepts, or the model cannot generate.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    prompt_tokens, new_tokens = _lengths(position_limit(model))
    vocabulary = vocabulary_size(model)
    prompt = torch.randint(vocabulary, (1, prompt_tokens), generator=generator, device="cpu")
    prompt = prompt.to(model.device)
    tokens, own = own_logits(model, prompt, new_tokens)
    engine = make_engine(1, prompt_tokens + new_tokens)
    ours = program_logits(engine, prompt[0].tolist(), tokens.tolist())
    found = compare(model, prompt, tokens, own, ours)
    if not found.accepted:
        basis = f" ({found.basis})" if found.basis else ""
        raise ValidationError(
            f"the compiled program disagrees with {type(model).__name__}'s own generation: relative error of the "
            f"logits {found.error:.2e}, limit {found.limit:.1e} for {model.dtype}{basis}; the model is not compiled. "
            "Pass validate=False to compile it all the same."
        )
    return found.error
