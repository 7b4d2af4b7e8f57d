"""Log lines as glog writes them, since tools read them:

    I1129 15:57:43.298321  5351 service.py:152] text          (level, mmdd, time, thread, file and line)

They go to stderr; with log_dir into one journal file there (mooncake_master.<date>-<time>.<pid>, and the link
mooncake_master.INFO to the newest) and, of stderrthreshold and above, to stderr too.
"""

import logging
import os
import socket
import sys
import threading
import time

from mooncake.errors import ConfigError

PROGRAM = "mooncake_master"
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)  # glog's 0 to 3


class GlogFormatter(logging.Formatter):
    """One record as a glog line, followed by its traceback if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        letter = "IWEF"[sum(record.levelno >= level for level in _LEVELS[1:])]
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        microseconds = int(record.created % 1 * 1_000_000)
        where = f"{record.filename}:{record.lineno}"
        line = f"{letter}{stamp}.{microseconds:06d} {threading.get_native_id():5d} {where}] {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(
    *,
    log_dir: str = "",
    logtostderr: bool = False,
    alsologtostderr: bool = False,
    stderrthreshold: int = 2,
    minloglevel: int = 0,
    verbosity: int = 0,
) -> None:
    """Send every log record of this process where the flags say.  Raises ConfigError if log_dir cannot be used."""
    logging.raiseExceptions = False  # a closed stderr must not stop the master
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if verbosity > 0 and minloglevel == 0 else _LEVELS[minloglevel])
    to_file = bool(log_dir) and not logtostderr
    stderr = logging.StreamHandler(sys.stderr)
    if to_file and not alsologtostderr:
        stderr.setLevel(_LEVELS[stderrthreshold])
    handlers: list[logging.Handler] = [stderr]
    if to_file:
        handlers.append(_journal(log_dir))
    for handler in handlers:
        handler.setFormatter(GlogFormatter())
    root.handlers[:] = handlers


def _journal(log_dir: str) -> logging.FileHandler:
    started = time.localtime()
    name = f"{PROGRAM}.{time.strftime('%Y%m%d-%H%M%S', started)}.{os.getpid()}"
    path = os.path.join(log_dir, name)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(
                f"Log file created at: {time.strftime('%Y/%m/%d %H:%M:%S', started)}\n"
                f"Running on machine: {socket.gethostname()}\n"
                "Log line format: [IWEF]mmdd hh:mm:ss.uuuuuu threadid file:line] msg\n"
            )
        link = os.path.join(log_dir, f"{PROGRAM}.INFO")
        fresh = f"{link}.{os.getpid()}"
        os.symlink(name, fresh)
        os.replace(fresh, link)
        return logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"The flag --log_dir={log_dir} cannot be used: no log file can be written there ({error.strerror})."
        ) from None
