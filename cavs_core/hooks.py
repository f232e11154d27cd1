"""Hooks: functions of MXNet that are replaced while somebody needs it, and put back."""

from __future__ import annotations

import functools
import types

__all__ = ["CodeHook", "Hooks", "to_list_hook", "to_method_hook", "to_super_hook"]


class Hooks:
    """Functions of MXNet that are replaced while somebody needs it.

    Parameters
    ----------
    hooks : (owner, name, make) of each; `make(original)` makes what stands for it, once and not each time
    """

    def __init__(self, *hooks):
        self._hooks, self._made, self._replaced = hooks, {}, []

    def install(self):
        for owner, name, make in self._hooks:
            original = vars(owner).get(name)
            if original is None:
                continue
            made = self._made.get((owner, name))
            if made is None or made[0] is not original:         # (somebody else may have replaced it, too)
                made = self._made[owner, name] = original, functools.wraps(original)(make(original))
            self._replaced.append((owner, name, original))
            setattr(owner, name, made[1])

    def remove(self):
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        self._replaced.clear()


def to_method_hook(self, *args):
    return _dynbatch_hook(self, *args)      # noqa: F821 (it runs in the module of MXNet's own function)


class _WithSuper:
    def to_super_hook(self, *args):
        __class__                           # noqa: B018, F821 (Python gives it to every method that names super)
        return _dynbatch_hook(self, *args)  # noqa: F821


to_super_hook = _WithSuper.to_super_hook


def to_list_hook(*arrays, **attrs):
    return _dynbatch_hook(arrays, attrs)    # noqa: F821


class CodeHook:
    """The hook of a function that gets other code; it stays where it is.

    For another `Block.__call__` Python would go through all classes of blocks, which takes as long as all other hooks
    together; and an operator may have been taken out of its module before.

    Parameters
    ----------
    owner, name : where the function is
    way : a function whose code calls the hook, `_dynbatch_hook`; `to_super_hook` for a method that names super
    make : makes the hook, of a function with the code that it had
    otherwise : what to do where the function is somebody else's, who may have made it of anything
    """

    def __init__(self, owner, name, way, make, otherwise=None):
        self._owner, self._name, self._make, self._otherwise = owner, name, make, otherwise or Hooks()
        self._module, self._made, self._replaced = vars(owner)[name].__globals__, (None, None), None
        self._way = way.__code__.replace(co_names=(f"_dynbatch_hook_of_{owner.__name__}_{name}",))

    def install(self):
        function = vars(self._owner)[self._name]
        if type(function) is not types.FunctionType or function.__globals__ is not self._module or (
                len(function.__closure__ or ()) != len(self._way.co_freevars)):
            self._otherwise.install()
            return
        code = function.__code__
        if self._made[0] is not code:
            twin = types.FunctionType(code, self._module, self._name, None, function.__closure__)
            self._made = code, self._make(twin)
        self._module[self._way.co_names[0]] = self._made[1]
        self._replaced = function, code
        function.__code__ = self._way

    def remove(self):
        self._otherwise.remove()
        if self._replaced is not None:
            function, function.__code__ = self._replaced
            self._replaced = None
