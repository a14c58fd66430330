"""Is what an explanation says of a step true of its trace?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import punar
from punar.errors import PlanMismatch, UsageError
from punar.ir import Trace
from punar.ir.lineage import NEVER
from punar.plan import Plan, make_plan, simulate
from punar.plan.playback import play
from punar.planning import moved
from punar.reporting.explain import Explanation, explain_step
from punar.reporting.explain.advice import CHUNKS, advise, floor_of, freed_early, loss_head, shrunk
from punar.reporting.explain.gradients import gradients_of
from punar.reporting.explain.holders import OPTIMIZER, grouped
from punar.reporting.explain.places import pattern_of
from punar.solvers import least, solve
from tests.solvers.problems import small_traces
from tests.synthetic import Step, trace_of, transformer

MIB = 1 << 20


def language_model(*, logits: int = 24 * MIB, scratch: int = 0) -> Trace:
    """Blocks, and a head whose logits and loss are larger than all of them."""
    width = MIB
    program = [Step(name="embed", reads=(-1,), bytes=width, module="GPT.embed")]
    for number in range(4):
        module = f"GPT.h.{number}.mlp"
        at = len(program) - 1
        program += [
            Step(name="aten.mm.default", kind="matmul", reads=(at,), bytes=width, time_ns=9_000_000, saves_inputs=True, module=module),
            Step(name="aten.gelu.default", reads=(at + 1,), bytes=4 * width, time_ns=50_000, saves_inputs=True, module=module),
            Step(name="down", reads=(at + 2,), bytes=width, saves_inputs=True, module=module, scratch=scratch),
        ]
    at = len(program) - 1
    program += [
        Step(name="aten.mm.default", kind="matmul", reads=(at,), bytes=logits, saves_inputs=True, module="GPT.head"),
        Step(name="aten._log_softmax.default", reads=(at + 1,), bytes=logits, saves_output=True),
        Step(name="aten.nll_loss_forward.default", reads=(at + 2,), bytes=4),
    ]
    return with_origins(trace_of(program))


def with_origins(trace: Trace) -> Trace:
    """Says whose backward each operator is, by the made-up names."""
    forward = {f"{op.name}_backward": op.id for op in trace.forward_ops}
    modules = iter(reversed(trace.forward_ops))
    ops, origin = list(trace.ops), None
    for op in trace.ops:
        if op.is_backward and op.name != "add":
            origin = next(modules)
            while f"{origin.name}_backward" != op.name:
                origin = next(modules)
            assert op.name in forward
        if op.is_backward and origin is not None:
            ops[op.id] = replace(op, forward=origin.id)
    return replace(trace, ops=tuple(replace(op, has_grad_mode=True, source="gpt.py:7") if not op.is_backward else op for op in ops))


def explained(trace: Trace, plan: Plan | None = None) -> Explanation:
    return explain_step(trace, plan, least(trace))


@pytest.mark.parametrize("share", [None, 0.7, 0.5])
def test_holders_add_up_to_the_simulated_peak(share: float | None) -> None:
    trace = transformer(4)
    plain = simulate(trace, (0,) * len(trace.values)).peak_bytes
    plan = None if share is None else solve(trace, int(share * plain))
    found = explained(trace, plan)
    assert found.peak.bytes == (plain if plan is None else plan.peak_bytes)
    assert sum(holder.bytes for holder in found.holders) == found.peak.bytes
    assert sum(holder.bytes for holder in grouped(found.holders)) == found.peak.bytes
    assert found.peak.own_bytes + found.peak.alive_bytes + found.peak.resident_bytes == found.peak.bytes


def test_the_peak_is_named_where_it_is() -> None:
    found = explained(language_model())
    assert (found.peak.operator, found.peak.phase, found.peak.module) == (
        "aten._log_softmax.default_backward",
        "backward",
        "(outside modules)",
    )
    assert found.peak.source == "gpt.py:7"
    assert "backward of aten._log_softmax.default, gpt.py:7" in str(found)


def test_every_saved_storage_is_in_one_choice() -> None:
    trace = language_model()
    plan = solve(trace, int(0.8 * simulate(trace, (0,) * len(trace.values)).peak_bytes))
    found = explained(trace, plan)
    made = {trace.values[save.value].storage for save in trace.saves if trace.values[save.value].producer >= 0}
    assert sum(choice.values for choice in found.choices) == len(made)
    assert sum(choice.bytes for choice in found.choices) == sum(trace.storages[storage].bytes for storage in made)
    assert sum(found.to_dict()["totals"].values()) == sum(choice.bytes for choice in found.choices)


def test_the_price_is_what_replays_take() -> None:
    """The activation is made by a quick operator from what stays; the matrix product before it takes longest."""
    trace = language_model()
    cheap = {op.outputs[0] for op in trace.forward_ops if op.name == "aten.gelu.default"}
    plan = make_plan(trace, [int(value.id in cheap) for value in trace.values], solver="greedy", budget_bytes=1 << 40)
    choices = {(choice.operator, choice.module): choice for choice in explained(trace, plan).choices}
    gelu, product = choices["aten.gelu.default", "GPT.h.*.mlp"], choices["aten.mm.default", "GPT.h.*.mlp"]
    assert (gelu.action, gelu.values, gelu.bytes) == ("recomputed", 4, 16 * MIB)
    assert gelu.remake_ns_per_mib == (50_000 + trace.overhead_ns) / 4
    assert gelu.replay_ns == 4 * (50_000 + trace.overhead_ns)
    assert (product.action, product.remake_ns_per_mib) == ("kept", 9_000_000 + trace.overhead_ns)
    assert explained(trace, plan).dropped_ns_per_mib == gelu.remake_ns_per_mib
    assert (gelu.why, product.why) == ("cheap to make again", "dearer to make again than what is dropped")


def test_a_chunked_loss_is_advised_where_the_logits_set_the_least_peak() -> None:
    trace = language_model()
    plan = least(trace)
    (advice,) = (advice for advice in explained(trace).advice if advice.kind == "chunked loss")
    smaller = simulate(language_model(logits=24 * MIB // CHUNKS), plan.hold_from, is_closed=True).peak_bytes
    assert advice.peak_bytes == smaller + 2 * MIB < plan.peak_bytes  # what the head reads, and its gradient, of all chunks
    assert "Compute the loss in 8 chunks: what aten.mm.default (GPT.head, gpt.py:7) makes" in advice.text


def test_it_is_not_where_the_logits_are_small() -> None:
    trace = language_model(logits=1024, scratch=64 * MIB)
    assert loss_head(trace) is not None
    assert "chunked loss" not in [advice.kind for advice in explained(trace).advice]


def test_half_a_batch_halves_all_but_gradients() -> None:
    trace = trace_of(
        [Step(name="a", reads=(-1,), bytes=1000), Step(name="b", reads=(0,), bytes=1000, saves_inputs=True, gradient_bytes=600)]
    )
    gradients = gradients_of(trace)
    assert [trace.storages[storage].bytes for storage in gradients] == [600]
    halved = shrunk(trace, range(len(trace.ops)), 2, gradients)
    assert [storage.bytes for storage in halved.storages if not storage.is_source] == [
        storage.bytes if storage.id in gradients else storage.bytes // 2 for storage in trace.storages if not storage.is_source
    ]
    assert next(op.peak_bytes for op in halved.ops if op.name == "b_backward") == 600 + 500


def test_gradients_freed_early_lower_the_peak_by_what_they_are() -> None:
    trace = trace_of(
        [
            Step(name="first", reads=(-1,), bytes=1000, scratch=9000, gradient_bytes=10),
            Step(name="last", reads=(0,), bytes=1000, saves_inputs=True, gradient_bytes=4000),
        ]
    )
    hold = (0,) * len(trace.values)
    early = freed_early(trace, gradients_of(trace))
    assert simulate(trace, hold).peak_bytes - simulate(early, hold).peak_bytes == 4000


@given(small_traces(), st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_plan_goes_below_the_floor(trace: Trace, data: st.DataObject) -> None:
    hold = [data.draw(st.sampled_from([0, 1, 2, NEVER])) for _ in trace.values]
    assert floor_of(trace).bytes <= simulate(trace, hold).peak_bytes


def test_the_floor_is_what_one_operator_reads_and_allocates() -> None:
    trace = language_model()
    floor = floor_of(trace)
    assert floor.bytes == trace.resident_bytes + 2 * 24 * MIB  # reads the logits, makes as much
    assert trace.ops[floor.op].name == "aten._log_softmax.default"


def test_states_and_gradients_from_before_are_told() -> None:
    trace = transformer(2)
    heavy = replace(trace, resident_bytes=100 * MIB, meta={"optimizer_bytes": str(60 * MIB), "gradient_bytes": str(30 * MIB)})
    found = explained(heavy)
    texts = {advice.kind: advice.text for advice in found.advice}
    assert texts["fewer bytes a state"].startswith(
        "The optimizer's states, not activations, are most of the resident bytes: 60.0 MiB, 60% of"
    )
    assert "Gradients from before the step are 30.0 MiB" in texts["no gradients before"]
    assert next(holder.resident_bytes for holder in found.holders if holder.module == OPTIMIZER) == 60 * MIB


def test_what_is_held_since_nobody_knows_it_to_be_pure_is_told() -> None:
    program = [
        Step(name="mylib.kernel", reads=(-1,), bytes=8 * MIB, saves_output=True, is_replayable=False),
        Step(name="aten.sum.default", reads=(0,), bytes=4, saves_inputs=True),
    ]
    trace = trace_of(program)
    plan = least(trace)
    (advice,) = (advice for advice in advise(trace, plan, play(trace, plan.hold_from).peak) if advice.kind == "replayable")
    assert "mylib.kernel is not known to be pure" in advice.text
    assert advice.is_bound
    assert advice.peak_bytes == plan.peak_bytes - 8 * MIB


def test_an_optimizer_that_came_since_is_resident() -> None:
    """A ``Remat``'s plan counts what was not there yet when its step was recorded."""
    trace = transformer(2)
    plan = least(trace)
    found = punar.explain(punar.Profile(trace=trace), moved(plan, 5 * MIB))
    assert found.peak.bytes == found.least.bytes == plan.peak_bytes + 5 * MIB
    assert sum(holder.bytes for holder in found.holders) == found.peak.bytes


def test_a_peak_outside_of_the_passes_is_told() -> None:
    trace = transformer(2)
    plan = replace(least(trace), peak_bytes=1 << 40)
    found = explain_step(trace, plan, least(trace))
    assert "The peak of 1.0 TiB is lower where what sets it allocates less" in str(found)
    assert found.peak.outside_bytes == 1 << 40
    assert str(found.peak).startswith(
        "1.0 TiB outside of forward and backward: an optimizer's step in the `with` block, or something else in it, sets the peak"
    )


def test_a_plan_of_another_step_is_refused() -> None:
    trace, other = transformer(2), transformer(3)
    with pytest.raises(PlanMismatch, match="asked to show a plan for the step"):
        explain_step(trace, least(other), least(trace))


def test_a_path_is_no_plan() -> None:
    profile = punar.Profile(trace=transformer(2))
    for verb in (profile.explain, profile.timeline):
        with pytest.raises(UsageError, match="asked to show a plan, found a str"):
            verb("plan.json")  # type: ignore[arg-type]


def test_dict_is_json() -> None:
    trace = language_model()
    body = json.loads(json.dumps(explained(trace, least(trace)).to_dict()))
    assert sum(holder["share"] for holder in body["holders"]) == pytest.approx(1)
    assert body["peak"]["text"].startswith(f"{body['peak']['bytes'] / MIB:.1f} MiB in ")


@pytest.mark.parametrize(
    ("module", "pattern"),
    [("GPT.h.3.mlp.0", "GPT.h.*.mlp.*"), ("UNet.enter", "UNet.enter"), ("GPT2.h2.11", "GPT2.h2.*"), ("7", "7")],
)
def test_repeated_modules_have_one_pattern(module: str, pattern: str) -> None:
    assert pattern_of(module) == pattern
