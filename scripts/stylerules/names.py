"""The names that a module binds, and its classes and strings, from one walk over its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from stylerules.findings import StyleFinding
from stylerules.words import (
    ADVICE,
    CLOCK_CALLS,
    COUNTERPARTS,
    REFUSED_BY_GLOSSARY,
    TIME_TYPES,
    WORDS_OF_TESTS,
    better_name,
    lone_word,
    rule_of,
)

ENUM: Final = re.compile(r"(?:Str|Int)?Enum|(?:Int)?Flag")
ONE_WORD_CLASS: Final = re.compile(r"_*[A-Z][a-z]+")
FIELDS_WITHOUT_NODES: Final = (
    "arg asname attr conversion ctx id is_async kind kwd_attrs level module name names op ops rest simple"
    " type_comment type_ignores"
)
"""Fields of syntax trees that hold texts, numbers, or what the rules do not read."""


@dataclass(slots=True)
class Scope:
    """A module, class or function, with the words that it binds."""

    role: str
    """"module", "class", "enum" or "function"."""
    words: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    """The attributes that the methods of a class give to ``self``. They share this set."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A name where it gets its value."""

    name: str
    role: str
    line: int
    scope: Scope


@dataclass(slots=True)
class ModuleFacts:
    """The parts of a module that the rules read."""

    findings: list[StyleFinding] = field(default_factory=list)
    strings: list[tuple[int, str]] = field(default_factory=list)
    """All strings with their lines."""
    docstrings: list[str] = field(default_factory=list)
    """The docstrings of the module and of its classes."""
    classes: list[tuple[int, str]] = field(default_factory=list)
    """The names of all classes with their lines."""
    functions: list[str] = field(default_factory=list)
    """The names of the public functions."""


def collect_facts(path: str, tree: ast.Module) -> ModuleFacts:
    """Return the facts of a module."""
    return _Walk(path).collect(tree)


class _Walk:
    """One walk over a module."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._facts = ModuleFacts()
        self._bindings: list[Binding] = []
        self._exempt_nodes: set[int] = set()

    def collect(self, tree: ast.Module) -> ModuleFacts:
        self._facts.functions = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
        ]
        self._add_docstring(tree)
        stack: list[tuple[Any, Scope]] = [(tree, Scope("module"))]
        while stack:
            node, scope = stack.pop()
            visit = _VISITS.get(node.__class__)
            inner = visit(self, node, scope) if visit is not None else None
            inner = inner or scope
            for name in _fields_backwards(node.__class__):
                child = getattr(node, name)
                if child.__class__ is list:
                    stack += [(part, inner) for part in reversed(child) if part is not None]
                elif child is not None:
                    stack.append((child, inner))
        self._facts.findings += self._check_bindings()
        return self._facts

    def _check_bindings(self) -> Iterator[StyleFinding]:
        """Yield the names that break a rule, unless another name of their scope excuses them."""
        is_test = self._path.startswith("tests/")
        for binding in self._bindings:
            rule, word = rule_of(binding.name, binding.role), lone_word(binding.name)
            if rule is None or COUNTERPARTS.get(word) in binding.scope.words:
                continue
            if not (is_test and word in WORDS_OF_TESTS):
                text = f"{binding.role} {binding.name!r}"
                advice = better_name(binding.name, binding.role, rule)
                yield StyleFinding(self._path, binding.line, rule, text, advice)

    def _bind(self, name: str, role: str, line: int, scope: Scope) -> None:
        scope.words.add(lone_word(name))
        self._bindings.append(Binding(name, role, line, scope))

    def _add_docstring(self, node: ast.Module | ast.ClassDef) -> None:
        if text := ast.get_docstring(node):
            self._facts.docstrings.append(text)

    def _visit_class(self, node: ast.ClassDef, scope: Scope) -> Scope:
        self._facts.classes.append((node.lineno, node.name))
        self._add_docstring(node)
        if ONE_WORD_CLASS.fullmatch(node.name):
            self._bind(node.name, "class", node.lineno, scope)
        is_enum = any(ENUM.fullmatch(name) for base in node.bases for name in identifiers_of(base))
        return Scope("enum" if is_enum else "class")

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> Scope:
        role = "method" if scope.role in ("class", "enum") else "function"
        self._bind(node.name, role, node.lineno, scope)
        return self._visit_lambda(node, scope)

    def _visit_lambda(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope
    ) -> Scope:
        """Bind the parameters of a function in a scope of its own, and return the scope."""
        inner = Scope("function", attributes=scope.attributes)
        rows = [row for row in ast.iter_child_nodes(node.args) if isinstance(row, ast.arg)]
        names = {row.arg for row in rows}
        for row in rows:
            types = identifiers_of(row.annotation)
            if not (row.arg == "now" and TIME_TYPES & types):
                self._bind(row.arg, "parameter", row.lineno, inner)
            self._check_glossary(row.arg, row.lineno, names | types)
        return inner

    def _visit_name(self, node: ast.Name, scope: Scope) -> None:
        is_exempt = scope.role == "enum" or id(node) in self._exempt_nodes
        if node.ctx.__class__ is ast.Store and not is_exempt:
            role = "constant" if node.id.isupper() else "local"
            role = "attribute" if scope.role == "class" else role
            self._bind(node.id, role, node.lineno, scope)

    def _visit_attribute(self, node: ast.Attribute, scope: Scope) -> None:
        """Bind an attribute of ``self`` where the class first sets it."""
        is_own = getattr(node.value, "id", "") in ("self", "cls")
        is_new = node.ctx.__class__ is ast.Store and node.attr not in scope.attributes
        if is_own and is_new:
            scope.attributes.add(node.attr)
            self._bind(node.attr, "attribute", node.lineno, scope)

    def _visit_statement(self, node: ast.AST, scope: Scope) -> None:
        """Check names by the values that a statement binds to them."""
        targets, value, annotation = _parts_of_binding(node)
        names = [part for target in targets for part in _stored_names(target)]
        for part in names:
            is_time = part.id == "now" and _is_time(value, annotation)
            if is_time or _is_token(part.id, value):
                self._exempt_nodes.add(id(part))
        if not REFUSED_BY_GLOSSARY.keys().isdisjoint(part.id for part in names):
            nearby = {part.id for part in names}
            nearby |= identifiers_of(value) | identifiers_of(annotation)
            for part in names:
                self._check_glossary(part.id, part.lineno, nearby)

    def _check_glossary(self, name: str, line: int, nearby: set[str]) -> None:
        """Add a finding if the identifiers near a name show that it stands for another word."""
        if name in REFUSED_BY_GLOSSARY:
            term, pattern = REFUSED_BY_GLOSSARY[name]
            if any(pattern.fullmatch(identifier) for identifier in nearby):
                advice = f"{ADVICE['glossary']}: {term}"
                finding = StyleFinding(self._path, line, "glossary", f"name {name!r}", advice)
                self._facts.findings.append(finding)

    def _visit_augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        self._exempt_nodes.add(id(node.target))  # the name is there already

    def _visit_named(self, node: ast.AST, scope: Scope) -> None:
        """Bind the name of an exception, of a pattern or of an import."""
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names = [alias.asname for alias in aliases if alias.asname != alias.name]
            case ast.MatchMapping(rest=name) | ast.ExceptHandler(name=name):
                names = [name]
            case ast.MatchAs(name=name) | ast.MatchStar(name=name):
                names = [name]
            case _:
                return
        for name in filter(None, names):
            self._bind(name, "local", getattr(node, "lineno", 0), scope)

    def _visit_constant(self, node: ast.Constant, scope: Scope) -> None:
        if node.value.__class__ is str:
            self._facts.strings.append((node.lineno, node.value))


_VISITS: Final[dict[type, Callable[[_Walk, Any, Scope], Scope | None]]] = {
    ast.ClassDef: _Walk._visit_class,
    ast.FunctionDef: _Walk._visit_function,
    ast.AsyncFunctionDef: _Walk._visit_function,
    ast.Lambda: _Walk._visit_lambda,
    ast.Name: _Walk._visit_name,
    ast.Attribute: _Walk._visit_attribute,
    ast.AugAssign: _Walk._visit_augmented,
    ast.Constant: _Walk._visit_constant,
    **dict.fromkeys(
        (
            ast.Assign,
            ast.AnnAssign,
            ast.NamedExpr,
            ast.For,
            ast.AsyncFor,
            ast.comprehension,
            ast.withitem,
        ),
        _Walk._visit_statement,
    ),
    **dict.fromkeys(
        (
            ast.Import,
            ast.ImportFrom,
            ast.ExceptHandler,
            ast.MatchAs,
            ast.MatchMapping,
            ast.MatchStar,
        ),
        _Walk._visit_named,
    ),
}


@cache
def _fields_backwards(node_class: type[ast.AST]) -> tuple[str, ...]:
    """Return the fields of a class of nodes that may have nodes, the last first."""
    if node_class in (ast.Constant, ast.MatchSingleton):
        return ()
    other_fields = FIELDS_WITHOUT_NODES.split()
    return tuple(name for name in reversed(node_class._fields) if name not in other_fields)


def _parts_of_binding(
    node: ast.AST,
) -> tuple[Sequence[ast.expr], ast.expr | None, ast.expr | None]:
    """Return the targets of a statement that binds names, the value and the annotation."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return targets, value, None
        case ast.AnnAssign(target=target, annotation=annotation, value=value):
            return [target], value, annotation
        case ast.NamedExpr(target=target, value=value):
            return [target], value, None
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            return [node.target], node.iter, None
        case ast.withitem(optional_vars=target, context_expr=context) if target is not None:
            return [target], context, None
    return [], None, None


def _stored_names(target: ast.expr) -> Iterator[ast.Name]:
    """Yield the names in a target, which may be a tuple of targets."""
    if isinstance(target, ast.Name):
        yield target
    elif isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _stored_names(part)
    elif isinstance(target, ast.Starred):
        yield from _stored_names(target.value)


def identifiers_of(tree: ast.expr | None) -> set[str]:
    """Return the names and attributes that an expression reads."""
    nodes = list(ast.walk(tree)) if tree is not None else []
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _is_time(value: ast.expr | None, annotation: ast.expr | None) -> bool:
    """Return whether a value is read from a clock, or is a time by its type."""
    function = value.func if isinstance(value, ast.Call) else None
    return bool(CLOCK_CALLS & identifiers_of(function) or TIME_TYPES & identifiers_of(annotation))


def _is_token(name: str, value: ast.expr | None) -> bool:
    """Return whether a constant is a token whose text is its name, e.g. ``KEPT = "kept"``."""
    text = value.value if isinstance(value, ast.Constant) else None
    return name.isupper() and isinstance(text, str) and text.lower() == name.lower()
