"""Replaying recorded traces against an SGLang server, over HTTP only.

trace = load_trace("demo")
report = replay(trace, "http://127.0.0.1:30000", ReplayOptions(limit=10))
print(report.summary.ttft_s.p50, report.summary.tokens.storage)
"""

from cacheflow_sgl.replay.console import replay
from cacheflow_sgl.replay.errors import FormatError, ReplayError
from cacheflow_sgl.replay.load import FORMATS, load_trace
from cacheflow_sgl.replay.plot import plot_runs
from cacheflow_sgl.replay.report import Report, RequestRecord, Stats, Summary, Tokens
from cacheflow_sgl.replay.runner import ReplayOptions, replay_async
from cacheflow_sgl.replay.show import compare_table, print_report
from cacheflow_sgl.replay.trace import Request, Session, Trace

__all__ = [
    "FORMATS",
    "FormatError",
    "ReplayError",
    "ReplayOptions",
    "Report",
    "Request",
    "RequestRecord",
    "Session",
    "Stats",
    "Summary",
    "Tokens",
    "Trace",
    "compare_table",
    "load_trace",
    "plot_runs",
    "print_report",
    "replay",
    "replay_async",
]
