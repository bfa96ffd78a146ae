"""Greedy tokens: the definition, the CUDA kernel (interpreted on the CPU), and what the sampler allocates for them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_compile.kernels.arrivals import arrivals
from sparse_compile.kernels.greedy import COLUMNS, define, greedy
from sparse_compile.runtime.request import Request, RequestMetrics, SamplingParams
from sparse_compile.runtime.sampler import Drawn, choose, largest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SPECIAL = [NAN, INF, -INF]


def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    from sparse_compile.kernels.greedy_backend import launch

    return launch(logits)


BOTH = pytest.mark.parametrize("run", [greedy, kernel])


def assert_same(run: Any, logits: torch.Tensor) -> None:
    """The definition's tokens, and its log-probabilities up to the order of a sum in float32."""
    tokens, logprobs = run(logits)
    wanted, wanted_logprobs = define(logits)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


@BOTH
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_definition_s_tokens(run: Any, data: st.DataObject) -> None:
    """Few distinct values, so that ties are the rule; NaN and infinities anywhere."""
    rows, vocabulary = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 300, 2049, 5000]))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randint(-2, 3, (rows, vocabulary), generator=g).to(
        DEVICE, data.draw(st.sampled_from(DTYPES))
    )
    for row in range(rows):
        for _ in range(data.draw(st.integers(0, 2))):
            logits[row, data.draw(st.integers(0, vocabulary - 1))] = data.draw(st.sampled_from(SPECIAL))
    assert_same(run, logits)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_logits(run: Any, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    assert_same(run, (torch.randn(3, 2 * COLUMNS + 77, generator=g) * 6).to(DEVICE, dtype))


@BOTH
def test_scores_that_mean_nothing_have_no_logprob(run: Any) -> None:
    """The engine ends a request by the NaN; blocks of -inf beside finite scores are no such case."""
    rows = torch.zeros(5, 6000, dtype=torch.bfloat16, device=DEVICE)
    rows[0, 4500], rows[1, 4500] = NAN, INF
    rows[2] = -INF
    rows[3] = -INF
    rows[3, 5000] = 2.0
    tokens, logprobs = run(rows)
    assert tokens.tolist() == [4500, 4500, 0, 5000, 0]
    assert logprobs.isnan().tolist() == [True, True, True, False, False]
    assert logprobs[3] == 0.0


@BOTH
def test_any_strides_and_no_rows(run: Any) -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6000, 6, generator=g).to(DEVICE, torch.bfloat16).t()[::2]
    assert_same(run, logits)
    tokens, logprobs = run(logits[:0])
    assert (tokens.shape, logprobs.shape) == ((0,), (0,))


@BOTH
def test_a_row_does_not_know_the_others(run: Any) -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 5000, generator=g).to(DEVICE, torch.bfloat16)
    whole = run(logits)
    alone = [torch.cat(part) for part in zip(*(run(row[None]) for row in logits), strict=True)]
    assert torch.equal(whole[0], alone[0])
    assert torch.equal(whole[1], alone[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_ties_in_a_large_vocabulary_on_the_gpu(rows: int, dtype: torch.dtype) -> None:
    """torch.argmax gives the first of equals too. In and out of CUDA graphs; a row has the same bits among others."""
    g = torch.Generator().manual_seed(rows)
    logits = torch.randint(-3, 4, (rows, 49152 + 77), generator=g).to("cuda", dtype)
    logits[0] = 1.5  # everything is equal
    logits[-1, 2048:] = 9.0  # from the second program on
    tokens, logprobs = greedy(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    assert_same(greedy, logits)
    alone = [torch.cat(part) for part in zip(*(greedy(row[None]) for row in logits), strict=True)]
    assert torch.equal(tokens, alone[0])
    assert torch.equal(logprobs, alone[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = greedy(logits)
    for shift in (0, 1, 7):
        logits.copy_(logits.roll(shift, dims=-1))
        graph.replay()
        assert torch.equal(made[0], logits.argmax(-1))
    assert not arrivals(logits.device, rows).any()


def test_float64_stays_float64() -> None:
    logits = torch.randn(2, 9000, dtype=torch.float64, device=DEVICE)
    tokens, logprobs = greedy(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), rtol=1e-13, atol=1e-13)


# ---------------------------------------------------------------------- what the sampler allocates


class Sizes(TorchDispatchMode):
    """The largest tensor of float32 or float64 that an operation returns, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor) and one.dtype in (torch.float32, torch.float64):
                self.largest = max(self.largest, one.numel())
        return made


def requests(**by_row: dict[str, Any]) -> list[Request]:
    made = []
    for name in ("a", "b", "c", "d"):
        params = SamplingParams(max_new_tokens=4, **by_row.get(name, {}))
        made.append(Request(name, params, [1, 2], RequestMetrics(prompt_tokens=2), added_at=0.0))
    return made


def sample(logits: torch.Tensor, batch: list[Request]) -> tuple[Drawn, int]:
    with Sizes() as sizes:
        drawn = largest(logits)
        choose(drawn, logits, batch)
    return drawn, sizes.largest


VOCABULARY = 10 * COLUMNS


@pytest.fixture
def logits() -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(4, VOCABULARY, generator=g).to(DEVICE, torch.bfloat16)


def test_greedy_rows_get_no_scores(logits: torch.Tensor) -> None:
    drawn, most = sample(logits, requests())
    assert torch.equal(drawn.tokens, logits.float().argmax(-1))
    assert most <= 4 * COLUMNS, "a copy of the logits in float32"


@pytest.mark.parametrize(
    "own", [{"do_sample": True}, {"processor": lambda ids, scores: scores - 1}, {"want_logits": True}]
)
def test_only_rows_that_need_scores_get_them(logits: torch.Tensor, own: dict[str, Any]) -> None:
    drawn, most = sample(logits, requests(b=own))
    others = [0, 2, 3]
    assert torch.equal(drawn.tokens[others], logits.float().argmax(-1)[others])
    assert most == VOCABULARY, "one row at a time"
    assert not drawn.errors
