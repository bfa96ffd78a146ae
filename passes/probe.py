"""Find out, by running the model once on a few tokens, where its tokens meet.

The row trace that follows sees every token alone, so whatever mixes tokens outside attention would silently vanish
from it. The probe makes such mixing visible: the first token's embedding is poisoned with NaN and attention is replaced
by a function that passes each token's own value on. A NaN at any later token then comes from a module that mixes tokens
on its own, whatever its weights are (0 * NaN is NaN); the first module that shows one without having been given one is
the culprit.

The same run records every attention call: which ones mix tokens at all (Inkling-2-loop's residual mixers attend over
blocks of one token), and what their masks mean (causal, sliding window, something else).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .attention import attention_override, evaluation_mode
from .errors import UnsupportedModel

# Query positions at which a mask is read: a window is the same at each of them, a chunk is not.
_READ_AT = (131071, 131072, 131075)
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


@dataclass
class Probe:
    """What the probe run saw.

    Attributes:
        mixing: module path -> window (0 = plain causal) of the attention calls that mix tokens; the other calls stay
            within one token.
    """

    mixing: dict[str, int] = field(default_factory=dict)


def repeat_heads(value: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, Hkv, N, D]` -> `[B, heads, N, D]`, each KV head repeated for its group of query heads."""
    return value if value.shape[1] == heads else value.repeat_interleave(heads // value.shape[1], dim=1)


def local_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Plain unmasked attention, in the layout that transformers expects back: `[B, queries, heads, D]`."""
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    out = nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return out.transpose(1, 2).contiguous()


def _window_at(mask_function: Any, position: int) -> int | None:
    """How many keys up to itself the query at `position` sees; None if it sees a later key or a gap."""
    with torch.device("cpu"):  # whatever the caller's default device is
        keys = torch.arange(position + 3)
        zero = torch.zeros((), dtype=torch.long)
        visible = torch.as_tensor(mask_function(zero, zero, torch.tensor(position), keys)).expand(keys.shape)
    seen = visible.nonzero().flatten()
    if len(seen) == 0 or int(seen[-1]) != position or int(seen[-1] - seen[0]) + 1 != len(seen):
        return None
    return len(seen)


def read_mask_function(mask_function: Any) -> int | None:
    """The window of an index-based mask function: 0 for causal, W for a sliding window, None for anything else."""
    windows = [_window_at(mask_function, position) for position in _READ_AT]
    if None in windows:
        return None
    if windows == [position + 1 for position in _READ_AT]:
        return 0
    return windows[0] if len(set(windows)) == 1 else None


def read_mask_tensor(mask: torch.Tensor) -> int | None:
    """The same for a finished mask `[..., N, N]`, bool or additive, as far as N tokens can tell."""
    visible = (mask if mask.dtype == torch.bool else mask > -1.0).reshape(-1, *mask.shape[-2:])[0]
    n = visible.shape[-1]
    distance = torch.arange(n, device=mask.device)[:, None] - torch.arange(n, device=mask.device)[None, :]
    for window in (0, *range(1, n)):
        wanted = (distance >= 0) & (distance < window) if window else distance >= 0
        if torch.equal(visible, wanted):
            return window
    return None


def _refuse_unseen_window(name: str, module: nn.Module, window: int | None, tokens: int) -> None:
    """A mask that the model built by itself is known for a few tokens only: a wider window looks causal there."""
    configured = getattr(getattr(module, "config", None), "sliding_window", None)
    if window == 0 and isinstance(configured, int) and configured >= tokens:
        raise UnsupportedModel(
            f"{name} gets a mask that the model built by itself, and config.sliding_window={configured} may be in it "
            "or not; build masks with transformers.masking_utils, or set config.sliding_window=None if it is not.",
            name,
        )


class _Recorder:
    """The two functions that stand in for the model's attention and mask building, and what they saw."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.tokens = tokens
        self.masks: dict[int, tuple[torch.Tensor, int | None]] = {}
        self.result = Probe()

    def mask(self, q_length: int, kv_length: int, mask_function: Any, **kwargs: Any) -> torch.Tensor:
        tensor = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=kwargs.get("device"))
        try:
            window = read_mask_function(mask_function)
        except (
            IndexError,
            RuntimeError,
        ):  # built over tensors of the prompt's length: no general rule to read
            window = None
        self.masks[id(tensor)] = (tensor, window)
        return tensor

    def window_of(
        self, name: str, module: nn.Module, mask: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> int:
        declared = int(kwargs.get("sliding_window") or 0)
        if mask is None:
            if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
                raise UnsupportedModel(
                    f"{name} attends in both directions; only causal attention is compiled.", name
                )
            return declared
        if id(mask) in self.masks:
            window = self.masks[id(mask)][1]
        else:
            window = read_mask_tensor(mask)
            _refuse_unseen_window(name, module, window, self.tokens)
        if window is None or (declared and window and declared != window):
            raise UnsupportedModel(
                f"{name} uses an attention mask that is neither causal nor a sliding window; "
                "only those two are compiled.",
                name,
            )
        return window or declared

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        name = self.names.get(id(module), type(module).__name__)
        if query.shape[0] != 1 or query.shape[2] != self.tokens:
            return local_attention(query, key, value, scaling), None
        if key.shape[2] != self.tokens:
            raise UnsupportedModel(
                f"{name} attends over {key.shape[2]} keys for {self.tokens} tokens; cross attention is not compiled.",
                name,
            )
        window = self.window_of(name, module, attention_mask, kwargs)
        if self.result.mixing.setdefault(name, window) != window:
            raise UnsupportedModel(
                f"{name} attends with a sliding window in one loop and without it, or with another one, in the next; "
                "a layer must have one window in all its loops.",
                name,
            )
        return repeat_heads(value, query.shape[1]).transpose(1, 2).contiguous(), None


def _token_dim(tensor: torch.Tensor, tokens: int) -> int | None:
    for dim in (1, 2, 0, 3):
        if tensor.dim() > dim and tensor.shape[dim] == tokens:
            return dim
    return None


def _poison_spread(output: Any, tokens: int) -> bool:
    """Whether a module's output holds a NaN at any token but the first."""
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        dim = _token_dim(tensor, tokens)
        if dim is not None and bool(tensor.narrow(dim, 1, tokens - 1).isnan().any()):
            return True
    return False


def _token_count(model: nn.Module) -> int:
    """A prompt length that no dimension of the model equals, so that the token dimension can be told apart."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    sizes |= {value for value in vars(getattr(model, "config", object())).values() if isinstance(value, int)}
    return next((prime for prime in _PRIMES if prime not in sizes), 47)


def vocabulary_size(model: Any) -> int:
    """Number of token ids; a wrapped embedding may have no `weight` of its own."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return int(
        weight.shape[0] if isinstance(weight, torch.Tensor) else model.config.get_text_config().vocab_size
    )


def _refuse_mixing(model: nn.Module, name: str) -> None:
    """Raise for the module that turned clean tokens into NaN: it mixes tokens, or its own weights are NaN."""
    module = model.get_submodule(name)
    shown = f"{name or 'the model'} ({type(module).__name__})"
    for key, tensor in module.state_dict().items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise UnsupportedModel(f"{shown} has NaN in its {key}; the checkpoint is damaged.", name)
    raise UnsupportedModel(
        f"{shown} mixes tokens outside attention; only models whose tokens meet in attention alone are compiled.",
        name,
    )


def probe(model: nn.Module) -> Probe:
    """Run the model once on a short poisoned prompt and say where tokens mix.

    Raises:
        UnsupportedModel: a module other than attention mixes tokens; attention that is not causal; no attention call
            reached transformers' attention interface; the model itself fails.
    """
    tokens = _token_count(model)
    recorder = _Recorder(model, tokens)
    culprits: list[str] = []

    def poison(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, 0] = float("nan")
        return output

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            clean = not _poison_spread((*args, *kwargs.values()), tokens)
            if not culprits and clean and _poison_spread(output, tokens):
                culprits.append(name)

        return hook

    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    handles = [embedding.register_forward_hook(poison)]
    handles += [
        submodule.register_forward_hook(watch(name), with_kwargs=True)
        for name, submodule in model.named_modules()
        if submodule is not embedding
    ]
    device = next(model.parameters()).device
    ids = torch.arange(tokens, device=device)[None] % vocabulary_size(model)
    try:
        with evaluation_mode(model), attention_override(model, recorder.attention, recorder.mask):
            output = model(input_ids=ids, use_cache=False)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _does_not_run(model, error) from error
    finally:
        for handle in handles:
            handle.remove()
    if getattr(output, "logits", None) is None:
        raise UnsupportedModel(
            f"{type(model).__name__} has no language-model head and gives no logits; load it with "
            "AutoModelForCausalLM."
        )
    if not recorder.result.mixing:
        raise _no_attention(model, culprits)
    if culprits:
        _refuse_mixing(model, culprits[0])
    return recorder.result


def _described(model: nn.Module, path: str) -> str:
    return f"{path} ({type(model.get_submodule(path)).__name__})"


def _no_attention(model: nn.Module, culprits: list[str]) -> UnsupportedModel:
    """The refusal of a model that attends, or mixes tokens in another way, on its own."""
    import transformers

    instead = f" ({_described(model, culprits[0])} mixes tokens by itself)" if culprits else ""
    return UnsupportedModel(
        f"no attention call of {type(model).__name__} reached the attention interface of the installed transformers "
        f"{transformers.__version__}{instead}; use code of the model that calls its attention through "
        "ALL_ATTENTION_FUNCTIONS, as the models of that version do.",
        culprits[0] if culprits else "",
    )


def _does_not_run(model: nn.Module, error: Exception) -> UnsupportedModel:
    """The refusal of a model whose forward raises, as code for another transformers does."""
    import transformers

    first = (str(error).strip() or "no message").splitlines()[0]
    return UnsupportedModel(
        f"a trial run of {type(model).__name__} on a short prompt failed with {type(error).__name__}: {first}; use "
        f"code of the model that runs under the installed transformers {transformers.__version__}."
    )
