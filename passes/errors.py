"""What the passes raise: a model that cannot be compiled, and a pass that broke its promise."""

from __future__ import annotations


class UnsupportedModel(ValueError):  # noqa: N818  the name that users catch says what it is
    """The model computes something that the compiler cannot prove it would reproduce.

    Attributes:
        module: path of the module at fault ("" when the whole model is meant).
        reason: one sentence, the same text as the message.
    """

    def __init__(self, reason: str, module: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.module = module


class PassError(RuntimeError):
    """A pass failed or left a graph that breaks its post-condition: a bug of the compiler, not of the model."""


class OptionError(ValueError):
    """An option that does not fit the model, found once the model's loops are known.

    Attributes:
        argument, value: the option and what it was set to.
        limit, remedy: which values fit this model, and what to do.
    """

    def __init__(self, argument: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(argument, value, limit, remedy)
        self.argument, self.value, self.limit, self.remedy = argument, value, limit, remedy

    def __str__(self) -> str:
        return f"{self.argument}={self.value} {self.limit}; {self.remedy}."
