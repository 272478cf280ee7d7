"""Appendix A1: the text of pictures, character by character; the drawings, well formed."""

import copy
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.draw import Picture, book_style, draw_pool, draw_slots, draw_table

SVG = "{http://www.w3.org/2000/svg}"


def pool(tables, seq_lens, free, num_blocks=8, block_size=4, **more):
    """A snapshot."""
    return {
        "block_size": block_size, "num_blocks": num_blocks, "free": free,
        "tables": tables, "seq_lens": seq_lens, **more,
    }  # fmt: skip


STEP_6 = pool({"A": [0, 1, 5], "B": [2, 6], "C": [3, 4]}, {"A": 9, "B": 5, "C": 5}, [7])
STEP_7 = pool({"A": [0, 1, 5], "C": [3, 4]}, {"A": 9, "C": 5}, [7, 2, 6])
STEP_8 = pool({"A": [0, 1, 5], "C": [3, 4, 7]}, {"A": 9, "C": 9}, [2, 6])
FORK = pool(
    {"A": [0, 1], "B": [0, 1], "C": [2]}, {"A": 6, "B": 6, "C": 4}, [3, 4, 5], 6,
    ref_counts=[2, 2, 1, 0, 0, 0],
)  # fmt: skip


def shapes(svg):
    """The parsed SVG: parsing fails where it is not well formed."""
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


# ---- text


def test_a_step_with_its_changes():
    assert str(draw_pool(STEP_7, before=STEP_6, title="B finishes")).split("\n") == [
        "B finishes",
        "  0      1      *2     3      4      5      *6     7",
        "[AAAA] [AAAA]  bbbb  [CCCC] [C...] [A...]  b---   ----",
        " free  7 2 6  front first",
        " A     0 1 5  9 tokens, 3 empty",
        " C     3 4    5 tokens, 3 empty",
        "*B            has left",
        "5 of 8 blocks held, 6 slots wasted",
    ]


def test_a_table_that_grows_is_marked_and_other_tables_are_not():
    assert str(draw_pool(STEP_8, before=STEP_7)).split("\n") == [
        "  0      1      2      3      *4     5      6      *7",
        "[AAAA] [AAAA]  ----  [CCCC] [CCCC] [A...]  ----  [C...]",
        " free  2 6    front first",
        " A     0 1 5  9 tokens, 3 empty",
        "*C     3 4 7  9 tokens, 3 empty",
        "6 of 8 blocks held, 6 slots wasted",
    ]


def test_shared_blocks_show_every_owner_and_the_count():
    assert str(draw_pool(FORK)).split("\n") == [
        "  0      1      2      3      4      5",
        "[AAAA] [AA..] [CCCC]  ----   ----   ----",
        " BBBB   BB..",
        "  x2     x2",
        "free  3 4 5  front first",
        "A     0 1    6 tokens, 2 empty",
        "B     0 1    6 tokens, 2 empty",
        "C     2      4 tokens, 0 empty",
        "3 of 6 blocks held, 2 slots wasted",
    ]


def test_empty_pool_and_full_pool_of_one_block():
    assert str(draw_pool(pool({}, {}, [0], 1, 1))) == "\n".join(
        [" 0", " -", "free  0", "0 of 1 block held, 0 slots wasted"]
    )
    assert str(draw_pool(pool({"A": [0]}, {"A": 1}, [], 1, 1))).split("\n")[:3] == [" 0", "[A]", "free     none"]


def test_a_block_that_fell_out_of_a_window():
    text = str(draw_pool(pool({"A": [-1, -1, 2]}, {"A": 10}, [0, 1, 3], 4)))
    assert "A     - - 2  10 tokens, 2 empty" in text
    assert "[AA..]" in text
    assert "[AAAA]" not in text


def test_a_lost_block_is_shown_as_lost():
    text = str(draw_pool(pool({"A": [0]}, {"A": 2}, [2, 3], 4)))
    assert text.split("\n")[1] == "[AA..] [????]  ----   ----"
    assert text.endswith("1 of 4 blocks held, 2 slots wasted, 1 block in no table shown")


def test_the_queue_keeps_its_order():
    assert "free  3 1 0 2  front first" in str(draw_pool(pool({}, {}, deque([3, 1, 0, 2]), 4)))


def test_highlight_from_the_call_and_from_the_snapshot():
    text = str(draw_pool(STEP_7 | {"highlight": [3]}, highlight=[7], before=STEP_6)).split("\n")[0]
    assert text == "  0      1      *2     >3     4      5      *6     >7"


def test_a_change_of_the_count_alone_is_a_change():
    before = FORK | {"ref_counts": [1, 2, 1, 0, 0, 0]}
    assert str(draw_pool(FORK, before=before)).split("\n")[0].split() == ["*0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "per_row"),
    [(64, 4, 8), (64, 1, 16), (16, 2, 8), (10, 4, 10), (12, 4, 8), (6, 16, 4), (4, 128, 4), (64, 8, 4)],
)
def test_rows_wrap_within_the_width(num_blocks, block_size, per_row):
    text = str(draw_pool(pool({}, {}, list(range(num_blocks)), num_blocks, block_size))).split("\n")
    assert text[0].split() == [str(i) for i in range(per_row)]
    assert max(map(len, text)) <= 80


def test_a_long_table_wraps():
    text = str(draw_pool(pool({"A": list(range(64))}, {"A": 256}, [], 64)))
    rows = text.split("\nfree")[1].split("\n")[1:-1]
    assert " ".join(rows).replace("256 tokens, 0 empty", "").split() == ["A", *map(str, range(64))]
    assert max(map(len, rows)) <= 80


def test_long_blocks_round_a_used_slot_up():
    text = str(draw_pool(pool({"A": [0], "B": [1]}, {"A": 1, "B": 128}, [2], 3, 128))).split("\n")
    assert text[1] == "[A...............] [BBBBBBBBBBBBBBBB]  ----------------"


@pytest.mark.parametrize(
    ("names", "letters"),
    [
        (["A", "B"], "AB"), (["S1", "S2"], "12"), (["chat A", "chat B"], "AB"),
        (["alice", "bob"], "ab"), (["alice", "anna"], "AB"), (["req-0", "req-10"], "AB"),
    ],
)  # fmt: skip
def test_letters(names, letters):
    picture = draw_pool(pool({names[0]: [0], names[1]: [1]}, dict.fromkeys(names, 4), [], 2))
    assert str(picture).split("\n")[1] == f"[{letters[0] * 4}] [{letters[1] * 4}]"
    if letters == "AB" and "a" in names[0] and "chat" not in names[0]:
        assert f"{names[0]} (A)" in str(picture)


def test_a_chat_keeps_its_colour_when_others_leave():
    alone = draw_pool(pool({"C": [3, 4]}, {"C": 5}, [0, 1, 2, 5, 6, 7]))
    assert "pk-on-c" in alone.svg
    assert "pk-on-c" in draw_pool(STEP_6).svg


def test_the_contiguous_pool():
    snapshot = {"num_slots": 32, "reservations": {"R1": (0, 12, 5), "R3": (20, 8, 6)}}
    assert str(draw_slots(snapshot, title="R2 left")).split("\n") == [
        "R2 left",
        "0       8       16      24",
        "11111.......--------333333..----",
        "R1    slots 0 to 11: 5 used, 7 empty",
        "R3    slots 20 to 27: 6 used, 2 empty",
        "free  12 slots in 2 runs, the longest 8",
    ]


def test_contiguous_pools_wrap_and_may_be_empty_or_full():
    text = str(draw_slots({"num_slots": 100, "reservations": {"A": (60, 10, 7)}})).split("\n")
    assert text[1] == "-" * 60 + "AAAA"
    assert text[2].startswith("64      72")
    assert text[3] == "AAA..." + "-" * 30
    full = str(draw_slots({"num_slots": 8, "reservations": {"A": (0, 8, 8)}}))
    assert full.split("\n")[1] == "AAAAAAAA"
    assert full.endswith("free  0 slots in 0 runs")
    assert "8 slots in 1 run" in str(draw_slots({"num_slots": 8, "reservations": {}}))


def test_one_table():
    assert str(draw_table("A", [0, 1, 5], 9, 4, 8)).split("\n") == [
        "A: 9 tokens in blocks of 4",
        "logical 0  tokens 0 to 3  ->  block 0",
        "logical 1  tokens 4 to 7  ->  block 1",
        "logical 2  token 8        ->  block 5",
    ]
    assert str(draw_table("A", [-1, 2], 4, 4, 3, title="t")).split("\n") == [
        "t",
        "logical 0  tokens 0 to 3  ->  given back",
        "logical 1  no token       ->  block 2",
    ]
    assert str(draw_table("A", [], 0, 4, 3)) == "A: 0 tokens in blocks of 4"


# ---- drawing and words


@pytest.mark.parametrize(
    "picture",
    [
        draw_pool(STEP_7, before=STEP_6, title="a < b & 'c'"), draw_pool(FORK, highlight=[1]),
        draw_pool(pool({"<": [0]}, {"<": 2}, [1], 2)),
        draw_pool(pool({"A": [0]}, {"A": 300}, [1], 2, 512)),
        draw_slots({"num_slots": 64, "reservations": {"A": (3, 40, 20)}}),
        draw_table("A", [3, -1, 0], 12, 4, 5),
    ],
)  # fmt: skip
def test_svg_is_well_formed_named_and_described(picture):
    assert isinstance(picture, Picture)
    for svg in picture.svgs:
        root = shapes(svg)
        assert root.get("role") == "img"
        assert root.get("aria-label") == picture.alt
        assert root.find(f"{SVG}title").text
        width, height = map(float, root.get("viewBox").split()[2:])
        assert (root.get("width"), root.get("height")) == (f"{width:g}", f"{height:g}")
        assert " id=" not in svg  # ids would clash between the pictures of a page
        for box in root.iter(f"{SVG}rect"):
            x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height
    shapes(picture.svg)
    assert "<style>" in picture.svg
    html = picture._repr_html_()
    ET.fromstring(html)
    assert html.count("<style>") == 1
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_letters_stand_in_the_drawing_as_in_the_text():
    for name, slots in (("A", 9), ("B", 5), ("C", 5)):
        texts = [t.text for t in shapes(draw_pool(STEP_6).svg).iter(f"{SVG}text") if t.text]
        assert sum(len(t) for t in texts if set(t) == {name}) == slots + 1  # and the chip


def test_state_is_told_by_outline_not_by_colour_alone():
    css = [r.get("class") for r in shapes(draw_pool(STEP_7, before=STEP_6).svg).iter(f"{SVG}rect")]
    assert css.count("pk-free pk-new") == 2  # 2 and 6, given back in this step
    assert css.count("pk-free") == 1 + 3  # block 7, and three boxes of the queue
    assert css.count("pk-box") == 5 + 5  # held blocks, and entries of tables


def test_words_stand_in_the_drawing_and_are_cut():
    tokens = {"A": ["the", " cat\n", "international"]}
    svg = draw_pool(pool({"A": [0]}, {"A": 4}, [1], 2, tokens=tokens)).svg
    words = [t.text for t in shapes(svg).iter(f"{SVG}text")]
    assert [w for w in words if w in ("the", "cat", "inter…")] == ["the", "cat", "inter…"]


def test_alternative_text_says_it_in_words():
    assert draw_pool(STEP_7, before=STEP_6, title="B finishes").alt == (
        "B finishes. Pool of 8 blocks of 4 slots. Free, front first: 7, 2, 6. "
        "A: 9 tokens, 3 empty, in blocks 0, 1, 5. C: 5 tokens, 3 empty, in blocks 3, 4. "
        "B: has left. Changed: 2, 6."
    )
    assert "Block 1 is shared by A, B." in draw_pool(FORK).alt
    assert "In no table shown and not free: 1." in draw_pool(pool({"A": [0]}, {"A": 2}, [], 2)).alt
    assert draw_table("A", [2], 1, 4, 3).alt == "A: 1 token in blocks of 4. Logical block 0, token 0: block 2."
    slots = draw_slots({"num_slots": 8, "reservations": {"A": (0, 4, 1)}})
    assert slots.alt == "Pool of 8 slots in a row. A: slots 0 to 3: 1 used, 3 empty. free: 4 slots in 1 run."


def test_numpy_values_draw_the_same_and_nothing_is_changed():
    arrays = copy.deepcopy(STEP_6)
    arrays["free"] = np.array(arrays["free"], dtype=np.int32)
    arrays["tables"] = {k: np.array(v, dtype=np.int32) for k, v in arrays["tables"].items()}
    arrays["seq_lens"] = {k: np.int64(v) for k, v in arrays["seq_lens"].items()}
    assert draw_pool(arrays) == draw_pool(STEP_6)
    kept = copy.deepcopy(FORK)
    draw_pool(FORK, before=FORK)
    assert kept == FORK


# ---- what cannot be true


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"free": [7, 5]}, r"snapshot\['tables'\]\['A'\] = .*blocks \[5\] are also in the free queue"),
        ({"free": [7, 7]}, r"snapshot\['free'\] = \[7, 7\]: no block may be free twice"),
        ({"free": [8]}, r"snapshot\['free'\] = 8: block ids run from 0 to 7"),
        ({"free": [-1]}, r"snapshot\['free'\] = -1: block ids run from 0 to 7"),
        ({"tables": STEP_6["tables"] | {"A": [0, 1, 8]}}, r"\['A'\] = 8: block ids run from -1 to 7"),
        ({"seq_lens": {"A": 13, "B": 5, "C": 5}}, r"\['seq_lens'\]\['A'\] = 13: .* holds 0 to 12 tokens"),
        ({"seq_lens": {"A": -1, "B": 5, "C": 5}}, r"\['seq_lens'\]\['A'\] = -1"),
        ({"seq_lens": {"A": 9, "B": 5}}, r"snapshot\['seq_lens'\] lacks the key 'C'"),
        ({"seq_lens": {"A": 9, "B": 5, "C": 5, "D": 1}}, r"\['seq_lens'\] has the unknown key 'D'"),
        ({"ref_count": []}, r"snapshot has the unknown key 'ref_count'; known keys: block_size,"),
        ({"ref_counts": [1]}, r"\['ref_counts'\] = \[1\]: one count a block, so 8"),
        ({"block_size": 0}, r"snapshot\['block_size'\] = 0: at least 1"),
        ({"num_blocks": 0}, r"snapshot\['num_blocks'\] = 0: at least 1"),
        ({"highlight": [9]}, r"\['highlight'\] = 9"),
        ({"tokens": {"D": ["x"]}}, r"\['tokens'\]\['D'\] = .*the tables are \['A', 'B', 'C'\]"),
        ({"tokens": {"B": ["x"] * 6}}, r"\['tokens'\]\['B'\] = .*at most 5 tokens"),
        ({"tables": {" ": [0]}, "seq_lens": {" ": 1}, "free": []}, r"\['tables'\] = ' ': names are"),
        ({"tables": {3: [0]}, "seq_lens": {3: 1}, "free": []}, r"\['tables'\] = 3: names are"),
    ],
)
def test_impossible_pools_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        draw_pool(STEP_6 | change)


def test_impossible_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="snapshot lacks the key 'free'"):
        draw_pool({k: v for k, v in STEP_6.items() if k != "free"})
    with pytest.raises(ValueError, match="highlight = 8"):
        draw_pool(STEP_6, highlight=[8])
    with pytest.raises(ValueError, match=r"before = .*not a snapshot of the same pool"):
        draw_pool(STEP_6, before=FORK)
    with pytest.raises(ValueError, match=r"before\['free'\] = 8"):
        draw_pool(STEP_6, before=STEP_6 | {"free": [8]})


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        ({"num_slots": 0, "reservations": {}}, r"\['num_slots'\] = 0"),
        ({"num_slots": 8, "reservations": {"A": (0, 4, 5)}}, "used is 0 to reserved"),
        ({"num_slots": 8, "reservations": {"A": (0, 4, 1), "B": (3, 2, 1)}}, "slots 4 to 7 are left"),
        ({"num_slots": 8, "reservations": {"A": (6, 4, 1)}}, r"\['reservations'\]\['A'\] = \(6, 4, 1\)"),
        ({"num_slots": 8, "reservations": {"A": (-1, 4, 1)}}, r"\['reservations'\]\['A'\]"),
        ({"num_slots": 8, "reservations": {}, "free": 1}, "unknown key 'free'"),
        ({"num_slots": 8}, "lacks the key 'reservations'"),
    ],
)
def test_impossible_reservations_are_refused_by_name(snapshot, message):
    with pytest.raises(ValueError, match=message):
        draw_slots(snapshot)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A", [8], 1, 4, 8), "blocks = 8: block ids run from -1 to 7"),
        (("A", [0], 5, 4, 8), "seq_len = 5: the table holds 0 to 4 tokens"),
        (("A", [0], 0, 0, 8), "block_size = 0"),
        (("A", [], 0, 4, 0), "num_blocks = 0"),
        (("", [0], 1, 4, 8), "name = ''"),
    ],
)
def test_impossible_tables_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_table(*arguments)


# ---- any pool


@st.composite
def pools(draw):
    """A pool that can be: blocks dealt out to chats, some shared, some lost."""
    block_size, num_blocks = draw(st.sampled_from([1, 2, 3, 4, 16, 128])), draw(st.integers(1, 64))
    ids = draw(st.permutations(range(num_blocks)))
    tables, seq_lens = {}, {}
    for name in "ABCDEFGH"[: draw(st.integers(0, 8))]:
        tables[name] = draw(st.lists(st.sampled_from(ids), unique=True, max_size=8))
        seq_lens[name] = draw(st.integers(0, len(tables[name]) * block_size))
    held = {block for table in tables.values() for block in table}
    idle = [block for block in ids if block not in held]
    return pool(tables, seq_lens, idle[: draw(st.integers(0, len(idle)))], num_blocks, block_size)


@settings(max_examples=60, deadline=None)
@given(pools())
def test_any_pool_draws_every_slot_the_same_twice(snapshot):
    picture = draw_pool(snapshot)
    assert picture == draw_pool(copy.deepcopy(snapshot))
    text = str(picture).split("\nfree")[0]
    assert all(line == line.rstrip() for line in str(picture).split("\n"))
    if snapshot["block_size"] <= 16:
        for name, length in snapshot["seq_lens"].items():
            assert text.count(name) == length
    for svg in picture.svgs:
        width = float(shapes(svg).get("width"))
        for box in shapes(svg).iter(f"{SVG}rect"):
            assert float(box.get("x")) + float(box.get("width")) <= width


# ---- plots


def test_drawing_needs_the_standard_library_only():
    code = (
        "import sys, paged_kv.draw as d; d.draw_table('A', [0], 1, 4, 1); "
        "sys.exit(bool({'matplotlib', 'torch', 'IPython'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_book_style_gives_a_white_card_and_the_same_svg_twice(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context():
        book_style()
        for name in ("a.svg", "b.svg"):
            plt.figure()
            line = plt.plot([0, 1])[0]
            plt.savefig(tmp_path / name, metadata={"Date": None})
            plt.close()
        assert line.get_color() == "#0072b2"
        assert matplotlib.rcParams["figure.facecolor"] == "white"
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
