"""The public names, what importing costs, and the doctor."""

import json
import subprocess
import sys
from pathlib import Path

import doublure_plugin
import pytest
from doublure_plugin import __main__, doctor

# What needs more than pyzmq, msgpack and numpy, by design.
OPTIONAL = ("commands", "demo", "hosts")


def test_names_are_sorted_and_there() -> None:
    names = doublure_plugin.__all__
    # Ruff's order: constants, classes, then functions.
    assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    for name in names:
        assert getattr(doublure_plugin, name).__doc__ or name.isupper()


MODULES = sorted(
    path.stem
    for path in Path(doublure_plugin.__file__).parent.glob("*.py")
    if path.stem not in OPTIONAL and not path.stem.startswith("__")
)

BLOCKED = """
import sys
for name in ("torch", "wgpu", "typer", "rich", "doublure_trainer", "matplotlib", "PIL"):
    sys.modules[name] = None
import importlib, threading
for name in {modules}:
    importlib.import_module("doublure_plugin." + name)
assert threading.active_count() == 1, threading.enumerate()
import doublure_plugin as doublure
source = doublure.Source("a", {{"a": "b"}})
with doublure.Session(source, (0, 1), trainer="tcp://127.0.0.1:9") as session:
    assert session.state == "connecting"
print(sorted(m for m in sys.modules if m.split(".")[0] in ("doublure_trainer", "torch")))
"""


def test_the_core_works_where_torch_and_the_rest_are_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKED.format(modules=MODULES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "['doublure_trainer', 'torch']\n"
    assert len(MODULES) > 10


def test_the_doctor_prints_every_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_ASK_TRAINER", "raise ImportError('No module named torch')")
    monkeypatch.setattr(doctor, "_ASK_ADAPTERS", 'print(\'{"wgpu": "1.0", "adapters": []}\')')
    monkeypatch.setattr(doctor, "_ASK_SECTIONS", "")
    assert __main__.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1].rstrip(":") for line in lines] == [
        "host", "packages", "runtime", "loopback", "trainer", "transport", "trainer", "wgpu",
    ]  # fmt: skip
    text = "\n".join(lines)
    assert sys.executable in text
    assert "pyzmq" in text
    assert "ImportError: No module named torch; run `" in text
    assert "-m pip install 'doublure[trainer]'`" in text
    assert "no adapter, the NumPy host is used" in text


def test_the_doctor_says_well_when_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"python": "3", "torch": "2.9", "cuda": 2, "where": "/x"}
    monkeypatch.setattr(doctor, "_ASK_TRAINER", f"print({json.dumps(answer)!r})")
    monkeypatch.setattr(doctor, "_ASK_ADAPTERS", "import wgpu_that_is_not_there")
    monkeypatch.setattr(doctor, "_ASK_SECTIONS", "")
    assert __main__.main(["doctor", "--json"]) == 0
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)}
    assert "torch 2.9, 2 CUDA devices" in checks["trainer"]["text"]
    assert checks["wgpu"]["status"] == "note"


def say(*lines: str) -> str:
    return ";".join(f"print({line!r}, flush=True)" for line in lines)


def test_the_doctor_tells_what_other_packages_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.dumps({"name": "rasterizer cpu", "status": "ok", "text": "numba 0.6, 8 threads"})
    said = say("a driver's banner", doctor._MARK + record, doctor._MARK + "{")
    monkeypatch.setattr(doctor, "_ASK_SECTIONS", said)
    assert list(doctor._sections()) == [
        doctor.Check("rasterizer cpu", "ok", "numba 0.6, 8 threads"),
        doctor.Check("further checks", "note", f"not understood: {doctor._MARK + '{'!r}"),
    ]


def test_the_doctor_survives_a_driver_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.dumps({"name": "rasterizer vulkan", "status": "note", "text": "no driver"})
    code = f"import os; {say(doctor._MARK + record)}; os.abort()"
    monkeypatch.setattr(doctor, "_ASK_SECTIONS", code)
    first, last = doctor._sections()
    assert first == doctor.Check("rasterizer vulkan", "note", "no driver")
    assert last.status == "note"
    assert "ended with status -6 before it was done" in last.text


def test_a_package_s_look_that_raises_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Entry:
        name = "rasterizer"

        def load(self) -> None:
            raise ImportError("no numba")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [Entry()])
    exec(doctor._ASK_SECTIONS, {})
    (check,) = doctor._marked(capsys.readouterr().out.encode())
    assert check == doctor.Check("rasterizer", "note", "ImportError: no numba")


@pytest.mark.parametrize("words", [[], ["doktor"], ["doctor", "--yaml"]])
def test_wrong_use_is_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(words) == 2
    assert "usage: python -m doublure_plugin doctor" in capsys.readouterr().err
