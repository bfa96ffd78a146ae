"""Export a Hugging Face causal language model once, on rows.

A row is one token on its own: `input_ids [T, 1]`, `position_ids [T, 1]`, T symbolic. Only attention mixes tokens, and
during the trace every attention call becomes one marker node that holds the row's fresh query, key and value:

    q, k, v = ...                           q, k, v = ...
    mask = causal mask                 ->   o = torch.ops.sparse_compile.site(q, k, v, scale=.., window=.., ...)
    o = softmax(q k' * scale + mask) v

No cache and no mask is in the graph.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from .attention import attention_override, evaluation_mode
from .errors import UnsupportedModel
from .graph import SITE, is_call, is_shape, lazy_module, lean_tracing, module_path, module_path_maybe
from .probe import Probe, local_attention, probe

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INNER = (
    "export.access_subclass_inner_tensor.default"  # (tensor subclass, name of a tensor that it is made of)
)
_ROWS = 3  # any number but 0 and 1, which export would treat as special
# Keyword arguments that attention functions receive and that do not change their result for a row.
_HARMLESS = {"position_ids", "cache_position", "dropout", "is_causal", "position_embeddings"}


class _Rows(nn.Module):
    """The function that is exported: token ids and positions in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def _check_call(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kwargs: dict[str, Any]) -> None:
    if v.shape[-1] != q.shape[-1] or k.shape[-1] != q.shape[-1]:
        raise UnsupportedModel(
            f"{name} has keys of {k.shape[-1]} and values of {v.shape[-1]} dimensions for queries of {q.shape[-1]}; "
            "the KV pool needs them equal.",
            name,
        )
    if q.shape[1] % k.shape[1]:
        raise UnsupportedModel(
            f"{name} has {q.shape[1]} query heads for {k.shape[1]} KV heads; no whole ratio.", name
        )
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and key not in _HARMLESS:
            raise UnsupportedModel(
                f"{name} passes `{key}` to attention, which the rewritten ops do not apply.", name
            )


def _marker_attention(model: nn.Module, seen: Probe) -> Any:
    """The attention function of the trace: a marker for calls that mix tokens, plain attention for the others."""
    names = {id(module): name for name, module in model.named_modules()}

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        name = names.get(id(module), type(module).__name__)
        if name not in seen.mixing:
            return local_attention(query, key, value, scaling), None
        _check_call(name, query, key, value, kwargs)
        out = torch.ops.sparse_compile.site(
            query.squeeze(2),
            key.squeeze(2),
            value.squeeze(2),
            scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
            window=seen.mixing[name],
            softcap=float(softcap or 0.0),
        )
        return out.unsqueeze(1), None

    return attention


def check_model(model: nn.Module) -> None:
    """Raises UnsupportedModel for what can be seen without running the model."""
    from transformers import PreTrainedModel

    if isinstance(getattr(model, "_orig_mod", None), PreTrainedModel):
        raise UnsupportedModel(
            f"{type(model).__name__} is a model under torch.compile; pass the model itself, which is its _orig_mod."
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"{type(model).__name__} is not a transformers PreTrainedModel.")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{type(model).__name__}.forward takes no position_ids, so rows cannot be given their positions."
        )
    if getattr(model.config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise UnsupportedModel(
            f"{type(model).__name__} with recurrent_kv_cache_mode='last_loop' lets earlier loops read the last loop's "
            "cache, which a row trace cannot see; load it with recurrent_kv_cache_mode='per_loop'."
        )
    _check_weights(model)


def _check_weights(model: nn.Module) -> None:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise UnsupportedModel(
                f"{name} is on the meta device and holds no values; load the weights first.", name
            )
    devices = {tensor.device: name for name, tensor in tensors.items()}
    if len(devices) > 1:
        where = " and ".join(f"{name} on {device}" for device, name in list(devices.items())[:2])
        raise UnsupportedModel(
            f"the model is spread over devices ({where}); move it to one with model.to(DEVICE)."
        )
    if model.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UnsupportedModel(f"the model is in {model.dtype}; compiled are models in {known}.")


def _export(model: nn.Module, seen: Probe) -> ExportedProgram:
    device = next(model.parameters()).device
    ids = torch.ones(_ROWS, 1, dtype=torch.long, device=device)
    positions = torch.arange(_ROWS, device=device)[:, None]
    rows = Dim.AUTO
    attention = attention_override(model, _marker_attention(model, seen))
    with evaluation_mode(model), attention, lean_tracing():
        program = export(_Rows(model), (ids, positions), dynamic_shapes=({0: rows}, {0: rows}), strict=False)
    if any(node.op == "call_function" and _mutates(node) for node in program.graph.nodes):
        with lean_tracing():
            program = program.run_decompositions({})
    return program


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def strip_wrapper(path: str) -> str:
    """`model.x.y` of the exported wrapper -> `x.y` of the user's model."""
    return path.removeprefix("model").removeprefix(".")


def _inline_weights(program: ExportedProgram, model: nn.Module) -> fx.GraphModule:
    """Turn lifted parameters, buffers and constants into `get_attr` nodes that share the user's own tensors."""
    graph = program.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    attributes: dict[str, Any] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            continue
        node = placeholders[spec.arg.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = strip_wrapper(spec.target)
            value = _attribute(model, name)
        else:
            name = f"constants.{spec.arg.name}"
            value = program.constants[spec.target]
        attributes[name] = value
        with graph.inserting_before(node):
            replacement = graph.create_node("get_attr", name)
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    output = graph.output_node()
    output.args = (output.args[0][-1],)
    _open_subclasses(graph, attributes)
    return lazy_module(attributes, graph, "Rows")


def _open_subclasses(graph: fx.Graph, attributes: dict[str, Any]) -> None:
    """Reads the tensors that a weight is made of, where the forward reads nothing else of it: a quantised weight is
    traced as what it computes, from `path.qdata` and `path.scale`, say.
    """
    waiting = [node for node in graph.nodes if node.op == "get_attr"]
    while waiting:
        outer = waiting.pop()
        if not outer.users or any(str(user.target) != _INNER for user in outer.users):
            continue
        opened: dict[str, fx.Node] = {}
        for user in list(outer.users):
            part, name = str(user.args[1]), f"{outer.target}.{user.args[1]}"
            if part not in opened:
                attributes[name] = getattr(attributes[str(outer.target)], part)
                with graph.inserting_before(outer):
                    opened[part] = graph.create_node("get_attr", name)
                opened[part].meta = {"val": user.meta["val"]}
            user.replace_all_uses_with(opened[part])
            graph.erase_node(user)
        graph.erase_node(outer)
        waiting += opened.values()


def _attribute(model: nn.Module, path: str) -> Any:
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part)
    return value


def trace(model: nn.Module) -> fx.GraphModule:
    """Export `model` on rows: `input_ids int64 [T, 1], position_ids int64 [T, 1] -> logits [T, 1, vocab]`.

    Weights are `get_attr` nodes under the names of the user's own parameters, and are the user's own tensors.

    Raises:
        UnsupportedModel: see `probe`; also random numbers in the graph, a graph whose shape depends on the number of
            rows, attention arguments that the ops do not know, and whatever torch.export cannot capture.
    """
    check_model(model)
    seen = probe(model)
    try:
        program = _export(model, seen)
    except UnsupportedModel:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModel(f"torch.export could not capture {type(model).__name__}: {first}") from error
    graph_module = _inline_weights(program, model)
    _check_rows(graph_module)
    _check_rows_stay_apart(graph_module.graph)
    _check_dtypes(graph_module, model.dtype)  # type: ignore[arg-type]
    return graph_module


def _check_rows_stay_apart(graph: fx.Graph) -> None:
    """Raises UnsupportedModel for a value that is computed from all rows together, such as the largest position.

    Rows of other sequences are no part of a token's past, so what a token becomes would depend on its neighbours. The
    probe cannot see this: it watches hidden states of one sequence, not positions of a batch.
    """
    live: set[fx.Node] = set()
    waiting = [graph.output_node()]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in live:
                live.add(source)
                waiting.append(source)
    from_rows: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" and not any(source in from_rows for source in node.all_input_nodes):
            continue
        if is_shape(node):  # the number of rows, not what is in them
            continue
        from_rows.add(node)
        if node not in live or not isinstance(value, torch.Tensor):
            continue
        if not any(isinstance(size, torch.SymInt) for size in value.shape):
            name = strip_wrapper((module_path_maybe(node) or ("", 0))[0])
            raise UnsupportedModel(
                f"{name or 'the model'} computes one value from all tokens of a batch ({node.target}); "
                "a token must not depend on its neighbours in a batch.",
                name,
            )


def _check_dtypes(graph_module: fx.GraphModule, dtype: torch.dtype) -> None:
    """One KV pool serves all sites, in the dtype of the model."""
    for node in graph_module.graph.nodes:
        if not is_call(node, SITE):
            continue
        found = [source.meta["val"].dtype for source in node.args[:3] if isinstance(source, fx.Node)]
        if any(one != dtype for one in found):
            name = strip_wrapper(module_path(node)[0])
            raise UnsupportedModel(
                f"{name} attends with queries, keys and values in {', '.join(map(str, found))} where the model is in "
                f"{dtype}; one KV pool serves one dtype.",
                name,
            )


def _draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node is random; dropout that is off, by itself or within attention, is not."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.dropout.default:
        return bool(node.args[2])
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _check_rows(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and not isinstance(node.meta["val"].shape[0], torch.SymInt):
            raise UnsupportedModel("the traced graph is bound to a fixed number of rows.")
        if _draws_random_numbers(node):
            where = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            name = strip_wrapper(where[-1]) if where else ""
            raise UnsupportedModel(
                f"{name or 'the model'} draws random numbers ({node.target}) on every call; "
                "the same token would not get the same state twice.",
                name,
            )
