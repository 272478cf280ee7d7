# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab: the economics of a victim
#
# Blocks have run out, and somebody has to go. Serve the same bursts of requests twice: once the
# last to arrive is put aside and computed again later, as vLLM does today; once the scheduler asks what each
# would cost, and may move blocks to host memory.

# %%
import json
import sys
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "benchmarks").is_dir())
sys.path.insert(0, str(ROOT))
from benchmarks import victims as lab

result = json.loads((ROOT / "benchmarks/results/victims.json").read_text())
table = {(entry["policy"], entry["figure"]): entry for entry in result["compared"]}
BASE = "last_arrived, recompute only"
for policy in (BASE, "cheapest"):
    missed, tax = (100 * table[policy, figure]["mean"] for figure in ("missed", "tax"))
    print(f"{policy:28}: {missed:.1f} % of the deadlines missed,",
          f"{tax:.1f} % of the tokens run twice")

# %% [markdown]
# **The question.** What does it cost to put a request aside, and does it matter whom it hits?
#
# :::{card} This lab
# - **You need** chapter [10](../10_preemption) and the [simulator](L6_simulate).
# - **Exports** nothing; it reads what `benchmarks/victims.py` simulated.
# - **Device** CPU; the GPU is a formula with assumed constants.
# - **Run time** under a minute; the benchmark takes several.
# - **You are here** 08 prefix hashing · 09 scheduling · 10 preemption · **lab** · 11 Triton
#   decode · 12 Triton prefill · 13 engine
# :::

# %% [markdown]
# ## What one preemption costs
#
# Swap moves the K/V of L tokens out and back: 2 x L x 131,072 B over the bandwidth to the host. Recompute multiplies L
# tokens with the weights, and with each other. Both grow with L, so at first sight the bandwidth alone says which
# wins.

# %%
cost = lab.COST
per_token = cost.token_flops / cost.matmul_rate
even = 2 * cost.kv_bytes / per_token
print(f"K/V of a token: {cost.kv_bytes:,} B")
print(f"a token computed again: {1e6 * per_token:.1f} us; a token swapped at 50 GB/s:",
      f"{1e6 * 2 * cost.kv_bytes / 50e9:.1f} us")
print(f"they are equal at {even / 1e9:.1f} GB/s")
for beside in lab.BESIDE:
    free = lab.free_tokens(cost, beside)
    print(f"beside {beside:3} rows of 500 tokens, {free:3.0f} tokens are free")
pairs = 8192**2 / 2 * cost.pair_flops / cost.matmul_rate
print(f"at 8,192 tokens attention adds {1e3 * pairs:.0f} ms to {1e3 * 8192 * per_token:.0f} ms")

# %% [markdown]
# Two terms bend that. A decoding step reads for longer than it multiplies, so a replay's first tokens
# ride along for nothing: that favours recompute for short prefixes. And attention makes a long replay grow with the
# square: that favours swap for long ones.
#
# :::{admonition} Predict
# :class: tip
# The host is 12.5 GB/s away, a little better than even. 32 rows decode meanwhile. Up to which length is it
# quicker to compute again? And at 50 GB/s?
# :::
#
# :::{dropdown} Reasoning
# Let f tokens be free, t the time of a token computed and s that of one swapped. Recompute wins while
# (L - f) t < L s, so while L < f t / (t - s). At 12.5 GB/s s is 21.0 us of 27.1, so the border is at more than
# four times f. At 50 GB/s s is a fifth of t, and the border lies a quarter above f.
# :::

# %%
import dataclasses


def border(bandwidth, beside):
    """Tokens up to which recompute is quicker, by the formula; attention left out."""
    swapped = 2 * cost.kv_bytes / bandwidth
    free = lab.free_tokens(cost, beside)
    return free * per_token / (per_token - swapped) if swapped < per_token else float("inf")


for bandwidth in lab.BANDWIDTHS:
    swapped = 1e6 * 2 * cost.kv_bytes / bandwidth
    print(f"{bandwidth / 1e9:5.1f} GB/s, {swapped:4.1f} us a token: border at",
          ", ".join(f"{border(bandwidth, beside):.0f} ({beside} rows)" for beside in lab.BESIDE))
print(f"{border(12.5e9, 32) / lab.free_tokens(cost, 32):.1f} times the free tokens at 12.5 GB/s")

# %% [markdown]
# Now the simulation. Some rows decode; in the middle one request is put aside by hand and taken back by the
# scheduler in the same step. The cost is the difference to the same steps without it.

# %% tags=["hide-input"]
import inspect

from IPython.display import Markdown

Markdown(f"```python\n{inspect.getsource(lab.serve_beside)}```")

# %%
crossing = [row for row in result["rows"] if row["experiment"] == "crossover"]
worst = max(abs(row[f"{m}_ms"] - row[f"{m}_predicted_ms"]) / row[f"{m}_ms"]
            for row in crossing for m in ("recompute", "swap") if row[f"{m}_ms"] > 1)
same = sum((row["swap_ms"] < row["recompute_ms"])
           == (row["swap_predicted_ms"] < row["recompute_predicted_ms"]) for row in crossing)
print(f"{len(crossing)} cases; the winner is the one predicted in {same}")
print(f"times above 1 ms: at most {100 * worst:.0f} % from the prediction")
live = dataclasses.replace(cost, host_bandwidth=12.5e9)
for length in (512, 1024):
    took = {m: 1e3 * lab.added_seconds(live, length, 32, m) for m in ("recompute", "swap")}
    print(f"live, 12.5 GB/s, {length:4} tokens:", {m: f"{ms:.2f} ms" for m, ms in took.items()})

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import numpy as np

from paged_kv.draw import book_style

book_style()
fig, axes = plt.subplots(1, 3, figsize=(7.6, 3.4), sharey=True)
for ax, beside in zip(axes, lab.BESIDE):
    rows = [row for row in crossing if row["beside"] == beside]
    for method, colour, marker in (("swap", "#0072B2", "s"), ("recompute", "#E69F00", "o")):
        won = [row for row in rows if (row["swap_ms"] < row["recompute_ms"]) == (method == "swap")]
        ax.plot([r["length"] for r in won], [r["bandwidth"] / 1e9 for r in won], marker,
                color=colour, label=f"{method} quicker", linestyle="none")
    lengths = np.geomspace(64, 8192, 100)
    replay = [lab.predicted(cost, length, beside)["recompute"] for length in lengths]
    edge = [2 * length * cost.kv_bytes / max(t, 1e-9) / 1e9 for length, t in zip(lengths, replay)]
    ax.plot(lengths, edge, color="#444444", label="predicted border")
    ax.set(xscale="log", yscale="log", ylim=(4, 300), xlabel="tokens")
    ax.set_title(f"beside {beside} rows")
    ax.set_xticks([64, 512, 4096], ["64", "512", "4,096"])
axes[0].set_ylabel("bandwidth to the host, GB/s")
axes[0].set_yticks([5, 10, 50, 200], ["5", "10", "50", "200"])
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=10)
plt.show()

# %% [markdown]
# *Figure: the quicker method, by length of the prefix and bandwidth to the host, beside 0, 32 and 200 decoding rows.
# The predicted border falls steeply at about 150 tokens beside few rows, earlier beside many, and runs on near 9.7
# GB/s; every point lies on the side predicted.*
#
# Times differ by up to a fifth where prefixes are short: whole blocks are moved, and six tokens have come
# since. "Short prefixes are recomputed, long ones swapped" is right, but the border lies at hundreds of tokens on a slow
# link and just above the free tokens on a fast one. Below 9.7 GB/s, hardly anything is worth moving. `Preemption` is told
# rates only: it swaps some short prefixes that could have come along for nothing.
#
# **Turn the knob.** In the cell that runs live, set `host_bandwidth=9e9`; expect recompute to win both.

# %% [markdown]
# ## Whom
#
# Now bursts. Every five seconds the rate changes between 13 and 51 requests/s. Seven in ten are *hasty*:
# somebody waits, and they are due in two to six seconds. The others are batch work with long texts, of
# lower priority, due in ten to twenty-five. The pool holds 16,384 tokens.
#
# :::{admonition} Predict
# :class: tip
# Policies: the last to arrive, the lowest priority, the cheapest for what it gains, the one with most slack, and
# cost times slack. Which matters more for missed deadlines: the policy, or whether swap is allowed?
# And which policy moves the most bytes?
# :::
#
# :::{dropdown} Reasoning
# Both, and about equally. Swap ends the tax: more than a fifth of all tokens were run twice. A policy decides *how often*
# somebody is hit. The last to arrive is often a short, hasty request that frees few blocks, so the next one follows soon.
# Batch work frees many blocks at once, and nobody waits for it; but those who pick it move the most.
# :::

# %% tags=["hide-input"]
NAMES = list(dict.fromkeys(entry["policy"] for entry in result["compared"]))
counts = [row["requests"] for row in result["rows"] if row["experiment"] == "policies"]
seeds = len(counts) // len(NAMES)
print(f"{seeds} seeds, {min(counts)} to {max(counts)} requests each; means, and in brackets the",
      "95 % interval of the difference from the first line")
rate, swing = (result["overload"][name] for name in ("rate", "swing"))
print(f"{rate * (1 - swing):.0f} to {rate * (1 + swing):.0f} requests/s")
pairs = {(row["policy"], row["seed"]): row for row in result["rows"]
         if row["experiment"] == "policies"}
for name in NAMES:
    parts = []
    shown = (("missed", 100, " %"), ("tax", 100, " %"), ("moved_gib", 1, " GiB"))
    for figure, scale, unit in shown:
        entry = table[name, figure]
        low, high = (scale * value for value in entry["difference_interval"])
        parts.append(f"{scale * entry['mean']:4.1f}{unit} [{low:+.1f} {high:+.1f}]")
    hit = np.mean([pairs[name, seed]["preemptions"] for seed in range(seeds)])
    print(f"{name:28} missed {parts[0]}, tax {parts[1]}, moved {parts[2]}, {hit:.0f} preemptions")
print("against last_arrived with swap, points of missed deadlines:")
for entry in lab.compared(list(pairs.values()), ["missed"], "last_arrived")[2:]:
    low, high = (100 * value for value in entry["difference_interval"])
    print(f"{entry['policy']:28} {100 * entry['difference']:+.1f} [{low:+.1f} {high:+.1f}]")

# %% tags=["hide-input"]
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.0), sharey=True)
heights = np.arange(len(NAMES))[::-1]
labels = {"missed": "deadlines missed, %", "tax": "tokens run twice, %"}
for ax, (figure, label) in zip(axes, labels.items()):
    means = 100 * np.array([table[name, figure]["mean"] for name in NAMES])
    ends = 100 * np.array([table[name, figure]["interval"] for name in NAMES])
    ax.errorbar(means, heights, xerr=np.abs(ends.T - means), fmt="o", capsize=3)
    ax.set(xlabel=label, xlim=(0, None))
axes[0].set_yticks(heights, [name.replace(", ", ",\n") for name in NAMES])
plt.show()

# %% [markdown]
# *Figure: deadlines missed (left) and tokens run twice (right) under six configurations, means over
# seeds with 95 % intervals.*
#
# Swap alone takes 2.7 points off the misses, at 13.9 GiB moved. Picking by priority or by price takes off about 3.5
# more, with half to three fifths of the preemptions and a third more bytes: they move few, large requests, worst in
# bytes and best for the users. `most_slack`, which looks at deadlines alone, gains little more than a third of that.
# And `cheapest`, which knows prices, is as good as `lowest_priority`, which knows what we told it.

# %% [markdown]
# ## The tail of the gaps
#
# Two more settings matter. The token budget cuts long prompts into chunks and bounds how long a step can be.
# One prompt in ten below has 4,096 to 8,192 tokens, the others are chats.
#
# :::{admonition} Predict
# :class: tip
# Budgets from 256 to 8,192 tokens. How long is the longest gap between two tokens of a chat? Does the 99 % quantile of
# the gaps grow with the budget as well?
# :::
#
# :::{dropdown} Reasoning
# A step that is full of prompt tokens multiplies: its time is the budget times 27.1 us, and some overhead. So the
# longest gap doubles with the budget. The quantile need not: a large budget makes fewer long steps and hurts *fewer
# tokens more*. Once fewer than one gap in a hundred is long, the 99 % quantile sees none of the worst.
# :::

# %% tags=["hide-input"]
chunk_rows = [row for row in result["rows"] if row["experiment"] == "chunks"]
print(f"a token computed: {1e6 * per_token:.1f} us")


def mean_over_seeds(budget, figure, chunked=True):
    """Mean of a figure over the seeds."""
    return np.mean([row[figure] for row in chunk_rows
                    if (row["budget"], row["chunked"]) == (budget, chunked)])


for budget, chunked in [*((b, True) for b in lab.BUDGETS), (lab.BUDGETS[-1], False)]:
    p50, p99, p999, longest = (1e3 * mean_over_seeds(budget, f"gap_{what}", chunked)
                               for what in ("p50", "p99", "p99.9", "max"))
    first = mean_over_seeds(budget, "first_token_p99", chunked)
    said = 1e3 * budget * per_token
    print(f"{budget:5} {'' if chunked else 'uncut':5} gaps {p50:.1f}, 99 % {p99:5.1f},",
          f"99.9 % {p999:5.1f}, longest {longest:5.1f} ms (said {said:5.1f});",
          f"first token {first:.2f} s")

# %% [markdown]
# The longest gap follows the budget. The 99 % quantile rises up to a budget of 4,096 and then *falls*: whoever tunes
# for it alone may choose the worst stutter. Time to first token, which large budgets are said to help,
# moves little from a budget of 512 on. Our clock does not know that kernels like large matrices.
#
# Not to cut prompts, the last line, gains nothing over the largest budget.

# %% [markdown]
# ## Blocks, large and small, under pressure
#
# The other setting is the block size. The memory stays 16,384 tokens, under the bursts; recompute only.
#
# :::{admonition} Predict
# :class: tip
# Blocks of 1 waste nothing, blocks of 256 half a block for each row. How much of the held memory is lost at 256,
# and how much longer do the unlucky wait for their first token?
# :::
#
# :::{dropdown} Reasoning
# About twenty rows of 700 tokens run. Half a block of 256 is 128 slots beside 700: of 828, 15 % are empty. A pool that
# is 15 % smaller admits that many fewer; under overload the queue turns this into more than 15 %.
# :::

# %% tags=["hide-input"]
size_rows = [row for row in result["rows"] if row["experiment"] == "block_sizes"]
for size in lab.SIZES:
    mine = [row for row in size_rows if row["block_size"] == size]
    filled, first, missed, rows = (
        np.mean([row[figure] for row in mine])
        for figure in ("slots_filled", "first_token_p99", "missed", "rows"))
    print(f"blocks of {size:3}: {100 * (1 - filled):4.1f} % of held slots empty, {rows:.1f} rows,",
          f"first token {first:5.2f} s (99 %), {100 * missed:.1f} % missed,",
          f"seeds differ by {100 * np.ptp([row['missed'] for row in mine]):.1f} points")
print(f"said for 256: {100 * 128 / 828:.0f} %")

# %% [markdown]
# As said, 15 % are empty at 256. The unlucky wait for 15.86 s, where with blocks of 16 it is 13.40 s, and three
# deadlines in a hundred more are missed. Up to 32, sizes differ by less than seeds do. Blocks of 1 look best because
# the clock knows neither tables nor kernels: see the [lab on indirection](L2_price_of_indirection).
#
# ## What this does not show
#
# The constants are assumed; the border moves with them. Transfers here block the step; an engine that copies beside it
# makes swap cheaper. Deadlines and lengths are made up, and under another mixture another policy may win: the
# intervals are over seeds, not over workloads. No prefix cache was on, with which a replay finds what others still
# hold. The paper, on an older device and link, found recompute and swap comparable at blocks of 16 to 64
# {cite}`kwon2023paged`.

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | Predicted from bytes and rates | `free_tokens`, the border of recompute and swap |
# | Confirmed | winner of each of 144 cases; times within a fifth |
# | Policies | same arrivals for each; intervals by `bootstrap_interval` |
# | Knobs | budget: longest gap; block size: empty slots |
# | Assumed | all constants of `LLAMA_3_8B_ON_H200` |
# | What breaks next | a formula says what a token takes; a kernel has to deliver it: [chapter 11](../11_triton_decode) |
#
# ## Real world
#
# vLLM once swapped and now only recomputes; its scheduler (`vllm/v1/core/sched/scheduler.py`) takes the last running
# request, or the lowest priority where priorities are on. SGLang retracts the request that has generated least
# (`managers/schedule_batch.py`) and can keep evicted prefixes in host memory. TensorRT-LLM pauses and recomputes, and
# offloads reusable blocks to the host.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-L7-compute
# *Compute.* With one KV head for each of the 32 query heads, four times as many bytes, at which bandwidth
# would swap and recompute be even?
# :::
#
# :::{solution} ex-L7-compute
# :class: dropdown
# Four times 9.7 GB/s: 38.7 GB/s, so that PCIe 4.0 would never be worth it.
# :::

# %% tags=["hide-input"]
wide = 2 * 4 * cost.kv_bytes / per_token
print(f"{wide / 1e9:.1f} GB/s, four times {even / 1e9:.1f} GB/s")
assert round(wide / 1e9, 1) == 38.7

# %% [markdown]
# :::{exercise}
# :label: ex-L7-trace
# *Trace.* A request of 600 tokens is swapped out and back, in blocks of 16, at 25 GB/s. How many blocks and bytes move, and how long do the others wait?
# :::
#
# :::{solution} ex-L7-trace
# :class: dropdown
# 38 blocks out and 38 back: 76 moves of 2 MiB, 159 MB, 6.4 ms.
# :::

# %% tags=["hide-input"]
slow = dataclasses.replace(cost, host_bandwidth=25e9)
moved = lab.serve_beside(slow, 594, 0, "swap")[1]
print(f"{moved} moves, {moved * 16 * cost.kv_bytes / 1e6:.0f} MB,",
      f"{1e3 * slow.move_seconds(0, moved, 16):.1f} ms at {slow.host_bandwidth / 1e9:.0f} GB/s;",
      f"a block is {16 * cost.kv_bytes / 2**20:.0f} MiB")
assert moved == 2 * 38

# %% [markdown]
# :::{exercise}
# :label: ex-L7-break
# *Break.* Tell `Preemption` that the host is 1,000 GB/s away while the clock says 5 GB/s. What becomes of the time in
# which requests are served?
# :::
#
# :::{solution} ex-L7-break
# :class: dropdown
# Everything is swapped, though replays would be quicker, and the last token comes later.
# :::

# %% tags=["hide-input"]
def serve_told(told):
    """Half a burst with a host 5 GB/s away, under prices for `told` B/s."""
    far = dataclasses.replace(cost, host_bandwidth=5e9)
    clock, manager = lab.Clock(), lab.BlockManager(256, 16, 64, 4096)
    prices = lab.prices(dataclasses.replace(far, host_bandwidth=told), 16)
    relief = lab.Preemption(manager, 1024, prices, lab.POLICIES["last_arrived"])
    scheduler = lab.Scheduler(manager, relief=relief, clock=clock, token_budget=1024,
                              max_running=64)
    requests = lab.overload(0, lab.Overload(seconds=1.5, rate=20))
    return lab.simulate(scheduler, clock, requests, far), relief.events


served = {told: serve_told(told) for told in (1e12, 5e9)}
for told, (report, events) in served.items():
    print(f"told {told / 1e9:5.0f} GB/s: {report.seconds:.2f} s, {dict(events)}")
(misled, swaps), (informed, replays) = served.values()
assert not swaps["recompute"] and not replays["swap"] and misled.seconds > informed.seconds

# %% [markdown]
# :::{exercise}
# :label: ex-L7-implement
# *Implement.* Write a policy that knows the free tokens: a replay within them costs nothing. Call it on candidates of
# your own making.
# :::
#
# :::{solution} ex-L7-implement
# :class: dropdown
# Subtract the free tokens from `replay` before the price is taken; the rest is `cheapest`.
# :::

# %% tags=["hide-input"]
from types import SimpleNamespace


def cheapest_beside(one, free=130):
    """Least seconds for what is gained, if `free` tokens of a replay ride along."""
    replay = one.costs.replay_seconds(max(0, one.replay - free))
    return (min(replay, one.costs.swap_seconds(one.moves)) / (one.frees * one.left),)


told = lab.prices(cost, 16)
short, long = (SimpleNamespace(costs=told, replay=16 * n, moves=n, frees=n, left=100)
               for n in (8, 80))
assert cheapest_beside(short)[0] == 0 < cheapest_beside(long)[0]
print("a victim of 128 tokens is free, one of 1,280 is not")

# %% [markdown]
# :::{exercise}
# :label: ex-L7-intervals
# *Compute.* Why are intervals taken of *differences*, seed by seed? For the misses of `last_arrived` with swap, compare
# the width of the interval of the difference with that of the mean.
# :::
#
# :::{solution} ex-L7-intervals
# :class: dropdown
# A heavy burst is heavy under each policy. In a difference of two runs over the same arrivals that part cancels.
# :::

# %% tags=["hide-input"]
entry = table["last_arrived", "missed"]
mean, difference = (100 * (entry[name][1] - entry[name][0])
                    for name in ("interval", "difference_interval"))
print(f"mean: {mean:.1f} points wide, difference: {difference:.1f} points wide")
assert difference < 0.7 * mean

# %% [markdown]
# ## Further reading
#
# - The PagedAttention paper, sections 4.5 and 7.3, on recompute and swap {cite}`kwon2023paged`.
# - Efron and Tibshirani, *An Introduction to the Bootstrap*, chapters 6 and 13.
# - Liu and Layland (1973), on scheduling under hard deadlines.
