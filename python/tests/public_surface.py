# SPDX-License-Identifier: Apache-2.0
"""Print the public names of a package and their signatures as JSON. Other Python versions run it
too.

    python public_surface.py PACKAGE > surface.json

{module: {name: what}} where what is {"kind": "function", "parameters": [..]}, {"kind": "class",
"parameters": [..] of the constructor, "members": {name: what}}, {"kind": "module"} or
{"kind": "value", "value": repr}. Modules that can't be imported here are {"error": why}.
"""

import contextlib
import importlib
import inspect
import io
import json
import pkgutil
import re
import sys
import types


def describe_parameters(thing):
    """[[name, kind, default or None]] without self; None if there is no signature."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    rows = []
    for p in parameters:
        default = None if p.default is p.empty else re.sub(r" at 0x[0-9a-f]+", "", repr(p.default))
        rows.append([p.name, p.kind.name, default])
    return rows[1:] if rows and rows[0][0] in ("self", "cls") else rows


def describe_class(cls):
    """Constructor and public members of a class, inherited ones of the package included."""
    top = cls.__module__.partition(".")[0]
    members = {}
    for base in reversed(cls.__mro__):
        if base is object or base.__module__.partition(".")[0] != top:
            continue
        for name, value in vars(base).items():
            if name.startswith("_") and name not in ("__enter__", "__exit__", "__getitem__",
                                                     "__len__", "__contains__", "__iter__"):
                continue
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if inspect.isfunction(value) or inspect.ismethoddescriptor(value):
                members[name] = {"kind": "function", "parameters": describe_parameters(value)}
            else:
                members[name] = {"kind": "value"}
        fields = getattr(base, "__dataclass_fields__", {})
        members.update({n: {"kind": "value"} for n in fields if not n.startswith("_")})
    return {"kind": "class", "parameters": describe_parameters(cls), "members": members,
            "is_enum": "__members__" in dir(cls)}


def is_from_elsewhere(module, value):
    """Whether a class or function was only imported by the module and is not one of its public
    names."""
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home not in (module.__name__, "builtins")


def describe_module(module, package, is_whole=False):
    """Return the public names that a module defines or re-exports from its own package.

    is_whole: also members that a module (not a package) has imported from elsewhere.
    """
    names = {}
    is_inner = not hasattr(module, "__path__") and not is_whole
    for name in dir(module):
        if name.startswith("_") and name not in ("__version__",):
            continue
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] == package:
                names[name] = {"kind": "module"}
        elif name == "TYPE_CHECKING" or (is_inner and is_from_elsewhere(module, value)):
            continue
        elif inspect.isclass(value):
            names[name] = describe_class(value)
        elif callable(value):
            names[name] = {"kind": "function", "parameters": describe_parameters(value)}
        elif type(value).__module__ == "builtins":
            names[name] = {"kind": "value", "value": repr(value)[:200]}
    return names


def read_surface(package, modules=None):
    """Describe a package: all its modules, or the named ones including what they import lazily."""
    is_whole = modules is not None
    top = importlib.import_module(package)
    if modules is None:
        modules = [package] + [
            info.name for info in pkgutil.walk_packages(top.__path__, f"{package}.")
            if not any(part.startswith("_") for part in info.name.split(".")[1:])
        ]
    surface = {}
    for name in modules:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                surface[name] = describe_module(importlib.import_module(name), package, is_whole)
        except BaseException as error:  # a framework that is not installed, a module that exits
            surface[name] = {"error": f"{type(error).__name__}: {error}"}
    return surface


if __name__ == "__main__":
    print(json.dumps(read_surface(sys.argv[1])))
