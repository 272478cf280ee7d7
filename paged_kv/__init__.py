# Written by tools/export.py from what the chapters export; edit those, not this file.
"""A paged KV cache for LLM serving, built chapter by chapter.

    sizing           How many bytes a KV cache takes: per token, per block, per sequence.
    contiguous       The old way: one run of adjacent slots a request, reserved before its length is known.
    block_pool       Block ids: a queue of the free ones, and for each the number of rows that hold it.
    block_manager    Block tables, and the manager that keeps them in step with the pool.
    kv_store         The bytes of a paged KV cache: one tensor a layer, written by slot, copied by block.
    attention        Attention that reads keys and values through a block table: a plain oracle, and torch.
    packed_batch     The new tokens of one step, packed without padding, and where their K/V live.
    guest_attention  How a model of transformers asks us for attention: one function, registered by name.
    guest_check      Whether a model can be served right: decided at load, by trying it.
    hf_adapter       A causal language model of transformers as guest: its layers, our K/V.
    copy_on_write    Sequences that share blocks: fork, copy before writing, rewire beams, rewind.
    sampling         Choosing tokens at random, reproducibly, and several answers to one prompt that share it.
    beams            Beam search: which texts to keep, and the block tables that follow them.
    draw_canvas      Pictures in three forms (text, SVG, words) and the canvas that the SVG is painted on.
    draw_state       What a picture of a pool shows: a snapshot, checked, then taken apart into cells and lines.
    draw_paint       A pool's cells and lines as text, and as shapes on a canvas.
    draw             Pictures of a pool of blocks, of a contiguous pool and of one block table.
    capacity_report  The sums behind `paged-kv size`: what a memory holds, and which GPUs hold what is needed.
    cli              The command line, `paged-kv`: each command asks the package one question and prints the answer.
    config_facts     The facts of a model's config.json, under whichever names the file gives them.
    configs          The KV cache of a real model, read from its config.json.
    weights          What a model's weights take, from its files or, for plain decoders, from its shapes.

Names come from their modules at first use: importing the package itself needs nothing but NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from paged_kv.attention import (
        Piece,
        check_attention,
        cut_batch,
        dense_attention,
        fetch_rows,
        group_pieces,
        load_tokens,
        paged_attention,
        paged_attention_numpy,
        piece_positions,
        read_through,
        visible_keys,
    )
    from paged_kv.beams import BeamSearch, Hypothesis, place_children, run_beams, step_beams
    from paged_kv.block_manager import (
        BlockManager,
        BlockTables,
        as_rows,
        checked_counts,
        checked_rows,
        extend_each,
        refuse_shared_tails,
        slot_mapping,
    )
    from paged_kv.block_pool import BlockPool, OutOfBlocks
    from paged_kv.capacity_report import (
        find_config,
        length_report,
        mean_bytes,
        memory_report,
        model_report,
        read_lengths,
        users_report,
    )
    from paged_kv.cli import (
        both_units,
        main,
        memory_rows,
        model_rows,
        print_rows,
        read_size,
        read_weights,
        refusing,
        size,
        size_report,
        stated_lengths,
        users_rows,
    )
    from paged_kv.config_facts import (
        find_fact,
        listed_values,
        read_config,
        required_fact,
        text_part,
        whole_number,
    )
    from paged_kv.configs import (
        LayerGroup,
        ModelKV,
        element_type,
        from_config,
        heads_per_rank,
        layer_kinds,
        layer_overrides,
        layer_shape,
        listed_kinds,
        patterned_kinds,
        window_of,
    )
    from paged_kv.contiguous import (
        ContiguousPool,
        OutOfSlots,
        ReservationFull,
        Run,
        SlotSplit,
        reserve_max,
        reserve_oracle,
        reserve_pow2,
    )
    from paged_kv.copy_on_write import (
        blocks_held,
        blocks_needed,
        copies_needed,
        fork,
        fork_many,
        guarded_tails,
        make_writable,
        must_copy,
        rewind,
        rewire,
    )
    from paged_kv.draw import book_style, draw_pool, draw_slots, draw_table
    from paged_kv.draw_canvas import Canvas, Picture
    from paged_kv.guest_attention import (
        HostCall,
        LayerAttention,
        attention_set,
        configs_of,
        host_attention,
        run_hosted,
        write_and_attend,
    )
    from paged_kv.guest_check import (
        CheckReport,
        GuestRefused,
        Probe,
        check_config,
        check_guest,
        guest_spec,
        largest,
        probe_prompts,
        probe_steps,
        windows_of,
    )
    from paged_kv.hf_adapter import (
        PagedModel,
        Progress,
        admit,
        check_prompts,
        continuous_decode,
        host,
        load_guest,
        model_folder,
    )
    from paged_kv.kv_store import KVStore, check_range, resolve_copies
    from paged_kv.packed_batch import PackedBatch, pack
    from paged_kv.sampling import (
        Samples,
        SamplingParams,
        decode,
        distribution,
        parallel_sample,
        prefill,
        sample,
    )
    from paged_kv.sizing import (
        Capacity,
        KVSpec,
        SizedKV,
        at_least,
        blocks_for,
        capacity,
        expected_tail_waste,
        format_bytes,
        parse_bytes,
        tail_waste,
    )
    from paged_kv.weights import count_parameters, weight_bytes

__all__ = [
    "BeamSearch",
    "BlockManager",
    "BlockPool",
    "BlockTables",
    "Canvas",
    "Capacity",
    "CheckReport",
    "ContiguousPool",
    "GuestRefused",
    "HostCall",
    "Hypothesis",
    "KVSpec",
    "KVStore",
    "LayerAttention",
    "LayerGroup",
    "ModelKV",
    "OutOfBlocks",
    "OutOfSlots",
    "PackedBatch",
    "PagedModel",
    "Picture",
    "Piece",
    "Probe",
    "Progress",
    "ReservationFull",
    "Run",
    "Samples",
    "SamplingParams",
    "SizedKV",
    "SlotSplit",
    "admit",
    "as_rows",
    "at_least",
    "attention_set",
    "blocks_for",
    "blocks_held",
    "blocks_needed",
    "book_style",
    "both_units",
    "capacity",
    "check_attention",
    "check_config",
    "check_guest",
    "check_prompts",
    "check_range",
    "checked_counts",
    "checked_rows",
    "configs_of",
    "continuous_decode",
    "copies_needed",
    "count_parameters",
    "cut_batch",
    "decode",
    "dense_attention",
    "distribution",
    "draw_pool",
    "draw_slots",
    "draw_table",
    "element_type",
    "expected_tail_waste",
    "extend_each",
    "fetch_rows",
    "find_config",
    "find_fact",
    "fork",
    "fork_many",
    "format_bytes",
    "from_config",
    "group_pieces",
    "guarded_tails",
    "guest_spec",
    "heads_per_rank",
    "host",
    "host_attention",
    "largest",
    "layer_kinds",
    "layer_overrides",
    "layer_shape",
    "length_report",
    "listed_kinds",
    "listed_values",
    "load_guest",
    "load_tokens",
    "main",
    "make_writable",
    "mean_bytes",
    "memory_report",
    "memory_rows",
    "model_folder",
    "model_report",
    "model_rows",
    "must_copy",
    "pack",
    "paged_attention",
    "paged_attention_numpy",
    "parallel_sample",
    "parse_bytes",
    "patterned_kinds",
    "piece_positions",
    "place_children",
    "prefill",
    "print_rows",
    "probe_prompts",
    "probe_steps",
    "read_config",
    "read_lengths",
    "read_size",
    "read_through",
    "read_weights",
    "refuse_shared_tails",
    "refusing",
    "required_fact",
    "reserve_max",
    "reserve_oracle",
    "reserve_pow2",
    "resolve_copies",
    "rewind",
    "rewire",
    "run_beams",
    "run_hosted",
    "sample",
    "size",
    "size_report",
    "slot_mapping",
    "stated_lengths",
    "step_beams",
    "tail_waste",
    "text_part",
    "users_report",
    "users_rows",
    "visible_keys",
    "weight_bytes",
    "whole_number",
    "window_of",
    "windows_of",
    "write_and_attend",
]

_HOME = {
    "BeamSearch": "beams",
    "BlockManager": "block_manager",
    "BlockPool": "block_pool",
    "BlockTables": "block_manager",
    "Canvas": "draw_canvas",
    "Capacity": "sizing",
    "CheckReport": "guest_check",
    "ContiguousPool": "contiguous",
    "GuestRefused": "guest_check",
    "HostCall": "guest_attention",
    "Hypothesis": "beams",
    "KVSpec": "sizing",
    "KVStore": "kv_store",
    "LayerAttention": "guest_attention",
    "LayerGroup": "configs",
    "ModelKV": "configs",
    "OutOfBlocks": "block_pool",
    "OutOfSlots": "contiguous",
    "PackedBatch": "packed_batch",
    "PagedModel": "hf_adapter",
    "Picture": "draw_canvas",
    "Piece": "attention",
    "Probe": "guest_check",
    "Progress": "hf_adapter",
    "ReservationFull": "contiguous",
    "Run": "contiguous",
    "Samples": "sampling",
    "SamplingParams": "sampling",
    "SizedKV": "sizing",
    "SlotSplit": "contiguous",
    "admit": "hf_adapter",
    "as_rows": "block_manager",
    "at_least": "sizing",
    "attention_set": "guest_attention",
    "blocks_for": "sizing",
    "blocks_held": "copy_on_write",
    "blocks_needed": "copy_on_write",
    "book_style": "draw",
    "both_units": "cli",
    "capacity": "sizing",
    "check_attention": "attention",
    "check_config": "guest_check",
    "check_guest": "guest_check",
    "check_prompts": "hf_adapter",
    "check_range": "kv_store",
    "checked_counts": "block_manager",
    "checked_rows": "block_manager",
    "configs_of": "guest_attention",
    "continuous_decode": "hf_adapter",
    "copies_needed": "copy_on_write",
    "count_parameters": "weights",
    "cut_batch": "attention",
    "decode": "sampling",
    "dense_attention": "attention",
    "distribution": "sampling",
    "draw_pool": "draw",
    "draw_slots": "draw",
    "draw_table": "draw",
    "element_type": "configs",
    "expected_tail_waste": "sizing",
    "extend_each": "block_manager",
    "fetch_rows": "attention",
    "find_config": "capacity_report",
    "find_fact": "config_facts",
    "fork": "copy_on_write",
    "fork_many": "copy_on_write",
    "format_bytes": "sizing",
    "from_config": "configs",
    "group_pieces": "attention",
    "guarded_tails": "copy_on_write",
    "guest_spec": "guest_check",
    "heads_per_rank": "configs",
    "host": "hf_adapter",
    "host_attention": "guest_attention",
    "largest": "guest_check",
    "layer_kinds": "configs",
    "layer_overrides": "configs",
    "layer_shape": "configs",
    "length_report": "capacity_report",
    "listed_kinds": "configs",
    "listed_values": "config_facts",
    "load_guest": "hf_adapter",
    "load_tokens": "attention",
    "main": "cli",
    "make_writable": "copy_on_write",
    "mean_bytes": "capacity_report",
    "memory_report": "capacity_report",
    "memory_rows": "cli",
    "model_folder": "hf_adapter",
    "model_report": "capacity_report",
    "model_rows": "cli",
    "must_copy": "copy_on_write",
    "pack": "packed_batch",
    "paged_attention": "attention",
    "paged_attention_numpy": "attention",
    "parallel_sample": "sampling",
    "parse_bytes": "sizing",
    "patterned_kinds": "configs",
    "piece_positions": "attention",
    "place_children": "beams",
    "prefill": "sampling",
    "print_rows": "cli",
    "probe_prompts": "guest_check",
    "probe_steps": "guest_check",
    "read_config": "config_facts",
    "read_lengths": "capacity_report",
    "read_size": "cli",
    "read_through": "attention",
    "read_weights": "cli",
    "refuse_shared_tails": "block_manager",
    "refusing": "cli",
    "required_fact": "config_facts",
    "reserve_max": "contiguous",
    "reserve_oracle": "contiguous",
    "reserve_pow2": "contiguous",
    "resolve_copies": "kv_store",
    "rewind": "copy_on_write",
    "rewire": "copy_on_write",
    "run_beams": "beams",
    "run_hosted": "guest_attention",
    "sample": "sampling",
    "size": "cli",
    "size_report": "cli",
    "slot_mapping": "block_manager",
    "stated_lengths": "cli",
    "step_beams": "beams",
    "tail_waste": "sizing",
    "text_part": "config_facts",
    "users_report": "capacity_report",
    "users_rows": "cli",
    "visible_keys": "attention",
    "weight_bytes": "weights",
    "whole_number": "config_facts",
    "window_of": "configs",
    "windows_of": "guest_check",
    "write_and_attend": "guest_attention",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        elif name == "__version__":
            value = _version()
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("paged-kv")
    except PackageNotFoundError:
        return "0+unknown"
