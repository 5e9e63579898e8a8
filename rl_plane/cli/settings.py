"""Every setting of the command line, in one table. `RL_PLANE_<NAME>` mirrors each flag; the flag wins.

An empty variable is an unset one. A wrong value is an error that names the flag, the variable and the fix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import click
from click import Choice, IntRange
from click.core import ParameterSource

from rl_plane._util.log_format import LOG_FORMATS
from rl_plane.cli import setting_types as types
from rl_plane.cli.output import BadSetting, fix_of, plane_error, say_json
from rl_plane.cli.setting_types import Seconds
from rl_plane.errors import InvalidRequest, PlaneError
from rl_plane.protocol.dialects import DIALECTS
from rl_plane.protocol.generation import RAW_LOGPROBS, LogprobsMode
from rl_plane.protocol.pooling import TASKS
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import MAX_PART_TIMEOUT_S, PART_TIMEOUT_S, UpdatePolicy
from rl_plane.protocol.validation import MAX_LEASE_S, Body
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, DIGEST_PATTERN, HEX_DIGITS
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S, Pause

ENV_PREFIX = "RL_PLANE_"

DEFAULT_URL = "http://127.0.0.1:8002"
DEFAULT_HTTP_URL = "http://127.0.0.1:8000"
START_TIMEOUT_S = 600.0
"""A large model takes minutes to load; longer is a fault."""
NO_DIALECT = "none"
OFF = "off"
HELP_CHARS = 110
"""The widest line of a help text, on a terminal that is as wide."""
DEMO_STEPS = 40
"""By then the reward of the demo has risen from a half to above 0.9 of its range."""
MAX_COUNT = 10_000
"""The number of workers in the largest fleet that was measured."""


class Setting(click.Option):
    """A flag and its variable.

    Args:
        name: The key of its value.
        help: What it does, for `--help`.
        kind: The type of its value; bool makes the switches `--flag` and `--no-flag`.
        default: The value where neither is given.
        flag: The flag, if not `--name-with-dashes`.
        env: The variable without its prefix, if not the name in capitals.
        alias: Another project's variable with the same meaning. It counts where the own variable is unset.
        separator: Makes the value a tuple. The flag may be repeated. The separator splits the variable; a comma also
            splits each flag.
        secret: Never show it in help, in messages, or in a process listing.
    """

    def __init__(
        self,
        name: str,
        help: str,
        kind: Any = types.WORD,
        default: Any = None,
        *,
        flag: str = "",
        env: str = "",
        alias: str = "",
        separator: str = "",
        secret: bool = False,
    ) -> None:
        option = flag or "--" + name.replace("_", "-")
        self.variable = ENV_PREFIX + (env or name.upper())
        self.variables = (self.variable, alias) if alias else (self.variable,)
        self.separator, self.secret = separator, secret
        self.otherwise = () if separator and default is None else default
        super().__init__(
            [f"{option}/--no-{option[2:]}" if kind is bool else option, name],
            help=help,
            type=kind,
            default=default,
            multiple=bool(separator),
            envvar=self.variables if alias else self.variable,
            show_envvar=True,
            show_default=isinstance(default, (int, float, str)) and default is not False,
        )

    def value_from_envvar(self, ctx: click.Context) -> Any:
        text = self.resolve_envvar_value(ctx)
        if not text or not self.separator:
            return text
        return [part for part in text.split(self.separator) if part]

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        if not self.separator:
            return super().process_value(ctx, value)
        if self.separator == "," and isinstance(value, (list, tuple)):
            value = [part for text in value for part in text.split(",")]
        return tuple(dict.fromkeys(super().process_value(ctx, value))) or self.otherwise


def _of_field(model: type[Body], name: str, **how: Any) -> Setting:
    """The flag of a request's field: its words, its default and its doc. `how`: other arguments of `Setting`."""
    field = model.model_fields[name]
    extra: Any = field.json_schema_extra
    words = extra["enum"] if extra else get_args(field.annotation)
    help = (field.description or "").replace("`", "")
    if "default" in how:
        help += f" Default: {field.default}."
    return Setting(name, help, Choice(words) if words else bool, **{"default": field.default, **how})


_NATS_URL = types.url(("nats", "tls", "ws", "wss"), DEFAULT_NATS_URL)
_HTTP_URL = types.url(("http", "https"), DEFAULT_HTTP_URL)
_POSITIVE = Seconds(0.001)

SETTINGS: dict[str, Setting] = {
    str(setting.name): setting
    for setting in (
        # the bus; a NATS URL may carry a password
        Setting("nats_url", f"The NATS server. Default: {DEFAULT_NATS_URL}.", _NATS_URL, secret=True),
        Setting(
            "over_nats",
            "Ask over NATS, and no frontend. The flags --nats-url, --nats-nkey and --nats-creds do so too.",
            bool,
            False,
        ),
        Setting("nats_nkey", "The file of this process's NKey, as `rl-plane keys` makes it.", types.PATH_TO_FILE),
        Setting("nats_creds", "A .creds file, in the place of an NKey.", types.PATH_TO_FILE),
        Setting(
            "nats_ca", "The certificate of the NATS server's authority. Default: the system's.", types.PATH_TO_FILE
        ),
        Setting("nats_cert", "This process's certificate, for a NATS server that wants one.", types.PATH_TO_FILE),
        Setting("nats_cert_key", "The private key of --nats-cert.", types.PATH_TO_FILE),
        Setting("keys", "The folder that `rl-plane keys init` has made.", types.PATH),
        Setting("tls_cert", "The certificate of nats-server.", types.FILE),
        Setting("tls_key", "The private key of --tls-cert.", types.FILE),
        Setting("tls_client_ca", "The authority of the certificates that clients must show.", types.FILE),
        Setting("namespace", "The first part of every subject.", types.NAME, DEFAULT_NAMESPACE),
        Setting("component", "The fleet's name.", types.NAME, DEFAULT_COMPONENT),
        Setting(
            "also_serve",
            "More components of the namespace, comma separated: a request's model chooses among all.",
            types.NAME,
            separator=",",
        ),
        Setting("nats_port", "The port of nats-server; 0 takes a free one.", types.PORT, 4222, flag="--port"),
        Setting("nats_host", "The address of nats-server.", types.HOST, "127.0.0.1", flag="--host"),
        Setting("up_nats_port", "The port of nats-server; 0 takes a free one.", types.PORT, 0, flag="--nats-port"),
        Setting("store", "The folder of nats-server. Default: a temporary one.", types.PATH),
        # a worker
        Setting("engine", "The engine: an entry point of the group rl_plane.engines."),
        Setting(
            "engines",
            "The engines. `up` starts N workers of each. Default: hf.",
            types.WORD,
            separator=",",
            flag="--engine",
            env="ENGINE",
        ),
        Setting("model", "The model's directory. Default: a tiny model, made from a seed.", types.DIRECTORY),
        Setting("model_name", "The name of the model in requests. Default: its directory's name.", types.LABEL),
        Setting(
            "task",
            "What the model does: classify is a reward model, embed an embedding model.",
            Choice(list(TASKS)),
            "generate",
        ),
        Setting(
            "weight_roots",
            "A directory beneath which weights may be read, beside the model's own.",
            types.DIRECTORY,
            separator=os.pathsep,
            flag="--weight-root",
        ),
        Setting(
            "weight_urls",
            "The beginning of URLs that weights may be fetched from: scheme, host and perhaps a path.",
            types.WEIGHT_URL,
            separator=",",
            flag="--weight-url",
        ),
        Setting(
            "logprobs_mode",
            "The logprobs of completions: of the raw logits, or (processed_logprobs) of the logits divided by the "
            "temperature.",
            Choice(get_args(LogprobsMode)),
            RAW_LOGPROBS,
        ),
        Setting("dtype", "The engine's dtype. Default: the checkpoint's."),
        Setting(
            "device", "auto, cpu, cuda, cuda:1, … With vllm, CUDA_VISIBLE_DEVICES selects.", types.WORD, "auto"
        ),
        Setting("engine_args", "An argument of the engine's own.", types.PAIR, separator=";", flag="--engine-arg"),
        Setting("engine_args_file", "A YAML file of such arguments; --engine-arg wins.", types.FILE),
        Setting("instance_id", "The worker's id, 16 hex digits. Default: a new one.", types.INSTANCE_ID),
        Setting("nnodes", "The hosts of this engine (vllm, sglang).", IntRange(1, 1024), 1),
        Setting("node_rank", "This host's number among them. 0 is the head.", IntRange(0, 1023), 0),
        Setting("dist_init_addr", "HOST:PORT of the head, where the engine's ranks meet."),
        Setting("node_wait_s", "Seconds that a node waits for the others.", _POSITIVE, 600.0),
        Setting(
            "metrics_port",
            "The port of the worker's /metrics; 0 takes a free one, off opens none.",
            types.PORT_OR_OFF,
            OFF,
        ),
        Setting("metrics_host", "The address of the worker's /metrics.", types.HOST, "127.0.0.1"),
        Setting("metrics_key", "The key of the worker's /metrics. Prefer the variable.", types.KEY, secret=True),
        Setting("copies", "Workers in this one process (engine fake only).", IntRange(1, MAX_COUNT), 1),
        Setting(
            "deterministic", "The same tokens whatever else is in the batch (vllm, sglang; GPU).", bool, False
        ),
        Setting("enable_memory_saver", "Let memory be released and resumed (vllm, sglang; GPU).", bool, False),
        Setting("liveness_timeout_s", "Close a worker whose engine takes longer to answer.", _POSITIVE, 5.0),
        Setting("engine_hang_s", "End a worker whose engine has not answered for this long.", _POSITIVE, 60.0),
        Setting("drain_s", "Seconds for running requests to end after SIGTERM.", Seconds(0.0), 30.0),
        Setting(
            "otel_endpoint",
            "An OTLP/HTTP collector for traces of updates and completions. Default: no traces are made.",
            types.COLLECTOR,
        ),
        Setting(
            "log_level",
            "debug, info, warning or error.",
            Choice(["debug", "info", "warning", "error"]),
            "info",
        ),
        Setting(
            "log_format",
            "text, or json: one JSON object for each line, with time, level, logger, message and further fields.",
            Choice(LOG_FORMATS),
            "text",
        ),
        # a frontend
        Setting("host", "The address of the listeners.", types.HOST, "127.0.0.1"),
        Setting("rl_port", "The port of /v1/rl/*; 0 takes a free one, off opens none.", types.PORT_OR_OFF, 8002),
        Setting(
            "http_port", "The port of generation; 0 takes a free one, off opens none.", types.PORT_OR_OFF, 8000
        ),
        Setting(
            "admin_key",
            "The key of /v1/rl/*. Prefer the variable.",
            types.KEY,
            alias="SGLANG_OMNI_ADMIN_KEY",
            secret=True,
        ),
        Setting("api_key", "The key of generation. Prefer the variable.", types.KEY, secret=True),
        Setting("keys_file", "A file of keys with roles, made by `rl-plane keys http-add`.", types.FILE),
        Setting("insecure", "Listen beyond loopback without a key.", bool, False),
        Setting(
            "allowed_hosts",
            "A name of this machine by which clients without a key may call it.",
            types.HOST,
            separator=",",
            flag="--allowed-host",
        ),
        Setting("https_cert", "The certificate chain of both HTTP listeners, in PEM.", types.FILE),
        Setting("https_key", "The private key of --https-cert, in PEM.", types.FILE),
        Setting(
            "dialects",
            "The trainers' HTTP dialects on the port of /v1/rl/*: some of vllm, sglang and prime-rl, comma separated, "
            "or none. Default: all.",
            Choice([*DIALECTS, NO_DIALECT]),
            tuple(DIALECTS),
            separator=",",
        ),
        Setting(
            "part_timeout_s",
            "Seconds for the tensors of one call in a trainer's dialect to reach every rank.",
            Seconds(0.001, MAX_PART_TIMEOUT_S),
            PART_TIMEOUT_S,
        ),
        Setting("expect", "The workers that must serve before the fleet is ready.", IntRange(0, 100_000), 0),
        Setting("record", "Record each completion in files of this folder, for `rl-plane replay`.", types.PATH),
        Setting("record_files", "The files that stay there, of 64 MiB each.", IntRange(1, 100_000), 16),
        # up
        Setting("workers", "The workers of each engine.", IntRange(0, 1000), 1),
        Setting("restart", "Start a worker again after its death.", bool, False),
        Setting("start_timeout_s", "Seconds until all must be ready.", _POSITIVE, START_TIMEOUT_S),
        # the commands that steer
        Setting("url", "The frontend's address.", types.url(("http", "https"), DEFAULT_URL), DEFAULT_URL),
        Setting(
            "components",
            "The components, comma separated. Default: the frontend's own.",
            types.NAME,
            separator=",",
            flag="--component",
            env="COMPONENT",
        ),
        Setting(
            "select_workers",
            "Only these instance ids, comma separated.",
            types.INSTANCE_ID,
            flag="--workers",
            separator=",",
        ),
        Setting("json", "Print JSON.", bool, False),
        Setting(
            "since_s", "Show the events of so much time: 600, 90s, 10m, 1h.", types.DURATION, 600, flag="--since"
        ),
        Setting("follow", "Wait for more events, until Ctrl-C.", bool, False),
        Setting(
            "wait_s",
            "Wait so long for readiness: 600, 90s, 10m, 1h.",
            types.DURATION,
            0,
            flag="--wait",
            env="READY_WAIT",
        ),
        Setting(
            "expect_ready",
            "The workers that must serve. Default: as many as the frontend expects.",
            IntRange(1, 100_000),
            flag="--expect",
            env="READY_EXPECT",
        ),
        Setting(
            "asked_roots",
            "A directory that must be the same for all workers, beneath their weight roots.",
            types.matching("DIR", r"/.+", "give an absolute path, as the workers see it"),
            separator=os.pathsep,
            flag="--weight-root",
            env="DOCTOR_WEIGHT_ROOTS",
        ),
        Setting(
            "records_dir",
            "Look for an ended request in this folder of `rl-plane frontend --record`.",
            types.DIRECTORY,
            flag="--records",
            env="EXPLAIN_RECORDS",
        ),
        Setting("once", "Print one screen, and end.", bool, False),
        Setting("timeout_s", "Seconds to wait for the answer; of an update, for the weights.", _POSITIVE),
        _of_field(Pause, "mode", env="PAUSE_MODE"),
        _of_field(UpdatePolicy, "pause_mode"),
        Setting("clear_cache", "Drop the prefix caches too, or not. Default: as the mode says.", bool),
        Setting(
            "lease_s",
            "Seconds after which the fleet resumes by itself.",
            Seconds(0.001, MAX_LEASE_S),
            DEFAULT_PAUSE_LEASE_S,
        ),
        Setting("version", "The trainer's label of the weights, such as step_17.", types.LABEL),
        Setting("cast", "Allow another float dtype than the engine's.", bool, False),
        _of_field(UpdatePolicy, "keep_staged"),
        _of_field(UpdatePolicy, "keep_pause"),
        _of_field(UpdatePolicy, "kv", default=None),
        _of_field(UpdatePolicy, "on_prepare_failure"),
        Setting("min_ready", "With exclude: how many workers must be ready.", IntRange(1, MAX_COUNT), 1),
        _of_field(UpdatePolicy, "barrier"),
        _of_field(UpdatePolicy, "staging"),
        Setting(
            "canary",
            "A JSON file with token sequences that every worker scores after the swap, and their values; off scores "
            "nothing. Default: sequences that follow from the vocabulary's size.",
            types.FILE_OR_OFF,
        ),
        _of_field(UpdatePolicy, "on_canary_failure"),
        Setting(
            "source",
            "A JSON file with url or urls, and perhaps headers: for signed URLs. It replaces PATH.",
            types.FILE,
            env="UPDATE_SOURCE",
        ),
        Setting("adapter", "Update this LoRA adapter instead of the base weights.", types.LABEL),
        Setting(
            "adapter_op",
            "load a new adapter, swap the loaded one of this name, or unload it (without a PATH).",
            Choice(["load", "swap", "unload"]),
            "load",
        ),
        Setting(
            "digest",
            "The digest that the trainer has published.",
            types.matching("DIGEST", DIGEST_PATTERN, "give xxh3: and 32 hex digits, or blake3: and 64"),
        ),
        Setting(
            "digest_algorithm",
            "The hash of the version's digest: xxh3 finds corruption, blake3 also forged bytes, and is slower.",
            Choice(list(HEX_DIGITS)),
            DEFAULT_ALGORITHM,
            flag="--digest",
            env="PUBLISH_DIGEST",
        ),
        Setting(
            "transport",
            "The transport: auto, filesystem, …",
            types.matching("NAME", r"[A-Za-z0-9_-]{1,64}", "give a transport's name, or auto"),
            "auto",
        ),
        Setting(
            "options",
            "An option of the transport's own. A value that is JSON is read as JSON.",
            types.PAIR,
            separator=";",
            flag="--option",
            env="PUBLISH_OPTIONS",
        ),
        Setting(
            "root",
            "The folder that filesystem writes to, beneath the workers' weight roots.",
            types.PATH,
            env="PUBLISH_ROOT",
        ),
        Setting(
            "base",
            "The checkpoint that the fleet serves: only the tensors that differ from it are sent.",
            types.PATH,
            env="PUBLISH_BASE",
        ),
        Setting("limit", "How many updates, the newest first.", IntRange(1, 256), 20, env="UPDATES_LIMIT"),
        Setting(
            "sequence", "The version's number, instead of its label.", IntRange(0, 2**53), env="ROLLBACK_SEQUENCE"
        ),
        Setting(
            "action",
            "checksum, snapshot, compare or reset_tensors.",
            Choice(["checksum", "snapshot", "compare", "reset_tensors"]),
            "checksum",
        ),
        Setting(
            "http_url",
            "The address of generation.",
            _HTTP_URL,
            DEFAULT_HTTP_URL,
        ),
        Setting(
            "records",
            "How many records, from the first one on.",
            IntRange(1, 1_000_000),
            1000,
            flag="--limit",
            env="REPLAY_LIMIT",
        ),
        Setting(
            "trace_file",
            "The file that is written.",
            types.PATH_TO_FILE,
            Path("trace.json"),
            flag="--output",
            env="TRACE_FILE",
        ),
        # the demo
        Setting("out", "The folder of the report. Default: demo-out.", types.PATH, Path("demo-out")),
        Setting("steps", "The number of optimiser steps.", IntRange(1, 1_000_000), DEMO_STEPS),
        Setting("seed", "The seed of everything random.", IntRange(0, 2**31 - 1), 0),
    )
}


@dataclass(frozen=True, slots=True)
class Command:
    """One command as it was given."""

    values: dict[str, Any]
    """The settings' values and the arguments, by name."""
    flags: frozenset[str]
    """The settings that were given by a flag."""


Handler = Callable[[Command], int]


PROCESSES = ("worker", "frontend")
"""Commands that send no request: what they find invalid is a setting of theirs."""


def command(
    name: str, doc: str, handler: Handler, settings: Iterable[str], *arguments: click.Argument
) -> click.Command:
    """A command of the settings in the table. Its handler returns the exit code."""

    def call(**values: Any) -> int:
        context = click.get_current_context()
        flags = {key for key in values if context.get_parameter_source(key) is ParameterSource.COMMANDLINE}
        if "nats_url" in flags and "@" in urlsplit(values["nats_url"]).netloc:
            raise BadSetting(
                "the address has a password, which every user of this machine can read in the list of processes",
                field="--nats-url",
                fix=f"set RL_PLANE_NATS_URL{' and give --over-nats' if 'over_nats' in values else ''}, "
                "or give a key by --nats-nkey",
            )
        try:
            return handler(Command(values, frozenset(flags)))
        except (PlaneError, ModuleNotFoundError, OSError) as error:
            found = plane_error(error)
            if found is None or isinstance(found, BadSetting):
                raise
            found.facts["fix"] = fix_of(found, name)
            if values.get("json"):
                say_json({"status": "error", "error": found.to_wire()})
            if name in PROCESSES and isinstance(found, InvalidRequest):
                raise BadSetting(found.message, **found.facts) from error
            raise found from error

    params: list[click.Parameter] = [*arguments, *(SETTINGS[each] for each in settings)]
    context = {"max_content_width": HELP_CHARS}
    return click.Command(name, context_settings=context, callback=call, params=params, help=doc)


def for_child(values: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Passes settings on to a child process: its flags, and its environment, which alone carries secrets."""
    known = {variable for setting in SETTINGS.values() for variable in setting.variables}
    env = {key: value for key, value in environ.items() if key not in known}
    argv: list[str] = []
    for name, value in values.items():
        setting = SETTINGS[name]
        flag = setting.opts[0]
        if value == setting.otherwise:
            continue
        if setting.secret:
            env[setting.variable] = value
        elif isinstance(value, bool):
            argv.append(flag if value else setting.secondary_opts[0])
        else:
            argv += [f"{flag}={item}" for item in (value if setting.separator else (value,))]
    return argv, env


def only_component(values: Mapping[str, Any]) -> str | None:
    """Returns the component that a command names, or None if it means the frontend's own."""
    names = values.get("components") or ()
    if len(names) > 1:
        raise BadSetting("several components are given", field="--component", fix="name one, call by call")
    return names[0] if names else None


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """`key=value` texts as a dict."""
    return dict(text.split("=", 1) for text in texts)
