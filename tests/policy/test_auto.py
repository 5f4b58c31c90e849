"""The policy ``auto``: what it is told, what it chooses, when it changes that, and how choices are frozen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.codecs import get_codec
from hybridcomp.perfmodel import BUILT_IN, Profile
from hybridcomp.policy import Message, load_policy
from hybridcomp.policy.auto.cost import Place, estimate, refined
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.policy.auto.freeze import to_toml
from hybridcomp.policy.auto.reviews import LAG, Reviews
from hybridcomp.policy.auto.signature import Signature
from hybridcomp.policy.load import default_policy

FOUR = Place(4, 4, 1, compiled=True)
MIB = 1 << 20


def profile(megabytes_per_second: float) -> Profile:
    tier = dataclasses.replace(BUILT_IN.network, bandwidth=megabytes_per_second * 1e6, burst=0.0)
    return dataclasses.replace(BUILT_IN, network=tier)


def message(axis: str, op: str, nbytes: int = 4 * MIB, name: str | None = None, **more) -> Message:
    return Message(axis, op, None, DType.FLOAT32, nbytes, name, **more)


def decider(policy: str = "auto", speed: float = 25.0, place: Place = FOUR) -> Decider:
    return Decider(load_policy(policy), profile(speed), place)


MESSAGES = [
    message("dp", "all_reduce", name="w"),
    message("dp", "all_reduce", 64 * MIB, name="m", shape=(4096, 4096)),
    message("dp", "all_reduce"),
    message("dp", "reduce_scatter", name="w"),
    message("dp", "all_gather", MIB),
    message("fsdp", "all_gather", MIB, name="w"),
    message("tp", "all_reduce", MIB),
    message("tp", "all_gather", MIB),
    message("pp", "send", MIB),
    message("ep", "all_to_all", MIB),
    message("default", "all_reduce"),
    message("default", "all_gather"),
    message("default", "send"),
    message("dp", "broadcast"),
    message("else", "gather"),
]
SAFE = {"none", "exponent", "bf16", "int8"}
USUAL = [("aggressive", i) for i in (0, 1, 3)] + [("safe", i) for i in (2, 6, 7, 8, 9, 10)]


@pytest.mark.parametrize("speed", [2.0, 25.0, 117.0, 5000.0])
def test_no_choice_is_below_the_class_of_its_axis(speed):
    found = decider(speed=speed)
    classes = {i: fidelity for fidelity, i in USUAL}
    for number, each in enumerate(MESSAGES):
        choice = found.choose(each)
        match classes.get(number, "exact"):
            case "exact":
                assert choice.codec.lossless, (each, choice)
            case "safe":
                assert choice.codec.name in SAFE, (each, choice)
                assert choice.feedback is None
            case "aggressive":
                assert choice.codec.lossless or choice.feedback == "ef", (each, choice)
    for decision in found.watched():  # nor is anything that is tried
        for option in decision.options:
            if decision.fidelity == "exact":
                assert option.codec.lossless
            elif decision.fidelity == "safe" or not decision.signature.named:
                assert option.codec.name in SAFE


def test_over_a_slow_link_gradients_go_by_four_bits_or_low_rank():
    found = decider(speed=25.0)
    assert found.choose(MESSAGES[0]).codec.name == "int4"
    assert found.choose(MESSAGES[1]).codec.name == "powersgd"
    assert "none" in found.choose(MESSAGES[0]).reason  # says what uncompressed would take


def test_within_a_host_with_slow_codecs_nothing_is_compressed():
    slow = {
        spec: dataclasses.replace(s, encode=1e8, decode=1e8, add=1e8) for spec, s in BUILT_IN.codecs.items()
    }
    slow["none"] = BUILT_IN.codecs["none"]
    found = Decider(load_policy("auto"), dataclasses.replace(BUILT_IN, codecs=slow), Place(4, 1, 4, True))
    assert {found.choose(each).codec.name for each in MESSAGES} == {"none"}


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_of_hosts_of_several_ranks_bytes_are_counted_once_a_host(op):
    """Predict that as much leaves a host of four ranks as would leave a host of one."""
    codec, slow, whole = get_codec("int8"), profile(5.0), 64 * MIB

    def kind(place: Place) -> Signature:
        return Signature("dp", op, "float32", whole // (place.ranks if op == "all_gather" else 1), True, 0)

    one, four = Place(2, 2, 1, compiled=False), Place(8, 2, 4, compiled=False)
    of_one, of_four = (estimate(slow, place, kind(place), codec) for place in (one, four))
    assert of_four.wire == pytest.approx(of_one.wire, rel=1e-3)
    assert refined(slow, four, kind(four), codec) == pytest.approx(of_four.wire, rel=0.2)
    assert refined(slow, four, kind(four), get_codec("none")) == pytest.approx(4 * of_four.wire, rel=0.2)


@pytest.mark.parametrize(
    ("spec", "axis", "op", "fidelity"),
    [
        ("auto", "dp", "all_reduce", "aggressive"),
        ("auto:dp=safe", "dp", "all_reduce", "safe"),
        ("auto:dp=safe", "dp", "all_gather", "exact"),
        ("auto:dp.all_gather=safe", "dp", "all_gather", "safe"),
        ("auto:tp=exact,pp=exact", "tp", "all_reduce", "exact"),
        ("auto:x=safe", "x", "all_gather", "safe"),
        ("auto:x=aggressive", "x", "broadcast", "exact"),
        ("auto:exact", "dp", "all_reduce", "exact"),
        ("auto:exact,dp=safe", "dp", "all_reduce", "safe"),
        ("auto:class=safe", "x", "all_gather", "safe"),
        ("auto:safe", "dp", "all_gather", "exact"),
        ("auto:aggressive", "x", "broadcast", "exact"),
        ("exact", "ep", "all_to_all", "exact"),
    ],
)
def test_classes_are_settable(spec, axis, op, fidelity):
    assert load_policy(spec).auto.fidelity(axis, op) == fidelity


def test_sections_of_a_file_win_over_auto(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text('[auto]\ndp = "safe"\n"dp.all_gather" = "safe"\n[tp]\ncodec = "zfp:rate=8"\n')
    found = decider(str(file))
    assert found.choose(message("tp", "all_reduce")).codec.name == "zfp"
    assert found.choose(message("dp", "all_reduce", name="w")).codec.name == "int8"
    assert found.choose(message("dp", "all_gather")).codec.name == "int8"


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("auto:dp=fast", "class of dp must be one of exact, safe, aggressive, not 'fast'"),
        ("auto:dp", "'dp' must be CLASS, AXIS=CLASS"),
        ("auto:safe,exact", "class stands there twice"),
        ("auto:dp=safe,dp=exact", "dp stands there twice"),
        ("auto:dp.allreduce=safe", "dp.allreduce names no operation; allowed: all_reduce"),
        ("auto:=safe", "'=safe' must be CLASS, AXIS=CLASS"),
    ],
)
def test_a_wrong_spec_ends_in_one_line(spec, match):
    with pytest.raises(hc.PolicyError, match=match) as caught:
        load_policy(spec)
    assert "\n" not in str(caught.value)


CHOICE = '[[auto.choice]]\naxis = "tp"\nop = "all_reduce"\ndtype = "float32"\nbytes = 1\nnamed = false\n'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("auto = 3", "line 1, key auto: auto must be a section, not 3"),
        ('[auto]\ndp = "fast"', r"line 2, key auto\.dp: the class of dp must be one of"),
        ("[auto]\ndp = 3", r"line 2, key auto\.dp: a class must be one of"),
        ("[auto]\nchoice = 3", "choice must be tables"),
        (CHOICE, "choice 1 has no codec"),
        (CHOICE + 'codec = "int3"', "choice 1: unknown codec 'int3'"),
        (CHOICE + 'codec = "int4"', "tp.all_reduce is safe, which int4:block=128 without feedback is not"),
        (CHOICE + 'codec = "none"\nhow = 1', "choice 1 has an unknown key 'how'"),
        (CHOICE.replace("= 1\n", "= true\n") + 'codec = "none"', "bytes must be of type int, not bool"),
        (CHOICE.replace("float32", "float31") + 'codec = "none"', "choice 1: "),
    ],
)
def test_a_wrong_section_names_its_line(tmp_path, text, match):
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(hc.PolicyError, match=match) as caught:
        load_policy(str(file))
    assert "\n" not in str(caught.value)


def test_a_class_for_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(
        hc.PolicyError, match="a class for axis ep, which the mesh does not have; it has pp, dp"
    ):
        load_policy("auto:ep=safe").require_axes(["pp", "dp"])


def test_digests_tell_what_decides_apart():
    specs = "auto", "auto:dp=safe", "auto:tp=exact", "auto:exact", "auto:safe", "exact", "hybrid"
    assert len({load_policy(spec).digest for spec in specs}) == len(specs)
    assert load_policy("auto:freeze=/tmp/a.toml").digest == load_policy("auto").digest


def test_auto_is_the_default_where_a_profile_was_calibrated(tmp_path, monkeypatch):
    monkeypatch.delenv("HYBRIDCOMP_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_policy().name == "hybrid"
    BUILT_IN.write(tmp_path / "hybridcomp" / "profile.toml")
    assert default_policy().name == "auto"
    assert default_policy().default


def test_a_decision_takes_less_than_a_millisecond():
    found = decider(speed=117.0)
    found.choose(message("dp", "all_reduce", name="w", shape=(1024, 1024)))  # imports, caches
    took = []
    for nbytes in range(MIB, 16 * MIB, MIB):
        began = time.perf_counter()
        found.choose(message("dp", "all_reduce", nbytes, name="w", shape=(1024, nbytes // 4096)))
        took.append(time.perf_counter() - began)
    assert sorted(took)[len(took) // 4] < 1e-3  # whatever else this machine does at the time


# -- measuring --------------------------------------------------------------------------------------------------


def _nothing() -> None:
    """Do nothing."""


class Job:
    """Hold ranks whose operations take what a test says, with a review before each."""

    def __init__(
        self, policy: str, seconds: Callable[[int, int, str], float], ranks: int = 3, exchange: float = 1e-4
    ) -> None:
        self.seconds, self.exchange = seconds, exchange
        self.now = [0.0] * ranks
        self.deciders = [decider(policy) for _ in range(ranks)]
        self.rows: list[dict] = [{} for _ in range(ranks)]
        self.due = [0] * ranks
        self.offers: list[list[np.ndarray]] = []
        self.sent = [0] * ranks
        self.chosen: list[list[str]] = [[] for _ in range(ranks)]
        self.reviews = [
            Reviews(
                d,
                lambda r=rank: self._rows(r),
                lambda v, r=rank: self._exchange(v, r),
                _nothing,
                lambda r=rank: self.now[r],
            )
            for rank, d in enumerate(self.deciders)
        ]

    def _rows(self, rank: int) -> Iterator:
        return iter([(*key, *values) for key, values in self.rows[rank].items()])

    def _exchange(self, values: np.ndarray, rank: int) -> Callable[[], np.ndarray]:
        number = self.sent[rank]
        self.sent[rank] += 1
        self.now[rank] += self.exchange
        if number == len(self.offers):
            self.offers.append([])
        self.offers[number].append(values)
        return lambda: np.array(self.offers[number])

    def run(self, first: int, last: int, what: Message = MESSAGES[0]) -> None:
        for operation in range(first, last):
            for rank, each in enumerate(self.deciders):
                if operation >= self.due[rank]:
                    self.due[rank] = operation + self.reviews[rank].review(operation)
                choice = each.choose(what)
                self.chosen[rank].append(choice.codec.name)
                row = self.rows[rank].setdefault((what.op, choice.codec.spec, choice.reason), [0, 0, 0.0])
                took = self.seconds(rank, operation, choice.codec.name)
                self.now[rank] += took
                for i, more in enumerate((1, what.nbytes, took)):
                    row[i] += more


def test_ranks_that_measure_different_times_choose_alike_at_the_same_operation():
    def seconds(
        rank: int, operation: int, codec: str
    ) -> float:  # each rank by itself would choose another one
        return {"int8": 0.01, "int4": 0.02}.get(codec, 0.03) if rank == 1 else 0.005 * (1 + (codec == "int8"))

    job = Job("auto", seconds)
    for each in job.deciders:
        each.profile = profile(5000.0)  # so that several are tried
    job.run(0, 300)
    assert job.chosen[0] == job.chosen[1] == job.chosen[2]
    assert len(set(job.chosen[0])) > 1
    assert job.chosen[0][-1] == "int8"  # the slowest rank's times decide
    assert "measured by operation" in job.deciders[0].choices()[0].reason


@pytest.mark.parametrize("factor", [6.0, 1 / 6])
def test_a_link_that_changes_is_noticed_within_fifty_operations(factor):
    job = Job("auto", lambda rank, operation, codec: 0.0335 * (factor if operation >= 200 else 1.0))
    job.run(0, 200)
    before = job.deciders[0].version
    assert not any("times as fast" in reason for reason in reasons(job))
    job.run(200, 250)
    assert job.deciders[0].version > before
    assert job.chosen[0] == job.chosen[1] == job.chosen[2]
    assert any("times as fast from operation" in reason for reason in reasons(job))
    faster = job.deciders[0].profile.network.bandwidth / profile(25.0).network.bandwidth
    assert faster < 0.5 if factor > 1 else faster > 2


def test_a_late_rank_does_not_put_off_the_next_exchanges():
    """The cost of an exchange is counted without the wait for a rank that comes late to it."""
    job = Job(
        "auto", lambda rank, operation, codec: 0.0335 * (6.0 if operation >= 200 else 1.0), exchange=2.0
    )
    job.run(0, 40)
    assert job.sent[0]
    job.exchange = 1e-4
    job.run(40, 250)
    assert any("times as fast from operation" in reason for reason in reasons(job))


def reasons(job: Job) -> list[str]:
    return [choice.reason for each in job.deciders for choice in each.choices()]


def test_a_message_that_does_not_come_again_says_nothing_of_the_link():
    job = Job("auto", lambda rank, operation, codec: 0.0335)
    for kind in MESSAGES:
        job.run(0, 1, kind)
    job.run(1, 300)
    assert not any("times as fast" in reason for reason in reasons(job))


def test_times_that_waver_are_no_other_link():
    noise = np.random.default_rng(1).uniform(0.85, 1.15, 2000)
    job = Job("auto", lambda rank, operation, codec: 0.06 * noise[operation])
    job.run(0, 150)
    settled = job.deciders[0].version
    job.run(150, 1000)
    assert job.deciders[0].version == settled


def test_a_stall_that_passes_is_no_other_link():
    job = Job("auto", lambda rank, operation, codec: 0.06 * (9.0 if 300 <= operation < 310 else 1.0))
    job.run(0, 1000)
    assert not any("times as fast" in reason for reason in reasons(job))


def test_short_messages_do_not_tell_of_the_link():
    short = message("dp", "all_reduce", 1 << 14, name="w", shape=(64, 64))
    job = Job("auto", lambda rank, operation, codec: 1e-3 * (6.0 if operation >= 400 else 1.0))
    job.run(0, 400, short)
    sent = job.sent[0]
    job.run(400, 1000, short)
    assert job.sent[0] == sent
    assert not any("times as fast" in reason for reason in reasons(job))


def test_few_exchanges_where_operations_are_short():
    """Operations of ten microseconds are not to see what exchanges of some more cost."""
    job = Job("auto", lambda rank, operation, codec: 1e-5)
    job.run(0, 3000)
    early = job.sent[0]
    job.run(3000, 6000)
    assert job.sent[0] - early <= 3000 * 1e-5 * 0.005 / job.exchange + 1
    slow = Job("auto", lambda rank, operation, codec: 1e-2)
    slow.run(0, 400)
    assert slow.sent[0] > 400 // (12 + LAG) - 8


def test_what_error_feedback_owes_is_sent_before_a_name_goes_uncompressed():
    found = decider()
    named = MESSAGES[0]
    assert found.choose(named).feedback == "ef"
    decision = found.watched()[0]
    decision.use(dataclasses.replace(decision.options[0], codec=hc.get_codec("none"), feedback=None), "test")
    owed = found.choose(named)
    assert (owed.codec.name, owed.feedback, owed.once) == ("none", "ef", True)
    assert owed.encodes
    later = found.choose(named)
    assert (later.codec.name, later.feedback, later.once) == ("none", None, False)
    assert not found.choose(dataclasses.replace(named, name="other")).once  # this name never had feedback


# -- frozen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["auto:tp=exact", "auto:safe,dp=aggressive"])
def test_frozen_choices_are_the_same_without_a_profile(tmp_path, spec):
    found = decider(spec)
    wanted = {each: found.choose(each) for each in MESSAGES}
    file = tmp_path / "frozen.toml"
    file.write_text(to_toml(load_policy(spec).auto, found.written, found.choices()))
    frozen = load_policy(str(file))
    assert not frozen.decides
    for each, choice in wanted.items():
        again = frozen.choose(each)
        assert (again.codec, again.feedback) == (choice.codec, choice.feedback), each
    near = frozen.choose(dataclasses.replace(MESSAGES[0], nbytes=5 * MIB))
    assert near.codec == wanted[MESSAGES[0]].codec
    assert "frozen: auto: " in near.reason
    assert frozen.choose(message("cp", "all_reduce")).reason.endswith("has no choice for all_reduce of cp")


def test_frozen_choices_keep_the_limits_that_they_were_made_under(tmp_path):
    (tmp_path / "p.toml").write_text('min_bytes = 9000\nexclude = ["odd\\"name*"]\n[auto]\nclass = "exact"\n')
    for spec, least, name in (("exact", 16384, None), (str(tmp_path / "p.toml"), 9000, 'odd"name 1')):
        policy, found = load_policy(spec), decider(spec, speed=2.0)
        large = message("dp", "all_reduce", MIB, name="w.bias")
        assert found.choose(large).codec.name == "exponent"
        file = tmp_path / "frozen.toml"
        file.write_text(to_toml(policy.auto, found.written, found.choices()))
        frozen = load_policy(str(file))
        for one in (
            large,
            *(message("dp", "all_reduce", size, name="w") for size in (4096, least - 4, least)),
        ):
            assert frozen.choose(one).codec.name == ("none" if one.nbytes < least else "exponent"), one
            if one.nbytes < least:
                assert found.choose(one).reason == frozen.choose(one).reason
        assert frozen.least_bytes("dp", "all_reduce") == policy.least_bytes("dp", "all_reduce") == least
        if name:
            assert frozen.choose(message("dp", "all_reduce", MIB, name=name)).reason.startswith("excluded by")


SECTIONS = """
codec = "int8"
min_bytes = 20000
steps = { 100 = "int4" }
exclude = ["\\u00fc*", "odd\\"name*"]
[tp]
forward = "bf16"
backward = { codec = ["powersgd:rank=2", "int4"], feedback = "ef", warmup_steps = 5, exclude = ["w.*"] }
between_hosts = true
codec = "int8:block=64"
[embedding]
fused = true
all_reduce = "int4"
["odd axis"]
all_reduce = { codec = "int8", steps = { 100 = "int4" }, min_bytes = 0, algorithm = "ring" }
[auto]
class = "exact"
"""


def test_frozen_choices_keep_the_sections_of_other_axes(tmp_path):
    (tmp_path / "p.toml").write_text(SECTIONS)
    policy, found = load_policy(str(tmp_path / "p.toml")), decider(str(tmp_path / "p.toml"), speed=2.0)
    found.choose(message("dp", "all_reduce", MIB, name="w"))
    (tmp_path / "frozen.toml").write_text(to_toml(policy.auto, found.written, found.choices()))
    frozen = load_policy(str(tmp_path / "frozen.toml"))
    assert (frozen.base, frozen.axes, frozen.entries) == (policy.base, policy.axes, policy.entries)
    assert frozen.fused
    assert frozen.choose(message("dp", "all_reduce", MIB, name="w")).codec.name == "exponent"


def test_a_folder_that_is_missing_is_said_when_the_communicator_is_made(tmp_path):
    from hybridcomp.policy.auto.freeze import Freezer

    with pytest.raises(
        hc.PolicyError, match=r"cannot write the choices to .*absent.*: it is no file of a folder"
    ):
        Freezer().add(load_policy(f"auto:freeze={tmp_path}/absent/f.toml").auto, decider())


def test_the_file_is_written_whole(tmp_path):
    from hybridcomp.policy.auto.freeze import Freezer

    freezer, found = Freezer(), decider()
    found.choose(MESSAGES[0])
    freezer.add(load_policy(f"auto:freeze={tmp_path}/f.toml").auto, found)
    freezer.write()
    assert [file.name for file in tmp_path.iterdir()] == ["f.toml"]
    assert load_policy(str(tmp_path / "f.toml")).choose(MESSAGES[0]).codec == found.choose(MESSAGES[0]).codec
