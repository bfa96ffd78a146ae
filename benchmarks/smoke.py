"""Compile the 1.4B shape with random weights and generate: does the real size trace, validate and run on this GPU?

python -m benchmarks.smoke
"""

from __future__ import annotations

import json
import time

import torch

from benchmarks.timing import conditions
from sparse_compile import sparse_compile
from sparse_compile.models import OuroForCausalLM, preset_config


def main() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = OuroForCausalLM(preset_config("ouro-1.4b")).to(torch.bfloat16).eval()
    start = time.perf_counter()
    compiled = sparse_compile(model, key_retention=0.1, progress=False)
    report = conditions() | {
        "compile_s": round(time.perf_counter() - start, 1),
        "validation_error": compiled.validate(),
    }
    facts = compiled.report().to_dict()
    report |= {key: facts[key] for key in ("rolled", "counts", "implementation", "kv_bytes_per_token")}
    prompt = torch.randint(3, 49152, (2, 300), device="cuda")
    compiled.generate(prompt, max_new_tokens=4)
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = compiled.generate(prompt, max_new_tokens=32)
    torch.cuda.synchronize()
    report |= {"tokens": list(out.shape), "generate_s": round(time.perf_counter() - start, 2)}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
