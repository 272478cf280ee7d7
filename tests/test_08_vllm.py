"""Chapter 08 beside vLLM's own KVCacheManager, request by request; runs where vLLM can be imported.

Where the contracts are the same, so is everything: tokens found, tables, the queue of free blocks, which blocks are
findable.  One difference is switched off for that comparison, and the differences are asserted one by one below.
"""

import os
import random

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm", reason="vLLM 0.23 is not installed here")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back, publish_full

MAX_LEN = 512


class Theirs:
    """vLLM's manager with the ids of its blocks counted from 0, as ours are; its block 0 is never handed out."""

    def __init__(self, num_blocks, size):
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        config = KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_LEN,
            scheduler_block_size=size,
            hash_block_size=size,
            enable_caching=True,
            log_stats=False,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(size, sha256)
        self.made = 0

    def admit(self, tokens, salt, chunk):
        """(request, tokens found), or None where there is no room."""
        self.made += 1
        params = SamplingParams(max_tokens=MAX_LEN)
        request = Request(str(self.made), list(tokens), params, None, block_hasher=self.hasher, cache_salt=salt)
        blocks, found = self.manager.get_computed_blocks(request)
        new = len(tokens) - found if chunk is None else min(chunk, len(tokens) - found)
        if self.manager.allocate_slots(request, new, found, blocks) is None:
            return None
        request.num_computed_tokens = found + new
        return request, found

    def grow(self, request, count):
        if self.manager.allocate_slots(request, count) is None:
            return False
        request.num_computed_tokens += count
        return True

    def table(self, request):
        return [block - 1 for block in self.manager.get_block_ids(request.request_id)[0]]

    def queue(self):
        return [block.block_id - 1 for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]

    def findable(self):
        return {block.block_id - 1 for block in self.manager.block_pool.blocks if block.block_hash is not None}


class FirstTwin(PrefixCache):
    """Ours with a difference in contract switched off: of twins it names the first, in use or not."""

    def _pick(self, node):
        return node.block


class Both:
    """One program run by the two, compared after every operation."""

    def __init__(self, num_blocks, size):
        self.manager = BlockManager(num_blocks, size, 16, MAX_LEN)
        self.cache, self.theirs, self.size = FirstTwin(self.manager.pool, size), Theirs(num_blocks, size), size
        self.running, self.hits, self.refused, self.evicted = {}, 0, 0, 0

    def admit(self, tokens, salt, chunk):
        root = b"" if salt is None else PrefixCache.root([("salt", salt)])
        other = self.theirs.admit(tokens, salt, chunk)
        try:
            row, found = admit_cached(self.manager, self.cache, tokens, root, chunk)
        except OutOfBlocks:
            assert other is None
            self.refused += 1
            return
        assert other is not None
        assert found == other[1]
        self.hits += found
        self.running[row] = [list(tokens), root, found // self.size, other[0]]
        self.publish(row)

    def publish(self, row):
        tokens, root, published, _ = self.running[row]
        known = tokens[: self.manager.tables.seq_lens[row]]
        self.running[row][2] = publish_full(self.manager, self.cache, row, known, published, root)

    def grow(self, row, count, token):
        tokens, _, _, request = self.running[row]
        length = int(self.manager.tables.seq_lens[row])
        if length == len(tokens):
            tokens.append(token)
            request.append_output_token_ids(token)
        count = min(count, len(tokens) - length)
        fits = self.theirs.grow(request, count)
        try:
            self.cache.forget(self.manager.append([row], count))
        except OutOfBlocks:
            assert not fits
            return
        assert fits
        self.publish(row)

    def finish(self, row):
        self.theirs.manager.free(self.running.pop(row)[3])
        give_back(self.manager, row)

    def compare(self):
        assert self.manager.pool.free_ids() == self.theirs.queue()
        for row, (*_, request) in self.running.items():
            assert self.manager.tables.ids(row) == self.theirs.table(request)
        mine = {b for b in range(self.manager.pool.num_blocks) if self.cache.key_of(b) is not None}
        assert mine == self.theirs.findable()
        self.manager.check()
        self.cache.check()


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed, size):
    """Hits, tables, evictions and refusals are the same through 150 operations under pressure."""
    draw = random.Random(seed)
    both = Both(draw.randrange(8, 40), size)
    heads = [[draw.randrange(5) for _ in range(size * 4)] for _ in range(3)]
    for _ in range(150):
        act = draw.choice(["admit", "admit", "grow", "grow", "finish"])
        if act == "admit" and len(both.running) < 16:
            head = draw.choice(heads)[: draw.randrange(1, size * 4 + 1)]
            own = [draw.randrange(3) for _ in range(draw.choice([0, 1, size, 2 * size + 1]))]
            both.admit(
                head + own, draw.choice([None, None, "tenant"]), draw.choice([None, draw.randrange(1, 3 * size + 1)])
            )
        elif act == "grow" and both.running:
            both.grow(draw.choice(list(both.running)), draw.randrange(1, 2 * size + 1), draw.randrange(3))
        elif act == "finish" and both.running:
            both.finish(draw.choice(list(both.running)))
        both.compare()
    assert both.hits > 0
    assert both.cache.stats.evicted > 0


def test_the_programs_refuse_too():
    refused = 0
    for seed in range(6):
        draw = random.Random(seed)
        both = Both(6, 4)
        for _ in range(40):
            if len(both.running) < 3:
                both.admit([draw.randrange(2) for _ in range(draw.randrange(1, 18))], None, None)
            else:
                both.finish(draw.choice(list(both.running)))
            both.compare()
        refused += both.refused
    assert refused > 0


def test_difference_twins():
    """Of twins, vLLM names the first even if idle; ours one in use, which leaves a block more to others."""
    prompt = list(range(8))
    manager = BlockManager(6, 4, 4, 64)
    cache, theirs = PrefixCache(manager.pool, 4), Theirs(6, 4)
    rows = [admit_cached(manager, cache, prompt)[0] for _ in "AB"]
    for row in rows:
        publish_full(manager, cache, row, prompt, 0)
    requests = []
    for _ in "AB":  # in vLLM the second of two steps would find the first's blocks, so the twin is of the last block
        requests.append(theirs.admit(prompt, None, None)[0])
    give_back(manager, rows[0])
    theirs.manager.free(requests[0])
    longer = [*prompt, 8]
    assert cache.match(b"", longer) == manager.tables.ids(rows[1])
    request = Request("longer", longer, SamplingParams(max_tokens=9), None, block_hasher=theirs.hasher)
    blocks, found = theirs.manager.get_computed_blocks(request)
    assert found == 8
    named = [block.block_id - 1 for block in blocks.blocks[0]]
    assert named[1] != theirs.table(requests[1])[1]
    assert theirs.manager.block_pool.blocks[named[1] + 1].ref_cnt == 0


def test_difference_reset():
    """vLLM refuses to reset while a request runs; ours forgets at once, and those that run publish no more."""
    prompt = list(range(9))
    manager = BlockManager(6, 4, 4, 64)
    cache, theirs = PrefixCache(manager.pool, 4), Theirs(6, 4)
    row, _ = admit_cached(manager, cache, prompt)
    publish_full(manager, cache, row, prompt, 0)
    theirs.admit(prompt, None, None)
    assert theirs.manager.reset_prefix_cache() is False
    cache.reset()
    assert cache.match(b"", prompt) == []
    assert publish_full(manager, cache, row, prompt, 1) == 1


def test_difference_identity():
    """vLLM's key is a digest of 32 bytes; ours is the content.  Both tell salts from none and from one another."""
    theirs, prompt = Theirs(30, 4), list(range(9))
    found = [theirs.admit(prompt, salt, None)[1] for salt in (None, "a", "b", "a", None)]
    manager = BlockManager(30, 4, 8, 64)
    cache = PrefixCache(manager.pool, 4)
    for salt, hit in zip((None, "a", "b", "a", None), found, strict=True):
        root = b"" if salt is None else PrefixCache.root([("salt", salt)])
        row, ours = admit_cached(manager, cache, prompt, root)
        publish_full(manager, cache, row, prompt, ours // 4, root)
        assert ours == hit
    assert found == [0, 0, 0, 8, 8]
