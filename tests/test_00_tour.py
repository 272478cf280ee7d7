"""The tour: what its page claims is in its stored outputs, and a short run of the same claim.

The eight answers are compared with transformers' own, in full, whenever nbval runs the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paged_kv.block_manager import BlockManager  # noqa: E402
from paged_kv.engine import Engine  # noqa: E402
from paged_kv.hf_adapter import host, load_guest, model_folder  # noqa: E402
from paged_kv.packed_batch import pack  # noqa: E402

PAGE = Path(__file__).resolve().parents[1] / "book" / "00_tour.ipynb"
QUESTIONS = ["Why is the sky blue?", "Name three colours.", "What is the capital of France? Answer in a word."]


def printed() -> str:
    """All that the stored page prints."""
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", [])) for output in outputs)


def test_the_stored_page_shows_what_it_claims() -> None:
    lines = [line.split() for line in printed().splitlines()]
    assert ["equal", *"ABCDEFGH"] in lines
    assert ["excused"] in lines
    assert ["different"] in lines
    assert ["tokens", "compared:", *["64"] * 8] in lines
    text = printed()
    assert "a cache of transformers was touched" in text
    again = next(line.split() for line in text.splitlines() if line.startswith("F again:"))
    asked, found, run = (int(again[place]) for place in (2, 5, 7))
    assert found == (asked - 1) // 16 * 16
    assert run == asked - found + 7  # and the answer's own, but its last
    told = {line.split("told: ")[1].split()[0]: line for line in text.splitlines() if "tables told" in line}
    assert told["True"].endswith("tokens that differ: 0  all bits equal: True")
    assert told["False"].endswith("False")
    assert "differ: 0" not in told["False"]


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    try:
        model_folder()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return load_guest()


@pytest.mark.xdist_group("smollm2")
def test_answers_equal_generate_with_the_caches_of_transformers_trapped(
    real: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = real
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    engine = Engine(model, tokenizer, num_blocks=12, max_seq_len=128)

    def touched(*given: Any, **options: Any) -> None:
        raise AssertionError("a cache of transformers was used")

    with monkeypatch.context() as patch:
        for kind in (transformers.Cache, transformers.DynamicCache, transformers.StaticCache):
            patch.setattr(kind, "update", touched)
        answers = engine.generate(prompts, 6)
    engine.check()
    for ids, answer in zip(prompts, [one.texts[0].token_ids for one in answers], strict=True):
        ones = torch.ones(1, len(ids), dtype=torch.long)
        result = model.generate(
            torch.tensor([ids]),
            attention_mask=ones,
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = result.sequences[0, len(ids) :].tolist()
        pairs = zip(answer, expected, strict=False)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is None:
            assert answer == expected
        else:  # two tokens within the noise: either may win
            best = result.logits[first][0].topk(2).values
            assert best[0] - best[1] < 4 * engine.guest.report.noise


@pytest.mark.xdist_group("smollm2")
def test_blocks_may_move_if_the_tables_know(real: tuple[Any, Any]) -> None:
    model, tokenizer = real
    guest, manager = host(model, num_blocks=12, block_size=4), BlockManager(12, 4, 2, 64)
    texts = [tokenizer.encode("The sky above the harbour was grey."), tokenizer.encode("Two and two are")]
    rows = [manager.add(len(ids)) for ids in texts]
    guest.forward(pack(manager.tables, rows, texts))
    manager.append(rows)
    saved = [tensor.clone() for tensor in guest.store.tensors]
    table = manager.tables.table.copy()

    def step(move: Any, told: bool) -> Any:
        for tensor, old in zip(guest.store.tensors, saved, strict=True):
            tensor[torch.tensor(move)] = old
        manager.tables.table[:] = table
        if told:
            manager.tables.table[table >= 0] = [move[block] for block in table[table >= 0]]
        return guest.forward(pack(manager.tables, rows, [[28], [28]]))

    used = [block for row in rows for block in manager.tables.ids(row)[:-1]]  # full ones
    move = list(range(12))
    for place, block in zip(used, used[1:] + used[:1], strict=True):
        move[place] = block
    stay = step(list(range(12)), told=True)
    assert torch.equal(step(move, told=True), stay)
    assert (step(move, told=False) - stay).abs().max() > 1
