"""Decide, by loop depth alone, which sites are dense, capture or consume.

Default: loop 0 dense, loop 1 capture, later loops consume. A capture that no later loop would read is left dense, and
so are sliding-window sites and layers that run once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from ..kernels.retention import Retention
from .base import Compilation, Options, Pass
from .errors import OptionError, PassError
from .program import Site


def give_retention(sites: tuple[Site, ...], options: Options) -> tuple[Site, ...]:
    """The sites with the retention of their layers. Raises OptionError unless the option has one for each layer."""
    layers = list(dict.fromkeys(site.layer for site in sites))
    given = options.retention
    if isinstance(given, Retention):
        return tuple(replace(site, retention=given) for site in sites)
    if not isinstance(given, tuple):
        return _by_name(sites, layers, given)
    if len(given) != len(layers):
        raise OptionError(
            "key_retention",
            tuple(one.numerator / one.denominator for one in given),
            f"must have one number for each of the {len(layers)} attention layers, {layers[0]} to {layers[-1]}",
            f"give {len(layers)} numbers in the order in which `sparse-compile inspect` lists the layers",
        )
    shares = dict(zip(layers, given, strict=True))
    return tuple(replace(site, retention=shares[site.layer]) for site in sites)


def _by_name(sites: tuple[Site, ...], layers: list[str], given: Mapping[str, Retention]) -> tuple[Site, ...]:
    odd = sorted(set(layers) ^ set(given))
    if odd:
        whose = "the model has no such layer" if odd[0] in given else "the calibration has no such layer"
        raise OptionError(
            "calibration",
            odd[0],
            f"is a layer of one side only: {whose}",
            "calibrate this model: sparse-compile calibrate MODEL --text FILE --out retention.json",
        )
    return tuple(replace(site, retention=given[site.layer]) for site in sites)


def is_capture_loop(loop: int, options: Options) -> bool:
    """Whether a looped site at this depth captures, before asking whether anything consumes it."""
    past = loop - options.capture_loop
    if past == 0:
        return True
    return options.recapture_every is not None and past > 0 and past % options.recapture_every == 0


def schedule_site(site: Site, options: Options) -> tuple[str, str]:
    """`(kind, reason)` of one site."""
    if site.window:
        return "dense", f"sliding window of {site.window} tokens"
    if site.loops == 1:
        return "dense", "layer is not looped"
    if not options.enabled:
        return "dense", "sparse attention is off"
    if site.retention.keeps_all:
        return "dense", "retention 1.0 keeps every key"
    if site.loop < options.capture_loop:
        return "dense", f"before the capture in loop {options.capture_loop}"
    if not is_capture_loop(site.loop, options):
        source = max(loop for loop in range(site.loop) if is_capture_loop(loop, options))
        return "consume", f"keys chosen in loop {source}"
    following = site.loop + 1
    if following >= site.loops or is_capture_loop(following, options):
        return "dense", "would capture, but no later loop consumes it"
    return "capture", "chooses the keys"


def check_capture_loop(sites: tuple[Site, ...], options: Options) -> None:
    """Raises OptionError if no layer runs often enough to capture in the loop that was asked for."""
    loops = max(site.loops for site in sites)
    if options.enabled and options.capture_loop >= loops:
        raise OptionError(
            "capture_loop",
            options.capture_loop,
            f"must be below {loops}, the model's number of loops",
            f"choose capture_loop between 0 and {loops - 1}",
        )


def schedule_sites(sites: tuple[Site, ...], options: Options) -> tuple[Site, ...]:
    """The sites with kind, reason and line of the store. Raises OptionError for a loop that the model has not."""
    check_capture_loop(sites, options)
    lines: dict[str, int] = {}
    scheduled = []
    for site in give_retention(sites, options):
        kind, reason = schedule_site(site, options)
        if kind == "capture":
            lines.setdefault(site.layer, len(lines))
        scheduled.append(replace(site, kind=kind, reason=reason))
    return tuple(
        replace(site, store_site=lines[site.layer]) if site.kind != "dense" else site for site in scheduled
    )


class Schedule(Pass):
    name = "schedule"

    def run(self, compilation: Compilation) -> dict[str, int]:
        compilation.sites = schedule_sites(compilation.sites, compilation.options)
        counts = Counter(site.kind for site in compilation.sites)
        return {kind: counts[kind] for kind in ("dense", "capture", "consume")}


def check_order(sites: tuple[Site, ...]) -> None:
    """Every consume has a capture of its own layer at a lower depth; raises PassError otherwise."""
    captured: dict[str, list[int]] = defaultdict(list)
    for site in sites:
        if site.kind == "capture":
            captured[site.layer].append(site.loop)
        elif site.kind == "consume" and not any(loop < site.loop for loop in captured[site.layer]):
            raise PassError(f"{site.name} consumes, but no lower loop of {site.layer} captures.")
