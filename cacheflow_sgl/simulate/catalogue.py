"""The profiles that come with the package, by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from cacheflow_sgl.core.profiles import Profile, ProfileError, load_profile

_SCHEMA = "schema"  # lies beside them


def named_profile(name: str) -> tuple[str, Profile]:
    """A profile that comes with the package, or that of a file; and what to call it.

    Args:
        name: of one in `profile_names()`, or the path of a file: it has a folder or ends in .json.

    Raises:
        ProfileError: there is none of this name, or the file is wrong; one line.
    """
    path = Path(name)
    if path.suffix == ".json" or len(path.parts) > 1:
        return path.stem, load_profile(path)
    if name not in profile_names():
        raise ProfileError(f"no profile {name!r}; there are: {', '.join(profile_names())}")
    return name, load_profile(_folder() / f"{name}.json")


def profile_names() -> list[str]:
    """Names of the profiles that come with the package, sorted."""
    return sorted(path.stem for path in _folder().glob("*.json") if path.stem != _SCHEMA)


def _folder() -> Path:
    """In a wheel they lie in the package; beside it in a checkout."""
    package = Path(str(resources.files("cacheflow_sgl")))
    inside = package / "profiles"
    return inside if inside.is_dir() else package.parent / "profiles"
