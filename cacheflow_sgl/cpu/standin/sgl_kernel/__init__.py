"""`sgl_kernel` for a machine whose installed one can't load, which is any without a GPU driver.

`cacheflow_sgl.cpu.activate` puts the directory above on `PYTHONPATH`, so SGLang's processes,
spawned ones included, find this package first. It steps aside wherever the installed
`sgl_kernel` does load (a CPU build with its own kernels, for example). Otherwise every name
imports, and calling one raises `RuntimeError` with that name: dense models call none.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_HERE = Path(__file__).resolve().parent


class MissingKernel:
    """One op (or a table of them): can be imported and looked into, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> MissingKernel:
        if attribute.startswith("__"):  # probes of copy, inspect and the like
            raise AttributeError(attribute)
        return MissingKernel(f"{self._name}.{attribute}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise, naming the op and the mend."""
        raise RuntimeError(
            f"{self._name} was called, but sgl_kernel has no kernels for this machine ({_reason}); "
            "choose a dense model and CPU backends, or install an sgl_kernel built for this CPU"
        )


class MissingModule(ModuleType):
    """A module of `sgl_kernel`: every public attribute is a `MissingKernel`."""

    def __getattr__(self, attribute: str) -> MissingKernel:
        if attribute.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
        return MissingKernel(f"{self.__name__}.{attribute}")


class SubmoduleFinder(MetaPathFinder, Loader):
    """Makes `import sgl_kernel.anything` give a `MissingModule`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Claim every submodule of `sgl_kernel`."""
        if not fullname.startswith(f"{__name__}."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module that answers for all names."""
        return MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: attributes are made when asked for."""


def _import_installed() -> str | None:
    """Import the installed `sgl_kernel` in our place; the reason if that can't be done."""
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != _HERE.parent]
    spec = PathFinder.find_spec(__name__, elsewhere)
    if spec is None or spec.loader is None:
        return "none is installed"
    ours = sys.modules[__name__]
    installed = importlib.util.module_from_spec(spec)
    # The import system hands out whatever sys.modules holds once this file has run.
    sys.modules[__name__] = installed
    try:
        spec.loader.exec_module(installed)
    except (ImportError, OSError) as error:
        for name in [name for name in sys.modules if name.startswith(f"{__name__}.")]:
            del sys.modules[name]
        sys.modules[__name__] = ours
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return None


_reason = _import_installed()
if _reason is not None:
    sys.modules[__name__].__class__ = MissingModule
    sys.meta_path.insert(0, SubmoduleFinder())
