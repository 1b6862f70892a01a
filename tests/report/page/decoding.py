"""Reads packed columns and finished pages again, without the code that wrote them."""

import base64
import json
import zlib
from html.parser import HTMLParser
from itertools import accumulate


def decode_column(column):
    """Whole numbers of a packed column, byte by byte, by the definition of LEB128 and zigzag."""
    data = base64.b64decode(column["data"])
    if column["deflate"]:
        data = zlib.decompress(data)
    values, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            values.append(-(number + 1) // 2 if number % 2 else number // 2)
            number = shift = 0
    assert shift == 0
    assert len(values) == column["count"]
    return list(accumulate(values)) if column["delta"] else values


def decode_spans(part):
    """Rows (rank, stream, opcode, stage, microbatch, peer, step, bytes, start, end) in the order of the part."""
    columns = {name: decode_column(column) for name, column in part["columns"].items()}
    rows, place = [], 0
    for (rank, stream), count in zip(part["tracks"], part["spans_per_track"], strict=True):
        before = 0
        for i in range(place, place + count):
            start = before + columns["gap"][i]
            before = start + columns["length"][i]
            names = ("opcode", "stage", "microbatch", "peer", "step", "num_bytes")
            numbers = [columns[name][i] for name in names]
            rows.append((rank, stream, *numbers, start * part["unit_ps"], before * part["unit_ps"]))
        place += count
    return rows


def timeline_rows(timeline):
    """The same rows from the timeline itself."""
    return [
        (
            timeline.tracks[timeline.track[i]].rank,
            timeline.tracks[timeline.track[i]].name,
            *(int(getattr(timeline, name)[i]) for name in ("opcode", "stage", "microbatch", "peer", "step")),
            int(timeline.num_bytes[i]),
            int(timeline.start_ps[i]),
            int(timeline.end_ps[i]),
        )
        for i in range(timeline.num_spans)
    ]


class Page(HTMLParser):
    """The elements of a page: tags with attributes, texts of scripts and styles, the title, the policy."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = {}
        self.inside = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = "document" if dict(attrs).get("id") == "document" else tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data

    @property
    def document(self):
        return json.loads(self.texts["document"])

    @property
    def policy(self):
        metas = [attributes for tag, attributes in self.elements if tag == "meta"]
        return next(item["content"] for item in metas if item.get("http-equiv") == "Content-Security-Policy")
