"""State and time: the KV pool, the reference store, row plans, the scheduler and the engine.

Imports torch, `sparse_compile.kernels` and `sparse_compile.passes`; never transformers, never the front.
"""
