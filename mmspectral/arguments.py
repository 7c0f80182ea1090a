"""From a command line to the config of a run; imports nothing slow, so that a mistyped path is reported at once."""

import argparse
import contextlib
import functools
import importlib
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction

from mmspectral.configs_path import config_path
from mmspectral.errors import DamagedCheckpointError, UnsafeCheckpointError, UsageError


def report_usage_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Turn the errors that a user can repair into one line and the exit status 2, without a traceback."""

    @functools.wraps(main)
    def guarded(*args, **kwargs):
        try:
            main(*args, **kwargs)
        except (UsageError, DamagedCheckpointError, UnsafeCheckpointError) as error:
            message = str(error)
        except KeyboardInterrupt as stop:
            print(f"\n{Path(sys.argv[0]).name}: {stop or 'Interrupted.'}", file=sys.stderr)
            sys.exit(130)
        except pickle.UnpicklingError as error:
            from mmspectral.compat.checkpoints import refusal_reason

            # From a source whose loader is mmengine's own, such as torchvision://.
            message = (
                f"A checkpoint is not read, because reading it may run code from it ({refusal_reason(error)}). "
                "Pass --trust-checkpoint if you trust every checkpoint that this config names."
            )
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            if (message := _deliberate(error)) is None:
                raise
        else:
            return
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
        sys.exit(2)

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(guarded)  # torchrun then prints the traceback of the rank that failed first
    return guarded


def _deliberate(error: BaseException | None) -> str | None:
    """Return the text of an error that a ``raise`` of this package made, or that one of mmengine was made of."""
    while error is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(frame.filename).is_relative_to(Path(__file__).parent)
        if ours and (frame.line or "").startswith("raise ") and error.args:
            return str(error.args[0])
        error = error.__cause__ or error.__context__
    return None


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG`` and ``--cfg-options``."""
    parser.add_argument("config", help="config file, or the name of a shipped one such as mmspectral::xcit/...py")
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        type=_key_and_value,
        metavar="KEY=VALUE",
        help='settings that replace those of the config, such as train_cfg.max_epochs=1; lists as key="[a,b]"',
    )


def _key_and_value(text: str) -> str:
    if "=" not in text.strip("="):
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE, such as train_cfg.max_epochs=1")
    return text


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust-checkpoint``; :func:`set_loading` acts on it."""
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="read checkpoints that hold more than tensors and log values, although this can run code from them",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a training and a test have in common: where results go and how processes are started."""
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument("--work-dir", help="folder for logs and checkpoints (default: ./work_dirs/CONFIG_NAME)")
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none", help="job launcher")
    # torch.distributed.launch passes --local-rank from torch 2.0 on, and --local_rank before; torchrun passes neither.
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help=argparse.SUPPRESS)


def require_checkpoint(name: str) -> None:
    """Raise :class:`UsageError` if ``name`` is a local path without a file."""
    if "://" not in name and not Path(name).expanduser().is_file():
        raise UsageError(f"There is no checkpoint {name} in {Path.cwd()}.")


def set_loading(args: argparse.Namespace) -> None:
    """Choose how this process reads checkpoints, from the argument of :func:`add_trust_argument`."""
    from mmspectral.compat.checkpoints import use_safe_loading, use_trusting_loading

    if args.trust_checkpoint:
        use_trusting_loading()
    else:
        use_safe_loading()


def read_config(name: str, options: dict[str, Any] | None = None, import_modules: bool = True) -> Config:
    """Read a config and merge the options of the command line into it.

    Args:
        name: Path of a file, or ``package::path`` for a config that an OpenMMLab package or mmspectral ships.
        options: Dotted names and their values, as ``--cfg-options`` gives them.
        import_modules: Whether to import the config's ``custom_imports``; only a config of another package always does.

    Raises:
        UsageError: There is no such config.
    """
    package, separator, path = name.rpartition("::")
    try:
        if package == "mmspectral":
            cfg = Config.fromfile(config_path(path), import_custom_modules=import_modules)
        elif separator:
            import mmengine.hub

            cfg = mmengine.hub.get_config(name)
        elif Path(name).is_file():
            cfg = Config.fromfile(name, import_custom_modules=import_modules)
        else:
            raise UsageError(f"There is no config {name} in {Path.cwd()}.")
    except FileNotFoundError as error:
        raise UsageError(f"The config {name} cannot be read: {error}") from error
    if options:
        try:
            cfg.merge_from_dict(options)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"--cfg-options {options} do not fit {name}: {error}") from error
    return cfg


def run_config(args: argparse.Namespace) -> Config:
    """Return the config of a run from the arguments of :func:`add_run_arguments`.

    Sets ``LOCAL_RANK`` in the environment where a launcher gave it as an argument, and the way in which checkpoints are
    read.

    Raises:
        UsageError: There is no such config.
    """
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    set_loading(args)
    if cfg.get("log_level") != "DEBUG":
        _import_quietly(f"{cfg.get('default_scope') or 'mmengine'}.datasets")  # the model may be of any package
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs", Path(args.config.rpartition("::")[2]).stem))
    return cfg


def _import_quietly(module: str) -> None:
    """Import a host's module without its printed notes on optional packages."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
        importlib.import_module(module)


def type_name(part: Any) -> str:
    """Return the type of a part of a config, written out where it is a class; "" where there is none."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if hasattr(kind, "__qualname__"):
        return f"{kind.__module__}.{kind.__qualname__}"
    return kind if isinstance(kind, str) else ""


def host_package(cfg: Config) -> str:
    """Return the package whose model the config describes: ``"mmdet"`` or ``"mmpretrain"``.

    Raises:
        UsageError: It is neither.
    """
    model_type = type_name(cfg.model)
    scope = model_type.partition(".")[0] if "." in model_type else ""
    host = cfg.get("default_scope") if scope in ("", "mmspectral") else scope
    if host not in ("mmdet", "mmpretrain"):
        raise UsageError(
            f"The model {model_type} belongs to neither mmdet nor mmpretrain; set default_scope to one of them."
        )
    return host
