"""Both ends of the files by which a bench steers its server."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cacheflow_sgl import bench
from cacheflow_sgl.bench.protocol import (
    BenchError,
    Control,
    Forward,
    Load,
    Log,
    Part,
    ServerEnd,
    Settings,
    log_path,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings.json"


def test_a_server_finds_settings_from_its_start(path: Path):
    Control(path)
    assert ServerEnd(path).settings == Settings(bytes_per_s=None, evict=0)


def test_every_change_is_seen_however_fast(path: Path):
    control = Control(path)
    end = ServerEnd(path)
    for rate in range(1, 200):
        control.set_rate(rate)
        assert end.settings.bytes_per_s == rate
    control.set_rate(None)
    assert end.settings.bytes_per_s is None


def test_unchanged_settings_are_not_read_again(path: Path):
    Control(path)
    end = ServerEnd(path)
    before = end.settings
    assert end.settings is before


def test_an_eviction_waits_for_the_server(path: Path):
    control = Control(path)
    control.set_rate(5.0)
    end = ServerEnd(path)
    done: list[int] = []

    def serve() -> None:
        for number in (1, 2):
            while end.settings.evict != number:
                pass
            assert end.settings.bytes_per_s == 5.0
            done.append(number)
            end.acknowledge(number)

    thread = threading.Thread(target=serve)
    thread.start()
    control.evict_device()
    assert done == [1]
    control.evict_device()
    assert done == [1, 2]
    thread.join()


def test_a_server_that_does_not_evict_is_an_error(path: Path):
    with pytest.raises(BenchError, match=r"did not evict its device in 0\.01 s"):
        Control(path).evict_device(timeout_s=0.01)


def test_an_old_acknowledgement_is_none(path: Path):
    control = Control(path)
    ServerEnd(path).acknowledge(0)
    with pytest.raises(BenchError):
        control.evict_device(timeout_s=0.01)


def test_each_line_of_the_log_is_read_once_and_whole(path: Path):
    control = Control(path)
    assert control.new_log() == Log((), ())
    end = ServerEnd(path)
    forward, load = Forward([Part("a", 0, 512)], 0.5, 0.25), Load(100, 1.0, 0.25)
    end.log(forward)
    end.log(load)
    assert control.new_log() == Log((forward,), (load,))
    assert control.new_log() == Log((), ())
    end.log(load)
    whole = log_path(path).read_bytes()
    with log_path(path).open("ab") as log:
        log.write(whole.splitlines(keepends=True)[0][:-3])
    assert control.new_log() == Log((), (load,))
    with log_path(path).open("ab") as log:
        log.write(whole.splitlines(keepends=True)[0][-3:])
    assert control.new_log() == Log((forward,), ())


def test_a_server_is_steered_only_where_a_bench_started_it(path: Path):
    assert not bench.is_active({})
    assert bench.is_active({bench.CONTROL_VARIABLE: str(path)})
