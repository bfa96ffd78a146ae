"""`sparse_compile`: one callable for a model, a function that returns one, and a model class."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, overload

from sparse_compile.config import SparseConfig

if TYPE_CHECKING:
    import torch

    from sparse_compile.compiled import CompiledModel


class _Missing(enum.Enum):
    MISSING = "missing"


MISSING: Final = _Missing.MISSING

# Constructors by class method: `from_pretrained`, `from_config`, `_from_config`, `from_...` of a remote
# class.
_CONSTRUCTORS = ("from_", "_from_config")


@overload
def sparse_compile(model: torch.nn.Module | CompiledModel, **options: Any) -> CompiledModel: ...
@overload
def sparse_compile(model: type, **options: Any) -> ModelFactory: ...
@overload
def sparse_compile(model: Callable[..., Any], **options: Any) -> Callable[..., CompiledModel]: ...
@overload
def sparse_compile(model: _Missing = ..., **options: Any) -> Callable[[Any], Any]: ...
def sparse_compile(model: Any = MISSING, **options: Any) -> Any:
    """Compile a looped Hugging Face model so that its later loops read only the keys that matter.

    model: a model; or a function that returns one (a wrapper is returned whose results are compiled); or a
        model class (a `ModelFactory` is returned); or an already compiled model (its original is compiled
        again, with the options given now); or nothing: `@sparse_compile(key_retention=0.1)` decorates a
        function or a class.
    options: the fields of `SparseConfig`. They are checked before anything else happens.

    Raises ValueError for a bad or unknown option and for a model that is not supported, TypeError for
    anything that is no model. The model itself is never changed.
    """
    config = SparseConfig.from_options(**options)
    if model is MISSING:
        return functools.partial(_apply, config=config)
    return _apply(model, config=config)


def _apply(target: Any, *, config: SparseConfig) -> Any:
    if _is_model(target):
        return _compile(target, config)
    if isinstance(target, type):
        if not _makes_models(target):
            raise TypeError(f"sparse_compile: the class {target.__name__} makes no models; {_EXPECTED}")
        return ModelFactory(target, config)
    if callable(target):
        return _wrap_function(target, config)
    raise TypeError(f"sparse_compile: got {_describe(target)}; {_EXPECTED}")


_EXPECTED = "pass a model, a function that returns one, or a model class"


def _describe(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def _is_model(value: object) -> bool:
    import torch

    from sparse_compile.compiled import CompiledModel

    return isinstance(value, torch.nn.Module | CompiledModel)


def _makes_models(cls: type) -> bool:
    """A module class, or one with `from_pretrained` such as AutoModelForCausalLM."""
    import torch

    return issubclass(cls, torch.nn.Module) or callable(getattr(cls, "from_pretrained", None))


def _compile(model: Any, config: SparseConfig) -> CompiledModel:
    from sparse_compile.compile import compile_model
    from sparse_compile.compiled import CompiledModel

    return compile_model(model.model if isinstance(model, CompiledModel) else model, config)


def _compile_result(result: Any, config: SparseConfig, source: str) -> Any:
    """Compile what a constructor returned; `output_loading_info=True` makes that a tuple (model, info)."""
    if isinstance(result, tuple) and result and _is_model(result[0]):
        return (_compile(result[0], config), *result[1:])
    if not _is_model(result):
        raise TypeError(f"sparse_compile: {source} returned {_describe(result)}, not a model")
    return _compile(result, config)


def _wrap_function(function: Callable[..., Any], config: SparseConfig) -> Callable[..., Any]:
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _compile_result(function(*args, **kwargs), config, f"{name}()")

    return wrapper


class ModelFactory:
    """A model class whose instances come out compiled: from the call, `from_pretrained`, `from_config` and
    the like.

    Every other attribute is the class's own. `isinstance(x, factory)` and subclassing refer to the class.
    """

    __wrapped__: type
    __name__: str

    def __init__(self, cls: type, config: SparseConfig) -> None:
        functools.update_wrapper(self, cls, updated=())
        self.sparse_config = config

    def __call__(self, *args: Any, **kwargs: Any) -> CompiledModel:
        return _compile(self.__wrapped__(*args, **kwargs), self.sparse_config)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not set yet: while copying or unpickling
            raise AttributeError(name)
        value = getattr(self.__wrapped__, name)
        if not name.startswith(_CONSTRUCTORS) or not callable(value):
            return value

        @functools.wraps(value)
        def constructor(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return _compile_result(result, self.sparse_config, f"{self.__name__}.{name}()")

        return constructor

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(getattr(instance, "model", instance), self.__wrapped__)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.__wrapped__,)

    def __repr__(self) -> str:
        return f"<sparse_compile factory of {self.__name__}>"
