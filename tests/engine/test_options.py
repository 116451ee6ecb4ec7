import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.engine.options import (
    Options,
    OptionsError,
    capacity_bytes,
    parse_options,
    read_extra_config,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"directroy": "/x"}', "did you mean 'directory'?"),
        ('{"Capacity": 1}', "did you mean 'capacity'?"),
        ('{"zzzz": 1}', "known keys: directory, capacity"),
        ('{"io_threads": "four"}', "io_threads: expected `int"),
        ('{"io_threads": 0}', "io_threads: expected `int` >= 1"),
        ('{"io_threads": true}', "io_threads: expected `int`, got `bool`"),
        ('{"io_deadline_s": -1}', "io_deadline_s: expected `float` > 0"),
        ('{"capacity": "ten bananas"}', "capacity: 'ten bananas' is not a size"),
        ('{"capacity": "0%"}', "capacity: '0%' is not above 0"),
        ('{"capacity": 12}', "capacity: 12 is 12 bytes for"),
        ('{"capacity": [1]}', "capacity: expected `int | str`, got `array`"),
        ('{"directory": ""}', "directory: expected `str` of length >= 1"),
        ('{"prefetch_threshold": "many"}', "prefetch_threshold: expected `int`"),
        ("{directory", "is not valid JSON"),
        ('{"directory": "/proc/kv"}', "capacity: '50%' is 0 bytes for /proc/kv"),
        ("[1, 2]", "holds a list, not keys with values"),
        ("@options.ini", "name it .json, .yaml, .yml or .toml"),
        ("@missing.json", "No such file"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(text, found):
    with pytest.raises(OptionsError) as caught:
        parse_options(read_extra_config(text))
    message = str(caught.value)
    assert found in message
    assert "\n" not in message
    assert message.startswith("--hicache-storage-backend-extra-config")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("o.json", '{"directory": "/kv", "capacity": "2GB", "prefetch_threshold": 64}'),
        ("o.yaml", "directory: /kv\ncapacity: 2GB\nprefetch_threshold: 64\n"),
        ("o.toml", 'directory = "/kv"\ncapacity = "2GB"\nprefetch_threshold = 64\n'),
    ],
)
def test_file_formats_say_the_same(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    options = parse_options(read_extra_config(f"@{tmp_path / name}"))
    assert options == Options(directory="/kv", capacity="2GB", prefetch_threshold=64)


@pytest.mark.parametrize(
    ("name", "content"),
    [("o.json", "{,}"), ("o.yaml", "a: [1"), ("o.toml", "= 3"), ("o.yml", "- 1\n- 2\n")],
)
def test_a_broken_file_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(OptionsError) as caught:
        read_extra_config(f"@{tmp_path / name}")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sglangs_own_keys_pass():
    own = {
        "prefetch_threshold": 1,
        "prefetch_timeout_base": 2,
        "prefetch_timeout_per_ki_token": 0.5,
        "hicache_storage_pass_prefix_keys": True,
        "tp_lcm_size": 8,
    }
    assert parse_options(own).prefetch_timeout_base == 2


def test_nothing_given_means_defaults():
    assert read_extra_config(None) == {} == read_extra_config("")
    assert parse_options({}) == Options()


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("200GB", 200 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("64 mib", 64 * 2**20),
        ("100000", 100_000),
        (131072, 131072),
        ("1G", 10**9),
    ],
)
def test_sizes(tmp_path, text, amount):
    assert capacity_bytes(text, tmp_path) == amount


def test_a_percentage_is_of_the_file_system_even_where_the_directory_is_still_to_be_made(tmp_path):
    there = capacity_bytes("100%", tmp_path)
    assert capacity_bytes("100%", tmp_path / "a" / "b") == there
    assert capacity_bytes("50%", tmp_path) == pytest.approx(there / 2, abs=1)


@given(
    st.dictionaries(
        st.text(max_size=12),
        st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=8), st.booleans()),
        max_size=4,
    )
)
def test_any_dictionary_parses_or_is_refused_in_one_line(content):
    try:
        parse_options(read_extra_config(json.dumps(content)))
    except OptionsError as error:
        assert "\n" not in str(error)
