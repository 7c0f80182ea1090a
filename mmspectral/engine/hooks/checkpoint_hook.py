"""mmengine's checkpoint hook, under which there is a loadable checkpoint at every moment."""

from collections import deque
from pathlib import Path

import mmengine.hooks
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.logging import print_log
from mmengine.runner import Runner

from mmspectral.arguments import SETTINGS, checked, optional, whole
from mmspectral.compat.atomic_write import write_atomically
from mmspectral.registry import HOOKS

_OUTDATED = "outdated_ckpt_id"


@register_backend("atomic")
class AtomicBackend(LocalBackend):
    """mmengine's local backend, with writes that a kill, a crash or a full disk cannot tear.

    ``backend_args=dict(backend='atomic')``; see
    :func:`mmspectral.compat.atomic_write.write_atomically`.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write bytes.

        Args:
            obj: Content of the file.
            filepath: Its path; its folder is made.

        Raises:
            FileWriteError: The disk is full, or the folder cannot be written.
        """
        write_atomically(obj, Path(filepath))

    def put_text(self, obj: str, filepath: str | Path, encoding: str = "utf-8") -> None:
        """Write text; as :meth:`put`."""
        write_atomically(obj.encode(encoding), Path(filepath))


@HOOKS.register_module()
class CheckpointHook(mmengine.hooks.CheckpointHook):
    """Save checkpoints so that a run which dies at any moment can be resumed.

    It differs from mmengine's hook, whose arguments it takes, in three things:

    - files are written completely or not at all
      (:class:`AtomicBackend`);
    - what ``max_keep_ckpts`` or a better score makes superfluous is deleted after
      its successor was written, not before. At least two checkpoints are kept, in
      case the newest one is damaged later; the disk must hold one more;
    - a run can outlive saves that fail.

    Args:
        interval: Epochs or iterations between checkpoints; -1 for never.
        max_keep_ckpts: Checkpoints to keep, at least 2; -1 for all of them.
        backend_args: Of another file backend.
        tolerated_failures: Saves in a row that may fail, for instance because the
            disk is full, before training stops. Each is counted and logged, and
            the earlier checkpoints stay. 0 stops at the first. A run whose last
            save failed ends with an error in any case.
        **kwargs: As mmengine's.
    """

    @checked(interval=whole(-1), max_keep_ckpts=whole(-1), backend_args=optional(SETTINGS), tolerated_failures=whole(0))
    def __init__(
        self,
        interval: int = -1,
        *,
        max_keep_ckpts: int = -1,
        backend_args: dict | None = None,
        tolerated_failures: int = 0,
        **kwargs,
    ) -> None:
        if max_keep_ckpts == 1:
            print_log("max_keep_ckpts=1 leaves nothing if that checkpoint is damaged; two are kept.", "current")
            max_keep_ckpts = 2
        if backend_args is None and "file_client_args" not in kwargs and "://" not in str(kwargs.get("out_dir")):
            backend_args = dict(backend="atomic")
        super().__init__(interval, max_keep_ckpts=max_keep_ckpts, backend_args=backend_args, **kwargs)
        self.tolerated_failures = tolerated_failures
        self.failures = 0

    def before_train(self, runner: Runner) -> None:
        """Take over what the run that is continued was about to do."""
        super().before_train(runner)
        # mmengine forgets it, and then does not note a better score in the checkpoint that it belongs to.
        self.last_ckpt = runner.message_hub.get_info("last_ckpt", None)
        outdated = runner.message_hub.get_info(_OUTDATED, None)
        if self.max_keep_ckpts > 0 and outdated is not None:
            self._remove(self._path(outdated))

    def after_train(self, runner: Runner) -> None:
        """Publish the checkpoint, unless it could not be saved.

        Raises:
            RuntimeError: The last save failed.
        """
        if self.failures:
            raise RuntimeError(
                f"Training ended without its last checkpoint: the last {self.failures} saves failed (see the log). "
                f"Free space and continue with --resume from {self.last_ckpt or 'the start'}."
            )
        super().after_train(runner)

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        last, kept = self.last_ckpt, list(self.keep_ckpt_ids) if self.max_keep_ckpts > 0 else []
        outdated = None
        if len(kept) == self.max_keep_ckpts and kept[-1] != step:
            outdated = self.keep_ckpt_ids.popleft()  # else super() deletes it before it writes
            runner.message_hub.update_info(_OUTDATED, outdated)
        try:
            super()._save_checkpoint_with_step(runner, step, meta)
        except OSError as error:
            self._count(error, runner)
            self.last_ckpt = last
            runner.message_hub.update_info("last_ckpt", last)
            if self.max_keep_ckpts > 0:
                self.keep_ckpt_ids = deque(kept, self.max_keep_ckpts)
                runner.message_hub.update_info("keep_ckpt_ids", kept)
            return
        self.failures = 0
        if outdated is not None:
            self._remove(self._path(outdated))

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        if not self.save_best:
            return
        before = dict(self._best)
        noted = {name: value for name, value in runner.message_hub.runtime_info.items() if name.startswith("best_")}
        self._best = dict.fromkeys(before)  # else super() deletes them before it writes
        try:
            super()._save_best_checkpoint(runner, metrics)
        except OSError as error:
            self._best = before
            for name in [name for name in runner.message_hub.runtime_info if name.startswith("best_")]:
                runner.message_hub.pop_info(name)
            runner.message_hub.update_info_dict(noted)
            self._count(error, runner)
            return
        written = self._best
        self._best = {key: written[key] or path for key, path in before.items()}
        for key, path in before.items():
            if path and written[key] not in (None, path):
                self._remove(path)

    @property
    def _best(self) -> dict[str, str | None]:
        """Paths of the best checkpoints, by metric; mmengine keeps a single one elsewhere."""
        return {"": self.best_ckpt_path} if len(self.key_indicators) == 1 else self.best_ckpt_path_dict

    @_best.setter
    def _best(self, paths: dict[str, str | None]) -> None:
        if len(self.key_indicators) == 1:
            self.best_ckpt_path = paths[""]
        else:
            self.best_ckpt_path_dict = paths

    def _count(self, error: OSError, runner: Runner) -> None:
        self.failures += 1
        if self.failures > self.tolerated_failures:
            raise error
        runner.logger.error(
            f"Saving failed, {self.failures} in a row of {self.tolerated_failures} tolerated; training goes on. {error}"
        )

    def _path(self, step: int) -> str:
        return self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(step))

    def _remove(self, path: str) -> None:
        if not is_main_process():
            return
        if self.file_backend.isfile(path):
            self.file_backend.remove(path)
        elif self.file_backend.isdir(path):  # of a sharded model
            self.file_backend.rmtree(path)
