"""Reading a program's text: small programs whose traffic can be added up by hand."""

from __future__ import annotations

import pytest

from dflash_jax.aot.hlo import Buffer, Program, parse_instruction

KERNEL = 'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"8","bytes_accessed":"4096"}}}'  # noqa: E501
HEADER = "HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1,2}: (3, {}, may-alias) }, entry_computation_layout={()->()}"  # noqa: E501
MAIN = "ENTRY %main.1 (w: bf16[64,128], pool: bf16[5,2,16,128]) -> bf16[5,2,16,128] {"


def program(*lines: str, before: str = "", header: str = HEADER) -> Program:
    body = "\n".join(f"  {line}" for line in lines)
    return Program.parse(f"{header}\n\n{before}\n{MAIN}\n{body}\n}}\n")


PARAMETERS = (
    "%w = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)",
    '%pool = bf16[5,2,16,128]{3,2,1,0:T(8,128)(2,1)} parameter(1), sharding={replicated}, metadata={op_name="a(b)"}',
    "%x = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} parameter(2)",
)


def test_an_instruction_with_a_type_of_many_parts():
    found = parse_instruction(
        "  ROOT %copy-start.1 = (bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, bf16[4,8]{1,0}, u32[]{:S(2)}) copy-start(%a.2), k=v"
    )
    assert found is not None and found.root
    assert (found.name, found.kind, found.operands) == ("copy-start.1", "copy-start", ("a.2",))
    assert found.results == (Buffer("bf16", (4, 8), 1), Buffer("bf16", (4, 8), 0), Buffer("u32", (), 2))
    assert [b.nbytes for b in found.results] == [64, 64, 4] and [b.main_bytes for b in found.results] == [0, 64, 0]


def test_what_lies_in_vmem_costs_nothing():
    """A product reads its weights from main memory; its rows and its result are in VMEM."""
    body = "\n".join([
        "%body (p0: bf16[64,128], p1: bf16[8,64]) -> bf16[8,128] {",
        "  %p0 = bf16[64,128]{1,0} parameter(0)",
        "  %p1 = bf16[8,64]{1,0} parameter(1)",
        "  ROOT %dot = bf16[8,128]{1,0} convolution(%p1, %p0), dim_labels=bf_io->bf",
        "}",
    ])  # fmt: skip
    found = program(
        *PARAMETERS,
        '%y = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%w, %x), kind=kOutput, calls=%body,'
        ' backend_config={"estimated_cycles":"77"}',
        "ROOT %z = bf16[8,128]{1,0:T(8,128)} copy(%y), backend_config={\"estimated_cycles\":\"5\"}",
        before=body,
    )  # fmt: skip
    assert found.traffic() == {"y": 64 * 128 * 2, "z": 8 * 128 * 2}
    assert found.cycles == 82


def test_a_prefetch_counts_once():
    found = program(
        *PARAMETERS,
        "%cs = (bf16[64,128]{1,0:S(1)}, bf16[64,128]{1,0}, u32[]{:S(2)}) copy-start(%w)",
        "%cd = bf16[64,128]{1,0:S(1)} copy-done(%cs)",
        "%ss = ((bf16[64,128]{1,0}), bf16[16,128]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:16], [0:128]}",
        "%sd = bf16[16,128]{1,0:S(1)} slice-done(%ss)",
        'ROOT %cat = bf16[16,128]{1,0:S(1)} custom-call(%sd), custom_call_target="ConcatBitcast"',
    )
    assert found.traffic() == {"cs": 64 * 128 * 2, "ss": 16 * 128 * 2}


def test_an_exchange_beside_the_main_program_counts_once_and_is_seen():
    """Some chips run collectives on other cores, as calls that are started and awaited."""
    body = "\n".join([
        "%away (p0: bf16[64,128]) -> bf16[64,128] {",
        "  %p0 = bf16[64,128]{1,0} parameter(0)",
        "  ROOT %sum = bf16[64,128]{1,0} all-reduce(%p0), replica_groups={{0,1}}, to_apply=%add",
        "}",
    ])  # fmt: skip
    found = program(
        *PARAMETERS,
        "%go = ((bf16[64,128]{1,0}), bf16[64,128]{1,0}, u32[]{:S(2)}) call-start(%w), to_apply=%away",
        "ROOT %come = bf16[64,128]{1,0} call-done(%go)",
        before=body,
    )
    assert found.traffic() == {"go": 2 * 64 * 128 * 2} and found.between_chips() == 64 * 128 * 2


def test_a_lookup_reads_the_rows_it_takes_even_through_fusions():
    body = "\n".join([
        "%inner (q0: bf16[64,128], q1: s32[3]) -> bf16[3,128] {",
        "  %q0 = bf16[64,128]{1,0} parameter(0)",
        "  %q1 = s32[3]{0} parameter(1)",
        "  ROOT %g = bf16[3,128]{1,0} gather(%q0, %q1), offset_dims={1}",
        "}",
        "%body (p0: bf16[64,128], p1: s32[3]) -> bf16[3,128] {",
        "  %p0 = bf16[64,128]{1,0} parameter(0)",
        "  %p1 = s32[3]{0} parameter(1)",
        "  ROOT %f = bf16[3,128]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%inner",
        "}",
        "%whole (r0: bf16[64,128]) -> bf16[8192] {",
        "  %r0 = bf16[64,128]{1,0} parameter(0)",
        "  ROOT %b = bf16[8192]{0} bitcast(%r0)",
        "}",
    ])  # fmt: skip
    found = program(
        *PARAMETERS,
        "%ids = s32[3]{0:S(1)} parameter(3)",
        "%rows = bf16[3,128]{1,0:S(1)} fusion(%w, %ids), kind=kCustom, calls=%body",
        "ROOT %all = bf16[8192]{0:S(1)} fusion(%w), kind=kLoop, calls=%whole",
        before=body,
    )
    assert found.traffic() == {"rows": 3 * 128 * 2, "all": 64 * 128 * 2}


def test_a_slice_of_an_order_anew_reads_the_slice():
    """A fusion makes its inner copies where they are used; of one that is used whole, all is read."""
    body = "\n".join([
        "%inner (q0: bf16[64,128]) -> bf16[64,128] {",
        "  %q0 = bf16[64,128]{1,0} parameter(0)",
        "  ROOT %c = bf16[64,128]{0,1} copy(%q0)",
        "}",
        "%sliced (p0: bf16[64,128]) -> bf16[2,128] {",
        "  %p0 = bf16[64,128]{1,0} parameter(0)",
        "  %f = bf16[64,128]{0,1} fusion(%p0), kind=kLoop, calls=%inner",
        "  ROOT %s = bf16[2,128]{0,1} slice(%f), slice={[4:6], [0:128]}",
        "}",
        "%whole (r0: bf16[64,128]) -> bf16[64,128] {",
        "  %r0 = bf16[64,128]{1,0} parameter(0)",
        "  %g = bf16[64,128]{0,1} fusion(%r0), kind=kLoop, calls=%inner",
        "  ROOT %n = bf16[64,128]{0,1} negate(%g)",
        "}",
    ])  # fmt: skip
    found = program(
        *PARAMETERS,
        "%few = bf16[2,128]{0,1:S(1)} fusion(%w), kind=kLoop, calls=%sliced",
        "ROOT %all = bf16[64,128]{0,1:S(1)} fusion(%w), kind=kLoop, calls=%whole",
        before=body,
    )
    assert found.traffic() == {"few": 2 * 128 * 2, "all": 64 * 128 * 2}


def test_an_update_in_place_writes_the_update():
    body = "\n".join([
        "%body (p0: bf16[64,128], p1: bf16[2,128], p2: s32[]) -> bf16[64,128] {",
        "  %p0 = bf16[64,128]{1,0} parameter(0)",
        "  %p1 = bf16[2,128]{1,0} parameter(1)",
        "  %p2 = s32[] parameter(2)",
        "  ROOT %u = bf16[64,128]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)",
        "}",
    ])  # fmt: skip
    found = program(
        *PARAMETERS,
        "%new = bf16[2,128]{1,0:S(1)} parameter(3)",
        "%at = s32[]{:S(2)} parameter(4)",
        "ROOT %out = bf16[64,128]{1,0} fusion(%w, %new, %at), kind=kLoop, calls=%body",
        before=body,
    )
    assert found.traffic() == {"out": 2 * 128 * 2}


def test_kernels_copies_of_pools_aliases_and_collectives():
    found = program(
        *PARAMETERS,
        f"%paged_write.3 = bf16[5,2,16,128]{{3,2,1,0}} custom-call(%x, %pool), {KERNEL}",
        "%copy.1 = bf16[5,2,16,128]{3,2,1,0:S(1)} copy(%paged_write.3)",
        "%ar = f32[8,128]{1,0:S(1)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add",
        "ROOT %t = (bf16[5,2,16,128]{3,2,1,0}) tuple(%paged_write.3)",
    )
    [kernel] = found.kernels
    assert (kernel.kernel_name, kernel.number("bytes_accessed")) == ("paged_write", 4096)
    assert found.copies_of({(5, 2, 16, 128)}) == ["copy.1"] and found.copies_of({(64, 128)}) == []
    assert found.aliased_parameters() == {1, 3}
    assert [number for number, _ in found.parameters()] == [0, 1, 2]
    assert found.between_chips() == 8 * 64 * 2
    assert found.traffic() == {"copy.1": 5 * 2 * 16 * 128 * 2}, "a kernel speaks for itself"


def test_a_program_that_takes_nothing_over():
    found = program(*PARAMETERS, "ROOT %t = (bf16[64,128]{1,0}) tuple(%w)", header="HloModule jit_f")
    assert found.aliased_parameters() == set()
    with pytest.raises(KeyError, match="no instruction nothing"):
        found.buffer("nothing")
