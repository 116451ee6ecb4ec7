"""The command against the real SGLang: a short run of every policy, and beside decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheflow_sgl.bench.options import POLICIES
from cacheflow_sgl.cli.main import app

pytestmark = [pytest.mark.engine, pytest.mark.full]


@pytest.mark.parametrize("decodes", [0, 2])
def test_every_policy_restores_and_says_the_same(tmp_path: Path, decodes: int):
    out = tmp_path / "out.json"
    arguments = ["--policies", ",".join(POLICIES), "--prefix-tokens", "1024", "--repeats", "2"]
    arguments += ["--decode", str(decodes), "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "restore", *arguments])
    assert result.exit_code in (0, 1), result.output
    rows = {row["policy"]: row for row in json.loads(out.read_text())["rows"]}
    # A busy machine may keep loads from the throttle, which is said and no fault of ours.
    assert result.exit_code == any(row["void"] for row in rows.values()), result.output
    assert rows.keys() == {*POLICIES}
    for row in rows.values():
        assert row["outputs_equal"]
        assert row["max_abs_dlogprob"] < 1e-3
        assert (row["ttft_s"]["n"], row["decodes"]) == (2, decodes)
        assert (row["decode_tpot_s"] is not None) == (decodes > 0)
    assert (rows["recompute"]["choice"], rows["recompute"]["io_busy"]) == ("recompute", 0)
    assert (rows["load"]["choice"], rows["load"]["compute_busy"]) == ("load", 0)
    split = rows["split"]
    assert split["choice"] == "split"
    assert 0 < split["meet_tokens"] < 1024
    assert split["compute_busy"] > 0
    assert split["io_busy"] > 0
