"""State and time: the KV pool, the reference store, row plans, the scheduler and the engine.

Imports torch and `sparse_compile.kernels`; never transformers, never the front.
"""
