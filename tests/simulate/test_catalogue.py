from pathlib import Path

import pytest

from cacheflow_sgl.core.profiles import ProfileError, encode
from cacheflow_sgl.simulate import catalogue
from cacheflow_sgl.simulate.catalogue import named_profile, profile_names

from .stand import PROFILE


def test_profiles_are_found_by_name():
    assert len(profile_names()) >= 12
    assert "schema" not in profile_names()
    for name in profile_names():
        assert named_profile(name)[0] == name


def test_a_file_is_named_by_its_stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.json").write_bytes(encode(PROFILE))
    assert named_profile(str(tmp_path / "mine.json")) == ("mine", PROFILE)
    monkeypatch.chdir(tmp_path)
    assert named_profile("mine.json") == ("mine", PROFILE)


def test_an_unknown_name_lists_those_that_are_there():
    with pytest.raises(ProfileError, match=r"no profile 'b200'; there are: a100-llama-3\.1-8b, "):
        named_profile("b200")
    with pytest.raises(ProfileError, match=r"nowhere\.json: cannot be read"):
        named_profile("nowhere.json")


def test_those_of_a_wheel_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "package"
    for folder, name in ((package / "profiles", "inside"), (tmp_path / "profiles", "beside")):
        folder.mkdir(parents=True)
        (folder / f"{name}.json").write_bytes(encode(PROFILE))
    monkeypatch.setattr(catalogue.resources, "files", lambda _: package)
    assert profile_names() == ["inside"]
    (package / "profiles" / "inside.json").unlink()
    (package / "profiles").rmdir()
    assert profile_names() == ["beside"]
