"""An offload processor in some sixty lines, and a quiet start for a real one, Ray Data.

It is in a module because the process that makes the batches is a new Python, which must import what it runs.
"""

import contextlib
import io
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

# A clean process either way. A fork server, where there is one, imports the heavy modules once for all of them.
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class Prefetcher:
    """Batches that another process makes ahead of the trainer, never more than `depth` of them.

    `make(*arguments)` runs there; `make` must be importable and return an iterator of picklable batches.
    Iterate inside `with Prefetcher(...) as batches:`; leaving the block, in whatever way, ends the process. If the
    process raises an error, dies, or sends no batch for `seconds`, the loop here raises an error that says which.
    `made` lists when each received batch was begun and finished, in seconds on the clock of `time.perf_counter`.
    """

    def __init__(self, make: Callable[..., Iterator], *arguments, depth: int = 4, seconds: float = 60):
        if depth < 1:
            raise ValueError(f"depth is {depth}, which leaves no room for a batch: make it 1 or more.")
        context = multiprocessing.get_context(START)
        receiver, sender = context.Pipe(duplex=False)
        self.made: list[tuple[float, float]] = []
        self.ended = False
        self.started = context.Value("i", 0)
        self._seconds, self._slots, self._ready = seconds, context.Semaphore(depth), queue.SimpleQueue()
        job = (sender, self._slots, self.started, make, arguments)
        self.process = context.Process(target=produce, args=job, daemon=True)
        self.process.start()
        sender.close()  # from here on only the child holds it, so the pipe ends when the child dies
        threading.Thread(target=self._receive, args=(receiver,), daemon=True).start()

    def _receive(self, receiver) -> None:
        with receiver, contextlib.suppress(EOFError, OSError):
            while True:
                self._ready.put(receiver.recv())
        self._ready.put(("died", None, None))

    def __iter__(self) -> Iterator:
        while not self.ended:  # there is no second epoch
            try:
                kind, value, when = self._ready.get(timeout=self._seconds)
            except queue.Empty:
                raise TimeoutError(f"No batch came for {self._seconds:g} s. Is the offload process stuck?") from None
            if kind == "end":
                self.ended = True
                return
            if kind == "error":
                raise RuntimeError(f"The offload process stopped after {len(self.made)} batches: {value}")
            if kind == "died":
                raise RuntimeError(f"The offload process died after {len(self.made)} batches. Out of memory?")
            self.made.append(when)
            self._slots.release()  # room for one more
            yield value

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.join(10)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def produce(sender, slots, started, make: Callable[..., Iterator], arguments: tuple) -> None:
    """What the child does: wait for room, make a batch, send it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then ends this process
    parent = multiprocessing.parent_process()
    try:
        batches = make(*arguments)
        while True:
            while not slots.acquire(timeout=1):
                if not parent.is_alive():
                    return
            started.value += 1
            begin = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                sender.send(("end", None, None))
                return
            sender.send(("batch", batch, (begin, time.perf_counter())))
    except BrokenPipeError:
        return
    except Exception as error:
        sender.send(("error", f"{type(error).__name__}: {error}", None))


def sleeping(count: int, seconds: float) -> Iterator[int]:
    """The numbers 0 to count - 1 as batches that each take `seconds` to make, without computing."""
    for i in range(count):
        time.sleep(seconds)
        yield i


def start_ray(workers: int = 2, seconds: float = 60, disk_bytes: int = 10**9) -> str:
    """Start Ray here with nothing but what Ray Data needs; return the reason why it could not start, or ''.

    No dashboard, no statistics sent anywhere, no progress bars, no log lines. Ray itself gives up if its helper
    processes need more than 15 s to start, as they may on a very busy machine.
    """
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < disk_bytes:
        return f"Ray was not started because the temporary folder has {free / 1e9:.1f} GB left: make 1 GB free."
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1", RAY_DATA_LOG_LEVEL="CRITICAL")
    # Ray would look for this machine's network address, and complain on stderr if there is none; with this setting
    # it stays on the loopback address, as it does on Windows and macOS.
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    os.environ.update(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_raylet_start_wait_time_s=str(int(seconds)))
    try:
        import ray
        import ray.data
    except ImportError as error:
        return f"Ray is not installed here ({error}): run `pip install 'ray[data]'` if there is a wheel."
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # `import ray` has set it to INFO
    try:
        with time_limit(seconds), contextlib.redirect_stderr(io.StringIO()):
            ray.init(
                address="local",
                num_cpus=workers,
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=200 * 2**20,
                _node_ip_address="127.0.0.1",
            )
            ray.data.DataContext.get_current().enable_progress_bars = False
            # Ray reports a dead worker in whichever cell is running then, with ids that differ each time. No setting
            # prevents that, and other versions of Ray may keep the function elsewhere.
            with contextlib.suppress(AttributeError):
                ray._private.worker.print_to_stdstream = lambda *_, **__: None
    except BaseException as error:
        ray.shutdown()
        if not isinstance(error, Exception):
            raise
        reason = str(error).strip().splitlines()
        return f"Ray could not start ({reason[0] if reason else type(error).__name__})."
    return ""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread if the block takes longer than `seconds`."""
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        signal.raise_signal(signal.SIGINT) if os.name == "nt" else os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not late.is_set():
            raise
        raise TimeoutError(f"it took longer than {seconds:g} s") from None
    finally:
        timer.cancel()
