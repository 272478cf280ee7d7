"""The pool and the planner that readers play with: equal to the package, and usable, in a real browser.

Each run draws new random stories and configs; the seed is printed, and PAGED_KV_SEED=N repeats it.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from planner_data import TARGET, render
from test_browser import BROWSERS, FLAGS, HTML
from widgets_page import ROOT, axe_findings, opened, random_story, told_by_the_package, write_page

from paged_kv.configs import ModelKV, from_config
from paged_kv.sizing import BITS, capacity, format_bytes, parse_bytes
from paged_kv.weights import weight_bytes

pytestmark = pytest.mark.xdist_group("widgets")

CONFIGS = {
    path.stem: json.loads(path.read_text("utf-8")) for path in sorted((ROOT / "book/data/configs").glob("*.json"))
}
SEED = int(os.environ.get("PAGED_KV_SEED", random.SystemRandom().randrange(10**6)))

POOL = "<paged-pool></paged-pool>"
PLANNER = "<capacity-planner></capacity-planner>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser found: looked for {', '.join(BROWSERS)}")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def scripts(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page that only lends its scripts."""
    with opened(browser, write_page(tmp_path_factory.mktemp("scripts"), "").as_uri()) as page:
        yield page


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Any:
    def show(body: str, fragment: str = "", **window: Any) -> Any:
        return opened(browser, write_page(tmp_path, body).as_uri() + fragment, **window)

    return show


# ---- equal to the package


def test_the_planners_tables_are_current() -> None:
    assert TARGET.read_text("utf-8") == render(), "run python tools/planner_data.py"


def run(scripts: Any, function: str, cases: list[Any]) -> list[Any]:
    """What a JavaScript function makes of each case; as text both ways, which is much faster than as objects."""
    plain = "(_, value) => typeof value === 'bigint' ? Number(value) : value"
    return list(
        json.loads(
            scripts.evaluate(f"text => JSON.stringify(JSON.parse(text).map({function}), {plain})", json.dumps(cases))
        )
    )


def test_random_stories_end_alike_in_the_browser_and_the_package(scripts: Any) -> None:
    print(f"PAGED_KV_SEED={SEED}")
    rng = random.Random(SEED)
    stories = [random_story(rng) for _ in range(200)]
    told = run(
        scripts,
        """({settings, events}) =>
            new PoolStory(settings, events).frames.map(({contiguous, paged}) => ({contiguous, paged}))""",
        stories,
    )
    seen: dict[str, int] = {}
    for number, (story, frames) in enumerate(zip(stories, told, strict=True)):
        for step, (ours, theirs) in enumerate(zip(told_by_the_package(story), frames, strict=True)):
            for layout, expected in ours.items():
                for note in theirs[layout].pop("notes"):
                    seen[note["kind"]] = seen.get(note["kind"], 0) + 1
                    seen["copy"] = seen.get("copy", 0) + len(note.get("copies", []))
                assert theirs[layout] == expected, (SEED, number, step, story["events"][: step + 1], story["settings"])
    for kind in ("admitted", "waits", "refused", "stuck", "wrote", "finished", "forked", "left", "copy"):
        assert seen.get(kind, 0) > 20, (SEED, seen)


SIZE = """({config, kvDtype, tensorParallel, policy}) => {
    const attempt = (get) => { try { return get(); } catch (error) { return {error: error.message}; } };
    return {
        kv: attempt(() => {
            const kv = CapacityPlanner.fromConfig(config, {kvDtype, tensorParallel, policy});
            return {kv, token: CapacityPlanner.bytesPerToken(kv),
                    some: [0, 1, 300, 4097, 131072].map((n) => [1, 16].map((b) => CapacityPlanner.bytesFor(kv, n, b)))};
        }),
        weights: attempt(() => CapacityPlanner.weightBytes(config)),
    };
}"""


def as_plain(kv: ModelKV) -> dict[str, Any]:
    groups = [{"spec": vars(group.spec), "window": group.window, "policy": group.policy} for group in kv.groups]
    return {**vars(kv), "groups": groups, "notes": list(kv.notes)}


def sized_by_the_package(case: dict[str, Any]) -> dict[str, Any]:
    """What the package says of a config, or the error it gives; None for what it does not answer at all."""

    def attempt(get: Any) -> Any:
        try:
            return get()
        except ValueError as error:
            return str(error)
        except (TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError):
            return None

    def size() -> dict[str, Any]:
        kv = from_config(case["config"], case["kvDtype"], case["tensorParallel"], case["policy"])
        some = [[kv.bytes_for(n, b) for b in (1, 16)] for n in (0, 1, 300, 4097, 131072)]
        return {"kv": as_plain(kv), "token": kv.bytes_per_token, "some": some}

    return {"kv": attempt(size), "weights": attempt(lambda: weight_bytes(case["config"]))}


def compare_sizes(scripts: Any, cases: list[dict[str, Any]]) -> dict[str, int]:
    seen = {"sized": 0, "refused": 0}
    for case, found in zip(cases, run(scripts, SIZE, cases), strict=True):
        for what, expected in sized_by_the_package(case).items():
            if isinstance(expected, str):
                assert isinstance(found[what], dict), (SEED, case, expected, found)
                assert found[what].get("error") == expected, (SEED, case)
                seen["refused"] += 1
            elif expected is not None:
                assert found[what] == expected, (SEED, case)
                seen["sized"] += 1
    return seen


def test_every_tested_config_has_the_same_bytes(scripts: Any) -> None:
    dtypes = [None, *BITS, "float8_e4m3fn", "int3"]
    cases = [
        {"config": config, "kvDtype": dtype, "tensorParallel": ranks, "policy": policy}
        for config in CONFIGS.values()
        for dtype, ranks, policy in [(d, 1, "full") for d in dtypes] + [(None, r, "window") for r in (1, 2, 3, 8, 16)]
    ]
    seen = compare_sizes(scripts, cases)
    assert min(seen.values()) > 100


def test_spoiled_configs_are_read_or_refused_alike(scripts: Any) -> None:
    print(f"PAGED_KV_SEED={SEED}")
    rng = random.Random(SEED)
    odd = [None, 0, -1, 1, 2, 3, 7, 64, 2.5, True, False, "x", "fp16", "sliding_attention", [], {}, ["full_attention"]]
    cases = []
    for _ in range(600):
        config = json.loads(json.dumps(rng.choice(list(CONFIGS.values()))))
        part = config.get("text_config") or config
        for _ in range(rng.randint(1, 2)):
            key = rng.choice([*part, "head_dim", "num_kv_shared_layers", "use_sliding_window", "sliding_window"])
            if rng.random() < 0.5 or key == "moe_intermediate_size":
                part.pop(key, None)
            else:
                part[key] = rng.choice(odd)
        cases.append({"config": config, "kvDtype": None, "tensorParallel": rng.choice([1, 2]), "policy": "window"})
    seen = compare_sizes(scripts, cases)
    assert min(seen.values()) > 100


def test_rare_kinds_of_layers_are_counted_alike(scripts: Any) -> None:
    base = {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": 2}
    rare = [
        {"sliding_window": 64, "sliding_window_pattern": "LLG"},
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5},
        {"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 32},
        {"attn_type_list": [0, 0, 1] * 4},
        {"full_attn_idxs": [3, 7]},
        {"use_cla": True, "cla_share_factor": 3},
        {"attention_chunk_size": 128},
        {"attention_chunk_size": 128, "no_rope_layers": [1, 0] * 6},
        {"hybrid_override_pattern": "M-M*" * 3},
        {"layer_types": ["full_attention", "warped_attention"] * 6},
        {"global_head_dim": 128, "sliding_window": 64, "sliding_window_pattern": 4, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1},
        {"per_layer_config": {"4": {"head_dim": 96}}},
        {"multi_query": True},
        {"num_kv_shared_layers": 4},
        {"head_dim": 64, "v_head_dim": 32},
        {"is_encoder_decoder": True},
        {"attn_config": {"kv_n_heads": 4}, "num_key_value_heads": None},
        {"model_type": "it's", "dtype": 'say "half"'},
    ]  # fmt: skip
    cases = [
        {"config": base | more, "kvDtype": None, "tensorParallel": 1, "policy": policy}
        for more in rare
        for policy in ("full", "window", "other")
    ]
    compare_sizes(scripts, cases)


PLAN = """({config, policy, memory, share, weights, tp, context, lengths, block}) => {
    const kv = CapacityPlanner.fromConfig(config, {tensorParallel: tp, policy});
    try {
        return CapacityPlanner.plan({kv, memory: CapacityPlanner.parseBytes(memory), share, weights: BigInt(weights),
            maxTokens: context, lengths: CapacityPlanner.parseLengths(lengths), blockSize: block});
    } catch (error) { return {error: error.message}; }
}"""


def test_random_plans_admit_the_same_users(scripts: Any) -> None:
    print(f"PAGED_KV_SEED={SEED}")
    rng = random.Random(SEED)
    cases = []
    for _ in range(300):
        low = rng.randint(1, 2000)
        ranges = [(low, low + rng.randint(0, 400)) for _ in range(rng.choice([1, 1, 2, 4]))]
        ranges = [(a, a) if rng.random() < 0.5 else (a, b) for a, b in ranges]
        cases.append(
            {
                "config": rng.choice(list(CONFIGS.values())), "policy": rng.choice(["full", "window"]),
                "memory": f"{rng.randint(8, 200)}{rng.choice(['.5 ', '', ' '])}{rng.choice(['GB', 'GiB'])}",
                "share": rng.randint(50, 100), "weights": rng.randint(0, 2 * 10**10), "tp": 1,
                "context": rng.randint(2000, 200_000), "block": rng.choice([1, 3, 16, 64]),
                "lengths": ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges), "ranges": ranges,
            }
        )  # fmt: skip
    planned = 0
    for case, found in zip(cases, run(scripts, PLAN, cases), strict=True):
        usable = parse_bytes(case["memory"]) * case["share"] // 100
        left = usable - case["weights"]
        longest = max(b for _, b in case["ranges"])
        if left <= 0 or longest > case["context"]:
            assert "error" in found, (SEED, case)
            continue
        kv = from_config(case["config"], policy=case["policy"])
        lengths = [n for a, b in case["ranges"] for n in range(a, b + 1)]
        mean, held = (
            Fraction(sum(kv.bytes_for(n, size) for n in lengths), len(lengths)) for size in (case["block"], 1)
        )
        assert found["forKV"] == left, (SEED, case)
        assert found["reserved"] == left // kv.bytes_for(case["context"]), (SEED, case)
        assert found["paged"] == left // mean, (SEED, case)
        assert found["pagedWaste"] == pytest.approx(float(1 - held / mean), abs=1e-12)
        if len(set(lengths)) == 1:
            ours = capacity(kv, left, lengths[0], case["context"], case["block"])
            assert (found["reserved"], found["paged"]) == (ours.reserved, ours.paged)
            assert found["reservedWaste"] == pytest.approx(ours.reserved_waste, abs=1e-12)
        planned += 1
    assert planned > 100


def test_sizes_are_read_and_written_alike(scripts: Any) -> None:
    rng = random.Random(SEED)
    sizes = [0, 1, 1023, 1024, 1152, *(2**k + d for k in range(10, 50) for d in (-1, 0, 2 ** (k - 3), 2 ** (k - 6)))]
    sizes += [int(10 ** rng.uniform(0, 15)) for _ in range(300)]
    written = scripts.evaluate("sizes => sizes.map(n => [0, 1, 2].map(d => CapacityPlanner.formatBytes(n, d)))", sizes)
    assert written == [[format_bytes(n, digits) for digits in (0, 1, 2)] for n in sizes], SEED
    words = "80GB|80 gib|1.5 GiB|4096|80G||x|-1 GB|1e3|0.1 TB|24 GiB |1.999 B|3 kB".split("|")
    read = "w => { try { return `${CapacityPlanner.parseBytes(w)}`; } catch (e) { return e.message; } }"
    expected = []
    for word in words:
        try:
            expected.append(str(parse_bytes(word)))
        except ValueError as error:
            expected.append(str(error))
    assert run(scripts, read, words) == expected


# ---- the pool, in a reader's hands


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


STATE = """() => {
    const blocks = document.querySelectorAll('.pkw-side')[1];
    const rows = [...blocks.querySelectorAll('tbody tr')].map((row) => [...row.children].map((cell) => cell.innerText));
    return {
        tables: Object.fromEntries(rows),
        free: blocks.querySelector('.pkw-ids').innerText,
        wasted: Number(blocks.querySelector('.pkw-count-wasted dd').innerText),
    };
}"""


def state(page: Any) -> dict[str, Any]:
    """What the paged side shows: tables, free list, wasted."""
    return dict(page.evaluate(STATE))


def test_c_is_shut_out_and_let_in(show: Any) -> None:
    with show(POOL) as page:
        runs, blocks = page.locator(".pkw-side").all()
        assert "C is shut out" in runs.inner_text()
        assert "32 slots in a row needed; 0 free" in runs.inner_text()
        assert "nobody waits" in blocks.inner_text()
        slider = page.get_by_role("slider")
        slider.fill("16")
        assert "nobody waits" in runs.inner_text()
        assert "A, B, C in" in page.get_by_role("status").inner_text()
        assert runs.get_by_role("img").get_attribute("aria-label") == (
            "64 slots. A: slots 0 to 15, 6 hold tokens. B: slots 16 to 31, 3 hold tokens. "
            "C: slots 32 to 47, 5 hold tokens."
        )
        slider.fill("32")
        assert "C is shut out" in runs.inner_text()
        press(page, "A finishes")
        assert "nobody waits" in runs.inner_text()


def test_blocks_are_handed_out_one_at_a_time(show: Any) -> None:
    with show(POOL) as page:
        assert state(page) == {
            "tables": {"A": "0 1", "B": "2", "C": "3 4"},
            "free": "5 6 7 8 9 10 11 12 13 14 15",
            "wasted": 6,
        }
        for _ in range(2):
            press(page, "A writes 1 token")
        assert state(page)["tables"]["A"] == "0 1"
        assert "goes on in block 1" in page.get_by_role("status").inner_text()
        press(page, "A writes 1 token")
        assert state(page)["tables"]["A"] == "0 1 5"
        assert "A takes block 5 from the front of the free list" in page.get_by_role("status").inner_text()
        assert page.locator(".pkw-block.pkw-fresh").count() == 1
        press(page, "B writes 4 tokens")
        press(page, "Every chat writes 1 token")
        assert state(page)["tables"] == {"A": "0 1 5", "B": "2 6", "C": "3 4"}
        for _ in range(4):
            press(page, "Back")
        assert state(page)["tables"] == {"A": "0 1 5", "B": "2", "C": "3 4"}
        page.get_by_label("Block size in tokens").select_option("16")
        assert state(page)["tables"] == {"A": "0", "B": "1", "C": "2"}
        assert state(page)["wasted"] == 48 - 17


BY_HAND = [  # tables, free list, wasted: the table of chapter 03
    ({}, "0 1 2 3 4 5 6 7", 0),
    ({"A": "0 1"}, "2 3 4 5 6 7", 2),
    ({"A": "0 1", "B": "2"}, "3 4 5 6 7", 3),
    ({"A": "0 1", "B": "2", "C": "3 4"}, "5 6 7", 6),
    ({"A": "0 1", "B": "2", "C": "3 4"}, "5 6 7", 4),
    ({"A": "0 1 5", "B": "2", "C": "3 4"}, "6 7", 7),
    ({"A": "0 1 5", "B": "2 6", "C": "3 4"}, "7", 9),
    ({"A": "0 1 5", "C": "3 4"}, "7 2 6", 6),
    ({"A": "0 1 5", "C": "3 4 7"}, "2 6", 6),
    ({"A": "0 1 5", "C": "3 4 7", "D": "2 6"}, "empty", 9),
]


def test_the_run_by_hand_step_by_step_and_back(show: Any) -> None:
    with show('<paged-pool scenario="by-hand"></paged-pool>') as page:
        for step, (tables, free, wasted) in enumerate(BY_HAND):
            if step:
                press(page, "Next step")
            assert state(page) == {"tables": tables, "free": free, "wasted": wasted}, step
        page.locator("summary").click()
        assert page.locator(".pkw-log tbody tr").count() == 9
        for tables, free, wasted in BY_HAND[-2:-5:-1]:
            press(page, "Back")
            assert state(page) == {"tables": tables, "free": free, "wasted": wasted}


def test_copy_on_write_shows_when_it_fires(show: Any) -> None:
    with show('<paged-pool scenario="copy-on-write"></paged-pool>') as page:
        says, blocks = page.get_by_role("status"), page.locator(".pkw-side").nth(1)
        press(page, "Next step")
        assert "B shares blocks 0, 1 with A, nothing copied" in says.inner_text()
        assert "0:2 1:2 2:0" in blocks.inner_text()
        press(page, "Next step")
        assert "copy-on-write, A copies the shared block 1 to 2" in says.inner_text()
        assert "0:2 1:1 2:1" in blocks.inner_text()
        assert page.locator(".pkw-block.pkw-copied .pkw-id").inner_text() == "1"
        press(page, "Next step")
        assert "B goes on in block 1, which it alone holds" in says.inner_text()
        assert state(page) == {"tables": {"A": "0 2", "B": "0 1"}, "free": "3 4 5", "wasted": 2}


def test_the_pool_by_keyboard_alone(show: Any) -> None:
    with show(POOL) as page:
        focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.type"
        order = []
        for _ in range(30):
            page.keyboard.press("Tab")
            name = page.evaluate(focused)
            order.append(name)
            if name == "range":
                for _ in range(4):
                    page.keyboard.press("ArrowLeft")
                assert "nobody waits" in page.locator(".pkw-side").first.inner_text()
            if name == "A writes 1 token":
                for key in ("Enter", "Space", "Enter"):
                    page.keyboard.press(key)
                    assert page.evaluate(focused) == name, "the focus went astray"
                assert state(page)["tables"]["A"] == "0 1 5"
            if name == "Fork A into D":
                page.keyboard.press("Enter")
                assert state(page)["tables"]["D"] == "0 1 5"
            if name == "A finishes":
                page.keyboard.press("Enter")
                assert page.evaluate(focused) == "A arrives", "the focus went astray"
        assert {"range", "A writes 1 token", "Fork A into D", "A finishes", "Every chat writes 1 token"} <= set(order)


# ---- the planner, in a reader's hands


def test_the_plan_a_reader_sees_first_is_the_packages(show: Any) -> None:
    with show(PLANNER) as page:
        left = 80 * 10**9 * 90 // 100 - weight_bytes(CONFIGS["llama-3-8b"])
        kv = from_config(CONFIGS["llama-3-8b"])
        mean = Fraction(sum(kv.bytes_for(n, 16) for n in range(100, 2001)), 1901)
        reserved, paged = left // kv.bytes_for(8192), int(left // mean)
        assert page.get_by_role("status").inner_text() == (
            f"{paged} users fit in blocks, {reserved} with reservations. That is {paged / reserved:.1f} times as many."
        )
        text = page.locator(".pkw-formula").inner_text()
        assert "2 (K and V) × 32 layers × 8 KV heads × 128 elements × 16 bits / 8 = 131,072 B (128 KiB)" in text
        assert f"80 GB (74.51 GiB) × 90 % − weights {format_bytes(weight_bytes(CONFIGS['llama-3-8b']))}" in text
        assert page.get_by_role("img").count() == 3


def test_bad_input_is_explained_beside_its_field(show: Any) -> None:
    with show(PLANNER) as page:

        def complaint(label: str, value: str) -> str:
            box = page.get_by_label(label, exact=True)
            before = box.input_value()
            box.fill(value)
            assert box.get_attribute("aria-invalid") == "true"
            error = page.locator(f"#{box.get_attribute('aria-describedby').split()[0]}")
            assert error.is_visible()
            assert label in page.get_by_role("status").inner_text()
            text = error.inner_text()
            box.fill(before)
            assert not error.is_visible()
            assert "users fit" in page.get_by_role("status").inner_text()
            return str(text)

        assert "'80G'" in complaint("Memory of one GPU", "80G")
        assert "nothing is left" in complaint("Weights of the model", "90 GB")
        assert "does not divide 32 query heads" in complaint("GPUs in tensor parallel", "3")
        assert "9,000 tokens exceed the context of 8,192" in complaint("Tokens a user holds", "9000")
        assert "write 1000" in complaint("Tokens a user holds", "many")
        assert "upwards" in complaint("Tokens a user holds", "20-10")
        assert "whole number from 1" in complaint("Block size, tokens", "0")
        assert "whole number from 1" in complaint("Share the server may use, %", "101")
        assert "whole number from 1" in complaint("Context, tokens", "1.5")
        page.get_by_label("Model", exact=True).select_option("deepseek-v3")
        page.get_by_label("Memory of one GPU").fill("141 GB")
        assert "quantised; give their size" in page.locator(".pkw-plan").inner_text()
        page.get_by_label("Weights of the model").fill("85 GB")
        assert "users fit" in page.get_by_role("status").inner_text()


def test_the_address_keeps_the_plan_and_a_pasted_config(show: Any) -> None:
    with show(PLANNER) as page:
        page.get_by_label("Model", exact=True).select_option("pasted")
        area = page.get_by_label("config.json, pasted")
        assert "paste the config.json" in page.locator(".pkw-plan").inner_text()
        area.fill("{")
        assert "not JSON" in page.locator(".pkw-plan").inner_text()
        area.fill("[1]")
        assert "a JSON object is needed" in page.locator(".pkw-plan").inner_text()
        area.fill('{"num_hidden_layers": 24}')
        assert "num_attention_heads or n_head or n_heads is missing" in page.locator(".pkw-plan").inner_text()
        quiz = {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
        area.fill(json.dumps(quiz, indent=1))
        page.get_by_label("Weights of the model").fill("1 GB")
        page.get_by_label("Context, tokens").fill("4,096")
        page.get_by_label("Tokens a user holds").fill("300, 1,200, 2004")
        said = page.get_by_role("status").inner_text()
        assert "24,576 B (24 KiB)" in page.locator(".pkw-formula").inner_text()
        assert "A user holds 1,168 tokens on average" in page.locator(".pkw-formula").inner_text()
        fragment = page.evaluate("location.hash")
        assert fragment.startswith("#plan:")
    with show(PLANNER, fragment) as page:
        assert page.get_by_role("status").inner_text() == said
        page.evaluate("location.hash = 'plan:model=gpt-oss-20b&weights=13+GB&policy=window'")
        page.get_by_label("Sliding layers keep").wait_for()
        assert page.get_by_label("Sliding layers keep").input_value() == "window"
        assert "looking back 128 tokens" in page.locator(".pkw-formula").inner_text()


# ---- everybody, everywhere


BODIES = {"pool": POOL, "fork": '<paged-pool scenario="copy-on-write" step="4"></paged-pool>', "planner": PLANNER}


CUT_OFF = """[...document.querySelectorAll('.pkw :is(button, select, input, textarea, dd, .pkw-cell, p)')]
    .filter(one => one.offsetParent && !one.closest('.pkw-scroll'))
    .filter(one => one.getBoundingClientRect().right > one.closest('.pkw').getBoundingClientRect().right)
    .map(one => one.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("name", BODIES)
def test_a_phone_a_dark_room_and_a_screen_reader(show: Any, name: str) -> None:
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    paper = "getComputedStyle(document.querySelector('.pkw')).backgroundColor"
    papers = []
    for scheme, width in (("light", 328), ("dark", 1000)):  # the book leaves 304 of a phone's 360 pixels
        with show(BODIES[name], width=width, scheme=scheme) as page:
            page.evaluate("theme => document.documentElement.dataset.theme = theme", scheme)
            page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
            assert page.evaluate(overflow) <= 0
            assert page.evaluate(CUT_OFF) == []
            assert axe_findings(page) == []
            papers.append(page.evaluate(paper))
            small = page.locator("button, select, input").evaluate_all(
                "all => all.filter(one => one.offsetParent && one.getBoundingClientRect().height < 24).length"
            )
            assert small == 0
            page.emulate_media(media="print")
            assert not page.get_by_role("button").first.is_visible()
            assert page.get_by_role("img").first.is_visible()
    assert papers[0] != papers[1]


def embedding_pages() -> list[str]:
    pages = sorted(HTML.rglob("*.html")) if HTML.exists() else []
    marks = ("<paged-pool", "<capacity-planner")
    return [
        page.relative_to(HTML).as_posix() for page in pages if any(mark in page.read_text("utf-8") for mark in marks)
    ]


def test_in_the_built_book(browser: Any) -> None:
    """Its pages pass axe-core in test_browser.py, which looks at every page."""
    pages = embedding_pages()
    if not pages:
        pytest.skip("no built page embeds a widget")
    for name in pages:
        with opened(browser, (HTML / name).as_uri(), width=1280) as page:
            for width in (1280, 360):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate(CUT_OFF) == [], name
                for widget in page.locator("paged-pool, capacity-planner").all():
                    widget.locator("section").first.wait_for()
                    box = widget.bounding_box()
                    assert box["x"] >= 0, name
                    assert box["x"] + box["width"] <= width, name
            plan = page.locator("capacity-planner select").first
            if plan.count():
                page.evaluate("location.hash = 'plan:model=qwen3-4b'")
                expect = "document.querySelector('capacity-planner select').value === 'qwen3-4b'"
                page.wait_for_function(expect)
                assert page.evaluate(CUT_OFF) == [], name
