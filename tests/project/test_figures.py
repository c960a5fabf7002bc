"""``python -m bench report``: figures that are shown follow from the data beside them."""

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from bench import figures
from tests.project.test_bench import bench, refusal

ROOT = Path(__file__).parents[2]
HEADER = {"commit": "none", "cpu": "a core", "cores": 2, "memcpy_gb_s": 9.5}


def test_figures_are_what_is_drawn_of_their_data_and_pages_show_them(tmp_path):
    for data in figures.FOLDER.glob("*.json"):
        (tmp_path / data.name).write_bytes(data.read_bytes())
    drawn = figures.draw(tmp_path)
    other = [f.name for f in drawn if f.read_text() != (figures.FOLDER / f.name).read_text()]
    pages = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    unshown = [f.name for f in drawn if not any(f"figures/{f.name})" in page for page in pages)]
    assert (other, unshown) == ([], [])
    assert len(drawn) > 1


def test_a_result_is_taken_without_what_is_not_drawn(tmp_path):
    command = "python -m bench train --model mlp --json somewhere.json --link 1gbit"
    row = {"model": "mlp", "workers": 2, "link": "1gbit", "loss": 0.123, "samples_per_s": 1234.567}
    rows = [row | {"system": name} for name in ("ringreduce", "multiworker")]
    rows.append(row | {"system": "single", "link": None})
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"header": HEADER | {"command": command}, "rows": rows}))
    assert bench(f"report {result} --into {tmp_path}").exit_code == 0
    taken = json.loads((tmp_path / "train.json").read_text())
    assert taken["header"]["command"] == "python -m bench train --model mlp --link 1gbit"
    assert taken["rows"][0].keys() == {"system", "model", "workers", "link", "samples_per_s"}
    drawn = xml.parse(tmp_path / "train.svg").getroot()
    texts = {node.text for node in drawn.iter() if node.tag.endswith("text")}
    assert {"Training mlp, 2 workers, links of 1gbit", "multiworker", "1,235 samples/s"} <= texts
    assert "without a network: single 1,235 samples/s" in texts


def test_a_step_is_cut_from_a_trace(tmp_path):
    def event(pid, what, begin, length):
        shown = {"ph": "X", "pid": pid, "tid": 1, "cat": what}
        return shown | {"ts": begin * 1e3, "dur": length * 1e3}

    events = [
        *({"ph": "M", "pid": r, "tid": 1, "args": {"name": "bucket 0"}} for r in (0, 1)),
        *(event(0, "training", begin, 10) for begin in (0, 10, 20)),
        *(event(1, "reduce", begin, 4) for begin in (2, 8, 18, 30)),
        event(1, "send", 12, 1),
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert bench(f"report {trace} --into {tmp_path}").exit_code == 0
    taken = json.loads((tmp_path / "step.json").read_text())["events"]
    found = [(each["rank"], each["what"], each["begin_ms"], each["end_ms"]) for each in taken]
    assert found == [(1, "reduce", 0, 2), (1, "reduce", 8, 10)]
    assert "rank 1: bucket 0" in (tmp_path / "step.svg").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "nothing is drawn of 'a file without a command'"),
        ('{"header": {"command": "python -m bench link -n 4"}, "rows": []}', "nothing is drawn of"),
        ("no json", "Expecting value"),
    ],
)
def test_what_is_not_drawn_is_refused(tmp_path, text, said):
    (tmp_path / "other.json").write_text(text)
    assert said in refusal(f"report {tmp_path}/other.json --into {tmp_path}")
    (tmp_path / "other.json").unlink()
    assert "has no data" in refusal(f"report --into {tmp_path}")
