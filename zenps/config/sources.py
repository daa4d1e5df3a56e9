"""Configuration loading: merges and checks the settings from all their sources.

:func:`load` does so once, at the start of a process.

Precedence, highest first:

1. ``--set section.field=value``
2. ``ZENPS_SECTION_FIELD``
3. BytePS's bootstrap variables ``DMLC_PS_ROOT_URI``, ``DMLC_PS_ROOT_PORT``, ``DMLC_NUM_WORKER``,
   ``DMLC_NUM_SERVER`` (https://github.com/bytedance/byteps/blob/master/docs/env.md)
4. torchrun's ``WORLD_SIZE`` (https://docs.pytorch.org/docs/stable/elastic/run.html)
5. the file: the one given, else ``ZENPS_CONFIG``, else ``./zenps.toml`` if it exists
6. the default
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from zenps.errors import ConfigError, UnknownKeyError
from zenps.schemes.registry import scheme_of

from .settings import FIELDS, MIN_CHUNK_BYTES, Config
from .sizes import chunk_bytes, least_budget_bytes
from .values import checked, format_bytes, is_ip_address

RESERVED: Final = frozenset({"ZENPS_CONFIG", "ZENPS_PLAN_TRACE", "ZENPS_PLAN_STEPS"})
"""``ZENPS_*`` variables that are not settings. Any other variable that names no setting is refused.

With the last two, ``zenps plan`` tells its workers what to record.
"""


class Loaded(NamedTuple):
    """A configuration, and the variable, option or file that set each ``section.field``."""

    config: Config
    sources: dict[str, str]


class Setting(NamedTuple):
    """One line of ``zenps config``."""

    name: str
    value: object
    source: str
    description: str


_WORLD_SIZES: Final = (
    *("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "BYTEPS_LOCAL_SIZE",
)
"""In which torchrun, horovodrun, MPI's launchers and bpslaunch say how many processes they have started.

Not ``SLURM_NTASKS``: the shell of a batch job has it, too, and one process that is started there is alone.
"""


def variable_of(name: str) -> str:
    """The environment variable of the setting ``section.field``."""
    return "ZENPS_" + name.replace(".", "_").upper()


_VARIABLES: Final = {variable_of(name): name for name in FIELDS}
_Layer = dict[str, tuple[object, str]]  # "section.field" -> raw value, source


def load(
    *,
    sets: Sequence[str] = (),
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    option: str = "--set",
) -> Loaded:
    """Reads, merges and checks all sources of settings, in the order that the module gives.

    Args:
        sets: ``section.field=value`` strings.
        file: a TOML file that must exist.
        environ: the environment variables.
        option: what the user calls ``sets``.

    Raises:
        ConfigError: a key is unknown, a value is out of bounds or does not fit the others, or a file cannot
            be read. A value that another source overrides is not checked.
    """
    settings = (
        _from_file(file, environ)
        | _from_torchrun(environ)
        | _from_byteps(environ)
        | _from_environment(environ)
        | _from_sets(sets, option)
    )
    values: dict[str, dict[str, object]] = {}
    for name, (raw, source) in settings.items():
        section, _, field = name.partition(".")
        values.setdefault(section, {})[field] = checked(name, raw, source)
    config = msgspec.convert(values, Config)
    if error := _conflict(config):
        raise error
    return Loaded(config, {name: settings[name][1] if name in settings else "default" for name in FIELDS})


def _conflict(config: Config) -> ConfigError | None:
    """The error for a setting that is valid alone, but not beside the others; None if all fit together."""
    sync, cluster = config.sync, config.cluster
    if sync.chunk_bytes > cluster.max_message_bytes:
        allowed = f"at most cluster.max_message_bytes = {format_bytes(cluster.max_message_bytes)}"
        return ConfigError("sync.chunk_bytes", sync.chunk_bytes, allowed)
    if chunk_bytes(config) < MIN_CHUNK_BYTES:
        least_bytes = least_budget_bytes(cluster.workers, MIN_CHUNK_BYTES)
        allowed = f"at least {format_bytes(least_bytes)} for cluster.workers = {cluster.workers}"
        return ConfigError("cluster.server_budget_bytes", cluster.server_budget_bytes, allowed)
    if error := scheme_of(sync.scheme).refuse(config.combination):
        return error
    if sync.levels == 2 and cluster.is_elastic:
        allowed = "1, because cluster.on_worker_loss = continue: a host needs the worker that leads it"
        return ConfigError("sync.levels", sync.levels, allowed)
    return _refused_by_ds_sync(config) if sync.consistency == "ds-sync" else None


def _refused_by_ds_sync(config: Config) -> ConfigError | None:
    """The error for the first setting that is not honoured where workers average models, not gradients."""
    sync, reason = config.sync, "because sync.consistency = ds-sync"
    for name, value, expected, because in (
        ("sync.levels", sync.levels, 1, "averages models among workers"),
        ("sync.sparsifier", sync.sparsifier, "none", "sends no gradients"),
        ("sync.values", sync.values, "same", "sends no gradients"),
        ("cluster.on_worker_loss", config.cluster.on_worker_loss, "fail", "needs every worker"),
    ):
        if value != expected:
            return ConfigError(name, value, f"{expected}, {reason} {because}")
    if config.security.keys:
        allowed = f"no keys, {reason} averages models among workers, over unencrypted connections"
        return ConfigError("security.keys", config.security.keys, allowed)
    return None


def allows_two_levels(config: Config) -> bool:
    """True if the other settings of the valid ``config`` can be combined with ``sync.levels = 2``."""
    return _conflict(structs.replace(config, sync=structs.replace(config.sync, levels=2))) is None


def describe(loaded: Loaded) -> list[Setting]:
    """Lists all settings in the order of their declaration, for ``zenps config``."""
    rows = []
    for name, field in FIELDS.items():
        section, _, attribute = name.partition(".")
        value = getattr(getattr(loaded.config, section), attribute)
        rows.append(Setting(name, value, loaded.sources[name], str(field.meta.description)))
    return rows


def check_partition(config: Config) -> None:
    """Checks that the strategy of ``sync.partition`` can be made.

    Imports the strategies, and with them torch: the scheduler, which runs without it, does not call this.

    Raises:
        ConfigError: it cannot.
    """
    from zenps.partition.strategies.registry import strategy

    strategy(config.sync.partition)


def require_cluster(loaded: Loaded, environ: Mapping[str, str] = os.environ) -> None:
    """Checks that a scheduler is configured if several workers were started.

    Otherwise each of them would train alone, on its share of the data, and nobody would notice.

    Raises:
        ConfigError: several workers were started, and no scheduler is configured.
    """
    if loaded.config.cluster.scheduler:
        return
    counts = [(name, _integer(environ, name, at_least=1) or 1) for name in _WORLD_SIZES]
    for name, count in [*counts, ("cluster.workers", loaded.config.cluster.workers)]:
        if count > 1:
            raise ConfigError(
                "cluster.scheduler",
                "",
                f"'host:port' of the scheduler, because {name}={count} says this is one of several workers; "
                "start them by zenps launch, or set it for all of them",
            )


def rank_from_environment(environ: Mapping[str, str] = os.environ) -> int | None:
    """The rank that torchrun (``RANK``) or BytePS (``DMLC_WORKER_ID``) gives; None: the scheduler chooses."""
    rank = _integer(environ, "RANK", at_least=0)
    return _integer(environ, "DMLC_WORKER_ID", at_least=0) if rank is None else rank


def local_rank_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """The rank among the workers of this host (torchrun's ``LOCAL_RANK``); 0 if it is not set."""
    return _integer(environ, "LOCAL_RANK", at_least=0) or 0


def metrics_port_of_worker(first: int, environ: Mapping[str, str] = os.environ) -> int:
    """Returns the port of a worker's metrics, where ``metrics.port`` is ``first``.

    The workers of a host have the same settings. So each adds its rank there to a fixed port.

    Raises:
        ConfigError: there is no such port.
    """
    port = first + local_rank_from_environment(environ) if first > 0 else first
    if port > 65535:
        allowed = f"a port that leaves room for {port - first} more after it, or 0 for any free"
        raise ConfigError("metrics.port", first, allowed)
    return port


def local_size_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """The number of workers on this host (torchrun's ``LOCAL_WORLD_SIZE``); 1 if it is not set."""
    return _integer(environ, "LOCAL_WORLD_SIZE", at_least=1) or 1


def kernel_threads(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """``kernels.threads``, or where that is 0 the cores of this process ÷ the workers of this host."""
    cores = len(os.sched_getaffinity(0))
    return config.kernels.threads or max(1, cores // local_size_from_environment(environ))


def restarts_from_environment(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """How often torchrun has restarted the workers (``TORCHELASTIC_RESTART_COUNT``), and still may."""
    count = _integer(environ, "TORCHELASTIC_RESTART_COUNT", at_least=0) or 0
    most = _integer(environ, "TORCHELASTIC_MAX_RESTARTS", at_least=0) or 0
    return count, max(most - count, 0)


def _integer(environ: Mapping[str, str], variable: str, *, at_least: int) -> int | None:
    text = environ.get(variable)
    if text is None:
        return None
    # Python refuses to parse thousands of digits, and no message has room for a number of more than 64 bits.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) >= at_least):
        raise ConfigError(variable, text, f"an integer from {at_least}, of at most 10 digits")
    return int(text)


def _from_file(file: Path | None, environ: Mapping[str, str]) -> _Layer:
    path = file or Path(environ.get("ZENPS_CONFIG") or "zenps.toml")
    named = file is not None or bool(environ.get("ZENPS_CONFIG"))
    try:
        if not named and not path.exists():
            return {}
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin with a BOM
    except OSError as error:
        raise ConfigError("file", str(path), f"a readable TOML file ({error.strerror})") from error
    # ValueError: tomllib.TOMLDecodeError and UnicodeDecodeError. RecursionError: it is nested too deep.
    except (ValueError, RecursionError) as error:
        raise ConfigError("file", str(path), f"TOML: {error}") from error
    layer: _Layer = {}
    for section, table in tree.items():
        if section not in Config.__struct_fields__:
            raise _unknown(section, section, Config.__struct_fields__)
        if not isinstance(table, dict):
            raise ConfigError(section, table, f"a table, [{section}] (set by {path})")
        layer |= {_known(f"{section}.{field}"): (value, str(path)) for field, value in table.items()}
    return layer


def _from_torchrun(environ: Mapping[str, str]) -> _Layer:
    return {"cluster.workers": (environ["WORLD_SIZE"], "WORLD_SIZE")} if "WORLD_SIZE" in environ else {}


def _from_byteps(environ: Mapping[str, str]) -> _Layer:
    counts = {"cluster.workers": "DMLC_NUM_WORKER", "cluster.servers": "DMLC_NUM_SERVER"}
    layer: _Layer = {name: (environ[key], key) for name, key in counts.items() if key in environ}
    host, port = environ.get("DMLC_PS_ROOT_URI"), environ.get("DMLC_PS_ROOT_PORT")
    if host and port:
        host = f"[{host}]" if ":" in host and is_ip_address(host) else host
        layer["cluster.scheduler"] = (f"{host}:{port}", "DMLC_PS_ROOT_URI")
    elif host or port:
        missing, given = ("PORT", "URI") if host else ("URI", "PORT")
        raise ConfigError(f"DMLC_PS_ROOT_{missing}", "", f"a value, because DMLC_PS_ROOT_{given} is set")
    return layer


def _from_environment(environ: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for variable in sorted(environ):
        if variable in _VARIABLES:
            layer[_VARIABLES[variable]] = (environ[variable], variable)
        elif variable.startswith("ZENPS_") and variable not in RESERVED:
            raise _unknown(variable, variable.split("_")[1].lower(), _VARIABLES)
    return layer


def _from_sets(sets: Sequence[str], option: str) -> _Layer:
    layer: _Layer = {}
    for item in list_of(sets):
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(option, item, "section.field=value")
        layer[_known(name.strip())] = (value.strip(), option)
    return layer


def list_of(sets: object) -> list[str]:
    """The strings ``section.field=value`` that a caller gave.

    Raises:
        ConfigError: it gave something else, such as one string, or a mapping.
    """
    if isinstance(sets, Iterable) and not isinstance(sets, str | Mapping):
        items = [*sets]
        if all(isinstance(item, str) for item in items):
            return items
    raise ConfigError("sets", sets, 'a list of strings, such as ["sync.density=0.1"]')


def _known(name: str) -> str:
    if name not in FIELDS:
        raise _unknown(name, name.partition(".")[0], FIELDS)
    return name


def _unknown(key: str, section: str, names: Iterable[str]) -> UnknownKeyError:
    fields = [name.partition(".")[2] for name in FIELDS if name.startswith(f"{section}.")]
    listing = (
        f"{section} has: {', '.join(fields)}"
        if fields
        else f"sections: {', '.join(Config.__struct_fields__)}"
    )
    close = difflib.get_close_matches(key, list(names), n=1, cutoff=0.75)
    return UnknownKeyError(key, f"did you mean {close[0]}? ({listing})" if close else listing)
