"""Errors in the words of the command line: the option that was typed in the place of the argument in Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import typer

from sparse_compile.speculation import SpeculationConfig

_LONGEST_VALUE = 80

# Arguments whose option has another name: the parameters of commands that set them. Options of the same name need none.
ALIASES: dict[str, tuple[str, ...]] = {
    "key_retention": ("retention", "retentions"),
    "capture_loop": ("capture_loops",),
    "speculation": ("speculate",),
    "mode": ("speculate",),
    "num_draft_tokens": ("draft_tokens",),
    "max_batch": ("batch",),
    "task_samples": ("samples",),
    "enabled": ("dense",),
    "validate": ("no_validate",),
}
_OPPOSITES = ("enabled", "validate")  # False where the flag is given


def option_names(command: Callable[..., Any]) -> dict[str, str]:
    """Argument -> option, for every argument of ours that the command takes: {"key_retention": "--retention", ...}."""
    named: dict[str, str] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        for found in getattr(hint, "__metadata__", ()):
            if isinstance(found, typer.models.OptionInfo):
                # Within Annotated, typer.Option("--name", "-n") has the first of its names as default.
                given = [one for one in (found.default, *(found.param_decls or ())) if isinstance(one, str)]
                named[name] = given[0].split("/")[0]
    for argument, parameters in ALIASES.items():
        option = next((named[one] for one in parameters if one in named), None)
        if option is not None:
            named.setdefault(argument, option)
    return named


def reworded(text: str, names: Mapping[str, str]) -> str:
    """A text about arguments in terms of options: "pass draft_loops=2" becomes "pass --draft-loops 2"."""
    if not names:
        return text
    known = "|".join(sorted(names, key=len, reverse=True))
    text = text.replace(", or None", "")
    text = re.sub(
        rf"\b({known})=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,;:)]+)",
        lambda found: _setting(found[1], found[2].strip("'\"[]"), names[found[1]]),
        text,
    )
    text = re.sub(rf"\b(leave|remove) ({known})\b", lambda found: f"{found[1]} {names[found[2]]}", text)
    long = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return re.sub(rf"(?<![-\w.])({long})(?![-\w(])", lambda found: names[found[1]], text) if long else text


def _setting(name: str, value: str, option: str) -> str:
    if value == "None":
        return f"no {option}"
    if value in ("True", "False"):
        return option if (value == "True") != (name in _OPPOSITES) else f"no {option}"
    return f"{option} {value.replace(', ', ',')}"


def describe(error: Exception, names: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """One line for an error, and what is known about it: "argument" as in Python, "option", "limit", "remedy" ..."""
    details = {
        name: getattr(error, name)
        for name in ("argument", "limit", "remedy", "module")
        if isinstance(getattr(error, name, None), str)
    }
    text = str(error)
    for name in ("limit", "remedy"):
        if details.get(name):
            before, details[name] = details[name], reworded(details[name], names)
            text = text.replace(before, details[name])
    option = names.get(re.sub(r"\[\d+\]$", "", details.get("argument", "")))
    if option is None or not {"limit", "remedy"} <= details.keys():
        return text, details
    details["option"] = option
    value = _shown(getattr(error, "value", None))
    return f"{option}{value and ' ' + value}: {details['limit']}; {details['remedy']}", details


def _shown(value: object) -> str:
    """A value as it is typed; nothing for a flag."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, SpeculationConfig):
        return value.mode
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = " ".join(text.split()) or "''"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
