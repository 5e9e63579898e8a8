"""Every setting of the command line: one table. `RL_PLANE_<NAME>` mirrors each flag; the flag wins.

An empty variable is an unset one. A bad value is a BadSetting that names the flag or the variable, and the fix.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rl_plane.cli.values as parse
from rl_plane.cli.values import Parse, Refused
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import MAX_PART_TIMEOUT_S, PART_TIMEOUT_S
from rl_plane.protocol.validation import MAX_LEASE_S
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S

ENV_PREFIX = "RL_PLANE_"

DEFAULT_URL = "http://127.0.0.1:8002"
DEFAULT_NATS_PORT = 4222
START_TIMEOUT_S = 600.0
"""A large model takes minutes to load; longer is a fault."""
DIALECTS = ("vllm", "sglang", "prime-rl")
NO_DIALECT = "none"
MAX_COUNT = 10_000
"""The largest fleet that was measured."""


class BadSetting(InvalidRequest):
    """A flag or a variable that can't be used; the command line exits with 2."""


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    """Its key in what `resolve` gives. None there means not set."""
    help: str
    parse: Parse | None = str
    """None: a switch, `--flag` and `--no-flag`; true or false in the environment."""
    default: Any = None
    flag: str = ""
    """`--name-with-dashes` unless another."""
    env: str = ""
    """Without the prefix; the name in capitals unless another."""
    separator: str = ""
    """Not empty: the value is a tuple, the flag may be repeated, and this splits the variable (a comma also what
    a flag was given)."""
    metavar: str = ""
    secret: bool = False
    """Never shown in help, in messages, or in a process listing."""

    @property
    def option(self) -> str:
        return self.flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + (self.env or self.name.upper())


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        # the bus
        Setting(
            "nats_url",
            f"the NATS server [{DEFAULT_NATS_URL}]",
            parse.url(("nats", "tls", "ws", "wss"), DEFAULT_NATS_URL),
            metavar="URL",
            secret=True,  # it may carry a password
        ),
        Setting("namespace", "the first part of every subject", parse.name, DEFAULT_NAMESPACE),
        Setting("component", "the fleet's name", parse.name, DEFAULT_COMPONENT),
        Setting("nats_port", "nats-server's port; 0: a free one", parse.port, DEFAULT_NATS_PORT, flag="--port"),
        Setting("nats_host", "nats-server's address", parse.host, "127.0.0.1", flag="--host"),
        Setting("up_nats_port", "nats-server's port; 0: a free one", parse.port, 0, "--nats-port", "UP_NATS_PORT"),
        Setting("store", "nats-server's folder; none: a temporary one", parse.path, metavar="DIR"),
        # a worker
        Setting("engine", "the engine: an entry point of the group rl_plane.engines"),
        Setting("engines", "the engines, N workers of each [hf]", flag="--engine", env="ENGINE", separator=","),
        Setting(
            "model", "a model directory; none: a tiny model, made from a seed", parse.directory, metavar="DIR"
        ),
        Setting("model_name", "how requests call the model; none: the directory's last part", parse.label),
        Setting(
            "weight_roots",
            "weights are read beneath these only, and the model's directory",
            parse.directory,
            (),
            "--weight-root",
            separator=os.pathsep,
            metavar="DIR",
        ),
        Setting("dtype", "the engine's dtype; none: as the checkpoint says"),
        Setting("device", "auto, cpu, cuda, or cuda:1, … (vllm: CUDA_VISIBLE_DEVICES says which)", str, "auto"),
        Setting(
            "engine_args",
            "an engine's own argument, key=value",
            parse.pair,
            (),
            "--engine-arg",
            separator=";",
            metavar="K=V",
        ),
        Setting(
            "engine_args_file",
            "an engine's own arguments, from a YAML file; --engine-arg wins",
            parse.file,
            metavar="FILE",
        ),
        Setting("instance_id", "the worker's name, 16 hex digits; none: a new one", parse.instance_id),
        Setting(
            "copies", "workers in this one process (engine fake only)", parse.whole(1, MAX_COUNT), 1, metavar="N"
        ),
        Setting("deterministic", "the same tokens whatever else is in the batch (vllm, sglang; GPU)", None, False),
        Setting("enable_memory_saver", "memory can be released and resumed (vllm, sglang; GPU)", None, False),
        Setting(
            "liveness_timeout_s",
            "how long an engine's round trip may take: a worker without one is closed meanwhile",
            parse.positive_seconds,
            5.0,
            metavar="SECONDS",
        ),
        Setting(
            "engine_hang_s",
            "a worker ends when its engine answers nothing for so long",
            parse.positive_seconds,
            60.0,
            metavar="SECONDS",
        ),
        Setting(
            "drain_s", "how long SIGTERM lets running requests take", parse.seconds(0.0), 30.0, metavar="SECONDS"
        ),
        Setting(
            "log_level",
            "debug, info, warning or error",
            parse.one_of("debug", "info", "warning", "error"),
            "info",
            metavar="LEVEL",
        ),
        # a frontend
        Setting("host", "the listeners' address", parse.host, "127.0.0.1"),
        Setting("rl_port", "the port of /v1/rl/*; 0: a free one, off: none", parse.port_or_off, 8002),
        Setting("http_port", "the generation API's port; 0: a free one, off: none", parse.port_or_off, 8000),
        Setting("admin_key", "the key of /v1/rl/*: better set in the environment", parse.key, secret=True),
        Setting("api_key", "the generation API's key: better set in the environment", parse.key, secret=True),
        Setting("insecure", "listen beyond loopback without a key", None, False),
        Setting(
            "dialects",
            "trainers' own HTTP dialects, spoken on the port of /v1/rl/*: some of vllm, sglang and prime-rl, comma "
            "separated, or none [all]",
            parse.one_of(*DIALECTS, NO_DIALECT),
            DIALECTS,
            separator=",",
            metavar="NAMES",
        ),
        Setting(
            "part_timeout_s",
            "how long the tensors of one call in a trainer's dialect may take to reach every rank; an hour at most",
            parse.seconds(0.001, MAX_PART_TIMEOUT_S),
            PART_TIMEOUT_S,
            metavar="SECONDS",
        ),
        # up
        Setting("workers", "workers of each engine", parse.whole(0, 1000), 1, metavar="N"),
        Setting("restart", "start a worker that died again", None, False),
        Setting(
            "start_timeout_s",
            "how long until all are ready",
            parse.positive_seconds,
            START_TIMEOUT_S,
            metavar="SECONDS",
        ),
        # the commands that steer
        Setting("url", "the facade", parse.url(("http", "https"), DEFAULT_URL), DEFAULT_URL),
        Setting(
            "components",
            "the components, comma separated; none: the facade's own",
            parse.name,
            None,
            "--component",
            "COMPONENT",
            ",",
            "NAME",
        ),
        Setting(
            "select_workers",
            "only these instance ids, comma separated",
            parse.instance_id,
            None,
            "--workers",
            separator=",",
            metavar="ID",
        ),
        Setting("json", "print JSON", None, False),
        Setting("timeout_s", "how long to wait", parse.positive_seconds, metavar="SECONDS"),
        Setting(
            "pause_mode",
            "keep freezes requests, wait lets them end, abort ends them; SGLang's retract and in_place are keep with "
            "and without the caches dropped",
            parse.pause_mode,
            "keep",
            metavar="MODE",
        ),
        Setting("clear_cache", "drop the prefix caches too", None),
        Setting(
            "lease_s",
            "the fleet resumes by itself after so long",
            parse.seconds(0.001, MAX_LEASE_S),
            DEFAULT_PAUSE_LEASE_S,
            metavar="SECONDS",
        ),
        Setting("version", "the trainer's word for the weights, such as step_17", parse.label, metavar="LABEL"),
        Setting("cast", "allow another float dtype than the engine's", None, False),
        Setting("keep_staged", "workers keep the weights in host memory, for deltas and peers", None, False),
        Setting("keep_pause", "leave the fleet paused after the commit", None, False),
        Setting("flush", "drop the prefix caches after the commit", None),
        Setting(
            "on_prepare_failure",
            "abort: all or none; exclude: go on without it",
            parse.one_of("abort", "exclude"),
            "abort",
            metavar="WHAT",
        ),
        Setting("min_ready", "with exclude: how many must be ready", parse.whole(1, MAX_COUNT), 1, metavar="N"),
        Setting(
            "barrier",
            "strict: two versions are never served at once; rolling: worker by worker",
            parse.one_of("strict", "rolling"),
            "strict",
            metavar="HOW",
        ),
        Setting(
            "staging",
            "host: beside the served weights; none: over them, for a model that doesn't fit twice",
            parse.one_of("host", "none"),
            "host",
            metavar="WHERE",
        ),
        Setting(
            "canary",
            "a JSON file with the token sequences that every worker scores after the swap, and what they should give; "
            "off: no worker scores anything; none: sequences that follow from the size of the vocabulary",
            parse.file_or_off,
            metavar="FILE",
        ),
        Setting(
            "on_canary_failure",
            "what happens if every worker fails the canary: rollback to the version before; exclude: no worker serves "
            "it; warn: the workers serve it",
            parse.one_of("rollback", "exclude", "warn"),
            "rollback",
            metavar="WHAT",
        ),
        Setting("adapter", "the update is of this LoRA adapter", parse.label, metavar="NAME"),
        Setting(
            "adapter_op",
            "load: a new name; swap: in place of this one; unload: it goes, without a PATH",
            parse.one_of("load", "swap", "unload"),
            "load",
            metavar="OP",
        ),
        Setting(
            "digest",
            "what the trainer published: blake3:<64 hex digits>",
            parse.matching(r"blake3:[0-9a-f]{64}", "give blake3: and 64 hex digits"),
        ),
        Setting(
            "transport",
            "by which the weights go: auto, filesystem, …",
            parse.matching(r"[A-Za-z0-9_-]{1,64}", "give a transport's name, or auto"),
            "auto",
            metavar="NAME",
        ),
        Setting(
            "options",
            "an option of the transport's own, key=value: as JSON where the value is that, else a word",
            parse.pair,
            (),
            "--option",
            "PUBLISH_OPTIONS",
            ";",
            "K=V",
        ),
        Setting(
            "root",
            "where filesystem writes: beneath the workers' weight roots",
            parse.path,
            env="PUBLISH_ROOT",
            metavar="DIR",
        ),
        Setting("limit", "the newest so many", parse.whole(1, 256), 20, env="UPDATES_LIMIT", metavar="N"),
        Setting(
            "sequence",
            "the version's number, instead of its label",
            parse.whole(0, 2**53),
            env="ROLLBACK_SEQUENCE",
            metavar="N",
        ),
        Setting(
            "action",
            "checksum, snapshot, compare or reset_tensors",
            parse.one_of("checksum", "snapshot", "compare", "reset_tensors"),
            "checksum",
        ),
        # the demo
        Setting("out", "where the report goes", parse.path, Path("demo-out"), metavar="DIR"),
        Setting("steps", "optimiser steps", parse.whole(1, 1_000_000), metavar="N"),
        Setting("seed", "of everything random", parse.whole(0, 2**31 - 1), metavar="N"),
    )
}


def resolve(
    names: Iterable[str], flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The settings' values: the flag, else the variable, else the default.

    `flags` holds what was given: a string, a list of them for a repeatable one, a bool for a switch."""
    return {name: _resolve(SETTINGS[name], flags, environ) for name in names}


def _resolve(setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    where, given = setting.option, flags.get(setting.name)
    if given is None:
        where, given = setting.variable, environ.get(setting.variable) or None
    if given is None:
        return setting.default
    if setting.parse is None:
        return given if isinstance(given, bool) else _switch(where, given)
    if not setting.separator:
        return _parsed(setting, where, given)
    if isinstance(given, str):
        texts = [text for text in given.split(setting.separator) if text]
    else:
        texts = [part for text in given for part in (text.split(",") if setting.separator == "," else [text])]
    return tuple(dict.fromkeys(_parsed(setting, where, text) for text in texts)) or setting.default


def _parsed(setting: Setting, where: str, text: str) -> Any:
    assert setting.parse is not None
    try:
        if not text:
            raise Refused("give a value, or leave it out")
        return setting.parse(text)
    except Refused as error:
        shown = "not usable" if setting.secret else repr(text[:200])
        raise BadSetting(f"{where} is {shown}", field=where, fix=str(error)) from error


def _switch(where: str, text: str) -> bool:
    word = text.lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise BadSetting(f"{where} is {text[:200]!r}", field=where, fix="give 1 or 0")


def for_child(values: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The same settings for a child process: flags, and its environment, which alone carries the secrets."""
    known = {setting.variable for setting in SETTINGS.values()}
    env = {key: value for key, value in environ.items() if key not in known}
    argv: list[str] = []
    for name, value in values.items():
        setting = SETTINGS[name]
        if value == setting.default:
            continue
        if setting.secret:
            if value is not None:
                env[setting.variable] = value
        elif setting.parse is None:
            argv.append(setting.option if value else "--no-" + setting.option[2:])
        elif setting.parse is parse.port_or_off:
            argv.append(f"{setting.option}={'off' if value is None else value}")
        elif setting.parse is parse.pair:
            argv += [f"{setting.option}={key}={text}" for key, text in value]
        elif setting.separator:
            argv += [f"{setting.option}={item}" for item in value or ()]
        elif value is not None:
            argv.append(f"{setting.option}={value}")
    return argv, env
