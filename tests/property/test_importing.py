from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from hypothesis import example, given
from hypothesis import strategies as st

from tessera.formulation.errors import InvalidInput
from tessera.simulator.traces import profiles, trace
from tessera.simulator.traces.csvfile import MAX_ERRORS
from tests.support.laws import examples

T = TypeVar("T")

HEADS = (
    ",".join([*profiles.REQUIRED, *profiles.OPTIONAL]),
    ",".join(profiles.REQUIRED),
    ",".join([*trace.REQUIRED, *trace.OPTIONAL]),
    ",".join(trace.REQUIRED),
)
FIELDS = st.one_of(
    st.sampled_from(
        ["bert", "1.3B", "256", "a100", "1", "2", "", "ok", "oom", "1e9", '"', '"a\nb"']
    ),
    st.text(max_size=8),
)
ROWS = st.lists(st.lists(FIELDS, min_size=6, max_size=12).map(",".join), max_size=8)
NEARLY = st.builds(
    lambda head, rows, end: end.join([head, *rows]).encode("utf-8", "surrogatepass"),
    st.sampled_from(HEADS),
    ROWS,
    st.sampled_from(["\n", "\r\n", "\r"]),
)


def read_or_refused(parse: Callable[[bytes, str], list[T]], data: bytes) -> list[T]:
    """Return the rows read, or [] if the file is refused; then every mistake must name the file."""
    message = ""
    try:
        return parse(data, "f.csv")
    except InvalidInput as error:
        message = str(error)
    mistakes = message.split("\nf.csv ")
    assert message.startswith("f.csv line ")
    assert len(mistakes) <= MAX_ERRORS
    return []


@given(data=st.one_of(st.binary(max_size=300), NEARLY))
@examples(300)
@example(data=HEADS[0].encode() + b"\n" + b"9" * 5000)
@example(data=HEADS[3].encode() + b'\nj,1,m,p,1,1,1\nj,1,m,p,1,1,1\n"')
@example(data=("\ufeff" + HEADS[3]).encode("utf-16"))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    records = read_or_refused(profiles.parse_profiles, data)
    assert all(e.cell.gpus >= e.cell.nodes >= 1 and e.iter_time_s > 0 for e in records)
    arrivals = read_or_refused(trace.parse_trace, data)
    assert all(math.isfinite(a.arrival_s) and a.arrival_s >= 0 for a in arrivals)
    assert all(a.spec.iterations >= 1 and a.spec.deadline_s > 0 for a in arrivals)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 10**12), st.floats(0, 1e9), st.integers(1, 64)), max_size=20
    )
)
@examples(50)
def test_written_files_read_back_unchanged(rows: list[tuple[int, float, int]]) -> None:
    lines = [f"j{i},{t!r},m,p,8,{n},{g}" for i, (n, t, g) in enumerate(rows)]
    data = "\r\n".join([",".join(trace.REQUIRED), *lines]).encode()
    options = trace.TraceOptions(iteration_divisor=1)
    found = {a.spec.name: a for a in trace.parse_trace(data, "f", options)}
    first = min((t for _, t, _ in rows), default=0.0)
    assert len(found) == len(rows)
    for i, (n, t, g) in enumerate(rows):
        a = found[f"j{i}"]
        assert (a.spec.iterations, a.arrival_s, a.spec.requested_gpus) == (n, t - first, g)
