"""What `torch.compile(..., backend="sparse_compile", options={...})` may say, checked before anything is compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from sparse_compile.calibration import Calibration
from sparse_compile.config import Number, SparseConfig, closest
from sparse_compile.errors import ArgumentError
from sparse_compile.passes.base import Options

ON_UNMATCHED = ("error", "warn", "ignore")
_SHARED = (
    "key_retention", "calibration", "target_mass", "keep_first", "keep_last", "capture_loop", "recapture_every",
    "implementation", "enabled",
)  # fmt: skip


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backend. Frozen; a bad value is an `ArgumentError` (a ValueError).

    key_retention, calibration, target_mass, keep_first, keep_last, capture_loop, recapture_every, implementation,
        enabled: as in `SparseConfig`. Retention by layer needs all attention layers in one graph, so no graph breaks.
    on_unmatched: what to do with a decode graph in which nothing is rewritten, or nothing is sparse though
        key_retention is below 1: "error", "warn", or "ignore".
    skinny_products: in decode graphs of half precision with up to 64 rows, run linear layers with kernels of ours that
        stream weights, where they were measured to be faster than the library's; None = on CUDA, where steps run from
        CUDA graphs (as with mode="reduce-overhead"): without them the host's time for a launch is more than is gained.
    mode: a mode of torch.compile, such as "reduce-overhead". torch.compile takes either `mode=` or `options=`; this is
        how to have both.
    inductor: options of Inductor by name, on top of `mode`; or False to run the rewritten graph without Inductor,
        which is slow and good for debugging.
    """

    key_retention: Number | Sequence[Number] = 0.1
    calibration: str | os.PathLike[str] | Calibration | None = None
    target_mass: float | None = None
    keep_first: int = 0
    keep_last: int = 0
    capture_loop: int = 1
    recapture_every: int | None = None
    implementation: str = "auto"
    enabled: bool = True
    on_unmatched: str = "error"
    skinny_products: bool | None = None
    mode: str | None = None
    inductor: Mapping[str, Any] | bool = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked = self.config()
        for name in ("key_retention", "calibration"):  # what is in a file now, not where it is
            object.__setattr__(self, name, getattr(checked, name))
        if self.on_unmatched not in ON_UNMATCHED:
            known = ", ".join(map(repr, ON_UNMATCHED))
            raise ArgumentError(
                "on_unmatched", self.on_unmatched, f"must be one of {known}", "pass on_unmatched='warn'"
            )
        if self.skinny_products is not None and not isinstance(self.skinny_products, bool):
            limit = "must be True, False or None"
            raise ArgumentError("skinny_products", self.skinny_products, limit, "pass skinny_products=False")
        if self.inductor is True:
            object.__setattr__(self, "inductor", {})
        if self.inductor is not False and not isinstance(self.inductor, Mapping):
            raise ArgumentError(
                "inductor",
                self.inductor,
                "must be a dict of Inductor's options, or False",
                "pass inductor={}",
            )
        self._check_inductor()
        self._check_mode()

    def _check_inductor(self) -> None:
        from torch._inductor import config

        given = dict(self.inductor) if isinstance(self.inductor, Mapping) else {}
        known = config.get_config_copy()
        for name, value in given.items():
            if name not in known:
                limit = f"has {str(name)!r}, which is no option of this Inductor"
                raise ArgumentError("inductor", given, limit, closest(str(name), list(known)))
            kind = config.get_type(name)  # type: ignore[attr-defined]
            if get_origin(kind) is None and not isinstance(value, kind):
                limit = f"gives {name!r} a {type(value).__name__}"
                raise ArgumentError("inductor", given, limit, f"pass for example {name!r}: {known[name]!r}")

    def _check_mode(self) -> None:
        if self.mode is None:
            return
        import torch._inductor

        known = torch._inductor.list_mode_options()
        if not isinstance(self.mode, str) or self.mode not in known:
            limit = f"must be one of {', '.join(known)}"
            raise ArgumentError("mode", self.mode, limit, "pass mode='reduce-overhead'")
        if self.inductor is False:
            raise ArgumentError(
                "mode", self.mode, "is a mode of Inductor, and inductor=False", "leave one of them out"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> BackendOptions:
        """From what torch.compile hands over; an unknown option is refused by name."""
        if options is not None and not isinstance(options, Mapping):
            raise ArgumentError("options", options, "must be a dict", "pass options={'key_retention': 0.1}")
        given = dict(options or {})
        known = [one.name for one in fields(cls)]
        for name, value in given.items():
            if name not in known:
                limit = f"unknown option; known are {', '.join(known)}"
                raise ArgumentError(str(name), value, limit, _remedy(str(name), value, known))
        if mode is not None and mode != "default":
            given.setdefault("mode", mode)
        return cls(**given)

    def config(self) -> SparseConfig:
        """Those options that the other front end has too."""
        return SparseConfig(**{name: getattr(self, name) for name in _SHARED})

    def for_passes(self, dump_dir: Path | None, device: str = "cpu") -> Options:
        """device: the type of that on which the graph runs."""
        config, skinny = self.config(), self.skinny_products
        if skinny is None:
            skinny = device == "cuda" and bool(self.config_patches().get("triton.cudagraphs"))
        return Options(
            retention=config.retention_for_passes(),
            enabled=config.enabled,
            capture_loop=config.capture_loop,
            recapture_every=config.recapture_every,
            implementation=config.implementation,
            skinny_products=skinny,
            dump_dir=dump_dir,
        )

    def config_patches(self) -> dict[str, Any]:
        """Inductor's settings: those of the mode, then those given by name."""
        import torch._inductor

        patches = dict(torch._inductor.list_mode_options(self.mode)) if self.mode else {}
        return patches | (dict(self.inductor) if isinstance(self.inductor, Mapping) else {})


def _remedy(name: str, value: Any, known: list[str]) -> str:
    """For an unknown option. torch.compile takes Inductor's options side by side; here they have a place of theirs."""
    from torch._inductor import config

    if name in config.get_config_copy():
        return f"it is one of Inductor: pass options={{'inductor': {{{name!r}: {value!r}}}}}"
    return closest(name, known)
