"""Timelines as text, picture, page and trace: what is drawn is what ran; docs/pipeline.md shows what the code draws."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_dist.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Span,
    Timeline,
    Times,
    build_schedule,
    chrome_trace,
    cost_of_stages,
    draw_html,
    draw_svg,
    draw_text,
    lower,
    parse_schedule,
    simulate,
    validate,
)
from lightning_dist.pipeline.schedule.__main__ import main
from lightning_dist.pipeline.schedule.svg_timeline import LIGHT_ON, TONES

DOCS = Path(__file__).resolve().parents[1] / "docs" / "pipeline.md"
SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, p: int = 4, m: int = 8) -> Timeline:
    v = {"interleaved": 2, "zbv": 2}.get(name, 1)
    return simulate(lower(build_schedule(name, p, m, v)), cost_of_stages(Times(), virtual_stages=v))


def waiting() -> Timeline:
    """A step in which a send waits for its receive."""
    late = parse_schedule(
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 RECV_B0.1 B0.0 B0.1\n"
        "RECV_F1.0 F1.0 RECV_F1.1 F1.1 B1.0 SEND_B1.0 B1.1 SEND_B1.1"
    )
    validate(late)
    return simulate(late, cost_of_stages([Times(1, 1, 1), Times(3, 1, 1)]))


def measured() -> Timeline:
    """Seconds on some clock, uneven, and with an action too short to be seen."""
    f, b = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    return Timeline([[Span(f, 1000.0, 1000.25), Span(b, 1000.5, 1001.0)], [Span(f, 1000.25, 1000.2500001)]])


def num_spans(timeline: Timeline) -> int:
    return sum(map(len, timeline.spans))


# --- text -----------------------------------------------------------------------------------------------------------


def test_1f1b_as_text() -> None:
    assert draw_text(timeline_of("1f1b", 2, 2)) == (
        "rank 0  F0─F1─······B0────···B1────\n"
        "rank 1  ···F0─B0────F1─B1────······\n"
        "step 9, bubble 33.3% of the ranks' time, all ranks equally busy, live activations 2 1\n"
    )


@pytest.mark.parametrize("width", [10, 24, 40, 72, 100, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_line_of_the_drawing_is_too_wide(name: str, width: int) -> None:
    timeline = timeline_of(name)
    *lines, _ = draw_text(timeline, width=width, ascii_only=True).splitlines()
    assert all(line.isascii() for line in lines)
    drawn = [line for line in lines if line.startswith("rank")]
    assert len(drawn) == 4
    assert {len(line) for line in drawn} == {len(drawn[0])} and len(drawn[0]) <= max(width, 24)
    letters = sum(len(re.findall(r"[FBIWfbiw]", line[8:])) for line in drawn)
    left_out = re.search(r"\((\d+) actions are shorter", "\n".join(lines))
    assert letters + (int(left_out[1]) if left_out else 0) == num_spans(timeline)


def test_labels_that_do_not_fit_keep_their_letter() -> None:
    drawing = draw_text(timeline_of("gpipe", 2, 12), width=48, ascii_only=True).splitlines()
    assert drawing[0] == "rank 0  " + "F" * 12 + "..." + "".join(f"B{i}" for i in range(10)) + "B-" * 2


def test_a_third_stage_has_primes() -> None:
    timeline = simulate(build_schedule("interleaved", 2, 2, 3), cost_of_stages(Times(), virtual_stages=3))
    row = draw_text(timeline).splitlines()[0]
    assert {label for label in re.findall(r"[A-Za-z]\d'*", row[8:]) if label[0] in "Ff"} == {
        f"{form[0]}{i}{form[1:]}" for form in ("F", "f", "f'") for i in range(2)
    }


def test_a_waiting_send_is_drawn() -> None:
    assert "F1─>>>>>>" in draw_text(waiting())


def test_measured_spans_are_drawn_from_their_first_start() -> None:
    assert draw_text(measured(), width=40, unit=" s") == (
        f"rank 0  F0──────········B0{'─' * 14}\n"
        f"rank 1  {'·' * 32}\n"
        "(1 actions are shorter than a column and not drawn)\n"
        "step 1 s, bubble 62.5% of the ranks' time, rank 0 is the busiest, live activations 1 1\n"
    )


# --- picture --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeline", [*map(timeline_of, SCHEDULES), waiting(), measured()])
def test_the_picture_has_one_rectangle_for_each_span(timeline: Timeline) -> None:
    root = ElementTree.fromstring(draw_svg(timeline))
    bars = list(root.iter(f"{SVG}rect"))
    spans = [(rank, span) for rank, row in enumerate(timeline.spans) for span in row]
    assert len(bars) == len(spans) > 0
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    scales = set()
    for bar, (rank, span) in zip(bars, spans, strict=True):
        title = bar.find(f"{SVG}title")
        assert title is not None and title.text is not None
        assert title.text.startswith(f"{span.action}: ") and f"rank {rank}, " in title.text
        assert float(bar.attrib["x"]) >= 0 and float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
        if span.duration > 0.001:
            scales.add(round(float(bar.attrib["width"]) / span.duration, 1))
    assert max(scales) - min(scales) <= 0.02 * max(scales), "widths are not in proportion to durations"


def test_bars_do_not_overlap() -> None:
    for name in SCHEDULES:
        rows: dict[str, list[tuple[float, float]]] = {}
        for bar in ElementTree.fromstring(draw_svg(timeline_of(name))).iter(f"{SVG}rect"):
            x = float(bar.attrib["x"])
            rows.setdefault(bar.attrib["y"], []).append((x, x + float(bar.attrib["width"])))
        assert len(rows) == 4
        for bars in rows.values():
            assert all(end <= start + 0.02 for (_, end), (start, _) in itertools.pairwise(bars))


def test_the_width_may_be_chosen() -> None:
    assert ElementTree.fromstring(draw_svg(timeline_of("1f1b"), width=500)).attrib["width"] == "500"


# --- colours --------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency":
# matrices of full severity, on linear RGB.
VISION = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
Color = tuple[float, float, float]


def linear(color: str) -> Color:
    r, g, b = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    )
    return r, g, b


def lab(color: str, vision: str) -> Color:
    r, g, b = (min(max(sum(m * c for m, c in zip(row, linear(color), strict=True)), 0), 1) for row in VISION[vision])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(a: str, b: str, vision: str) -> float:
    return sum((x - y) ** 2 for x, y in zip(lab(a, vision), lab(b, vision), strict=True)) ** 0.5


def test_kinds_look_different_to_everyone() -> None:
    compared = 0
    for vision in VISION:
        for first, second in itertools.combinations(TONES.values(), 2):
            for a, b in itertools.product(first, second):
                assert distance(a, b, vision) > 9, (vision, a, b)
                compared += 1
    assert compared == 4 * 6 * 9
    assert distance("#d55e00", "#8a8a00", "deuteranopia") < 25 < distance("#d55e00", "#8a8a00", "all cones")


def test_labels_have_contrast() -> None:
    for color in itertools.chain(*TONES.values()):
        r, g, b = linear(color)
        light = 0.2126 * r + 0.7152 * g + 0.0722 * b
        contrast = 1.05 / (light + 0.05) if color in LIGHT_ON else (light + 0.05) / 0.05
        assert contrast >= 4.5, color


# --- page and trace -------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Counts elements, and notes what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.meta: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.fetched += [str(value) for key, value in attrs if key in ("src", "href")]
        if tag == "meta":
            self.meta.append(dict(attrs))
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1


@pytest.mark.parametrize("timeline", [*map(timeline_of, SCHEDULES), waiting(), measured()])
def test_the_page_is_whole_and_fetches_nothing(timeline: Timeline) -> None:
    text = draw_html(timeline, title="a <b> & c", unit=" ms", note="1 < 2")
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == [] and page.fetched == []
    assert "url(" not in text and "@import" not in text and "fetch(" not in text
    assert page.count["rect"] == num_spans(timeline)
    assert page.count["tr"] == 1 + timeline.num_ranks
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.meta
    assert "prefers-color-scheme: dark" in text
    assert "<h1>a &lt;b&gt; &amp; c</h1>" in text and "1 &lt; 2" in text


@pytest.mark.parametrize("timeline", [*map(timeline_of, SCHEDULES), waiting(), measured()])
def test_the_trace_holds_every_span(timeline: Timeline) -> None:
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {rank: f"rank {rank}" for rank in range(timeline.num_ranks)}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == num_spans(timeline)
    assert min(event["ts"] for event in spans) == 0
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timeline.makespan * 1e6)
    expected = [(rank, str(span.action)) for rank, row in enumerate(timeline.spans) for span in row]
    assert [(event["tid"], event["name"]) for event in spans] == expected


# --- command and documentation --------------------------------------------------------------------------------------


def test_the_command_draws_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"out.{kind}" for kind in ("svg", "html", "trace")}
    options = [item for kind, file in files.items() for item in (f"--{kind}", str(file))]
    assert main(["zb_h1", "--ranks", "2", "--micro-batches", "3", *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 0  F0─F1─") and "By formula the bubble is 10.0%." in out
    timeline = timeline_of("zb_h1", 2, 3)
    assert files["svg"].read_text() == draw_svg(timeline)
    assert "zb_h1: 2 ranks, 3 micro-batches" in files["html"].read_text()
    assert len(json.loads(files["trace"].read_text())["traceEvents"]) == 2 + num_spans(timeline)


def test_the_command_takes_a_file_and_prints_actions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("F0.0 B0.0\nF1.0 B1.0\n")
    assert main([str(file), "--actions"]) == 0
    lowered = capsys.readouterr().out
    assert lowered.startswith("UNSHARD0 F0.0 SEND_F0.0 RECV_B0.0 B0.0 RESHARD0 REDUCE0\n")
    file.write_text(lowered)  # what it prints it also takes
    assert main([str(file), "--actions"]) == 0
    assert capsys.readouterr().out == lowered
    file.write_text("F0.0 B0.0\nF1.0\n")
    assert main([str(file)]) == 2
    assert "error: rank 1 lacks B1.0" in capsys.readouterr().err


def test_the_documentation_shows_what_the_command_draws(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```\n\$ python -m lightning_dist\.pipeline\.schedule (.*)\n((?:.*\n)*?)```", DOCS.read_text())
    for arguments, shown in blocks:
        assert main(arguments.split()) == 0
        assert capsys.readouterr().out == shown, f"docs/pipeline.md, {arguments}: not what is drawn today"
    assert {arguments.split()[0] for arguments, _ in blocks} == set(SCHEDULES)
