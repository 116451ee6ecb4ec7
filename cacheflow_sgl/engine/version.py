"""Which SGLang this adapter is written against, and which one is installed."""

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.5.23"


class UnsupportedSGLangError(RuntimeError):
    """The installed SGLang is not the one the adapter's seams were written for."""


def installed_sglang() -> str | None:
    """Version of the installed SGLang distribution, or None if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def check_sglang_version() -> None:
    """Raise UnsupportedSGLangError, in one line, unless the supported SGLang is installed."""
    found = installed_sglang()
    if found == SUPPORTED:
        return
    what = "is not installed" if found is None else f"{found} is installed"
    raise UnsupportedSGLangError(
        f"cacheflow: sglang {what}, supported is {SUPPORTED}: pip install 'sglang=={SUPPORTED}'"
    )
