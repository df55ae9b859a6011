"""The package with every shape in its annotations checked as it runs: modules are loaded with their functions wrapped.

What stands under `if TYPE_CHECKING` in those modules (jaxtyping and `sqrtdk._shapes`) is imported, so that annotations
mean something at run time; a name in one that is nowhere is an error. jaxtyping's own import hook passes over both.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Annotated, Any, get_args, get_type_hints

from beartype import BeartypeConf, beartype
from beartype.vale import Is
from jaxtyping import jaxtyped

# "module.qualified.name" of every function whose annotations hold a shape; of those that ran; another annotation for
# an argument or the result ("return") of some
SHAPED: set[str] = set()
CALLED: set[str] = set()
PLANTED: dict[str, tuple[str, str]] = {}
Function = Callable[..., Any]
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


class Finder(MetaPathFinder):
    """Finds the modules of the package whose annotations hold shapes."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith("sqrtdk.") else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if _imports_of_shapes(ast.parse(spec.loader.get_data(spec.loader.path))) is None:
            return None
        spec.loader = Loader(name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    """Loads a module of which every function is wrapped in `checked`, and every class in `checked_class`."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        block = _imports_of_shapes(tree)
        assert block is not None
        block.test = ast.copy_location(ast.Constant(True), block.test)
        names = {alias.asname or alias.name for part in ast.walk(block) for alias in getattr(part, "names", ())}
        Wrapper(fullname, names).visit(tree)
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(checked=checked, checked_class=checked_class)
        super().exec_module(module)


class Wrapper(ast.NodeTransformer):
    """Adds the decorators, and plants what `PLANTED` asks for."""

    def __init__(self, module: str, shapes: set[str]) -> None:
        self.place, self.shapes = [module], shapes

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.place.append(node.name)
        self.generic_visit(node)
        self.place.pop()
        node.decorator_list.insert(0, ast.Name("checked_class", ast.Load()))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.place.append(node.name)
        name = ".".join(self.place)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        part, text = PLANTED.get(name, ("", ""))
        if part == "return":
            node.returns = ast.parse(text, mode="eval").body
        for argument in arguments:
            if argument is not None and argument.arg == part:
                argument.annotation = ast.parse(text, mode="eval").body
        annotations = [node.returns, *(a.annotation for a in arguments if a is not None)]
        used = {part.id for a in annotations if a is not None for part in ast.walk(a) if isinstance(part, ast.Name)}
        empty = all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in node.body)
        if used & self.shapes and not empty:  # an overload or a protocol's method is never called
            SHAPED.add(name)
            node.decorator_list.append(ast.Call(ast.Name("checked", ast.Load()), [ast.Constant(name)], []))
        self.generic_visit(node)
        self.place.pop()
        return node


def checked(name: str) -> Callable[[Function], Function]:
    """A function with its arguments and its result checked at every call; its annotations are read at the first."""

    def wrap(function: Function) -> Function:
        @cache
        def strict() -> Function:
            return _strict(function, vars(sys.modules[function.__module__]))

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            CALLED.add(name)
            return strict()(*args, **kwargs)

        return run

    return wrap


def checked_class(cls: type) -> type:
    """A frozen class or a named tuple whose fields are checked, shapes of one against another, when one is made."""
    names = vars(sys.modules[cls.__module__])
    maker = "__init__" if is_dataclass(cls) else "__new__" if hasattr(cls, "_fields") else None
    if maker is None:
        return cls
    made: Function = getattr(cls, maker)

    @cache
    def strict() -> Function:
        return _strict(made, names)

    @wraps(made)
    def run(*args: Any, **kwargs: Any) -> Any:
        return strict()(*args, **kwargs)

    setattr(cls, maker, run)
    return cls


def _strict(function: Function, names: dict[str, Any]) -> Function:
    hints = get_type_hints(function, names, include_extras=True)
    # The letters of a resolved call's key and value are those of the function; its rows may be a block of the call's.
    binding = {"call": Annotated[Any, Is[_binds]]} if "call" in hints else {}
    shaped = {name: hint if _holds_shape(hint) else Any for name, hint in hints.items()}
    function.__annotations__ = shaped | binding
    return jaxtyped(function, typechecker=_beartype)


def _binds(call: Any) -> bool:
    from sqrtdk._shapes import Key, Value

    return isinstance(call.key, Key) and isinstance(call.value, Value)


def _holds_shape(hint: Any) -> bool:
    return hasattr(hint, "dim_str") or any(_holds_shape(part) for part in get_args(hint))


def _imports_of_shapes(tree: ast.Module) -> ast.If | None:
    """The block that imports jaxtyping or `sqrtdk._shapes` for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            modules = {part.module for part in node.body if isinstance(part, ast.ImportFrom)}
            if modules & {"jaxtyping", "sqrtdk._shapes"}:
                return node
    return None


def install() -> None:
    """For every module of the package that is imported from here on."""
    sys.meta_path.insert(0, Finder())
