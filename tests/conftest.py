"""Settings for all tests: the matrices are small, and one thread is several times faster for them."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
