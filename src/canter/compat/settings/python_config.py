"""RSL-RL settings in Python files (Isaac Lab, mjlab, legged_gym), read without running them.

Only the syntax tree is looked at: classes whose fields are literals and calls of other such
classes, `field(...)`, assignments to `self` in `__post_init__`, functions that return one such
call. What a name from another file means is looked up in that file, if it is found next to this one
or on the path; a function or any other object becomes the text "module:name".
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.compat.settings.python_syntax import (
    MISSING,
    Class,
    Definition,
    External,
    Module,
    Unread,
    is_class,
    members,
    note,
)
from canter.compat.settings.rsl_rl_network import DISTRIBUTIONS, NETWORK_CLASSES
from canter.core.plain import ConfigError
from canter.core.registry import nearest

MAX_BYTES = 2**20
NOT_RUN = "settings are read without running the file, which this would need"
CONFIG_WORDS = ("RunnerCfg", "CfgPPO")
"""Words in the names of classes, or of their bases, that describe a whole run."""


class Reader:
    """Reads classes of settings and follows names into other files."""

    def __init__(self, path: Path) -> None:
        self.modules: dict[Path, Module] = {}
        self.roots = [*_package_roots(path), *(Path(entry) for entry in sys.path if entry)]
        self.main = self.module(path)

    def module(self, path: Path) -> Module:
        """Return the parsed module of a file."""
        path = path.resolve()
        if path not in self.modules:
            source = path.read_bytes()
            if len(source) > MAX_BYTES:
                raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes")
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{getattr(error, 'lineno', 0)}: not valid Python: {error}") from error
            module = self.modules[path] = Module(path, path.stem)
            for node in tree.body:
                note(module, node)
        return self.modules[path]

    def find(self, module: Module, name: str, depth: int = 0) -> Definition[Any] | External | None:
        """Return the definition of a name in a file; None for an unknown name."""
        if depth > 40:
            return External(f"{module.name}:{name}")
        if name not in module.names:
            inside = (self._find_in(module, star, name, depth) for star in module.stars)
            return next((found for found in inside if found), None)
        found = module.names[name]
        if not isinstance(found, tuple):
            return Definition(found, module)
        where, original = found
        if original is None:
            return External(where)
        submodule = self._locate(module, f"{where}.{original}" if not where.endswith(".") else where + original)
        unread = External(f"{where}.{original}" if submodule else f"{where}:{original}")
        return self._find_in(module, where, original, depth) or unread

    def _find_in(self, module: Module, where: str, name: str, depth: int) -> Definition[Any] | External | None:
        """Return the definition of a name in another file, by its import path."""
        target = self._locate(module, where)
        return self.find(self.module(target), name, depth + 1) if target else None

    def _locate(self, module: Module, name: str) -> Path | None:
        """Return the file of a module, without importing it."""
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.lstrip(".").split(".") if part]
        roots = [module.path.parents[dots - 1]] if dots else self.roots
        for root in roots:
            base = root.joinpath(*parts)
            for candidate in (base.with_suffix(".py") if parts else base / "__init__.py", base / "__init__.py"):
                if candidate.is_file():
                    return candidate
        return None


def _package_roots(path: Path) -> Iterator[Path]:
    """Yield the folders that may hold a file's package or packages of the same checkout."""
    for folder in path.resolve().parents:
        yield folder
        if (folder / ".git").exists() or (folder / "source").is_dir() or (folder / "src").is_dir():
            yield from sorted(entry for entry in folder.glob("source/*") if entry.is_dir())
            yield folder / "src"
            return


def _power(base: float, exponent: float) -> float:
    """Return a power of ordinary size."""
    if abs(base) > 1e6 or abs(exponent) > 64:
        raise ConfigError(f"{base}**{exponent}: too large a power for a setting")
    return base**exponent


OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: _power,
}


class Evaluator(Reader):
    """Evaluates syntax trees of settings to plain data."""

    def fail(self, module: Module, node: ast.AST, what: str) -> ConfigError:
        """Return the error of an expression that would have to be run."""
        return ConfigError(f"{module.path}:{getattr(node, 'lineno', 0)}: {what}: {ast.unparse(node)[:80]}")

    def value(self, node: ast.AST, module: Module, scope: Class | None = None) -> Any:
        """Return an expression as plain data."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self.value(item, module, scope) for item in items]
            case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
                pairs = zip(keys, values, strict=True)
                return {self.value(key, module, scope): self.value(item, module, scope) for key, item in pairs if key}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, module, scope)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](self._number(left, module, scope), self._number(right, module, scope))
            case ast.Name() | ast.Attribute():
                return self._named(node, module, scope)
            case ast.Call():
                return self._call(node, module, scope)
            case ast.Lambda(body=body):
                return self.value(body, module, scope)
        raise self.fail(module, node, NOT_RUN)

    def or_error(self, node: ast.AST, module: Module, scope: Class | None = None) -> Any:
        """Return an expression as plain data, or as `Unread` if it has no value unless the file runs."""
        try:
            return self.value(node, module, scope)
        except ConfigError as error:
            return Unread(error)

    def _number(self, node: ast.AST, module: Module, scope: Class | None) -> float:
        value = self.value(node, module, scope)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(module, node, "expected a number")
        return value

    def _target(self, node: ast.AST, module: Module, scope: Class | None) -> Definition[Any] | External:
        """Return the definition of a name or a dotted name."""
        if isinstance(node, ast.Name):
            while scope is not None:
                inner = members(scope.node).get(node.id)
                if isinstance(inner, ast.ClassDef):
                    return Definition(inner, module, scope)
                scope = scope.outer
            return self.find(module, node.id) or External(node.id)
        if isinstance(node, ast.Attribute):
            of = self._target(node.value, module, scope)
            if isinstance(of, External):
                return External(f"{of}{'.' if ':' in of or of == 'self' else ':'}{node.attr}")
            own: Any = of.node.value if isinstance(of.node, ast.Constant) else None
            if isinstance(own, dict) and node.attr in own:
                return Definition(ast.Constant(own[node.attr]), module)  # a field of self, in __post_init__
            for base in self.lineage(of) if is_class(of) else ():
                if node.attr in members(base.node):
                    return Definition(members(base.node)[node.attr], base.module, base)
        return External(ast.unparse(node))

    def _named(self, node: ast.AST, module: Module, scope: Class | None) -> Any:
        if isinstance(node, ast.Name) and node.id == "MISSING":
            return MISSING
        found = self._target(node, module, scope)
        if isinstance(found, External):
            if found.startswith("self."):
                raise self.fail(module, node, "no such field of self")
            return MISSING if found.endswith(":MISSING") else str(found)
        if isinstance(found.node, ast.ClassDef | ast.FunctionDef):
            return f"{found.module.name}:{found.node.name}"
        return self.value(found.node, found.module, found.outer)

    def _call(self, node: ast.Call, module: Module, scope: Class | None) -> Any:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "field":
            inner = keywords.get("default_factory", keywords.get("default"))
            if inner is None:
                return MISSING
            if isinstance(inner, ast.Name | ast.Attribute) and "default_factory" in keywords:
                inner = ast.Call(func=inner, args=[], keywords=[], lineno=node.lineno, col_offset=0)
            return self.value(inner, module, scope)
        if name in ("list", "tuple", "dict") and not keywords:
            return self.value(node.args[0], module, scope) if node.args else ({} if name == "dict" else [])
        if name in NUMERIC and not keywords and self.find(module, name) is None:
            return NUMERIC[name](*(self._number(item, module, scope) for item in node.args))
        given = {key: self.or_error(item, module, scope) for key, item in keywords.items()}
        if name == "dict":
            return given
        found = self._target(node.func, module, scope)
        if isinstance(found, External) and name.endswith("Cfg"):
            return {"class_name": class_of(name) or MISSING} | given
        if isinstance(found, External):
            raise self.fail(module, node, NOT_RUN)
        if is_class(found):
            return self.instance(found, given)
        if isinstance(found.node, ast.FunctionDef):
            return self.returned(found.node, found.module)
        raise self.fail(module, node, "expected a class of settings")

    def returned(self, function: ast.FunctionDef, module: Module) -> Any:
        """Return the value of a function without arguments that returns one expression."""
        returned = [node.value for node in function.body if isinstance(node, ast.Return) and node.value is not None]
        if len(returned) != 1:
            raise self.fail(module, function, NOT_RUN)
        local = Module(module.path, module.name, dict(module.names), module.stars)
        for statement in function.body:
            note(local, statement)
        return self.value(returned[0], local)

    def lineage(self, cls: Class) -> Iterator[Class]:
        """Yield a class and its bases that are in reach, itself first."""
        yield cls
        for base in cls.node.bases:
            found = self._target(base, cls.module, cls.outer)
            if is_class(found):
                yield from self.lineage(found)

    def base_names(self, cls: Class) -> Iterator[str]:
        """Yield the names of a class and all its bases, in reach or not."""
        for member in self.lineage(cls):
            yield member.node.name
            for base in member.node.bases:
                yield ast.unparse(base).rpartition(".")[2]

    def instance(self, cls: Class, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return an object of a class as plain data.

        Fields, then arguments, then `__post_init__`.
        """
        lineage = [*self.lineage(cls)]
        known = [known for name in self.base_names(cls) if (known := class_of(name))]
        values: dict[str, Any] = {"class_name": known[0]} if known else {}
        for member in reversed(lineage):
            for name, node in members(member.node).items():
                if isinstance(node, ast.expr):
                    values[name] = self.or_error(node, member.module, member)
                elif isinstance(node, ast.ClassDef) and name.islower():  # a section of legged_gym's
                    values[name] = self.instance(Definition(node, member.module, member))
        values |= given or {}
        self._post_init(lineage, values)
        return values

    def _post_init(self, lineage: Iterable[Class], values: dict[str, Any]) -> None:
        """Apply the assignments of the first `__post_init__` of these classes."""
        having = ((cls, method) for cls in lineage if (method := members(cls.node).get("__post_init__")))
        first = next(having, None)
        if first is None:
            return
        cls, method = first
        for statement in method.body:
            match statement:
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    continue
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"))))):
                    self._post_init([*self.lineage(cls)][1:], values)
                case ast.Assign(targets=[ast.Attribute() as target], value=value):
                    self._assign(target, value, values, cls)
                case _:
                    raise self.fail(cls.module, statement, NOT_RUN)

    def _assign(self, target: ast.Attribute, node: ast.expr, values: Any, cls: Class) -> None:
        root, *path = ast.unparse(target).split(".")
        here = values
        for part in path[:-1]:
            here = here.get(part) if isinstance(here, dict) else None
        if root != "self" or not isinstance(here, dict):
            raise self.fail(cls.module, target, "expected a field of self that exists")
        local = replace(cls.module, names=cls.module.names | {"self": ast.Constant(values)})
        here[path[-1]] = self.or_error(node, local, cls)

    def run(self, name: str, tree: Any) -> Any:
        """Return the settings of a whole run.

        Raise ConfigError if they stand in a package that is not found.
        """
        tree = without_missing(tree)
        imported = {found[0]: None for found in self.main.names.values() if isinstance(found, tuple)}
        if isinstance(tree, dict) and "num_steps_per_env" not in tree.get("runner", tree) and imported:
            why = f"no num_steps_per_env in what can be read here of {', '.join(imported)}"
            raise ConfigError(f"{self.main.path}:{name}: {why}; install the packages, or put them on PYTHONPATH")
        return tree


NUMERIC: dict[str, Any] = {"round": lambda x, digits=None: round(x, digits), "int": int, "float": float, "abs": abs}
"""Functions of numbers that a file may call."""
KNOWN_CLASSES = (*NETWORK_CLASSES, *DISTRIBUTIONS, "PPO", "Distillation", "OnPolicyRunner", "DistillationRunner")


def class_of(cfg: str) -> str | None:
    """Return `class_name` of a class of Isaac Lab's or mjlab's, which need not be installed; None for another.

    RslRlPpoActorCriticCfg is of ActorCritic, RslRlPpoAlgorithmCfg of PPO.
    """
    name = re.sub("^RslRl(Ppo)?|(Algorithm)?Cfg$", "", cfg) or "PPO"
    return name if name in KNOWN_CLASSES else None


def without_missing(value: Any) -> Any:
    """Return plain data without unset fields."""
    if isinstance(value, dict):
        return {key: without_missing(item) for key, item in value.items() if item is not MISSING}
    return [without_missing(item) for item in value] if isinstance(value, list) else value


def runs_in(path: Path) -> dict[str, Any]:
    """Return the settings of all runs in a file, as callables by name."""
    evaluator = Evaluator(path)
    found: dict[str, Any] = {}
    for name, node in evaluator.main.names.items():
        match node:
            case ast.ClassDef():
                cls = Definition(node, evaluator.main)
                if any(word in base for base in evaluator.base_names(cls) for word in CONFIG_WORDS):
                    found[name] = lambda name=name, cls=cls: evaluator.run(name, evaluator.instance(cls))
            case ast.FunctionDef(args=ast.arguments(args=[]), returns=ast.expr() as kind):
                if "RunnerCfg" in ast.unparse(kind):
                    found[name] = lambda name=name, f=node: evaluator.run(name, evaluator.returned(f, evaluator.main))
    return found


def read_python_config(path: Path, name: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the settings of one class or function of a file, and its name."""
    found = runs_in(path)
    if not found:
        raise ConfigError(f"{path}: no class of settings for a whole run, and no function without arguments for one")
    if name is None and len(found) > 1:
        raise ConfigError(f"{path}: has several settings, say which: {', '.join(f'{path}:{each}' for each in found)}")
    if name is not None and name not in found:
        raise ConfigError(f"{path}: has no settings {name!r}, {nearest(name, found)}")
    name = name or next(iter(found))
    tree = found[name]()
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}:{name}: returns {tree!r}, which are no settings; name a class of settings")
    return tree, name
