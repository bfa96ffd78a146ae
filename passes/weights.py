"""The memory of a model's weights: where it lies, and how several weights become one block of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of `model`, each under all of its names."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def get_tensor(root: nn.Module, path: str) -> torch.Tensor:
    """The tensor of a module by its dotted name."""
    module, _, name = path.rpartition(".")
    value = getattr(root.get_submodule(module), name)
    assert isinstance(value, torch.Tensor)
    return value


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte address, exclusive, that a tensor may touch."""
    if tensor.numel() == 0:
        return 0, 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory and strides and nothing else: no subclass, not sparse."""
    return type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout is torch.strided


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, or what a subclass such as a quantised weight holds."""
    if is_plain(tensor) or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(tensor, name))]


def memory(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors hold, each that is given more than once counted once; of sparse ones those of the values."""
    known = {id(tensor): tensor for tensor in tensors}
    return sum(_bytes(part) for tensor in known.values() for part in parts(tensor))


def _bytes(part: torch.Tensor) -> int:
    sparse = part.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
    return part._nnz() * part.element_size() if sparse else part.nbytes


def lie_in_a_row(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors are one block of memory already, as after an earlier compilation of the same model."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    follows = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(tensors))
    return len(storages) == 1 and follows


def held_twice(tensors: Sequence[torch.Tensor], others: Iterable[torch.Tensor]) -> int:
    """Bytes of `tensors` that would stay where they are beside a joined copy: those in storages that `others` need."""
    if lie_in_a_row(tensors):
        return 0
    needed = {part.untyped_storage().data_ptr() for one in others for part in parts(one) if is_plain(part)}
    return sum(one.nbytes for one in tensors if one.untyped_storage().data_ptr() in needed)


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all rows; afterwards the data of `tensors` are its slices, and their own memory is free but for
    what `held_twice` says.
    """
    rows = sum(tensor.shape[0] for tensor in tensors)
    with torch.inference_mode(False), torch.no_grad():
        if lie_in_a_row(tensors):
            first = tensors[0].detach()
            return first.as_strided((rows, *first.shape[1:]), first.stride())
        joined = torch.cat([tensor.detach() for tensor in tensors])
        at = 0
        for tensor in tensors:
            tensor.data = joined[at : at + tensor.shape[0]]
            at += tensor.shape[0]
    return joined
