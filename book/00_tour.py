# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The tour: one small pool, eight conversations
#
# This page shows the finished thing at work. A real language model answers eight questions at
# once. All that it has to remember lies in one small pool of memory, cut into blocks of equal size
# and handed out like the frames of a computer's main memory. You need no knowledge of any of it
# yet. Each part is built from nothing in one of the chapters that follow; the map is at the end.
#
# **The question.** Can one small pool hold what eight conversations must remember, and nobody notice?
#
# :::{card} This chapter
# - **You need** nothing. To run it: `make model` once.
# - **Exports** nothing; it uses what the chapters export.
# - **Device** CPU, one thread, float32.
# - **Run time** one to two minutes, most of it for the reference that we compare with.
# - **You are here** **00 tour** · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09 scheduling ·
#   10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::
#
# ## The model, and what it must remember
#
# A language model continues text. It reads the text as *tokens*, pieces of about a word, and says
# which token is likely to come next. That token is put behind the text, and the model is asked
# again: an answer of 64 tokens takes 64 such steps.
#
# To choose the next token the model looks back at every token before it. For each of those, each of
# its layers has worked out two lists of numbers: a *key*, which says what the token is about, and a
# *value*, which is what it has to tell. Keys and values of old tokens never change. So nobody works
# them out again at each step; they are kept. That is the *KV cache*.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
import numpy as np
import torch

from paged_kv.draw import draw_pool
from paged_kv.engine import Engine
from paged_kv.hf_adapter import guest_spec, load_guest
from paged_kv.packed_batch import pack
from paged_kv.runner import EagerRunner
from paged_kv.sampling_params import SamplingOptions

model, tokenizer = load_guest()
spec = guest_spec(model)
weights = sum(parameter.numel() for parameter in model.parameters())
print(f"weights: {weights / 1e6:.0f} million")
print(f"layers: {spec.num_layers}, each with keys and values of",
      f"{spec.num_kv_heads} x {spec.head_size} numbers")
print(f"to remember one token: {spec.bytes_per_token:,} B")
print(f"the longest text it can read, 8,192 tokens: {spec.bytes_for(8192) / 2**20:.0f} MiB")

# %% [markdown]
# The model is SmolLM2 with 135 million weights {cite}`allal2025smollm2`. It is tiny, knows little, and
# runs on one core; everything on this page holds for one a thousand times its size, save that the
# numbers hurt more. One token costs 46,080 B, and one text of full length 360 MiB.
#
# Here are eight people with eight questions.

# %%
questions = {
    "A": "Why is the sky blue?",
    "B": "Explain how a refrigerator works.",
    "C": "Describe a walk in the forest in autumn.",
    "D": "List some ways to save water at home.",
    "E": "Write a short story about a lighthouse keeper who finds a bottle on the beach.",
    "F": "Give me a recipe for tomato soup, step by step, with the amounts of each ingredient and"
    " the time that each step takes.",
    "G": "What should I think about before I adopt a dog? I live in a small flat, work from home"
    " three days a week, and like long walks at the weekend.",
    "H": "Plan three days in Rome for a family with two children, four and nine years old. They"
    " like animals, ice cream and old castles, get tired after two hours of walking, and want to be"
    " back at the hotel by eight in the evening. Tell us what to do in the morning and in the"
    " afternoon of each day.",
}
prompts = {
    chat: tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    for chat, question in questions.items()
}
print("tokens in each prompt:", *(f"{chat} {len(ids)}" for chat, ids in prompts.items()))

# %% [markdown]
# ## The trouble with memory
#
# How long will each answer become? Nobody knows before it has been given. The simple way is to
# reserve room for the longest text that the model can read, once for each person, since a stretch of
# memory cannot grow into its neighbour's. Our eight would pin 2,880 MiB and use almost none of it.
#
# The other way is to promise nothing. Memory is cut into *blocks* with room for 16 tokens. A
# conversation gets its first blocks when it starts and another one whenever its last is full. The
# blocks need not be neighbours: for each conversation a *block table* lists which blocks hold its
# tokens, in order. Operating systems have kept programs in memory like this since the 1960s; vLLM
# brought it to language models in 2023 {cite}`kwon2023paged`.

# %%
NEW = 64  # tokens for each answer
B = 16  # tokens in a block
ends = [len(ids) + NEW - 1 for ids in prompts.values()]  # the last token is never read again
num_blocks = sum(-(-end // B) for end in ends)

reserved = len(prompts) * spec.bytes_for(8192)
pool = num_blocks * spec.bytes_per_block(B)
print(f"eight reservations: {reserved / 2**20:,.0f} MiB")
print(f"our pool: {num_blocks} blocks of {spec.bytes_per_block(B) / 2**10:.0f} KiB,",
      f"{pool / 2**20:.1f} MiB")
print(f"smaller by {reserved / pool:.0f} times")

# %% [markdown]
# 2,880 MiB against 42.9 MiB. Our pool of 61 blocks of 720 KiB is the smallest that can carry all
# eight, side by side, to the end of their answers.
#
# ## Eight answers at once
#
# The model is a guest. Its layers and weights are those of the transformers library
# {cite}`wolf2020transformers`; only where it would store keys and values in a cache of its own, it is
# handed ours. On the way in it is checked: what it says as our guest must be what it says by itself.
# To leave no doubt about whose memory is in use, the library's caches are booby-trapped while the
# eight answers are made.

# %%
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache


def trap(*given, **options):
    raise RuntimeError("a cache of transformers was touched")


class Trapped:
    """Within this context any use of transformers' own caches raises."""

    def __enter__(self):
        kinds = (Cache, DynamicCache, StaticCache)
        self.old = {kind: kind.__dict__.get("update") for kind in kinds}
        for kind in self.old:
            kind.update = trap

    def __exit__(self, *fault):
        for kind, update in self.old.items():
            if update is None:
                del kind.update
            else:
                kind.update = update


with Trapped():
    try:
        model.generate(torch.tensor([prompts["A"]]), max_new_tokens=1, do_sample=False)
    except RuntimeError as error:
        print("the library by itself:", error)

# %% [markdown]
# The trap works. Now ours. The engine of chapter 13 takes the model and a number of blocks; it is
# given eight prompts and gives eight answers. Its first step reads the prompts. In each step after
# that, the newest token of every conversation goes through the model, all in one row, and the token
# that comes out is appended. We always take the likeliest, so that there is only one right answer. To
# watch, we look over the shoulder of whoever runs the steps.

# %%
snapshots = []


class Watched(EagerRunner):
    """Runs each step as always; keeps a picture of the pool first."""

    def forward(self, plan, sampled):
        rows = engine.scheduler.home.running.tolist()
        snapshots.append(engine.manager.snapshot(dict(zip(prompts, rows, strict=True))))
        return super().forward(plan, sampled)


settings = {"num_blocks": num_blocks, "block_size": B, "prefix_caching": False}
engine = Engine(model, tokenizer, runner=Watched, **settings)
with Trapped():
    answers = dict(zip(prompts, engine.generate(list(prompts.values()), NEW), strict=True))
engine.check()
print("steps:", engine.stats.steps, "  tokens:", engine.stats.tokens_made)

# %%
for chat, answer in answers.items():
    text = answer.text.replace("\n", " ")
    print(f"{chat}: {text[:88]}...")

# %% [markdown]
# ## Watch the tables grow
#
# This is the pool after the first step. Each letter is one token of a conversation, each hatched cell
# (a dot in text) a slot that waits for one. The prompts came together, so their blocks still lie side
# by side.

# %%
draw_pool(snapshots[0], title="After step 1")

# %% [markdown]
# Twenty steps later every conversation has grown by 20 tokens. Whoever filled its last block took
# the next free one, and the blocks of one conversation begin to scatter. A star marks what has changed.

# %%
draw_pool(snapshots[20], before=snapshots[0], title="After step 21")

# %% [markdown]
# At the end the pool is full, and the tables read like seating plans. No conversation has
# noticed: each reads its tokens in order, through its table.

# %%
draw_pool(snapshots[-1], before=snapshots[20], title="After step 64")

# %% [markdown]
# What did we hold over time, against the reservations?

# %%
def held(snapshot):
    return sum(len(table) for table in snapshot["tables"].values())


for step in (1, 21, 64):
    snapshot = snapshots[step - 1]
    tokens = sum(snapshot["seq_lens"].values())
    slots = held(snapshot) * B
    size = held(snapshot) * spec.bytes_per_block(B) / 2**20
    print(f"step {step:2}: {tokens:4} tokens in {held(snapshot)} blocks, {size:.1f} MiB,",
          f"empty {100 * (1 - tokens / slots):.0f} %")
used = sum(snapshots[-1]["seq_lens"].values()) / (8 * 8192)
print(f"eight reservations at the end: {reserved / 2**20:,.0f} MiB, empty {100 * (1 - used):.1f} %")

# %% [markdown]
# ## Is it right?
#
# A cache that loses a token does not crash; it answers a little worse. So we ask the library
# itself, without us: `generate`, its own loop, with its own cache, one question at a time. The two
# must agree token for token.
#
# One caution, decided before looking. The two add up the same numbers in a different order, so
# their last bits differ, and where two tokens are almost equally likely either may win. A first
# difference would be excused only if, in the reference, the best two logits are closer than four
# times the measured noise. It would be counted.

# %%
def by_itself(ids):
    """The library's own greedy answer, and for each token the gap between its best two logits."""
    result = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2).values
    return result.sequences[0, len(ids):].tolist(), (best[:, 0] - best[:, 1]).tolist()


def compare(ours, reference, gaps, allowed):
    """One word: equal, excused or different."""
    if ours == reference:
        return "equal"
    pairs = zip(ours, reference, strict=False)
    first = next(i for i, (left, right) in enumerate(pairs) if left != right)
    return "excused" if gaps[first] < allowed else "different"


references = {chat: by_itself(ids) for chat, ids in prompts.items()}
allowed = 4 * engine.guest.report.noise
ours = {chat: answer.texts[0].token_ids for chat, answer in answers.items()}
verdicts = {chat: compare(ours[chat], *references[chat], allowed) for chat in prompts}
for verdict in ("equal", "excused", "different"):
    print(f"{verdict:9}", *(chat for chat in prompts if verdicts[chat] == verdict))
print("tokens compared:", *(len(tokens) for tokens, _ in references.values()))
assert "different" not in verdicts.values()

# %% [markdown]
# Eight equal answers. But perhaps the blocks do not matter, and the model would have said the same
# whatever was in them? Let us break it on purpose. We take the state as it is in mid-answer, and
# shuffle all full blocks: the bytes of each move to another place.
#
# :::{admonition} Predict
# :class: tip
# What happens to the next tokens if the blocks are shuffled and the tables are not told? And if the
# tables are told?
# :::
#
# :::{dropdown} Reasoning
# Without the tables each conversation reads pieces of others' texts in a wrong order: the
# next tokens must change. With tables that name the new places, the same tokens are read in the same
# order, so even the last bits must be the same. A place means nothing. Only the table gives it
# meaning.
# :::

# %%
engine = Engine(model, tokenizer, **settings)
for ids in prompts.values():
    engine.add_request(ids, NEW)
for _ in range(12):
    engine.step()  # twelve tokens into the answers, hold on
manager, store, state = engine.manager, engine.guest.store, engine.scheduler.home.rows
rows = engine.scheduler.home.running.tolist()
newest = [state.tokens[row, state.known[row] - 1 : state.known[row]].tolist() for row in rows]
manager.append(rows)

saved = [tensor.clone() for tensor in store.tensors]
table = manager.tables.table.copy()


def next_logits(places, tell):
    """The next step, with the bytes of block b moved to places[b], and the tables told or not."""
    for tensor, old in zip(store.tensors, saved, strict=True):
        tensor[torch.from_numpy(places)] = old
    manager.tables.table[:] = np.where(table >= 0, places[table], -1) if tell else table
    return engine.guest.forward(pack(manager.tables, rows, newest))


stay = np.arange(num_blocks)
shuffled = stay.copy()
full = np.concatenate([manager.tables.ids(row)[:-1] for row in rows])  # tails stay
shuffled[full] = np.random.default_rng(0).permutation(full)

undisturbed = next_logits(stay, tell=True)
for tell in (False, True):
    logits = next_logits(shuffled, tell)
    wrong = (logits.argmax(-1) != undisturbed.argmax(-1)).sum()
    print(f"{(shuffled != stay).sum()} blocks moved, tables told: {tell!s:5}",
          f" tokens that differ: {wrong}  all bits equal: {torch.equal(logits, undisturbed)}")

# %%
manager.check()  # every block still counted once
draw_pool(manager.snapshot(dict(zip(prompts, rows, strict=True))),
          title="Shuffled, and the tables know")

# %% [markdown]
# With the tables, all bits are equal. Without them five of the eight go on with another token, and
# there is no error message; which is why every part of this book comes with a check that something
# else must agree with.
#
# ## What blocks make possible
#
# Tables say where tokens lie, and nothing says that two tables may not name the same block. So memory
# can be shared. F asks again, word for word: the keys and values of its question are still in the
# pool. Only the end of it, behind the last full block, and the tokens of the answer are run.

# %%
engine = Engine(model, tokenizer, num_blocks=num_blocks, block_size=B)
for turn in ("first", "again"):
    before = engine.tokens_run
    answer = engine.generate([prompts["F"]], 8)[0]
    print(f"F {turn}: {len(prompts['F'])} tokens asked, {answer.hit_tokens} found,",
          f"{engine.tokens_run - before} run")
    assert answer.texts[0].token_ids == ours["F"][:8]

# %% [markdown]
# Two answers to one question share it too, until they differ. Here A gets two, drawn by lot and not
# by the greatest likelihood.

# %%
engine.add_request(prompts["A"], 12, n=2, sampling=SamplingOptions(temperature=1.0, seed=1))
for _ in range(6):
    engine.step()
first, second = engine.scheduler.home.running.tolist()
ids = engine.manager.tables.ids
print("one table:", ids(first), " the other:", ids(second))
for piece in engine.run():
    if piece.answer:
        print(piece.answer.hit_tokens, "of its tokens found")
        print(*(f"{text.index}: {text.text!r}" for text in piece.answer.texts), sep="\n")

# %% [markdown]
# Both tables begin with the same two blocks, which hold most of the question once. The third block
# was not full: each writes its answer there, so one of them got a copy of it first. And the 16 tokens
# that were found are F's: every prompt here begins with the same words of instruction.
#
# And nobody has to wait for the end. An answer can be read as it comes, piece by piece.

# %%
print(*(piece.text for piece in engine.stream(prompts["B"], 16)), sep="|")
engine.check()

# %% [markdown]
# ## What you have seen, and what comes next
#
# - A model must remember every token it has read: here 46,080 B for each.
# - Nobody knows how long a text becomes. Reservations strand memory; blocks and tables do not: at
#   most one block of each conversation is partly empty.
# - Attention that reads through a table gives the same answers.
# - Whatever two texts have in common from the start, up to the last full block, needs to be computed
#   and kept only once.
#
# When a conversation ends, its blocks go to whoever comes next. What you have *not* seen is how a
# server decides who runs when there is not enough, and what it takes for the reading to be as fast as
# memory allows. That is the second half of the book.

# %% tags=["hide-input"]
print(f"a token: {spec.bytes_per_token:,} B")

# %% [markdown]
# | chapter | question | you leave with |
# |---|---|---|
# | [01 sizing](01_kv_sizing) | What does a token cost? | `KVSpec`, and sums you can do in your head |
# | [02 contiguous pool](02_contiguous_pool) | What is wrong with reservations? | three kinds of waste, measured |
# | [03 block manager](03_block_manager) | Who owns which block? | `BlockPool`, `BlockManager` |
# | [04 paged attention](04_paged_attention) | How does attention read scattered tokens? | `KVStore`, the oracle of every kernel |
# | [05 guest model](05_guest_model) | How does a model we did not write use it? | a serving loop in thirty lines |
# | [06 copy-on-write](06_copy_on_write) | Can two texts share a block? | fork, and who copies when |
# | [07 sampling and beams](07_sampling_and_beams) | Many answers to one question? | shared prompts, beam search |
# | [08 prefix hashing](08_prefix_hashing) | Has somebody asked this before? | a cache of whole prefixes |
# | [09 scheduling](09_scheduling) | Who runs in this step? | token budgets, chunked prompts |
# | [10 preemption](10_preemption) | And if memory runs out? | recompute or swap, and what each costs |
# | [11](11_triton_decode), [12](12_triton_prefill) Triton kernels | How fast can the table be read? | kernels, and what bounds them |
# | [13 engine](13_engine), [14 full speed](14_at_full_speed) | Does it serve? | `Engine`, which ran this page; CUDA graphs |
#
# Start with [chapter 01](01_kv_sizing) if you have never seen the inside of a language model, with
# [chapter 03](03_block_manager) if you know what attention is and want the tables.
#
# :::{exercise}
# :label: ex-00-longest
# How many tokens could the pool of this page hold at most, and how many conversations of 100 tokens
# each?
# :::
#
# :::{solution} ex-00-longest
# :class: dropdown
# 61 blocks of 16 hold 976 tokens. 100 tokens take 7 blocks, so 8 conversations, and 5 blocks are left.
# :::

# %% tags=["hide-input"]
assert num_blocks * B == 976
assert divmod(num_blocks, -(-100 // B)) == (8, 5)
print(num_blocks * B, "tokens;", num_blocks // -(-100 // B), "conversations of 100")
