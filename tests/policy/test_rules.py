from __future__ import annotations

import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.policy import OPS, PRESETS, Message, Place, in_place, load_policy, place
from hybridcomp.policy.message import ROOTED
from hybridcomp.policy.toml import parse_policy

EXAMPLE = """
min_bytes = 1000
exclude = ["*.bias", "*norm*"]
codec = "bf16"

[dp]
min_bytes = 4
all_reduce = { codec = ["powersgd:rank=4", "int4:block=64"], feedback = "ef", warmup_steps = 10 }

[tp]
codec = "int8:block=128"
backward = { codec = "fp16" }

[pp]
forward = "int8"
backward = { min_bytes = 0 }
"""


def message(axis="dp", op="all_reduce", phase=None, nbytes=1 << 20, dtype=DType.FLOAT32, **more):
    return Message(axis, op, phase, dtype, nbytes, **more)


@pytest.fixture(scope="module")
def policy():
    return parse_policy(EXAMPLE, "example.toml")


@pytest.mark.parametrize(
    ("asked", "spec"),
    [
        (message("ep", "all_to_all"), "bf16"),  # nothing said: the top level
        (message("dp", "all_gather"), "bf16"),
        (message("dp", shape=(512, 512), name="w"), "powersgd:rank=4:seed=0"),
        (message("dp", shape=(512, 512)), "int4:block=64"),  # no name to keep a residual by: the next codec
        (message("dp", shape=(262144,)), "int4:block=64"),  # no matrix: the next codec
        (message("tp"), "int8:block=128"),
        (message("tp", phase="forward"), "int8:block=128"),
        (message("tp", phase="backward"), "fp16"),
        (message("pp", "send", phase="forward"), "int8:block=128"),
        (message("pp", "send", phase="backward", nbytes=8), "bf16"),
        (message("pp", "send"), "bf16"),
    ],
)
def test_the_innermost_rule_wins(policy, asked, spec):
    assert policy.choose(asked).codec.spec == spec


def test_an_operation_goes_before_a_phase():
    """A section that names both: what it says of the operation holds, for settings that the phase has, too."""
    text = (
        '[tp]\nbackward = {{ codec = "fp8", warmup_steps = 9 }}\n{} = {{ codec = "int4", min_bytes = 8 }}\n'
    )
    for op in OPS:
        policy = parse_policy(text.format(op), "it")
        for phase in ("forward", "backward", None):
            choice = policy.choose(message("tp", op, phase=phase, step=3))
            assert (choice.codec.name, choice.min_bytes) == ("int4", 8), (op, phase)
        other = next(one for one in OPS if one not in (op, *ROOTED))
        assert policy.choose(message("tp", other, phase="backward", step=9)).codec.name == "fp8"
        assert not policy.choose(message("tp", other, phase="backward", step=8)).compresses


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (message("tp", nbytes=999), "below min_bytes (1000)"),
        (message("dp", nbytes=3), "below min_bytes (4)"),
        (message("dp", name="h.0.attn.bias"), "excluded by '*.bias'"),
        (message("dp", name="h.0.norm1.weight"), "excluded by '*norm*'"),
        (message("dp", step=9), "warm-up (10 steps)"),
        (
            message("dp", dtype=DType.INT32),
            "int32 is not floating-point; allowed: float32, float64, float16, bfloat16",
        ),
        (message("dp", "broadcast"), "broadcasts are exact unless named"),
    ],
)
def test_what_is_not_compressed_says_why(policy, asked, reason):
    choice = policy.choose(asked)
    assert not choice.compresses
    assert choice.feedback is None
    assert choice.reason == reason


def test_codecs_that_leave_most_out_need_a_residual(policy):
    for asked in (
        message("dp", shape=(512, 512)),
        message("dp", shape=(512, 512), name="w", remembers=False),
    ):
        assert policy.choose(asked).codec.spec == "int4:block=64"
    only = parse_policy('dp.all_reduce = { codec = "topk", feedback = "ef" }', "it")
    choice = only.choose(message("dp"))
    assert choice.codec.name == "none"
    assert choice.reason == "topk relies on error feedback, which keeps nothing of this message"
    assert parse_policy('dp.all_reduce = "topk"', "it").choose(message("dp")).codec.name == "topk"
    assert policy.choose(message("dp", shape=(99,), name="w", remembers=False, step=10)).feedback is None


def test_feedback_belongs_to_its_codec(policy):
    assert policy.choose(message("dp", step=10)).feedback == "ef"
    assert policy.choose(message("dp", "all_gather")).feedback is None


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("broadcast", "broadcasts are exact unless named"),
        ("reduce", "reductions to one rank are exact unless named"),
    ],
)
def test_what_is_exact_unless_named(op, reason):
    general = parse_policy('codec = "int8"\n[dp]\nall_reduce = "int4"\n', "test")
    assert general.choose(message("dp", op)).reason == reason
    named = parse_policy(f'codec = "int8"\n[dp]\n{op} = "int4"\n', "test")
    assert named.choose(message("dp", op)).codec.name == "int4"
    assert not named.choose(message("tp", op)).compresses
    phases = parse_policy('[dp]\nforward = "int4"\n', "test")  # names no operation
    assert phases.choose(message("dp", "all_gather", phase="forward")).codec.name == "int4"
    assert not phases.choose(message("dp", op, phase="forward")).compresses


@pytest.mark.parametrize("op", OPS)
def test_a_codec_as_policy_carries_everything_but_scalars(op):
    for policy in (load_policy("int8:block=64"), load_policy(hc.get_codec("int8:block=64"))):
        assert policy.choose(message("any", op, nbytes=4096)).codec.spec == "int8:block=64"
        spared = policy.choose(message("any", op, nbytes=4092))
        assert (spared.codec.name, spared.reason) == ("none", "below min_bytes (4096)")
        assert policy.least_bytes("any", op) == 4096
        assert not policy.choose(message("any", op, dtype=DType.INT64)).compresses


@pytest.mark.parametrize(
    "spec", ["int8", "int8:block=64", "bounded:1e-3", "topk:ratio=0.01:values=(int8:block=64)"]
)
@pytest.mark.parametrize("least", [0, 1000])
def test_a_codec_as_policy_may_say_from_which_size(spec, least):
    for policy in (load_policy(f"{spec}:min_bytes={least}"), load_policy(f"{spec},min_bytes={least}")):
        assert policy.choose(message("any", nbytes=1000)).codec == hc.get_codec(spec)
        assert policy.choose(message("any", nbytes=996)).compresses == (least == 0)
        assert load_policy(policy.name) == policy != load_policy(spec)  # one rank's name is loaded by others


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    policy = load_policy(name)
    assert policy.name == name
    assert policy.compresses == (name != "none")
    policy.require_axes(["dp"])  # presets may speak of axes that a mesh lacks
    assert load_policy(policy) is policy


def test_onebit_has_signs_for_momenta_and_finer_codecs_for_gradients():
    policy = load_policy("onebit")
    signs = policy.choose(message("momentum", name="h.0.mlp.fc.bias", nbytes=1024))
    assert (signs.codec.name, signs.feedback) == ("sign", "ef")
    gradients = policy.choose(message("dp", name="h.0.mlp.fc.weight", shape=(1024, 256)))
    assert (gradients.codec.spec, gradients.feedback) == ("int8:block=128", None)


def test_hybrid_is_aggressive_on_dp_and_mild_elsewhere():
    policy = load_policy("hybrid")
    dp = policy.choose(message("dp", name="h.0.mlp.fc.weight", shape=(1024, 256)))
    assert dp.feedback == "ef"
    for axis, op in (("tp", "all_reduce"), ("pp", "send")):
        mild = policy.choose(message(axis, op, phase="backward"))
        assert mild.feedback is None
        assert dp.codec.ratio(1 << 18) > mild.codec.ratio(1 << 18) > 3
    assert not policy.choose(message("dp", name="h.0.mlp.fc.bias")).compresses
    assert policy.choose(message("dp", name="tok_embed.weight")) == dp
    assert policy.choose(message("tp", "all_reduce", hosts=1)).reason == "all ranks are on one host"


def test_those_of_the_paper_take_gradients_and_activations_apart():
    gradients = message("dp", shape=(1 << 10, 1 << 8))
    activations = [message("tp", "all_reduce", phase="forward"), message("pp", "send", phase="backward")]
    for name, mild in (("mzhybrid", "mpc:lag=6"), ("zhybrid", "zfp:rate=16")):
        policy = load_policy(name)
        chosen = policy.choose(gradients)
        assert (chosen.codec.spec, chosen.feedback) == ("zfp:rate=8", None)
        assert [policy.choose(m).codec.spec for m in activations] == [mild, mild]


def test_the_digest_is_of_what_is_decided():
    a = parse_policy('[dp]\ncodec = "int8"\nmin_bytes = 5\n', "a")
    b = parse_policy('# other layout\n[dp]\nmin_bytes = 5\ncodec = "int8:block=128"\n', "b")
    c = parse_policy('[dp]\ncodec = "int8"\nmin_bytes = 6\n', "c")
    assert a.digest == b.digest != c.digest
    assert len({a, b, c}) == 3  # names differ
    assert a.digest != load_policy("int8").digest


def test_codecs_that_may_be_used(policy):
    assert [c.name for c in policy.codecs("pp", "send")] == ["bf16", "int8"]
    assert load_policy("none").codecs("pp", "send") == ()


def test_a_missing_codec_says_which_sections_there_are():
    policy = parse_policy('[dp]\nall_reduce = "int8"\n[tp]\ncodec = "fp16"\n', "p.toml")
    reasons = {axis: policy.choose(message(axis, "send")).reason for axis in ("default", "dp")}
    assert reasons == {
        "default": "policy p.toml has sections dp, tp; this group's axis is default",
        "dp": "policy p.toml names no codec for send of axis dp",
    }
    exact = parse_policy('[dp]\ncodec = "none"\n', "p.toml")
    assert exact.choose(message("default")).reason == "the policy says none"


def test_hybrid_compresses_the_sums_of_a_program_without_a_mesh():
    policy = load_policy("hybrid")
    for op in ("all_reduce", "reduce_scatter"):
        assert policy.choose(message("default", op)).codec.spec == "int8:block=128"
    for op in ("all_gather", "broadcast", "all_to_all", "send"):
        assert not policy.choose(message("default", op)).compresses
    assert not policy.choose(message("default", nbytes=1000)).compresses


def test_within_a_host_nothing_need_be_compressed():
    text = '[tp]\ncodec = "int8"\nbetween_hosts = true\nbackward = "int4"\n'
    policy = parse_policy(text, "hosts.toml")
    choice = policy.choose(message("tp", "all_reduce", hosts=1))
    assert (choice.codec.name, choice.reason) == ("none", "all ranks are on one host")
    for hosts in (2, None):  # with an unknown number of hosts, it is compressed
        assert policy.choose(message("tp", "all_reduce", hosts=hosts)).codec.name == "int8"
    # a level with a codec of its own takes nothing of the level around it that belongs to a codec
    assert policy.choose(message("tp", "all_reduce", "backward", hosts=1)).codec.name == "int4"
    assert policy.digest != parse_policy(text.replace("true", "false"), "hosts.toml").digest
    assert not policy.places


PLACES = """
codec = "int8"
[pp]
forward = { codec = "int8", from_layer = 2 }
backward = { codec = "int4", feedback = "ef", only = "cool-down", from_layer = 1 }
[dp]
all_reduce = { codec = "int4", stages = 2 }
"""


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (message("pp", "send", "forward", layer=1), "layer 1 is before from_layer 2"),
        (message("pp", "send", "backward", part="steady", layer=4), "not in the cool-down"),
        (message("pp", "send", "backward", part="cool-down", layer=0), "layer 0 is before from_layer 1"),
        (message("dp", stage=2), "stage 2 is not among the first 2"),
    ],
)
def test_what_belongs_to_other_places_goes_uncompressed(asked, reason):
    choice = parse_policy(PLACES, "places.toml").choose(asked)
    assert (choice.codec.name, choice.reason) == ("none", reason)


@pytest.mark.parametrize(
    ("asked", "codec"),
    [
        (message("pp", "send", "forward", layer=2, part="steady"), "int8"),
        (message("pp", "send", "forward"), "int8"),
        (message("pp", "send", "backward", part="cool-down", layer=1), "int4"),
        (message("pp", "send", "backward"), "int4"),  # without part and layer it is not left out
        (message("dp", stage=1), "int4"),
        (message("dp"), "int4"),
        (message("dp", "all_gather", stage=5), "int8"),
    ],
)
def test_what_belongs_there_or_nowhere_is_compressed(asked, codec):
    assert parse_policy(PLACES, "places.toml").choose(asked).codec.name == codec


def test_places_are_part_of_the_rules():
    texts = [
        PLACES,
        *(PLACES.replace(f", {key}", "") for key in ('only = "cool-down"', "stages = 2", "from_layer = 2")),
    ]
    policies = [parse_policy(text, "f.toml") for text in texts]
    assert len({policy.digest for policy in policies}) == len(texts)
    assert policies[0].places
    assert not load_policy("hybrid").places


def test_places_are_said_one_within_another():
    with in_place(stage=1, link="up"):
        with in_place(layer=3, stage=2):
            assert place() == Place(2, 3, None, "up")
        assert place() == Place(1, None, None, "up")
    assert place() == Place()
    with (
        pytest.raises(ValueError, match="a part is 'steady' or 'cool-down', not 'warm'"),
        in_place(part="warm"),
    ):
        pass
