"""Draws a trace as an SVG: a row for each span, beneath its parent, with a bar over the time that it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from tests.support.otlp_receiver import Received

WIDTH, NAMES, ROW, HEAD = 980, 330, 19, 46
"""Pixels: the picture, its column of names, a row, and the head with the legend."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Colours that a colour-blind reader can distinguish, for the processes in their order."""
TICKS = 5


def rows_of(spans: Sequence[Received]) -> list[tuple[int, Received]]:
    """The spans in the order of the rows, each with its depth."""
    known = {span.span_id for span in spans}

    def beneath(parent: str, depth: int) -> Iterator[tuple[int, Received]]:
        children = [
            span for span in spans if span.parent_id == parent or (not depth and span.parent_id not in known)
        ]
        for span in sorted(children, key=lambda span: (span.began_ns, span.span_id)):
            yield depth, span
            yield from beneath(span.span_id, depth + 1)

    return list(beneath("", 0))


def process_of(span: Received, workers: Sequence[str]) -> str:
    """The name of the span's process in the legend."""
    if not span.service.endswith("worker"):
        return "frontend"
    return f"worker {workers.index(span.resource['service.instance.id']) + 1}"


def picture(title: str, spans: Sequence[Received]) -> str:
    """The SVG of one trace."""
    workers = sorted(
        {span.resource["service.instance.id"] for span in spans if span.service.endswith("worker")},
    )
    processes = ["frontend", *(f"worker {number}" for number in range(1, len(workers) + 1))]
    colours = dict(zip(processes, COLOURS, strict=False))
    rows = rows_of(spans)
    began, ended = min(span.began_ns for span in spans), max(span.ended_ns for span in spans)
    scale = (WIDTH - NAMES - 70) / max(1, ended - began)
    height = HEAD + ROW * len(rows) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for number, name in enumerate(processes):
        x = NAMES + 110 * number
        parts.append(f'<rect x="{x}" y="26" width="11" height="11" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 16}" y="36">{name}</text>')
    for tick in range(TICKS + 1):
        at = NAMES + (ended - began) * scale * tick / TICKS
        parts.append(f'<line x1="{at:.1f}" y1="{HEAD}" x2="{at:.1f}" y2="{height - 18}" stroke="#dddddd"/>')
        ms = (ended - began) * tick / TICKS / 1e6
        parts.append(f'<text x="{at:.1f}" y="{height - 5}" text-anchor="middle" fill="#555555">{ms:.0f} ms</text>')
    for number, (depth, span) in enumerate(rows):
        parts += _row(number, depth, span, colours[process_of(span, workers)], began, scale)
    return "\n".join([*parts, "</svg>\n"])


def _row(number: int, depth: int, span: Received, colour: str, began: int, scale: float) -> Iterator[str]:
    y = HEAD + ROW * number
    x, width = NAMES + (span.began_ns - began) * scale, max(1.5, (span.ended_ns - span.began_ns) * scale)
    nbytes = span.attributes.get("rl_plane.bytes")
    more = f" · {nbytes:,} bytes" if nbytes else ""
    failed = f" · {span.attributes['error.type']}" if span.failed else ""
    edge = ' stroke="#000000" stroke-dasharray="3 2"' if span.failed else ""
    yield f'<text x="{10 + 16 * depth}" y="{y + 14}">{escape(span.name + more + failed)}</text>'
    yield f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="12" fill="{colour}"{edge}/>'
    duration = f"{(span.ended_ns - span.began_ns) / 1e6:.1f} ms"
    yield f'<text x="{x + width + 4:.1f}" y="{y + 14}" fill="#555555">{duration}</text>'
