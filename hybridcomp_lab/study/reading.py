"""Read a study from TOML.

.. code-block:: toml

    title = "Policies at pp 2, dp 2, tp 2"
    hosts = 4                              # of the lab; hosts * ppn ranks
    ppn = 2
    baseline = "none"                      # the variant that the others are compared with

    [train]                                # fields of `hybridcomp train`, of all runs
    pp = 2
    [grid]                                 # a variant for each combination
    policy = ["none", "naive", "hybrid"]
    schedule = ["1f1b", "2bw"]
    [policies]                             # policies of the study's own, as texts
    mine = 'dp.all_reduce = "int4"'
    [[variants]]                           # more variants, with any fields
    name = "gloo"
    backend = "gloo"
    parts = ["speed"]                      # and no loss
    [sweep]                                # a variant for each place and codec, and a picture of loss against bits
    codecs = ["int8", "int4"]
    places = { dp = 'dp.all_reduce = "CODEC"', "tp forward" = 'tp.forward = "CODEC"' }

    [loss]                                 # each variant with each seed, on unshaped links
    seeds = [1, 2, 3]
    steps = 1000
    [speed]                                # each variant at each rate, in turn, some rounds
    rates = ["200mbit", "1gbit"]
    rounds = 3
    steps = 12
    cores = "0.5,0.5,0.5,0.25"             # of each host, if not all of this machine's
    [[expect]]                             # an expected result
    faster = ["hybrid", "naive"]
    rate = "200mbit"
    [reduced]                              # changes of all this by --reduced
    loss = { seeds = [1], steps = 40 }
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from hybridcomp.errors import ConfigError, HybridcompError, printable
from hybridcomp.files import parse_toml, read_text, shown
from hybridcomp.net import Rate
from hybridcomp.net.hosts import cores_of
from hybridcomp.policy.load import PRESETS, load_policy
from hybridcomp.policy.toml import parse_policy
from hybridcomp_lab.study.plan import Expectation, Kind, Loss, Speed, Study, Variant
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import AXES, TrainConfig
from hybridcomp_lab.train.reading import fail, fields_of

_TOP: dict[str, type] = {"title": str, "about": str, "hosts": int, "ppn": int, "baseline": str}
_TABLES: dict[str, type] = {
    "train": dict,
    "grid": dict,
    "policies": dict,
    "sweep": dict,
    "loss": dict,
    "speed": dict,
}
_LISTS = ("variants", "expect")
_PARTS = ("loss", "speed")
_KINDS = get_args(Kind)


def read_study(path: str | Path, *, reduced: bool = False) -> Study:
    """Read a study's file and check all that can be checked before it runs.

    Args:
        path: path of the TOML file.
        reduced: whether to apply the changes of its table ``[reduced]``.

    Raises:
        ConfigError: the study is wrong; names the file, and the line and key where it is one key that is wrong.
        PolicyError: a policy is wrong; names it, and the line in it.
    """
    text = read_text(path, what="the study")
    document = parse_toml(text, str(path))
    changes = document.pop("reduced", None)
    reader = _Reader(str(path), text)
    if reduced:
        if not isinstance(changes, dict):
            reader.fail("reduced", "there is no table [reduced], which says what --reduced changes")
        document = _merged(document, changes)
    try:
        return reader.study(document)
    except HybridcompError as error:  # of a value: a rate, a codec, a policy's text
        if str(path) in str(error):
            raise
        raise type(error)(f"{printable(path)}: {error}") from error


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the changes made to it, table by table; a list is replaced."""
    result = dict(values)
    for key, change in changes.items():
        old = result.get(key)
        result[key] = _merged(old, change) if isinstance(old, dict) and isinstance(change, dict) else change
    return result


class _Reader:
    """Reader of the parsed document; it has the text so that its errors name a line."""

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self._text = text

    def fail(self, key: str, what: str) -> NoReturn:
        fail(self._path, self._text, key, what)

    def study(self, document: dict[str, Any]) -> Study:
        self._check_names(document)
        policies = self._policies(document)
        fields = self._fields(document.get("train", {}))
        variants = [
            *self._grid(document.get("grid", {})),
            *self._listed(document.get("variants", [])),
            *self._swept(document.get("sweep"), policies),
        ]
        study = Study(
            name=Path(self._path).stem,
            title=document.get("title", Path(self._path).stem),
            about=document.get("about", ""),
            hosts=document.get("hosts", 4),
            ppn=document.get("ppn", 1),
            baseline=document.get("baseline", variants[0].name if variants else ""),
            fields=fields,
            variants=tuple(variants),
            policies=policies,
            loss=self._loss(document.get("loss")),
            speed=self._speed(document.get("speed")),
            expectations=tuple(self._expectation(table) for table in document.get("expect", [])),
        )
        self._check(study)
        return study

    def _check_names(self, document: Mapping[str, Any]) -> None:
        for key, value in document.items():
            kind: type | None = _TOP.get(key) or _TABLES.get(key) or (list if key in _LISTS else None)
            if kind is None:
                self.fail(
                    key, f"unknown key {key!r}; allowed: {', '.join((*_TOP, *_TABLES, *_LISTS, 'reduced'))}"
                )
            tables = value if isinstance(value, list) else []
            if type(value) is not kind or not all(isinstance(table, dict) for table in tables):
                words = {
                    str: "a string",
                    int: "an integer",
                    dict: f"a table: [{key}]",
                    list: f"tables: [[{key}]]",
                }
                self.fail(key, f"must be {words[kind]}, not {shown(value)}")

    def _fields(self, table: Mapping[str, Any]) -> dict[str, Any]:
        for key in ("out", "resume"):
            if key in table:
                self.fail(key, f"a study says itself where its runs are: {key} may not be given")
        return fields_of(dict(table), self._path, self._text)

    def _policies(self, document: Mapping[str, Any]) -> dict[str, str]:
        policies = document.get("policies", {})
        for name, text in policies.items():
            if not isinstance(text, str):
                self.fail(name, f"must be the text of a policy, not {shown(text)}")
            if name in PRESETS:
                self.fail(name, "is a preset's name; give this policy another")
            parse_policy(text, f"{self._path}: policy {name}")
        return dict(policies)

    def _grid(self, table: Mapping[str, Any]) -> list[Variant]:
        for key, values in table.items():
            if not isinstance(values, list) or not values:
                self.fail(key, f"must be a list of values to run, not {shown(values)}")
        told = [key for key, values in table.items() if len(values) > 1] or list(table)[:1]
        variants = []
        for values in itertools.product(*table.values()) if table else ():
            given = self._fields(dict(zip(table, values, strict=True)))
            variants.append(Variant(" ".join(str(given[key]) for key in told), given))
        return variants

    def _listed(self, tables: list[dict[str, Any]]) -> list[Variant]:
        variants = []
        for table in tables:
            given = dict(table)
            name, parts = given.pop("name", None), given.pop("parts", list(_PARTS))
            if not isinstance(name, str) or not name:
                self.fail("variants", "each of the [[variants]] has a name")
            if not isinstance(parts, list) or not parts or not set(parts) <= set(_PARTS):
                self.fail("parts", f"must be a list of {' and '.join(_PARTS)}, not {shown(parts)}")
            variants.append(Variant(name, self._fields(given), parts=tuple(parts)))
        return variants

    def _swept(self, table: Mapping[str, Any] | None, policies: dict[str, str]) -> list[Variant]:
        """Return the sweep's variants; adds their policies."""
        if table is None:
            return []
        codecs, places = table.get("codecs"), table.get("places")
        if set(table) != {"codecs", "places"} or not isinstance(codecs, list) or not isinstance(places, dict):
            self.fail("sweep", "has a list of codecs and a table of places, and nothing else")
        variants = []
        for place, text in places.items():
            if not isinstance(text, str) or "CODEC" not in text:
                self.fail(
                    place, f"must be the text of a policy with CODEC where the codec goes, not {shown(text)}"
                )
            for codec in codecs:
                name = f"{place} {codec}"
                policies[name] = text.replace("CODEC", str(codec))
                parse_policy(policies[name], f"{self._path}: sweep, {name}")
                variants.append(Variant(name, {"policy": name}, series=place, codec=str(codec)))
        return variants

    def _loss(self, table: dict[str, Any] | None) -> Loss | None:
        if table is None:
            return None
        given = dict(table)
        seeds = given.pop("seeds", [1])
        if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
            self.fail("seeds", f"must be a list of integers, not {shown(seeds)}")
        return Loss(tuple(dict.fromkeys(seeds)), self._fields(given))

    def _speed(self, table: dict[str, Any] | None) -> Speed | None:
        if table is None:
            return None
        given = dict(table)
        rates, rounds = given.pop("rates", ["none"]), given.pop("rounds", 3)
        cores = given.pop("cores", None)
        if not isinstance(rates, list) or not rates:
            self.fail("rates", f"must be a list of rates, not {shown(rates)}")
        if type(rounds) is not int or rounds < 1:
            self.fail("rounds", f"must be a positive integer, not {shown(rounds)}")
        try:
            parsed = tuple(str(Rate.parse(str(rate))) for rate in rates)
        except ConfigError as error:
            self.fail("rates", str(error))
        if cores is not None and not isinstance(cores, str):
            self.fail(
                "cores", f"must be a text such as '0.5,0.5,0.25', a number for each host, not {shown(cores)}"
            )
        return Speed(parsed, rounds, self._fields(given), cores)

    def _expectation(self, table: dict[str, Any]) -> Expectation:
        given = dict(table)
        kinds: list[Kind] = [kind for kind in _KINDS if kind in given]
        if len(kinds) != 1:
            self.fail("expect", f"each [[expect]] has one of {', '.join(_KINDS)}")
        names = given.pop(kinds[0])
        if not isinstance(names, list) or len(names) != 2 or not all(isinstance(n, str) for n in names):
            self.fail(kinds[0], f"must be two names of variants, the better one first, not {shown(names)}")
        wrong = sorted(set(given) - {"rate", "axis", "by", "within"})
        if wrong:
            self.fail(wrong[0], f"unknown key {wrong[0]!r} of [[expect]]; allowed: rate, axis, by, within")
        rate = None if "rate" not in given else str(Rate.parse(str(given["rate"])))
        numbers = {key: self._positive(key, given[key]) for key in ("by", "within") if key in given}
        return Expectation(kinds[0], (names[0], names[1]), rate, given.get("axis"), **numbers)

    def _positive(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.fail(key, f"must be a number above 0, not {shown(value)}")
        return float(value)

    def _check(self, study: Study) -> None:
        names = [variant.name for variant in study.variants]
        if not names:
            self.fail("grid", "there is nothing to run: give [grid], [[variants]] or [sweep]")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            self.fail("variants", f"two variants are named {twice[0]!r}")
        if study.baseline not in names:
            self.fail("baseline", f"there is no variant {study.baseline!r}; there are {', '.join(names)}")
        if study.loss is None and study.speed is None:
            self.fail("loss", "there is nothing to measure: give [loss] or [speed]")
        try:
            cores_of(None if study.speed is None else study.speed.cores, study.hosts)
        except ConfigError as error:
            self.fail("cores", str(error))
        for expectation in study.expectations:
            self._check_expectation(expectation, study)
        for run in study.runs():
            self._check_run(study, run.fields, run.variant.name)

    def _check_expectation(self, expectation: Expectation, study: Study) -> None:
        part = "loss" if expectation.kind.endswith("loss") else "speed"
        known = [variant.name for variant in study.of(part)] if getattr(study, part) is not None else []
        for name in expectation.variants:
            if name not in known:
                there = f"there are {', '.join(known)}" if known else f"there is no [{part}]"
                self.fail(expectation.kind, f"no {part} is measured of a variant {name!r}; {there}")
        if expectation.kind == "faster" and (
            study.speed is None or expectation.rate not in study.speed.rates
        ):
            rates = ", ".join(study.speed.rates) if study.speed else ""
            self.fail(expectation.kind, f"rate must be one of {rates}, not {shown(expectation.rate)}")
        if expectation.axis is not None and expectation.axis not in AXES:
            self.fail("axis", f"must be one of {', '.join(AXES)}, not {shown(expectation.axis)}")

    def _check_run(self, study: Study, fields: Mapping[str, Any], name: str) -> None:
        config = TrainConfig(**fields)
        try:
            check_config(config)
            if config.policy is not None and config.policy not in study.policies:
                load_policy(config.policy)
        except HybridcompError as error:
            raise ConfigError(f"{self._path}: variant {name!r}: {error}") from error
        if config.ranks != study.hosts * study.ppn:
            raise ConfigError(
                f"{self._path}: variant {name!r}: pp * dp * tp is {config.ranks}, but hosts * ppn is "
                f"{study.hosts * study.ppn}: there is one rank for each part of the mesh"
            )
