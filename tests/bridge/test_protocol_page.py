"""docs/protocol.md describes every field of every message as the code has it."""

from dataclasses import MISSING, fields
from inspect import getdoc
from pathlib import Path

import doublure_bridge.codec as codec
from doublure_bridge import MESSAGES, Message
from doublure_bridge.messages import Delivery

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
START = "--regenerate` -->\n"
END = "<!-- end of tables -->"


def table(cls: type[Message]) -> str:
    doc = (getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    policy = "reliable" if cls.delivery is Delivery.RELIABLE else "latest: may be dropped"
    lines = [f"### {cls.tag} · {cls.__name__}", f"{cls.direction.value}; {policy}. {doc}", ""]
    lines += ["| field | type | meaning |", "|---|---|---|"]
    for field in fields(cls):
        kind = cls.kinds[field.name]
        optional = field.default is not MISSING or field.default_factory is not MISSING
        mark = " (optional)" if optional else ""
        kind_text = kind.describe().replace("|", "\\|")
        lines.append(f"| `{field.name}`{mark} | {kind_text} | {kind.doc} |")
    return "\n".join(lines)


def test_tables_are_those_of_the_code(regenerate: bool) -> None:
    tables = "\n" + "\n\n".join(table(cls) for _, cls in sorted(MESSAGES.items())) + "\n\n"
    page = PAGE.read_text()
    before, rest = page.split(START)
    _, after = rest.split(END)
    if regenerate:
        PAGE.write_text(before + START + tables + END + after)
    assert PAGE.read_text().split(START)[1].split(END)[0] == tables


def test_limits_on_the_page_are_those_of_the_codec() -> None:
    assert f"at most {codec.MAX_HEADER_BYTES:,} bytes" in PAGE.read_text()
