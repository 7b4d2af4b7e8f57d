"""Random orders of everything that may happen to prompts on their way from prefill to decode.

Runs in the vLLM environment: `python -m tests.connector.push_storm MODEL SEED STEPS`.  Two instances of each role and
one of both, each a process of its own over real sockets, are forked from this one; some are stopped, killed and
started again on their port.  Every request of a decode that lives must be answered, rightly, and nothing may be left in
the end.  Prints its counts as JSON.
"""

import faulthandler
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress

from mooncake.cli.loopback import free_ports
from tests.connector import push_engine

LIMIT = 6  # seconds: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
ANSWER_LIMIT = 45.0  # seconds in which a request must be answered, whatever happens
START_LIMIT = END_LIMIT = 90.0  # seconds until an instance is ready, or has ended, while all of them are busy
ROLES = ("kv_producer", "kv_producer", "kv_consumer", "kv_consumer", "kv_both")


class Instance:
    """A process; `alive` unless it was killed."""

    def __init__(self, model: str, role: str, seed: int) -> None:
        self.model, self.role, self.seed = model, role, seed
        (self.port,) = free_ports(1)
        self.engine = ""
        self.waiting: dict[str, float] = {}  # requests that must be answered → until when
        self.stopped_until = 0.0
        self.idle: dict | None = None
        self.start()

    @property
    def hands(self) -> bool:
        return self.role != "kv_consumer"

    @property
    def pulls(self) -> bool:
        return self.role != "kv_producer"

    def start(self) -> None:
        """Its engine's id comes later."""
        self.engine, self.waiting, self._buffer, self._unsent = "", {}, b"", b""
        self._ready_by = time.monotonic() + START_LIMIT
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        os.set_blocking(self._events, False)
        os.set_blocking(self._commands, False)  # a stopped process reads nothing
        self.pid = os.fork()
        if self.pid == 0:
            self._become(commands, events)
        os.close(commands)
        os.close(events)

    def _become(self, commands: int, events: int) -> None:
        code = 1
        try:
            os.dup2(commands, 0)
            os.dup2(events, 1)
            os.closerange(3, 1024)
            faulthandler.register(signal.SIGUSR1)
            os.environ |= {
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.port),
                "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LIMIT),
                "VLLM_HOST_IP": "127.0.0.1",
            }
            push_engine.main(self.model, self.role, self.seed)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._commands)
        os.close(self._events)
        self.seed += 100

    def end(self) -> None:
        os.close(self._commands)
        os.close(self._events)
        limit = time.monotonic() + END_LIMIT
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < limit, f"the {self.role} of port {self.port} does not end"
            time.sleep(0.01)
        assert ended[1] == 0, f"the {self.role} of port {self.port} failed"

    def tell(self, **command) -> None:
        self._unsent += (json.dumps(command) + "\n").encode()
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._commands, self._unsent) :]
        except BlockingIOError:
            pass

    def show(self) -> None:
        """Where each of its threads is, on stderr."""
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)

    def listen(self) -> None:
        """Take what it has said, and send what it has not taken yet."""
        self._send()
        try:
            data = os.read(self._events, 1 << 20)
        except BlockingIOError:
            data = None
        if data == b"":
            _, status = os.waitpid(self.pid, 0)
            raise AssertionError(f"the {self.role} of port {self.port} ended by itself ({status:#x})")
        *lines, self._buffer = (self._buffer + (data or b"")).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "engine" in event:
                self.engine = event["engine"]
            elif "done" in event:
                self.waiting.pop(event["done"], None)
            else:
                self.idle = event["idle"]
        late = [name for name, until in self.waiting.items() if time.monotonic() > until]
        assert not late, f"{self.role} of port {self.port} does not answer {late}"
        assert self.engine or time.monotonic() < self._ready_by, f"{self.role} of port {self.port} does not start"


class Storm:
    def __init__(self, model: str, seed: int) -> None:
        self.random, self.counts = random.Random(seed), Counter()
        self.instances = [Instance(model, role, seed * 1000 + i) for i, role in enumerate(ROLES)]
        self.families = [[self.random.randrange(5, 1000) for _ in range(600)] for _ in range(4)]
        self.later: list[tuple[float, Instance, str, dict]] = []  # (when, instance, its engine, command)
        self.former = ["a-former-engine"]
        self.number = 0
        while not all(one.engine for one in self.instances):
            self.listen()
            time.sleep(0.05)

    def listen(self) -> None:
        for one in self.instances:
            if not one.stopped_until:
                one.listen()

    def prompt(self) -> list[int]:
        start = self.random.choice(self.families)[: self.random.randrange(1, 420)]
        return start + [self.random.randrange(5, 1000) for _ in range(self.random.choice((0, 0, 1, 40)))]

    def act(self) -> None:
        self.listen()
        now = time.monotonic()
        due = [each for each in self.later if each[0] <= now]
        self.later = [each for each in self.later if each[0] > now]
        for _, instance, engine, command in due:
            if instance.engine == engine:
                self.send(instance, command)
        if self.random.random() < 0.4:
            self.request()
        self.disturb(now)
        time.sleep(0.004)

    def send(self, instance: Instance, command: dict) -> None:
        if "add" in command and instance.pulls:
            instance.waiting[command["add"]] = time.monotonic() + ANSWER_LIMIT
        if "abort" in command:
            instance.waiting.pop(command["abort"], None)
        instance.tell(**command)

    def request(self) -> None:
        """Two halves, in any order, one of which may lack, be late, or be given up."""
        prefill = self.random.choice([one for one in self.instances if one.hands])
        decode = self.random.choice([one for one in self.instances if one.pulls and one is not prefill])
        if not (prefill.engine and decode.engine) or len(decode.waiting) > 6:
            return
        self.number += 1
        name, prompt, fate = f"r{self.number}", self.prompt(), self.random.random()
        handing = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        pulling = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_bootstrap_addr": f"http://127.0.0.1:{prefill.port}",
            "remote_engine_id": prefill.engine,
        }
        now = time.monotonic()
        late = {0: 0.0, 1: self.random.random() * 0.2, 2: self.random.random() * 1.5}[self.random.randrange(3)]
        first = self.random.random() < 0.5
        wanted = prompt
        if fate < 0.02:
            pulling["remote_engine_id"] = self.random.choice(self.former)
            self.counts["former engines asked"] += 1
        elif fate < 0.04:
            wanted = [*prompt[:-1], prompt[-1] + 1]
            self.counts["other prompts"] += 1
        elif fate < 0.05:
            late = LIMIT + 1.0  # one half comes after the other was given up
            self.counts["late halves"] += 1
        p, d = (now, now + late) if first else (now + late, now)
        if not 0.05 < fate < 0.06:
            command = {"add": f"{name}p", "prompt": prompt, "count": 1, "params": handing}
            self.later.append((p, prefill, prefill.engine, command))
        if not 0.06 < fate < 0.07:
            count = self.random.choice((1, 1, 5, 30))
            command = {"add": f"{name}d", "prompt": wanted, "count": count, "params": pulling}
            self.later.append((d, decode, decode.engine, command))
        for begun, instance, letter in ((p, prefill, "p"), (d, decode, "d")):
            if self.random.random() < 0.06:
                when = begun + self.random.random() * 0.3
                self.later.append((when, instance, instance.engine, {"abort": f"{name}{letter}"}))
                self.counts["aborts"] += 1
        self.counts["requests"] += 1

    def disturb(self, now: float) -> None:
        fate, one = self.random.random(), self.random.choice(self.instances)
        for each in self.instances:
            if each.stopped_until and now > each.stopped_until:
                os.kill(each.pid, signal.SIGCONT)
                each.waiting = dict.fromkeys(each.waiting, now + ANSWER_LIMIT)
                each.stopped_until = 0.0
        if not one.engine or one.stopped_until:
            return
        if fate < 0.001:
            self.former.append(one.engine)
            one.kill()
            one.start()
            self.counts["kills"] += 1
        elif fate < 0.002:
            os.kill(one.pid, signal.SIGSTOP)
            one.stopped_until = now + self.random.choice((0.2, 3.0, 9.0))
            self.counts["stops"] += 1
        elif fate < 0.01:
            one.tell(preempt=True)
            self.counts["forced preemptions"] += 1

    def end(self) -> None:
        """Everything comes to its end, and nothing is left."""
        for one in self.instances:
            if one.stopped_until:
                os.kill(one.pid, signal.SIGCONT)
                one.stopped_until = 0.0
                one.waiting = {name: time.monotonic() + ANSWER_LIMIT for name in one.waiting}
        while self.later or any(one.waiting or not one.engine for one in self.instances):
            now = time.monotonic()
            for when, instance, engine, command in self.later:
                if when <= now and instance.engine == engine:
                    self.send(instance, command)
            self.later = [each for each in self.later if each[0] > now]
            self.listen()
            time.sleep(0.01)
        for one in self.instances:
            one.tell(idle=True)
        limit = time.monotonic() + push_engine.IDLE_LIMIT + 20
        while not all(one.idle for one in self.instances):
            self.listen()
            assert time.monotonic() < limit, "instances do not become idle"
            time.sleep(0.05)
        for one in self.instances:
            self.counts.update(one.idle)
            one.end()


def main() -> None:
    logging.disable(logging.ERROR)
    model, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    storm = Storm(model, seed)
    try:
        for _ in range(steps):
            storm.act()
        storm.end()
    except BaseException:
        for one in storm.instances:
            with suppress(ProcessLookupError):
                one.show()
        for one in storm.instances:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        raise
    print(json.dumps(storm.counts))


if __name__ == "__main__":
    main()
