# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab: the timing channel
#
# A patient fills in a clinic's form and sends it to a model. Somebody else, who has never seen
# the patient's prompt and never sees an answer to it, sends two prompts of the same length to
# the same server.

# %%
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, in a notebook
ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "benchmarks").is_dir())
sys.path.insert(0, str(ROOT / "benchmarks"))
import timing_channel as lab
from transformers import AutoTokenizer

from paged_kv.hf_adapter import model_folder

form = lab.make_form(AutoTokenizer.from_pretrained(model_folder()))
secret = [4, 3, 0, 5]  # Emmy, oncology, aspirin, Saturday
service = lab.Service(salted=False)
service.ask("victim", [*form.filled(secret), form.end])
for option in (4, 6):
    name = lab.FIELDS[0][1][option]
    computed = service.ask("attacker", [*form.filled([option]), form.end]).computed
    print(f"the form begins with {name}: {computed} tokens computed")

# %% [markdown]
# One took less work, and less work is less time. So the server has told that Emmy was here.
# **The question.** How much can be read through a prefix cache, and what does it take to close
# it?
#
# :::{card} This lab
# - **You need** chapters [05](../05_guest_model) and [08](../08_prefix_hashing).
# - **Exports** nothing; it runs `benchmarks/timing_channel.py` without a model and reads what
#   the script measured with one.
# - **Device** CPU.
# - **Run time** a few seconds; the benchmark takes a few minutes.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · **lab** · 09
#   scheduling
# :::
#
# The cells below count tokens, which gives the same result in every run. The clock comes at the
# end.

# %% [markdown]
# ## Who knows what
#
# The attacker is another customer of the same service, with an account and no other rights.
#
# | | knows | does not know |
# |---|---|---|
# | the form | opening, fields, the 8 answers possible for each | which were chosen |
# | the server | that it caches prefixes; the block size | its logs, its memory, other people's answers |
# | of each own prompt | how long the first token took | how much of it was found |
#
# Each part of the form fills whole blocks, which makes the run easy to follow. In text of
# another shape the attacker guesses what a block holds together: more options, same method.

# %%
import math

sizes = [len(options) for _, options in lab.FIELDS]
print(f"opening {len(form.opening)} tokens, {len(form.opening) // lab.BLOCK_SIZE} blocks;",
      f"{len(sizes)} fields of {len(form.options[0][0])} tokens, {sizes[0]} options each")
print("all fillings:", f"{math.prod(sizes):,}")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# The form can be filled in in 4,096 ways. How many prompts does the attacker need?
# :::
#
# :::{dropdown} Reasoning
# Not 4,096. A match stops at the first missing block, so a guess of the first field is answered
# before anything is known about the second. Field by field these are at most 8 + 8 + 8 + 8 = 32
# guesses. A cache that tells where a match ends turns a product into a sum, as a lock does that
# clicks when one of its dials is right.
# :::
#
# Before each field the attacker asks for what is known so far. That makes it cached in any
# case, whoever computed it first, and the guesses differ in one block only.

# %% tags=["hide-input"]
import inspect

from IPython.display import Markdown


def show(*things):
    """The source of functions of the script, as it runs."""
    return Markdown("\n\n".join(f"```python\n{inspect.getsource(thing)}```" for thing in things))


show(lab.Service.ask, lab.probe)

# %% [markdown]
# ## Block by block

# %%
def attack(service):
    """Guess field after field by the fewest computed tokens; None where all are equal."""
    known, asked = [], 0
    for field, options in enumerate(form.options):
        answers = lab.probe(service, form, known, range(len(options)))
        asked += 1 + len(answers)
        counts = {option: answer.computed for option, answer in answers.items()}
        print(f"{lab.FIELDS[field][0].strip():26} computed {list(counts.values())}")
        if len(set(counts.values())) == 1:
            return None, asked
        known.append(min(counts, key=counts.get))
    return known, asked


service = lab.Service(salted=False)
service.ask("victim", [*form.filled(secret), form.end])
guessed, asked = attack(service)
print("guessed:", [lab.FIELDS[field][1][option] for field, option in enumerate(guessed)])
print(f"{asked} prompts, {asked - len(guessed)} of them guesses")
assert guessed == secret

# %% [markdown]
# The whole form, without a model, a clock, or one wrong guess in the end. What the attacker
# sees of the server is one number a prompt. In each field seven options cost 17 tokens, the
# block and the token behind it, and one option costs 1.
#
# :::{admonition} Predict
# :class: tip
# Suppose that the first measurement was noisy, and the attacker asks the same 8 options of the
# first field again, to be sure. What are the counts?
# :::
#
# :::{dropdown} Reasoning
# All 1. Each guess was computed the first time, and from then on it is found because the
# *attacker* sent it. A guess can be asked once, until its block is evicted. To average over
# noise, the attacker must wait, or push the pool full between two rounds.
# :::

# %%
again = lab.probe(service, form, [], range(8))
counts = [answer.computed for answer in again.values()]
print("asked again:", counts)
assert counts == [1] * 8

# %% [markdown]
# ## With a salt
#
# Chapter 08's keys begin at a root, and whatever is in the root is part of every key behind it.
# Put the user's salt there. Then equal texts of two users have different keys.

# %%
salted = lab.Service(salted=True)
salted.ask("victim", [*form.filled(secret), form.end])
guessed, asked = attack(salted)
assert guessed is None
own = [salted.ask("victim", [*form.filled(secret), form.end]).computed for _ in range(2)]
print("guessed:", guessed, "| the victim's own form again:", own, "tokens computed")
assert own == [1, 1]

# %% [markdown]
# All eight options cost the same, so there is nothing to choose by. And that does not depend on
# which form the victim sent, nor on whether there was one: the next cell asks after each of
# eight victims and none.

# %%
seen = set()
for answer in [None, *range(8)]:
    service = lab.Service(salted=True)
    if answer is not None:
        service.ask("victim", [*form.filled([answer, *secret[1:]]), form.end])
    seen.add(tuple(reply.computed for reply in lab.probe(service, form, [], range(8)).values()))
print("different sets of counts over nine histories:", len(seen), seen)
assert len(seen) == 1

# %% [markdown]
# The price: the opening, which is no secret, is now computed and kept once for each salt. With
# one salt for a company instead of one for a person, its people share and can spy on each
# other, but on nobody else.
#
# :::{admonition} Predict
# :class: tip
# 100 users send forms filled in at random. How many blocks are cached with one root for all,
# with a salt for each of ten companies, and with a salt for each user?
# :::
#
# :::{dropdown} Reasoning
# With a salt for each user everybody has everything: 100 times the opening's 2 blocks and 4
# fields. With one root the opening lies there once, the first field in 8 variants at most, the
# second in 64; behind that few forms are equal and sharing ends. Ten companies lie between.
# :::

# %%
import random


def blocks_cached(num_salts):
    """Findable blocks after 100 users with random forms, spread over so many salts."""
    rng, service = random.Random(0), lab.Service(salted=True)
    service.cache = lab.PrefixCache((manager := lab.BlockManager(900, 16, 4, 256)).pool, 16)
    service.manager = manager
    for user in range(100):
        answers = [rng.randrange(8) for _ in form.options]
        service.ask(f"salt {user % num_salts}", [*form.filled(answers), form.end])
    return service.cache.stats.findable


opening = len(form.opening) // lab.BLOCK_SIZE
held = {salts: blocks_cached(salts) for salts in (1, 10, 100)}
print(f"opening of {opening} blocks; blocks held, by number of salts:", held)
assert held[100] == 100 * (opening + 4) and held[1] < held[10] < held[100]
print(f"with a salt each: 100 times {opening + 4}")

# %% [markdown]
# **Turn the knob.** Make `lab.OPENING` twice as long and build the form again; expect an opening
# of 3 blocks, one block more for each salt, and the leak without salts as it is.

# %% [markdown]
# ## With a clock
#
# So far the attacker read counts, which a server does not show. It shows time. The script runs
# the same attack on SmolLM2 on one CPU thread, and measures processor time from admission to
# the first token. In every trial the service is new, the form is random, and the order of the
# guesses is too; the salted and the unsalted service take turns.

# %%
import json

result = json.loads((ROOT / "benchmarks/results/timing_channel.json").read_text())
plain, with_salt = result["rows"]
print("measured: on", result["device"])
for name, row in {"unsalted": plain, "salted": with_salt}.items():
    print(f"measured: {name:8} right guess {row['median_right_ms']:.1f} ms,",
          f"wrong guess {row['median_wrong_ms']:.1f} ms (medians of {len(row['right_ms'])}",
          f"and {len(row['wrong_ms'])})")
    low, high = row["auc_95"]
    print(f"measured: {name:8} AUC {row['auc']:.3f}, 95 % interval {low:.3f} to {high:.3f};",
          f"fields recovered {row['recovered']} of {row['fields']}")

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

from paged_kv.draw import book_style

book_style()
fig, axes = plt.subplots(2, 1, figsize=(7, 4.4), sharex=True)
every = [ms for row in result["rows"] for kind in ("right_ms", "wrong_ms") for ms in row[kind]]
top = sorted(every)[int(0.99 * len(every))] * 1.1
bins = [top * i / 60 for i in range(61)]
for ax, row in zip(axes, result["rows"]):
    for kind, colour, hatch in (("wrong_ms", "#E69F00", "//"), ("right_ms", "#0072B2", "")):
        weights = [100 / len(row[kind])] * len(row[kind])
        ax.hist(row[kind], bins, weights=weights, color=colour, alpha=0.65, hatch=hatch,
                edgecolor="white", label=kind.replace("_ms", " guess"))
    ax.set_title("a salt for each user" if row["salted"] else "one root for all", fontsize=10)
    ax.set_ylabel("share, %", fontsize=9)
axes[0].legend(fontsize=9)
axes[1].set_xlabel("time to the first token, ms of processor time", fontsize=9)
plt.show()

# %% [markdown]
# *Figure: distributions of the time to the first token for right and wrong guesses. Above,
# without salts, they lie apart. Below, with a salt for each user, they lie on each other.*
#
# AUC is the chance that a right guess, picked at random, was quicker than a wrong one: 1 if the
# two are apart, 0.5 if time says nothing. It is the statistic of Mann and Whitney divided by the
# number of pairs, so it asks only for order, not for a shape of the distributions. The interval
# comes from drawing whole trials again and again. Without salts every field is recovered. With
# salts about one in eight is: that is guessing.

# %%
assert plain["auc_95"][0] > 0.95 and plain["recovered"] == plain["fields"]
assert with_salt["auc_95"][0] < 0.5 < with_salt["auc_95"][1]
low, high = with_salt["recovered_share_95"]
print(f"measured: salted, recovered {with_salt['recovered']} of {with_salt['fields']}:",
      f"95 % interval {low:.1f} % to {high:.1f} %")
print(f"blind guessing: {100 / 8:.1f} %")
assert low < 100 / 8 < high
print("tokens computed, right and wrong:", plain["computed_right"], plain["computed_wrong"],
      "| salted:", with_salt["computed_right"], with_salt["computed_wrong"])

# %% [markdown]
# ## What this does not show
#
# A clock of processor time on the server is more than an attacker has. Across a
# network there is noise. Adding normal noise of standard deviation s to a gap g gives an AUC of
# the normal distribution function at g / (s √2); the cell tells how much noise the attack
# stands. Averaging does not help much, since a guess can be asked once. What helps the attacker
# is a longer block, or a longer unknown text of few variants: its gap grows with every token
# that need not be computed.

# %%
from statistics import NormalDist

gap = plain["median_wrong_ms"] - plain["median_right_ms"]
print(f"measured: the gap is {gap:.0f} ms")
for noise in (0.25, 0.5, 1, 2, 4):
    print(f"noise of {noise:4} gaps: AUC {NormalDist().cdf(1 / (noise * 2**0.5)):.2f}")

# %% [markdown]
# Nor are salts the end of all channels. Users of one pool still compete for blocks and for the
# processor: how soon one's *own* blocks are evicted, or how long one waits, tells how busy the
# others are. That is a far coarser thing than their text.
#
# ## State card
#
# | | |
# |---|---|
# | Classes | `Service`: a `BlockManager` and a `PrefixCache` for all users; `Form`: the text, block by block |
# | Leak | tokens computed are a function of other people's prompts |
# | Invariant with salts | tokens computed are a function of one's own history, while nothing is evicted |
# | Price | a shared opening is kept once for each salt |
# | What breaks next | evicting under pressure: chapter 09's scheduler decides who waits |
#
# ## Real world
#
# vLLM takes a `cache_salt` with each request and puts it into the key of the first block
# (`vllm/v1/core/kv_cache_utils.py`). SGLang's radix cache can keep namespaces apart by an extra
# key (`python/sglang/srt/mem_cache/radix_cache.py`). TensorRT-LLM keeps a salt in
# the key of each block (`cpp/tensorrt_llm/batch_manager/blockKey.cpp`). Hosted services say how they isolate in their documents:
# usually by organisation. That the leak is real on hosted services, and can be followed token by
# token, has been shown {cite}`song2024early`.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-L5-compute
# *Compute.* A number of six digits is somewhere in a prompt, alone in a block. How many guesses
# does it take at most? And if two blocks hold three digits each?
# :::
#
# :::{solution} ex-L5-compute
# :class: dropdown
# A million; and 1,000 + 1,000. Where the border of a block falls decides.
# :::

# %% tags=["hide-input"]
print(f"{10**6:,} and {2 * 10**3:,}")
assert 10**6 // (2 * 10**3) == 500

# %% [markdown]
# :::{exercise}
# :label: ex-L5-trace
# *Trace.* Without salts: the victim's form is Emmy, oncology. The attacker's prompt is the
# opening, Emmy, urology, and one token. How many tokens are computed?
# :::
#
# :::{solution} ex-L5-trace
# :class: dropdown
# 17: the block of urology and the token. Opening and Emmy are found.
# :::

# %% tags=["hide-input"]
service = lab.Service(salted=False)
service.ask("victim", [*form.filled([4, 3]), form.end])
print(service.ask("attacker", [*form.filled([4, 4]), form.end]).computed, "tokens")
assert service.ask("attacker", [*form.filled([4, 5]), form.end]).computed == 17

# %% [markdown]
# :::{exercise}
# :label: ex-L5-break
# *Break.* Somebody salts the *last* block of a prompt instead of the root. Show what the
# attacker still learns.
# :::
#
# :::{solution} ex-L5-break
# :class: dropdown
# All but the last field. A key covers what stands before it, not what comes behind, so blocks in
# front of the salt are shared as before.
# :::

# %% tags=["hide-input"]
service = lab.Service(salted=False)
service.ask("victim", [*form.filled(secret[:3]), *([1] * 16), form.end])  # 1: the victim's salt
late = [min(answers, key=lambda o: answers[o].computed) for answers in (
    lab.probe(service, form, secret[:field], range(8)) for field in range(3))]
print("recovered in front of the salt:", late)
assert late == secret[:3]

# %% [markdown]
# :::{exercise}
# :label: ex-L5-implement
# *Implement.* Another defence: delay every first token to what the whole prompt would have
# cost. Write `padded(computed, prompt)` in tokens, and say what is lost and what is kept.
# :::
#
# :::{solution} ex-L5-implement
# :class: dropdown
# The time saved is lost for the user, and the work saved is kept for the server, whose
# processor is free for others. It hides the hit from this clock, as long as the delay is exact
# and the processor's load does not show.
# :::

# %% tags=["hide-input"]
def padded(computed, prompt):
    """Tokens' worth of time that the user waits."""
    return max(computed, prompt)


service = lab.Service(salted=False)
service.ask("victim", [*form.filled(secret), form.end])
waits = set()
for option in range(8):
    prompt = [*form.filled([option]), form.end]
    waits.add(padded(service.ask("attacker", prompt).computed, len(prompt)))
print("waits:", waits)
assert len(waits) == 1

# %% [markdown]
# :::{exercise}
# :label: ex-L5-own
# *Compute.* From the formula above: how large may the noise be, in gaps, for an AUC of 0.9?
# :::
#
# :::{solution} ex-L5-own
# :class: dropdown
# g / (s √2) must be the 0.9 quantile of the normal distribution, 1.28, so s is 0.55 gaps.
# :::

# %% tags=["hide-input"]
quantile = NormalDist().inv_cdf(0.9)
print(f"{quantile:.2f}, s = {1 / (quantile * 2**0.5):.2f} gaps")
assert round(1 / (quantile * 2**0.5), 2) == 0.55

# %% [markdown]
# ## Further reading
#
# - vLLM's documentation of automatic prefix caching, on isolation by salts.
# - Song and others, on timing channels in LLM serving systems {cite}`song2024early`.
# - Kocher, *Timing Attacks on Implementations of Diffie-Hellman, RSA, DSS, and Other Systems*
#   (1996): where the method comes from.
# - Mann and Whitney, *On a Test of Whether One of Two Random Variables Is Stochastically Larger
#   than the Other* (1947).
